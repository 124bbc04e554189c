"""What the user's hooks and steps ask of the Trainer is answered before training as it is while training.

Run: ``pytest tests/e2e/test_what_steps_read.py``. The warm-up runs before the sanity check, and so before Lightning
sets up any loader.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_memfit import MemFit
from tests.zoo.data_programs import features
from tests.zoo.models import Classifier
from tests.zoo.test_matrix import AS_IT_IS

MakeTrainer = Callable[..., Any]

pytestmark = [pytest.mark.usefixtures("no_probing")]


class Asking(Classifier):
    """Asks for loaders and their lengths wherever Lightning has set them up."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[tuple[Any, ...]] = set()

    def _ask_of_training(self) -> None:
        loader, batches = self.trainer.train_dataloader, self.trainer.num_training_batches
        self.told.add((len(loader), loader.batch_size, batches))

    def on_train_start(self) -> None:
        self._ask_of_training()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._ask_of_training()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loader, batches = self.trainer.val_dataloaders, self.trainer.num_val_batches
        self.told.add((len(loader), len(loader.dataset), *batches))
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("sanity_steps", [0, 2])
@pytest.mark.parametrize("effective", [None, 12])
def test_loaders_and_their_lengths(sanity_steps: int, effective: int | None, make_trainer: MakeTrainer) -> None:
    module, plugin = Asking(), MemFit(effective, verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin, num_sanity_val_steps=sanity_steps)
    trainer.fit(module, DataLoader(features(24), batch_size=8), DataLoader(features(20), batch_size=5))
    assert plugin.measured is not None and plugin.plan is not None
    assert plugin.plan.forecast.method == "traced"
    batch_size = plugin.plan.split.loader_batch_size
    assert module.told == {(24 // batch_size, batch_size, 24 // batch_size), (4, 20, 4)}


def test_loaders_are_not_in_sight_after_a_warm_up_that_failed(make_trainer: MakeTrainer) -> None:
    class Failing(Classifier):
        def on_train_start(self) -> None:
            raise RuntimeError("not today")

    trainer = make_trainer(MemFit(verbose=False, **AS_IT_IS))
    with pytest.raises(RuntimeError, match="not today"):
        trainer.fit(Failing(), DataLoader(features(24), batch_size=8), DataLoader(features(20), batch_size=5))
    assert trainer.train_dataloader is None and trainer.val_dataloaders is None
    assert trainer.num_training_batches == float("inf") and trainer.num_val_batches == []


def test_a_logger_that_the_step_uses_is_found_by_its_class_and_gets_only_what_training_logs(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            (logger,) = [each for each in self.trainer.loggers if isinstance(each, CSVLogger)]
            logger.log_metrics({"mine": float(loss.detach())}, step=batch_idx)
            return loss

    written = {}
    for name, plugin in {"plain": None, "planned": MemFit(verbose=False, **AS_IT_IS)}.items():
        trainer = make_trainer(plugin, logger=CSVLogger(tmp_path, name=name, version=0), log_every_n_steps=1)
        trainer.fit(Logs(), DataLoader(features(24), batch_size=8), DataLoader(features(20), batch_size=5))
        with (tmp_path / name / "version_0" / "metrics.csv").open(newline="") as file:
            written[name] = list(csv.reader(file))
    assert written["planned"] == written["plain"]


def test_nothing_is_logged_by_small_steps_where_a_step_cannot_be_traced(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Untraceable(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.logger.log_metrics({"mine": float(loss.detach().numpy())}, step=batch_idx)
            return loss

    plugin = MemFit(verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin, logger=CSVLogger(tmp_path, name="run", version=0))
    trainer.fit(Untraceable(), DataLoader(features(24), batch_size=8))
    assert plugin.plan is not None and plugin.plan.forecast.method == "extrapolated"
    with (tmp_path / "run" / "version_0" / "metrics.csv").open(newline="") as file:
        assert sum(bool(row["mine"]) for row in csv.DictReader(file)) == 3


def test_callbacks_are_there_and_take_no_part(make_trainer: MakeTrainer) -> None:
    class Counts(lightning.Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.steps += 1

    class Looks(Classifier):
        def on_train_start(self) -> None:
            assert self.trainer.checkpoint_callback is not None
            assert self.trainer.checkpoint_callback.dirpath is not None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert any(isinstance(each, Counts) for each in self.trainer.callbacks)
            return super().training_step(batch, batch_idx)

    counts, plugin = Counts(), MemFit(verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin, callbacks=[counts], enable_checkpointing=True)
    trainer.fit(Looks(), DataLoader(features(24), batch_size=8))
    assert plugin.measured is not None
    assert counts.steps == trainer.global_step == 3


def test_a_forward_under_the_compiler_whose_blocks_cannot_be_recomputed_is_named(make_trainer: MakeTrainer) -> None:
    class Compiled(Classifier):
        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.blocks(x))
            return logits

    plugin = MemFit(verbose=False, **{**AS_IT_IS, "activation_checkpointing": ["blocks.*"]})
    with pytest.raises(Exception, match=r"blocks\.0.* under torch\.compile") as caught:
        make_trainer(plugin).fit(Compiled(), DataLoader(features(24), batch_size=8))
    assert type(caught.value).__name__ == "ConfigurationError"
