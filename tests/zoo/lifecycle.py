"""What the tests of a Trainer's life share: a module and a Trainer of either package, and how outcomes are compared.

A story is a function of a :class:`Stage`, on which it makes its modules, loaders and Trainers; it returns what a user
could see of it. It is told twice, without MemFit and with it, and both outcomes are compared.
"""

from __future__ import annotations

import csv
import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memfit import MemFit
from tests.zoo.data_programs import ResumableLoader, features
from tests.zoo.models import WIDTH, blocks
from tests.zoo.program import SGD_MOMENTUM
from tests.zoo.test_matrix import AS_IT_IS, difference

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")

PLANS: Mapping[str, Mapping[str, Any]] = {
    "no-op": {},
    "sliced and recomputed": {"micro_batch_size": 3, "activation_checkpointing": ["blocks.*"]},
    "8-bit states": {"optimizer_states": "8bit"},
}
"""Settings that leave no choice but this plan."""
WITHIN = {"no-op": 0.0, "sliced and recomputed": 1e-5}
"""Largest relative difference of a plan's outcome from that of a run without MemFit; ``0.0``: to the last bit."""


def memfit(plan: str, **settings: Any) -> MemFit:
    """The plugin that must take this plan."""
    return MemFit(verbose=False, **{**AS_IT_IS, **PLANS[plan], **settings})


@functools.cache
def classifier_of(namespace: str) -> Any:
    """The class of a small module that logs in several ways, of one of Lightning's packages."""
    base: Any = importlib.import_module(namespace).LightningModule

    class Classifier(base):  # type: ignore[misc]  # the class is chosen at run time
        def __init__(self, width: int = WIDTH, depth: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.first = nn.Linear(WIDTH, width)
            self.blocks = blocks(depth, width)
            self.head = nn.Linear(width, 4)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.blocks(self.first(x)))
            return logits

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits: Tensor = self(batch[0])
            return logits

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), **SGD_MOMENTUM)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Classifier


def shuffled() -> DataLoader[Any]:
    """Three batches of eight samples."""
    return DataLoader(features(24), batch_size=8, shuffle=True)


def resumable() -> ResumableLoader:
    """The same in an order of its own, with a position that checkpoints keep."""
    return ResumableLoader(features(24), batch_size=8)


def held_out() -> DataLoader[Any]:
    """Two batches of other samples."""
    return DataLoader(features(36), batch_size=6, sampler=range(24, 34))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a story is told."""

    namespace: str
    """The package of Trainer and modules."""
    folder: Path
    """A folder of its own."""
    plan: str | None
    """The plan of every fit; ``None`` without MemFit."""

    @property
    def pl(self) -> Any:
        """The package."""
        return importlib.import_module(self.namespace)

    def part(self, name: str) -> Any:
        """A class of the package, such as ``"callbacks.EarlyStopping"``."""
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(f"{self.namespace}.{module}"), attribute)

    def module(self, **settings: Any) -> Any:
        """A new module; two have equal weights."""
        return classifier_of(self.namespace)(**settings)

    def trainer(self, **settings: Any) -> Any:
        """A new Trainer, with a new plugin where there is a plan."""
        quiet = {
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "default_root_dir": self.folder,
        }
        plugins = [*settings.pop("plugins", []), *([] if self.plan is None else [memfit(self.plan)])]
        return self.pl.Trainer(plugins=plugins, **{**quiet, **settings})

    def fit(self, trainer: Any, module: Any, loader: Any, **settings: Any) -> None:
        """Fit from one seed, and see that MemFit took part and the plan was what the story is about."""
        self.pl.seed_everything(1, verbose=False)
        trainer.fit(module, loader, held_out(), **settings)
        if self.plan is not None:
            plugin = trainer.precision_plugin
            assert plugin.measured is not None
            assert (plugin.plan.split.num_slices == 3) == ("sliced" in self.plan)
            assert bool(plugin.plan.candidate.checkpointed_modules) == ("recomputed" in self.plan)


def outcome(trainer: Any, module: Any) -> dict[str, Any]:
    """What can be seen of a Trainer and its module."""
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "steps": (trainer.global_step, trainer.current_epoch, trainer.num_training_batches),
        "progress": trainer.fit_loop.state_dict(),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "rates": [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers],
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
    }


def rows(folder: Path) -> dict[str, list[list[Any]]]:
    """Every ``metrics.csv`` below a folder: names and numbers."""
    found = {}
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="") as file:
            found[str(path.relative_to(folder))] = [[_number(text) for text in row] for row in csv.reader(file)]
    return found


def files(folder: Path) -> list[str]:
    """Every file below a folder, MemFit's own plan and report apart."""
    own = ("plan.yaml", "memfit_report.txt")
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in own
    )


def assert_same(ours: Any, theirs: Any, *, within: float, where: str = "outcome") -> None:
    """Numbers differ by at most ``within``, relatively; everything else is equal."""
    if isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        if within and theirs and all(isinstance(value, Tensor) for value in theirs.values()):
            assert difference(ours, theirs) <= within, where
            return
        for name, value in theirs.items():
            assert_same(ours[name], value, within=within, where=f"{where}.{name}")
    elif isinstance(theirs, Sequence) and not isinstance(theirs, str):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            assert_same(ours[index], value, within=within, where=f"{where}[{index}]")
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=within, atol=within)
    elif isinstance(theirs, float):
        assert ours == theirs or abs(ours - theirs) <= within * max(1.0, abs(theirs)), f"{where}: {ours} != {theirs}"
    else:
        assert ours == theirs, where


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
