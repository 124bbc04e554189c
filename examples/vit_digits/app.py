"""A Hydra application of your own that takes the memfit group from the package: a vision transformer on digits.

Needs scikit-learn and hydra-core; from any folder:

    python examples/vit_digits/app.py                                 # within the 8 MiB of conf/config.yaml
    python examples/vit_digits/app.py memfit.budget=64MiB model=wide  # another choice of each group
    python examples/vit_digits/app.py memfit=report                   # plan and print, change nothing
    python examples/vit_digits/app.py --cfg job --package memfit      # every key of the group
"""

from __future__ import annotations

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_memfit.config import memfit_from_config, register_configs
from lightning_memfit.units import format_bytes


class ViT(LightningModule):
    """Patches of 2 x 2 pixels as tokens, learned positions, and the mean token decides."""

    def __init__(self, width: int, layers: int, heads: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores ``(batch, 10)`` of images ``(batch, 1, 8, 8)``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens + self.positions).mean(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the samples of a batch, or of a slice of it."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Share of digits that are told apart."""
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(dim=1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of training and validation images; the data come with scikit-learn."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    train, validation = random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2])
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(validation, batch_size)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train one configuration, and say what was chosen and what was needed."""
    seed_everything(config.seed, verbose=False)
    memfit = memfit_from_config(config.memfit)  # checks every key, and names the choices where one is wrong
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=config.epochs,
        plugins=[memfit],
        default_root_dir=HydraConfig.get().runtime.output_dir,  # plan.yaml goes beside Hydra's own files
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ViT(**config.model), *digits(config.batch_size))
    if memfit.measured is None:  # memfit=disabled and memfit=report prove nothing
        return
    print(f"plan             {memfit.plan.candidate.label}")
    print(f"budget           {format_bytes(memfit.plan.budget.budget_bytes)}")
    print(f"measured peak    {format_bytes(memfit.measured.measured_peak_allocated_bytes)}")
    print(f"accuracy         {trainer.callback_metrics['val_accuracy']:.1%}")
    print(f"written to       {trainer.default_root_dir}")


if __name__ == "__main__":
    register_configs()  # before Hydra composes: wrong names and types are then errors of the command line
    main()
