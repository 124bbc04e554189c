"""Checkpoints of every layout, and runs under other layouts or on other devices that go on from them."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_memfit import MemFit
from lightning_memfit.errors import CheckpointFormatError
from lightning_memfit.plan import Plan
from tests.ranks.cpu_deepspeed import CPUDeepSpeed
from tests.ranks.trainer_programs import QUIET, Case, Net, data_of

FOLDER = "MEMFIT_TEST_CHECKPOINTS"
"""Environment variable: where checkpoints are, for all ranks."""
CASE = Case(optimizer="adamw", samples=64)
EFFECTIVE_BATCH_SIZE = 32
SAVED_EPOCHS, ALL_EPOCHS = 2, 3
_SMALL = {"reduce_bucket_size": 300_000, "allgather_bucket_size": 300_000, "stage3_prefetch_bucket_size": 300_000}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run holds its model, and saves it."""

    engine: str
    """``"single"``, ``"ddp"``, ``"fsdp2"`` or ``"zero"``."""
    stage: int = 0
    """Of ZeRO."""
    whole_file: bool = False
    """``save_distributed_checkpoint=False`` of FSDP2."""
    offloaded: bool = False
    """``offload_optimizer`` of ZeRO."""
    full_weights: bool = False
    """``load_full_weights`` of ZeRO."""
    universal: bool = False
    """``load_universal`` of ZeRO."""

    def strategy(self, ranks: int) -> Any:
        if self.engine == "single":
            return "auto"
        if self.engine == "ddp":
            return DDPStrategy()
        if self.engine == "fsdp2":
            return ModelParallelStrategy(
                data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=not self.whole_file
            )
        if self.universal:
            config = {
                "zero_optimization": {"stage": self.stage, **_SMALL},
                "zero_allow_untested_optimizer": True,
                "checkpoint": {"load_universal": True},
            }
            return CPUDeepSpeed(config=config, logging_level=logging.ERROR)
        return CPUDeepSpeed(
            stage=self.stage,
            offload_optimizer=self.offloaded,
            load_full_weights=self.full_weights,
            logging_level=logging.ERROR,
        )


SINGLE, DDP, FSDP2 = (Layout(engine=engine) for engine in ("single", "ddp", "fsdp2"))
FSDP2_FILE = Layout(engine="fsdp2", whole_file=True)
ZERO_1, ZERO_2, ZERO_3 = (Layout(engine="zero", stage=stage) for stage in (1, 2, 3))
ZERO_2_OFFLOADED = Layout(engine="zero", stage=2, offloaded=True)
ZERO_2_UNIVERSAL = Layout(engine="zero", stage=2, universal=True)
ZERO_3_FULL_WEIGHTS = Layout(engine="zero", stage=3, full_weights=True)

IN_BFLOAT16 = "zero 2 in bfloat16"
SAVED_BY_ONE = {"fsdp2 of 1": FSDP2}
SAVED_BY_TWO = {
    "ddp": DDP, "fsdp2": FSDP2, "fsdp2 file": FSDP2_FILE, "zero 2": ZERO_2, "zero 3": ZERO_3,
    "zero 2 offloaded": ZERO_2_OFFLOADED, IN_BFLOAT16: ZERO_2,
}  # fmt: skip
"""By name of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A run that is to go on from a checkpoint."""

    saved: str
    """Name of the checkpoint."""
    layout: Layout
    """Of this run."""
    precision: str = "32-true"
    """As MemFit is told."""


ON_TWO = {
    "fsdp2, 1 to 2": Move(saved="fsdp2 of 1", layout=FSDP2),
    "fsdp2": Move(saved="fsdp2", layout=FSDP2),
    "ddp to fsdp2": Move(saved="ddp", layout=FSDP2),
    "fsdp2 file to ddp": Move(saved="fsdp2 file", layout=DDP),
    "zero 2 to zero 1": Move(saved="zero 2", layout=ZERO_1),
    IN_BFLOAT16: Move(saved=IN_BFLOAT16, layout=ZERO_1, precision="auto"),
    "zero 2 offloaded to not": Move(saved="zero 2 offloaded", layout=ZERO_2),
    "zero 3": Move(saved="zero 3", layout=ZERO_3),
}
ON_ONE = {
    "fsdp2, 2 to 1": Move(saved="fsdp2", layout=FSDP2),
    "fsdp2 file to one device": Move(saved="fsdp2 file", layout=SINGLE),
    "zero 2, 2 to 1, converted": Move(saved="universal", layout=ZERO_2_UNIVERSAL),
}
REFUSED_ON_TWO = {
    "zero 2 to zero 3": Move(saved="zero 2", layout=ZERO_3),
    "zero 3 to zero 2": Move(saved="zero 3", layout=ZERO_2),
    "zero 2 to fsdp2": Move(saved="zero 2", layout=FSDP2),
    "fsdp2 to zero 2": Move(saved="fsdp2", layout=ZERO_2),
    "ddp to zero 2": Move(saved="ddp", layout=ZERO_2),
    "fsdp2 to ddp": Move(saved="fsdp2", layout=DDP),
    "zero 2 to ddp": Move(saved="zero 2", layout=DDP),
    "zero 3 as full weights": Move(saved="zero 3", layout=ZERO_3_FULL_WEIGHTS),
    "from 32 bits to bfloat16": Move(saved="zero 2", layout=ZERO_2, precision="bf16-mixed"),
    "from bfloat16 to 32 bits": Move(saved=IN_BFLOAT16, layout=ZERO_2),
    "nothing there": Move(saved="gone", layout=FSDP2),
}
REFUSED_ON_ONE = {
    "zero 2, 2 to 1": Move(saved="zero 2", layout=ZERO_2),
    "fsdp2 to one device": Move(saved="fsdp2", layout=SINGLE),
}


class Watched(Net):
    """Keeps what it was as training began and ended."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(dataclasses.replace(CASE, engine=layout.engine))
        self.layout = layout
        self.began: dict[str, torch.Tensor] = {}
        self.ended: dict[str, torch.Tensor] = {}

    def on_train_start(self) -> None:
        if self.trainer.global_step:  # before that there are no states
            self.began = self.all_states()

    def on_train_end(self) -> None:
        self.ended = self.all_states()

    def all_states(self) -> dict[str, torch.Tensor]:
        """Weights whole, by their names; states of the optimizer, under ZeRO 1 and 2 this rank's part of them."""
        if self.layout.engine == "zero":
            return self._zero_states()
        found = {name: _whole(each) for name, each in self.named_parameters()}
        (optimizer,) = self.trainer.optimizers
        for name, each in self.named_parameters():
            found |= {f"{name}: {key}": _whole(state) for key, state in optimizer.state[each].items()}
        return found

    def _zero_states(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = {name: safe_get_full_fp32_param(each).clone() for name, each in self.named_parameters()}
        if self.layout.stage == 3:
            for key in ("exp_avg", "exp_avg_sq"):
                for name, each in self.named_parameters():
                    found[f"{name}: {key}"] = safe_get_full_optimizer_state(each, key).clone()
            return found
        engine: Any = self.trainer.strategy.model
        for group, states in engine.optimizer.optimizer.state_dict()["state"].items():
            found |= {f"{group}: {key}": torch.as_tensor(state).clone() for key, state in states.items()}
        return found


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one rank did."""

    began: dict[str, torch.Tensor]
    """Weights and states as training began."""
    ended: dict[str, torch.Tensor]
    """The same as it ended."""
    steps: int
    """Optimizer steps, those before the checkpoint included."""
    plan: Plan
    """MemFit's."""


def save_on_one(rank: int) -> dict[str, Ran]:
    """Two epochs, saved."""
    return {name: _fit(layout, rank, ranks=1, save=name) for name, layout in SAVED_BY_ONE.items()}


def save_and_go_on_on_two(rank: int) -> dict[str, Any]:
    """Two epochs under each layout, saved; and all moves on two ranks."""
    _set_up_deepspeed()
    found: dict[str, Any] = {name: _fit(layout, rank, ranks=2, save=name) for name, layout in SAVED_BY_TWO.items()}
    return {"saved": found, "moved": _moved(ON_TWO, rank, 2), "refused": _refused(REFUSED_ON_TWO, rank, 2)}


def go_on_on_one(rank: int) -> dict[str, Any]:
    """All moves on one rank."""
    _set_up_deepspeed()
    return {"moved": _moved(ON_ONE, rank, 1), "refused": _refused(REFUSED_ON_ONE, rank, 1)}


def _moved(moves: dict[str, Move], rank: int, ranks: int) -> dict[str, Ran]:
    return {name: _fit(each.layout, rank, ranks=ranks, move=each) for name, each in moves.items()}


def _refused(moves: dict[str, Move], rank: int, ranks: int) -> dict[str, str]:
    """What the errors say, Lightning's on a folder in the note on it; another end is one of the program."""
    said = {}
    for name, each in moves.items():
        try:
            _fit(each.layout, rank, ranks=ranks, move=each)
        except CheckpointFormatError as error:
            said[name] = str(error)
        except IsADirectoryError as error:
            (said[name],) = error.__notes__
    return said


def _fit(layout: Layout, rank: int, *, ranks: int, save: str | None = None, move: Move | None = None) -> Ran:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saved = Path(os.environ[FOLDER])
    net, data = Watched(layout), data_of(CASE)
    plugin = MemFit(
        effective_batch_size=EFFECTIVE_BATCH_SIZE,
        micro_batch_size=3,
        precision=("bf16-mixed" if save == IN_BFLOAT16 else "32-true") if move is None else move.precision,
        activation_checkpointing="none",
        optimizer_implementation="as-configured",
        optimizer_states="as-configured",
        budget="256MiB",
        cache_dir=None,
        verbose=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=layout.strategy(ranks),
            max_epochs=SAVED_EPOCHS if move is None else ALL_EPOCHS,
            plugins=[plugin],
            default_root_dir=folder,
            **QUIET,
        )
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
        loader = DataLoader(data, batch_size=CASE.loader_batch_size, sampler=sampler)
        if move is None:
            trainer.fit(net, loader)
        else:
            trainer.fit(net, loader, ckpt_path=saved / move.saved, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(saved / save)
    assert plugin.plan is not None
    return Ran(began=net.began, ended=net.ended, steps=trainer.global_step, plan=plugin.plan)


def _set_up_deepspeed() -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo reduces: nothing is compiled


def _whole(tensor: Any) -> torch.Tensor:
    """Every element of a tensor that may be spread; all ranks ask."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()  # on one rank the whole is the part itself
