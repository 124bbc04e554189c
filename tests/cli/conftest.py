"""A folder with a user's own code and config, and the command run inside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_memfit.cli import main

MODELS = '''
"""A user's own code."""
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

print("imported")
factories = []


class Lit(LightningModule):
    """8 x 64 + 64 x 8 weights; reads its Trainer for the schedule."""

    def __init__(self, width=64):
        super().__init__()
        self.wide = nn.Linear(8, width, bias=False)
        self.head = nn.Linear(width, 8, bias=False)
        factories.append(self.head.weight.device.type)

    def training_step(self, batch, batch_idx):
        inputs, targets = (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self.head(torch.relu(self.wide(inputs))), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class Late(Lit):
    """Makes its layers when it is asked to."""

    def __init__(self):
        LightningModule.__init__(self)

    def configure_model(self):
        self.wide, self.head = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)


class Numbers(LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.samples = [(torch.zeros(8), torch.tensor(i % 8)) for i in range(32)]

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=self.batch_size)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)[x.sum(1) > 0]


def lit():
    print("made")
    return Lit()


def batch():
    return torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)


def loader():
    return DataLoader([(torch.zeros(8), torch.tensor(1))] * 8, batch_size=4)


def wide():
    return Lit(width=2**28)


def plain():
    return nn.Linear(8, 8)


def summed(module, batch):
    return module(batch).sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def triple():
    return plain(), summed, sgd


def masked():
    return Masked(), summed, sgd


def needs_values():
    layer = nn.Linear(8, 8)
    layer.weight.sum().item()
    return layer, summed, sgd


def failing():
    raise ValueError("no weights\\nsecond line")


def leaving():
    raise SystemExit(0)


def nothing():
    return None


def out_of_memory():
    raise torch.OutOfMemoryError("out of memory")


number = 3
'''
CONFIG = """
defaults:
  - memfit_schema
  - _self_
model:
  _target_: models_of_a_user.Lit
  width: 64
data:
  _target_: models_of_a_user.Numbers
  batch_size: 4
trainer:
  _target_: lightning.pytorch.Trainer
  accelerator: gpu
  max_steps: 7
  default_root_dir: ${hydra:runtime.output_dir}
  logger:
    _target_: lightning.pytorch.loggers.CSVLogger
    save_dir: ${hydra:runtime.output_dir}
  callbacks:
    - _target_: there.is.no.such.Callback
memfit:
  effective_batch_size: 8
"""


class Ran:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def memfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ran]]:
    (tmp_path / "models_of_a_user.py").write_text(MODELS)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str) -> Ran:
        code = main(words)
        return Ran(code, *capsys.readouterr())

    yield run
    sys.modules.pop("models_of_a_user", None)


@pytest.fixture
def plan(memfit: Callable[..., Ran]) -> Callable[..., Ran]:
    """``memfit plan`` of a factory on a small batch."""

    def run(factory: str, *words: str, batch: str = "models_of_a_user:batch") -> Ran:
        return memfit("plan", "--model", f"models_of_a_user:{factory}", "--batch", batch, *words)

    return run
