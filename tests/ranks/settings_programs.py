"""Fits on two ranks whose strategies differ in a setting alone, one after the other with one folder of kept plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_memfit import MemFit, fully_shard
from lightning_memfit.errors import MemFitError
from lightning_memfit.sharding import Sharding
from tests.ranks.trainer_programs import QUIET, RANKS, Case, Net, loader_of

_CASE = Case(epochs=1)


class Sharded(Net):
    """As the documentation has it: nothing asks whether the module is sharded already."""

    def configure_model(self) -> None:
        fully_shard(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


class Fit:
    """One Trainer with a plugin of its own."""

    def __init__(self, strategy: Any, folder: str, plan: str | None = None, **settings: Any) -> None:
        self.plugin = MemFit(
            precision="32-true",
            **{"optimizer_implementation": "as-configured", **settings},
            cache_dir=Path(folder) / "cache",
            plan=plan,
            verbose=False,
        )
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            max_epochs=_CASE.epochs,
            plugins=[self.plugin],
            default_root_dir=folder,
            **QUIET,
        )

    def of(self, net: Net, rank: int) -> Sharding | None:
        """Fit; how the plan says that the run is spread."""
        self.trainer.fit(net, loader_of(_CASE, rank))
        assert self.plugin.plan is not None
        return self.plugin.plan.candidate.sharding


def run_settings(rank: int) -> dict[str, Any]:
    """What the plans of runs say that differ in one setting of DDP, and what is refused with which words."""
    found: dict[str, Any] = {}
    torch.set_num_threads(1)
    folder = _folder()
    for view in (False, True):
        found[f"views {view}"] = Fit(DDPStrategy(gradient_as_bucket_view=view), folder).of(Net(_CASE), rank)
    for name, budget, view in (
        ("views measured", 2**30, True),
        ("at its own peak", None, True),
        ("views where nothing else fits", None, False),
    ):
        own = Path(folder) / name  # nothing is known there of the fit before
        own.mkdir(exist_ok=True)
        fit = Fit(
            DDPStrategy(gradient_as_bucket_view=view),
            str(own),
            budget=found["views measured"] if budget is None else budget,
            activation_checkpointing="none",
            micro_batch_size=8,
        )
        sharding = fit.of(Net(_CASE), rank)
        assert fit.plugin.plan is not None and fit.plugin.measured is not None
        found[f"{name}, in words"] = (
            fit.plugin.plan.candidate.label,
            next(each for each in fit.plugin.plan.choices if each.lever == "strategy").reason,
        )
        peak = fit.plugin.measured.measured_peak_allocated_bytes
        found[name] = peak if budget is not None else (sharding, peak)
    refused: dict[str, Callable[[], Any]] = {
        "static graph": lambda: Fit(DDPStrategy(static_graph=True), folder).of(Net(_CASE), rank),
        "fused": lambda: Fit(_fsdp2(), folder, optimizer_implementation="fused").of(Sharded(_CASE), rank),
    }
    for name, work in refused.items():
        found[name] = _error_of(work)
    net, fit = Sharded(Case(engine="fsdp2", epochs=1)), Fit(_fsdp2(), folder)
    fit.of(net, rank)
    trained = copy.deepcopy(_whole(net))
    found["validated"] = fit.trainer.validate(net, loader_of(_CASE, rank), verbose=False)
    found["unchanged"] = all(torch.equal(weight, trained[name]) for name, weight in _whole(net).items())
    return found


def run_zero_settings(rank: int) -> dict[str, Any]:
    """The same for stages of DeepSpeed, and a fit under manual optimization."""
    import logging

    import deepspeed

    from tests.ranks.cpu_deepspeed import CPUDeepSpeed

    def zero(stage: int) -> Any:
        sizes = {"allgather_bucket_size": 1000, "reduce_bucket_size": 1000}
        return CPUDeepSpeed(stage=stage, logging_level=logging.ERROR, **sizes)

    found: dict[str, Any] = {}
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder = _folder()
    for stage in (1, 2, 3):
        found[f"stage {stage}"] = Fit(zero(stage), folder).of(Net(_CASE), rank)
    saved = str(Path(folder) / "plan.yaml")
    found["a plan of another stage"] = _error_of(lambda: Fit(zero(1), folder, plan=saved).of(Net(_CASE), rank))
    manual = Fit(zero(2), folder)
    manual.of(Manual(_CASE), rank)
    found["steps of manual optimization"] = manual.trainer.global_step
    return found


class Manual(Net):
    """Its step is ``training_step``'s own."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def _folder() -> str:
    """In the folder that all ranks work in: one of plans and of what is kept of them."""
    folder = Path.cwd() / "kept"
    folder.mkdir(exist_ok=True)
    return str(folder)


def _fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)


def _error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except MemFitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _whole(net: Net) -> dict[str, torch.Tensor]:
    # Behind an evaluation the root's parameters are gathered still.
    return {
        name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        for name, weight in net.state_dict().items()
    }
