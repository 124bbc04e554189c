"""Ways in which people start, stop, watch and save a run, and the other plugins that they give to the Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.zoo.data_programs import features, own_folder
from tests.zoo.models import Classifier
from tests.zoo.program import Program, Run


class Scheduled(Classifier):
    """Its learning rate follows the number of steps that the Trainer says the run will have."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Validated(Scheduled):
    """What it learns next depends on every validation so far, so that one too many, or at another step, would show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("validations", torch.zeros(()))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations += self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.001 * self.validations)


class Overfitting(Classifier):
    """Learns its labels by heart, so that the validation's loss rises."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def run_of(module: Callable[[], Any], *, batch_size: int = 8) -> Callable[[], Run]:
    """Shuffled batches, three in an epoch if nothing is said, and two of validation."""

    def make() -> Run:
        loaders = {
            "train_dataloaders": DataLoader(features(24), batch_size=batch_size, shuffle=True),
            "val_dataloaders": DataLoader(features(10), batch_size=6),
        }
        return Run(module=module(), fit=loaders)

    return make


def folder() -> str:
    """A new one for every run, so that no run finds another's files."""
    return tempfile.mkdtemp(dir=own_folder())


def saved_and_stopped_early() -> Mapping[str, Any]:
    path = folder()
    callbacks = [
        EarlyStopping("val_loss", patience=1),
        ModelCheckpoint(path, monitor="val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(path, every_n_train_steps=2, save_top_k=-1, filename="{step}"),
        LearningRateMonitor("step"),
    ]
    return {"callbacks": callbacks, "enable_checkpointing": True, "logger": CSVLogger(path), "max_epochs": 12}


class MarkingIO(TorchCheckpointIO):
    """A CheckpointIO of the user's own, which marks what is written whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        Path(f"{path}.saved").touch()


def own_plugins() -> Mapping[str, Any]:
    keep = ModelCheckpoint(folder(), every_n_train_steps=2, save_top_k=-1)
    return {"callbacks": [keep], "enable_checkpointing": True, "plugins": [MarkingIO(), LightningEnvironment()]}


def watched() -> Mapping[str, Any]:
    keep = ModelCheckpoint(folder(), every_n_train_steps=2, save_top_k=-1)
    return {
        "callbacks": [keep, Timer("00:01:00:00")],
        "enable_checkpointing": True,
        "plugins": [AsyncCheckpointIO()],
        "profiler": "simple",
        "detect_anomaly": True,
    }


PROGRAMS = (
    Program(
        name="max_steps within an epoch", make=run_of(Scheduled), trainer=lambda: {"max_steps": 4, "max_epochs": -1}
    ),
    Program(
        name="max_steps of accumulated batches",
        make=run_of(Scheduled, batch_size=4),
        trainer=lambda: {"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 2},
        settings={"effective_batch_size": 8},
    ),
    Program(
        name="validated every two batches, across epochs",
        make=run_of(Validated),
        trainer=lambda: {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 3},
    ),
    Program(
        name="two batches of an epoch, every second one validated, no sanity check",
        make=run_of(Validated),
        trainer=lambda: {
            "limit_train_batches": 2,
            "check_val_every_n_epoch": 2,
            "num_sanity_val_steps": 0,
            "max_epochs": 4,
        },
    ),
    Program(name="stopped early and saved in many ways", make=run_of(Overfitting), trainer=saved_and_stopped_early),
    Program(name="a CheckpointIO and a ClusterEnvironment", make=run_of(Classifier), trainer=own_plugins),
    Program(
        name="watched by a profiler, for anomalies, and saved by a thread", make=run_of(Classifier), trainer=watched
    ),
)
