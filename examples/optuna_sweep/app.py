"""A sweep with Hydra's Optuna sweeper under a memory budget that some trials do not fit.

MemFit tells such a trial before its first step, and its objective is a penalty, so that the sweep goes on and the
sampler learns to stay away. Needs scikit-learn and hydra-optuna-sweeper; from any folder:

    python examples/optuna_sweep/app.py -m                             # 12 trials, about a minute on one core
    python examples/optuna_sweep/app.py -m memfit.budget=64MiB         # everything fits
    python examples/optuna_sweep/app.py width=256                      # one run, without the sweeper
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

from lightning_memfit import objective
from lightning_memfit.config import memfit_from_config, register_configs
from lightning_memfit.units import format_bytes


class Perceptron(LightningModule):
    """Three hidden layers of one width: parameters, gradients and optimizer states grow with its square."""

    def __init__(self, width: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        hidden = (layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU()))
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the samples of a batch, or of a slice of it."""
        pixels, labels = batch
        return nn.functional.cross_entropy(self.layers(pixels), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """What the sweep minimises."""
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self.layers(pixels), labels)
        self.log("val_loss", loss, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of training and validation images; the data come with scikit-learn."""
    pixels, labels = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(labels))
    train, validation = random_split(images, [0.8, 0.2])
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(validation, batch_size)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> float:
    """Train one trial, and return what the sweeper minimises."""
    seed_everything(config.seed, verbose=False)
    memfit = memfit_from_config(config.memfit)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=config.epochs,
        plugins=[memfit],
        default_root_dir=HydraConfig.get().runtime.output_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # With memfit.on_no_fit=value this returns, without a step, if nothing fits.
    trainer.fit(Perceptron(config.width, config.learning_rate), *digits(config.batch_size))
    score = objective(trainer, "val_loss")
    if memfit.no_fit is not None:
        missing = format_bytes(memfit.no_fit.missing_bytes)
        print(f"width={config.width} does not fit, {missing} too much: counts as {score}")
    else:
        peak = format_bytes(memfit.measured.measured_peak_allocated_bytes)
        print(f"width={config.width} trained within {peak} ({memfit.plan.candidate.label}): {score:.3f}")
    return score


if __name__ == "__main__":
    register_configs()
    main()
