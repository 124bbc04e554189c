"""MemFit in Trainers that run DeepSpeed on two ranks."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_memfit import MemFit
from lightning_memfit.plan import Offload
from tests.ranks.cpu_deepspeed import CPUDeepSpeed
from tests.ranks.trainer_programs import QUIET, RANKS, loader_of, net_of
from tests.ranks.zero_programs import ZeroCase, whole_weights

_PINNED = {
    "precision": "32-true", "optimizer_implementation": "as-configured", "activation_checkpointing": "none",
    "micro_batch_size": 3,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LiveCase(ZeroCase):
    """One fit; its slices, accumulation and last window are uneven."""

    micro_batch_size: int = 3
    accumulate: int = 2
    samples: int = 8 * RANKS * 5
    epochs: int = 7
    memfit: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, LiveCase] = {
    "stage 2, chosen by MemFit": LiveCase(
        stage=2,
        memfit={"optimizer_implementation": "auto", "activation_checkpointing": "auto", "optimizer_states": "auto"},
    ),
    "stage 3, blocks recomputed": LiveCase(stage=3, memfit={"activation_checkpointing": "blocks"}),
    "stage 2, a batch without labels": LiveCase(
        stage=2, tokens=True, accumulate=1, samples=8 * RANKS * 4, memfit={"loss_weight": "tokens"}
    ),
    "stage 1, offloaded": LiveCase(stage=1, offload="optimizer"),
    "stage 2, offloaded by MemFit": LiveCase(
        stage=2, optimizer="adamw", memfit={"offload": "optimizer", "optimizer_implementation": "auto"}
    ),
    "stage 3, offloaded by MemFit": LiveCase(
        stage=3, optimizer="adamw", memfit={"offload": "optimizer", "optimizer_implementation": "auto"}
    ),
    "stage 3, parameters offloaded": LiveCase(stage=3, offload="parameters"),
    "stage 3, parameters and all offloaded by MemFit": LiveCase(
        stage=3,
        optimizer="adamw",
        memfit={
            "offload": "parameters",
            "optimizer_implementation": "auto",
            "activation_checkpointing": "blocks",
        },
    ),
}


def run_live(rank: int) -> dict[str, Any]:
    """Every case, one after the other."""
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo reduces: nothing is compiled
    with tempfile.TemporaryDirectory() as folder:
        return {name: fit(case, rank, f"{folder}/{place}") for place, (name, case) in enumerate(CASES.items())}


MOVED = LiveCase(stage=2, optimizer="adamw", epochs=3, memfit={"optimizer_implementation": "auto"})
"""A run that is saved with its optimizer in one place and goes on with it in the other."""
PLACES: tuple[Offload, ...] = ("never", "optimizer")


def run_moved(rank: int) -> dict[str, Any]:
    """By where the optimizer was and where it went: the weights, and those of a run that stayed where it was."""
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for before in PLACES:
            # In the folder that all ranks work in: each writes its part.
            saved = str(Path.cwd() / f"{before}.ckpt")
            stayed = fit(_kept(before), rank, folder)
            fit(dataclasses.replace(_kept(before), epochs=2), rank, folder, save_as=saved)
            for after in PLACES:
                found[f"{before} to {after}"] = {"stayed": stayed, "moved": fit(_kept(after), rank, folder, saved)}
    return found


def _kept(place: Offload) -> LiveCase:
    return dataclasses.replace(MOVED, memfit={**MOVED.memfit, "offload": place})


def fit(
    case: LiveCase, rank: int, folder: str, resumed: str | None = None, *, save_as: str | None = None
) -> dict[str, Any]:
    """One fit on one rank."""
    plugin = MemFit(
        effective_batch_size=case.effective_batch_size, cache_dir=folder, verbose=False, **(_PINNED | case.memfit)
    )
    strategy = CPUDeepSpeed(
        stage=case.stage,
        offload_optimizer=case.offload != "never",
        offload_parameters=case.offload == "parameters",
        allgather_bucket_size=1000,
        reduce_bucket_size=1000,
        logging_level=logging.ERROR,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=case.epochs,
        plugins=[plugin],
        default_root_dir=folder,
        **QUIET,
    )
    net = net_of(case)
    trainer.fit(net, loader_of(case, rank), ckpt_path=resumed, weights_only=False)
    if save_as is not None:
        trainer.save_checkpoint(save_as)
    assert plugin.plan is not None and plugin.measured is not None
    return {
        "weights": whole_weights(net),
        "losses": net.losses,
        "steps": trainer.global_step,
        "plan": plugin.plan,
        "measured": plugin.measured,
        "optimizer": type(strategy.model.optimizer.optimizer).__name__,
        "strategy": (type(strategy).__name__, strategy.handles_gradient_accumulation),
        "parameters_on_host": bool(getattr(strategy.model.optimizer, "offload_param", False)),
    }
