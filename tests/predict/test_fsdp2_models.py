"""One rank's derived step equals torch's own engine, for sixteen kinds of models.

Run: ``pytest tests/predict/test_fsdp2_models.py``; all models with ``-m "slow or not slow"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest

from benchmarks.zoo import Precision, ZooCase, build
from benchmarks.zoo_models import MODELS
from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.predict.fsdp2 import fsdp2_timeline
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.training_step import program_of, trace_window

_FAST = ("big_vocabulary", "lstm")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one model is spread."""

    ranks: int
    precision: Precision = "32-true"
    recomputed: bool = False
    slices: int = 1
    reshards: bool = True
    synchronisation: Literal["step", "slice"] = "slice"


SETTINGS = (
    Setting(ranks=2),
    Setting(ranks=8, precision="bf16-mixed", recomputed=True, slices=2),
    Setting(ranks=64, slices=2, reshards=False, synchronisation="step"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FAST else pytest.mark.slow) for name in MODELS]
)
def test_a_derived_rank_needs_what_a_traced_one_does(name: str) -> None:
    for setting in SETTINGS:
        module, batch = build(ZooCase(name, setting.precision, "none", "sgd"))
        blocks = find_repeated_blocks(module)
        sharding = Sharding(
            engine="fsdp2",
            ranks=setting.ranks,
            synchronisation=setting.synchronisation,
            shard_groups=(*blocks, ""),
            reshard_after_forward=setting.reshards,
        )
        samples = batch_size_of(batch) // setting.slices
        trace = partial(
            trace_window,
            program_of(module, step_context=autocast_context(setting.precision)),
            batch,
            divide=lambda whole, sizes=(samples,) * setting.slices: split_by_sizes(whole, sizes),
            collect_signatures=False,
            steps=False,
        )
        with checkpointed(module, blocks if setting.recomputed else ()):
            whole, traced = trace(), predict_memory(trace(sharding=sharding))
        derived = predict_memory(fsdp2_timeline(whole, sharding, collectives="gloo", slices_per_batch=setting.slices))
        # Without operator probes the trace does not see the copies of gradients that are filled up to whole rows.
        assert derived.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=1e-4), setting
