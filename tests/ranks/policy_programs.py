"""Runs of a Trainer on two ranks under a mixed-precision policy of ``fully_shard``: with MemFit, and without."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_memfit.errors import ConfigurationError
from tests.ranks.trainer_programs import Case, loader_of, net_of, plain, plugin_of, train, trainer_of, weights_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SUMS_IN_32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OUTPUTS_IN_32 = dataclasses.replace(SUMS_IN_32, output_dtype=torch.float32)

DIVIDED = {
    "gradients added up in float32": Case(engine="fsdp2", policy=SUMS_IN_32, micro_batch_size=3, accumulate=2),
    "gradients added up in bfloat16": Case(engine="fsdp2", policy=BF16, micro_batch_size=3, accumulate=2),
    "outputs in float32, blocks recomputed": Case(
        engine="fsdp2",
        policy=OUTPUTS_IN_32,
        micro_batch_size=3,
        accumulate=2,
        settings={"activation_checkpointing": "blocks", "precision": "auto"},
    ),
}
"""Slices of 3, 3 and 2 samples, and 2 batches per optimizer step, of which there are 20."""
NOTHING = Case(engine="fsdp2", policy=SUMS_IN_32, epochs=5)
"""A plan for it changes nothing."""


def undivided(case: Case, rank: int, folder: str) -> dict[str, Any]:
    """The same fit without MemFit, its batches whole."""
    net, trainer = net_of(case), trainer_of(case, [], folder)
    trainer.accumulate_grad_batches = case.accumulate
    trainer.fit(net, loader_of(case, rank))
    return {"weights": weights_of(net), "steps": trainer.global_step}


def refused(rank: int, folder: str) -> str:
    """What is said to a precision beside the policy."""
    case = dataclasses.replace(NOTHING, settings={"precision": "bf16-mixed"})
    try:
        trainer_of(case, [plugin_of(case, folder)], folder).fit(net_of(case), loader_of(case, rank))
    except ConfigurationError as error:
        return str(error)
    return ""


def run_cases(rank: int) -> dict[str, Any]:
    """Every case, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {name: train(case, rank, folder) for name, case in DIVIDED.items()}
        found["undivided"] = {name: undivided(case, rank, folder) for name, case in DIVIDED.items()}
        found["nothing divided"] = train(NOTHING, rank, folder)
        found["plain"] = plain(NOTHING, rank, folder)
        found["refused"] = refused(rank, folder)
        return found
