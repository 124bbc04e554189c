"""What is predicted for the ranks of a case, engine by engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.rank_cases import RankCase, build, fsdp2_sharding, slices_of
from lightning_memfit.applied_in_a_trace import checkpointed
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.predict.fsdp2 import fsdp2_timeline
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.sharding import GroupPrecision, Sharding
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.optimizer_step import trace_optimizer_step
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import trace_window


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What one case needs, told in several ways."""

    one_device: MemoryBreakdown
    """The whole step on one device."""
    traced: MemoryBreakdown | None = None
    """One rank, by following the engine on fakes."""
    transformed: MemoryBreakdown | None = None
    """One rank, derived from the step of one device."""


def _of_fsdp2(case: RankCase, prober: OperatorProber) -> Predicted:
    sharding = fsdp2_sharding(case, build(case)[0])
    whole, spread = _trace(case, None), _trace(case, sharding)
    computing = whole if case.policy is None else _trace(case, None, sharding.group_precision)
    step = trace_optimizer_step(build(case)[2], sharding=sharding)
    derived = fsdp2_timeline(computing, sharding, step, collectives="gloo", slices_per_batch=case.slices)
    return Predicted(
        one_device=_replay(whole, prober), traced=_replay(spread, prober), transformed=_replay(derived, prober)
    )


def _trace(case: RankCase, sharding: Sharding | None, of_groups: GroupPrecision | None = None) -> Timeline:
    network, batch, program = build(case)
    blocks = find_repeated_blocks(network) if case.recomputed else ()
    with checkpointed(network, blocks):
        return trace_window(
            replace(program, group_precision=of_groups),
            batch,
            divide=lambda whole: slices_of(case, whole),
            micro_steps=case.slices * case.accumulate,
            sharding=sharding,
        )


def _replay(timeline: Timeline, prober: OperatorProber) -> MemoryBreakdown:
    return predict_memory(timeline, prober.probe(timeline.signatures).results)


PREDICTING: Mapping[str, Callable[[RankCase, OperatorProber], Predicted]] = {"fsdp2": _of_fsdp2}
"""By engine."""
