"""One trainer or module used again: consecutive fits, evaluation around them, resuming, and checkpoints that move.

Run with ``pytest tests/e2e/test_consecutive_runs.py``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memfit import MemFit

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).digest()[:8]


def random_states() -> tuple[bytes, ...]:
    states = (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())
    return tuple(hashlib.sha256(repr(state).encode()).digest()[:8] for state in states)


class Small(lightning.LightningModule):
    """Slices of its batches add up, and its blocks can be recomputed."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.head(self.drop(self.blocks(batch[0]))), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.blocks(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Broad(Small):
    """Its parameters are large enough for states in 8 bits."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))


class Wide(Dataset[Any]):
    def __init__(self, size: int = 48) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def small_run(trainer: Any, module: Any = None, **fit: Any) -> Any:
    lightning.seed_everything(5, verbose=False)
    module = Small() if module is None else module
    trainer.fit(module, DataLoader(Wide(), 12, shuffle=True), DataLoader(Wide(12), 12), **fit)
    return module


def weights(module: nn.Module) -> dict[str, bytes]:
    return {name: digest(value) for name, value in module.state_dict().items()}


def slicing() -> MemFit:
    return MemFit(micro_batch_size=5, activation_checkpointing="blocks", verbose=False, **AS_IT_IS)


def test_two_fits_of_one_trainer_equal_those_of_a_plain_one(make_trainer: MakeTrainer) -> None:
    results = []
    for plugin in (None, MemFit(verbose=False, **AS_IT_IS)):
        lightning.seed_everything(5, verbose=False)
        trainer, module = make_trainer(plugin), Small(dropout=0.1)
        small_run(trainer, module)
        trainer.fit_loop.max_epochs = 2
        small_run(trainer, module)
        results.append((weights(module), random_states(), trainer.global_step, len(trainer.callbacks)))
    assert results[0] == results[1]
    assert results[0][2] == 8


class OptimizerOfEachFit(lightning.Callback):
    """Remembers the optimizer that each fit begins to train with, and its flag."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            (optimizer,) = trainer.optimizers
            assert optimizer.param_groups[0]["params"][0] is next(pl_module.parameters()), "the optimizer of this fit"
            self.seen.append((type(optimizer).__name__, optimizer.param_groups[0].get("foreach")))


@pytest.mark.parametrize("setting", ["optimizer_implementation", "optimizer_states"])
def test_the_optimizer_of_a_second_fit_has_the_lever_too(setting: str, make_trainer: MakeTrainer) -> None:
    if setting == "optimizer_states":
        pytest.importorskip("bitsandbytes")
    lever = "8bit" if setting == "optimizer_states" else "foreach"
    watcher = OptimizerOfEachFit()
    plugin = MemFit(verbose=False, **{**AS_IT_IS, setting: lever})
    trainer = make_trainer(plugin, callbacks=[watcher])
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Broad(), DataLoader(Wide(), 12))
    assert trainer.global_step == 8
    assert watcher.seen == [("AdamW8bit", None) if lever == "8bit" else ("AdamW", True)] * 2


@pytest.mark.parametrize("mode", ["apply", "off"])
def test_after_a_fit_the_checkpoint_of_another_model_can_be_tested(
    mode: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    other = make_trainer()
    other.fit(Small(), DataLoader(Wide(), 12))
    other.save_checkpoint(tmp_path / "other.ckpt")
    trainer = make_trainer(MemFit(mode=mode, verbose=False, **{**AS_IT_IS, "optimizer_states": "8bit"}))
    trainer.fit(Broad(), DataLoader(Wide(), 12))
    found = trainer.test(Small(), DataLoader(Wide(12), 12), ckpt_path=tmp_path / "other.ckpt", verbose=False)
    assert found == make_trainer().test(
        Small(), DataLoader(Wide(12), 12), ckpt_path=tmp_path / "other.ckpt", verbose=False
    )


def test_a_second_trainer_finds_the_module_as_a_plain_one_leaves_it(make_trainer: MakeTrainer) -> None:
    module = small_run(make_trainer())
    before = [set(vars(part)) for part in module.modules()]
    for plugin in (slicing(), slicing(), None):
        trainer = make_trainer(plugin)
        small_run(trainer, module)
        assert trainer.global_step == 4
        assert [set(vars(part)) for part in module.modules()] == before
        assert "MemFitWarmUp" not in [type(callback).__name__ for callback in trainer.callbacks]
        for loop in (trainer.fit_loop.epoch_loop.automatic_optimization, trainer.fit_loop._data_source):
            assert not [name for name in vars(loop) if name in ("_make_closure", "dataloader")]


def test_validate_test_and_predict_around_a_fit_plan_nothing_and_see_the_plain_model(
    make_trainer: MakeTrainer,
) -> None:
    results = []
    for plugin in (None, MemFit(verbose=False, **AS_IT_IS)):
        lightning.seed_everything(5, verbose=False)
        trainer, module, data = make_trainer(plugin), Small(), DataLoader(Wide(12), 12)
        found = [trainer.validate(module, data, verbose=False)]
        if plugin is not None:
            assert plugin.plan is None
        small_run(trainer, module)
        found += [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        found += [[digest(part) for part in trainer.predict(module, data)]]
        results.append((found, weights(module), random_states()))
    assert results[0] == results[1]


def in_order(trainer: Any, **fit: Any) -> Any:
    lightning.seed_everything(5, verbose=False)
    module = Small()
    trainer.fit(module, DataLoader(Wide(), 12), DataLoader(Wide(12), 12), **fit)
    return module


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("stopped_at", [2, 4])
def test_a_run_resumed_under_slices_and_checkpointing_goes_on_as_it_would_have(
    stopped_at: int, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    weights_of = {}
    for name in ("plain", "memfit"):
        keep = ModelCheckpoint(tmp_path / name, every_n_train_steps=stopped_at, save_top_k=-1, filename="{step}")
        settings = {"max_epochs": 2, "callbacks": [keep], "enable_checkpointing": True}
        whole = in_order(make_trainer(slicing() if name == "memfit" else None, **settings))

        plugin = slicing() if name == "memfit" else None
        trainer = make_trainer(plugin, max_epochs=2)
        resumed = in_order(trainer, ckpt_path=tmp_path / name / f"step={stopped_at}.ckpt", weights_only=False)
        assert trainer.global_step == 8
        if plugin is not None:
            assert plugin.measured is not None, "the plan was proven after the state was restored"
        if stopped_at == 4:  # within an epoch Lightning starts an ordinary loader anew
            assert weights(whole) == weights(resumed), "bit for bit"
        weights_of[name] = [*whole.parameters(), *resumed.parameters()]
    for ours, theirs in zip(weights_of["memfit"], weights_of["plain"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpoints_move_between_plain_trainers_and_memfit(
    precision: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def trainer_of(kind: str, **settings: Any) -> Any:
        if kind == "plain":
            return make_trainer(precision=precision, **settings)
        plugin = MemFit(
            micro_batch_size=4, activation_checkpointing="blocks", verbose=False, **{**AS_IT_IS, "precision": precision}
        )
        return make_trainer(plugin, **settings)

    for writer, reader in (("plain", "memfit"), ("memfit", "plain")):
        first = trainer_of(writer)
        small_run(first)
        path = tmp_path / f"{writer}.ckpt"
        first.save_checkpoint(path)
        second = trainer_of(reader, max_epochs=2)
        module = Small()
        small_run(second, module, ckpt_path=path, weights_only=False)
        assert second.global_step == 8
        assert Small.load_from_checkpoint(path, strict=True, weights_only=False) is not None
    plain, memfit = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("plain", "memfit"))
    assert set(memfit) - set(plain) == {"MemFit"}  # the plan travels in it
    assert set(plain) <= set(memfit)
