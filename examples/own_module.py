"""A LightningModule of your own inside a memory budget, with exactly the effective batch that you ask for.

The model and its data know nothing of MemFit; one argument of the Trainer is all there is to it.

    python examples/own_module.py                      # about half a minute on one core
    python examples/own_module.py --budget 64MiB       # more memory: the batch is not divided
    python examples/own_module.py --budget 2MiB        # nothing fits: an error before the first step says what would
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit
from lightning_memfit.units import format_bytes


class WaveClassifier(LightningModule):
    """Tells sine, square and sawtooth apart. Nothing in it knows of MemFit."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, waves: Tensor) -> Tensor:
        """Class scores ``(batch, 3)`` of waves ``(batch, 64)``."""
        hidden = self.encoder(self.embed(waves.unsqueeze(-1)) + self.positions)
        return self.head(hidden.mean(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """A mean over samples, so that slices of a batch add up exactly; MemFit checks that before it slices."""
        waves, kinds = batch
        loss = nn.functional.cross_entropy(self(waves), kinds)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluation needs memory too, and is held to the same budget."""
        waves, kinds = batch
        self.log("val_loss", nn.functional.cross_entropy(self(waves), kinds))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """MemFit may choose another implementation of it (fused, foreach), never another learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def waves(samples: int) -> TensorDataset:
    """Noisy waves of random phase, and which of the three kinds each is."""
    kinds = torch.arange(samples) % 3
    angles = torch.linspace(0, 4 * torch.pi, 64) + 2 * torch.pi * torch.rand(samples, 1)
    sine = angles.sin()
    shapes = torch.stack([sine, sine.sign(), (angles / torch.pi) % 2 - 1])
    return TensorDataset(shapes[kinds, torch.arange(samples)] + 0.3 * torch.randn(samples, 64), kinds)


def main() -> None:
    """Train, and say what was chosen and what was needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="16MiB", help="bytes of torch's allocator, such as 16MiB; or auto")
    parser.add_argument("--samples", type=int, default=2560, help="training samples")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--output", default="outputs/own_module", help="folder of plan.yaml")
    options = parser.parse_args()
    seed_everything(1, verbose=False)

    # Batches of 64, optimizer steps over 128 samples: MemFit sets accumulate_grad_batches=2 by itself.
    train = DataLoader(waves(options.samples), batch_size=64, shuffle=True, drop_last=True)
    memfit = MemFit(effective_batch_size=128, budget=options.budget, verbose=False)  # verbose: the whole report
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        plugins=[memfit],  # MemFit(precision=...) takes the place of Trainer(precision=...)
        default_root_dir=options.output,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, validation = WaveClassifier(layers=options.layers), DataLoader(waves(192), batch_size=32)
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, train, validation)

    plan, measured = memfit.plan, memfit.measured
    print(f"plan             {plan.candidate.label}")
    print(f"effective batch  {plan.split.effective_batch_size} samples, slices of {plan.split.slice_sizes}")
    print(f"budget           {format_bytes(plan.budget.budget_bytes)}")
    print(f"predicted peak   {format_bytes(plan.forecast.predicted_peak_bytes)}")
    print(f"measured peak    {format_bytes(measured.measured_peak_allocated_bytes)}")
    print(f"validation loss  {before:.3f} to {trainer.callback_metrics['val_loss']:.3f} nats per wave")


if __name__ == "__main__":
    main()
