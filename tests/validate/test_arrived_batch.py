"""What arrives at ``training_step``, told before training. Run: ``pytest tests/validate/test_arrived_batch.py``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_memfit.apply.batch_transfer import hook_owners
from lightning_memfit.validate.arrived_batch import ArrivedBatch, arrived_batch

BATCH = torch.arange(6, dtype=torch.uint8)


class Plain(LightningModule):
    def train_dataloader(self) -> Any:
        return DataLoader(BATCH, batch_size=6)


class Scales(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer.training
        return batch.float() * 2


class Draws(LightningDataModule):
    """Changes the batch in place, draws from every source, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.chance = 0, torch.Generator().manual_seed(5)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        batch += 1
        return batch + torch.rand(1) + random.random() + torch.rand(1, generator=self.chance)


class Fails(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch * self.made_when_training_starts


def connected(module: LightningModule, folder: Path, data: LightningDataModule | None = None) -> Trainer:
    """A Trainer as far as it is when a precision plugin converts the module."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=data)
    trainer.training = True
    return trainer


def arrived(module: LightningModule, folder: Path, data: LightningDataModule | None = None) -> ArrivedBatch:
    return arrived_batch(connected(module, folder, data), module, BATCH)


def test_without_hooks_of_the_users_it_is_the_loaders_batch_itself(tmp_path: Path) -> None:
    assert arrived(Plain(), tmp_path) == ArrivedBatch(batch=BATCH)


def test_the_modules_hook_makes_the_batch(tmp_path: Path) -> None:
    assert arrived(Scales(), tmp_path).batch.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_hooks_leave_no_trace(tmp_path: Path) -> None:
    data = Draws()
    before = torch.get_rng_state(), random.getstate(), data.chance.get_state()
    batch = arrived(Plain(), tmp_path, data).batch
    assert 1 < batch[0] < 4  # 0 + 1 and three draws
    assert BATCH.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.calls == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(data.chance.get_state(), before[2])


def test_hooks_of_module_and_data_module_both_run(tmp_path: Path) -> None:
    module, data = Scales(), Draws()
    with pytest.warns(UserWarning, match="overridden `on_after_batch_transfer`"):
        trainer = connected(module, tmp_path, data)
        assert hook_owners(trainer) == [data, module]
    assert 2 < arrived_batch(trainer, module, BATCH).batch[0] < 8


def test_a_hook_that_cannot_run_yet_is_named(tmp_path: Path) -> None:
    found = arrived(Fails(), tmp_path)
    assert found.batch is BATCH
    assert found.failure == "AttributeError: 'Fails' object has no attribute 'made_when_training_starts'"
