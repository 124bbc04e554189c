"""The timeline of one rank of a step that is spread over several devices, whoever spreads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_memfit.plan import Candidate, Category, MemoryBreakdown, Offload, Phase, Precision
from lightning_memfit.predict.ddp import ddp_timeline, parameter_bytes
from lightning_memfit.predict.fsdp2 import fsdp2_timeline
from lightning_memfit.predict.module_calls import with_module_calls
from lightning_memfit.predict.optimizer_step import OptimizerStepCost, moved, renumbered, with_optimizer_step
from lightning_memfit.predict.shares import computing_layouts, pinned_beyond_bytes, shares_of
from lightning_memfit.predict.step_writer import Memory
from lightning_memfit.predict.variants import OneRank, StepVariants, Variant
from lightning_memfit.predict.zero import zero_timeline
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import (
    FlatStep,
    ParameterLayout,
    Timeline,
)


def sharded_timeline(
    window: Timeline,
    step: RankStep,
    sharding: Sharding,
    *,
    offload: Offload = "never",
    on_a_gpu: bool = True,
    slices_per_batch: int | None = None,
) -> Timeline:
    """The timeline of one rank, the one that holds most.

    Args:
        window: one optimizer step on one device, up to its optimizer's step.
        step: the optimizer's step over the rank's share.
        sharding: how training is spread.
        offload: what lies in the host's memory.
        on_a_gpu: ranks exchange by NCCL; else by gloo, which works on copies.
        slices_per_batch: slices of one Lightning batch; by default all of the window.
    """
    if sharding.engine == "ddp":
        return with_optimizer_step(ddp_timeline(window, sharding), step.whole)
    if sharding.engine == "deepspeed":
        return _of_zero(window, step, sharding, offload, "device" if on_a_gpu else "both", on_a_gpu)
    return fsdp2_timeline(
        window,
        sharding,
        step.whole,
        collectives="nccl" if on_a_gpu else "gloo",
        slices_per_batch=slices_per_batch,
    )


def _of_zero(
    window: Timeline, step: RankStep, sharding: Sharding, offload: Offload, memory: Memory, on_a_gpu: bool
) -> Timeline:
    return zero_timeline(
        with_module_calls(window),
        sharding,
        step.flat,
        offload=offload,
        memory=memory,
        collectives="nccl" if on_a_gpu else "gloo",
    )


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The optimizer's step over what one rank holds."""

    whole: Timeline
    """All of it; its residents are what is stepped, gradients and states."""
    flat: tuple[FlatStep, ...] = ()
    """DeepSpeed: group by group, as ZeRO runs it."""

    @classmethod
    def of_groups(cls, flat: Sequence[FlatStep]) -> RankStep:
        """One group's step after the other's."""
        whole = _NOTHING
        for each in flat:
            offset = 1 + max([*(r.storage for r in whole.residents), *whole.categories], default=0)
            first = len(whole.signatures)
            step = each.step
            whole = replace(
                whole,
                residents=(*whole.residents, *(r._replace(storage=r.storage + offset) for r in step.residents)),
                events=(*whole.events, *(renumbered(event, offset, first) for event in step.events)),
                categories={**whole.categories, **{s + offset: held for s, held in step.categories.items()}},
                signatures=(*whole.signatures, *(moved(signature, first) for signature in step.signatures)),
                num_operations=whole.num_operations + step.num_operations,
                num_parameters=whole.num_parameters + each.elements,
                notes=tuple(dict.fromkeys((*whole.notes, *step.notes))),
            )
        return cls(whole=whole, flat=tuple(flat))


_NOTHING = Timeline(
    residents=(), events=(), categories={}, signatures=(), num_parameters=0, num_operations=0, flops=0,
    recomputed_flops=0,
)  # fmt: skip


def of_one_device(candidate: Candidate) -> Candidate:
    """The candidate whose slices are followed on one device: as it is, unless its engine computes otherwise.

    DeepSpeed runs forward and backward in 16 bits where Lightning's precision is a mixed one. What a policy of FSDP2
    makes of the step is no precision: :attr:`~lightning_memfit.sharding.Sharding.group_precision` has it.

    Source: ``lightning/pytorch/strategies/deepspeed.py``, 2.6, ``_format_precision_config``; deepspeedai/DeepSpeed
    ``runtime/engine.py``, 0.19: ``module.bfloat16()``, ``module.half()``.

    Ignores: ``float16`` in place of ``bfloat16``, which takes as many bytes.
    """
    sharding = candidate.sharding
    if sharding is None:
        return candidate
    is_16_bits = sharding.engine == "deepspeed" and candidate.precision != "32-true"
    precision: Precision = "bf16-true" if is_16_bits else candidate.precision
    return replace(candidate, sharding=None, offload="never", precision=precision)


def host_bytes(
    parameters: Sequence[ParameterLayout],
    states_bytes: int,
    candidate: Candidate,
    *,
    groups: Iterable[Sequence[int]] = (),
) -> int | None:
    """Bytes that one rank keeps in the host's memory; ``None`` where nothing is offloaded.

    Args:
        parameters: of the module, in its dtype of the forward.
        states_bytes: the rank's share of the optimizer's states.
        candidate: how training is spread, and what is offloaded.
        groups: by group of the optimizer the indices of its parameters, whose buffers are pinned where they are
            offloaded.
    """
    if candidate.sharding is None or candidate.offload == "never":
        return None
    micro_steps = candidate.split.num_slices * candidate.split.accumulate_grad_batches
    shares = shares_of(parameters, candidate.sharding, offload=candidate.offload, micro_steps=micro_steps)
    pinned = pinned_beyond_bytes(parameters, groups, candidate.sharding) if candidate.offload == "parameters" else 0
    return states_bytes + shares.host_bytes + pinned


def floor_bytes(parameters: Sequence[ParameterLayout], states_bytes: int, candidate: Candidate) -> int:
    """Bytes that lie on a rank's device when its optimizer steps, whatever the slices and what is recomputed.

    Args:
        parameters: of the module, in its dtype of the forward.
        states_bytes: the rank's share of the optimizer's states.
        candidate: how training is spread, and what is offloaded.
    """
    if candidate.sharding is None:
        return 0
    shares = shares_of(parameters, candidate.sharding, offload=candidate.offload)
    states = states_bytes if candidate.offload == "never" else 0
    return shares.parameters_bytes + shares.gradients_bytes + shares.masters_bytes + shares.always_bytes + states


def estimated_memory(
    variants: StepVariants,
    variant: Variant,
    step: OptimizerStepCost,
    candidate: Candidate,
    *,
    on_a_gpu: bool = True,
) -> MemoryBreakdown:
    """The peak of one rank, told in milliseconds from sums: what strategies are ranked by before one is confirmed.

    What is alive beside the parameters is exact at each moment, gradients scaled to the rank's share of them; what
    exchanging takes counts with its most in each phase.

    Args:
        variants: of the recorded step on one device.
        variant: the slices, and what is recomputed.
        step: the optimizer's step over the rank's share.
        candidate: how training is spread, and what is offloaded; on one device the peak is the variant's own.
        on_a_gpu: what is offloaded leaves the device; of a host it is a part.

    Raises:
        NotDerivableError: if the variant cannot be told from the record.
    """
    sharding, offload = candidate.sharding, candidate.offload if on_a_gpu else "never"
    if sharding is None:
        return variants.memory(variant, step)
    parameters = variants.parameters
    if offload != "never":
        step = replace(step, states_bytes=0, memory=replace(step.memory, peak_allocated_bytes=0, by_category={}))
    shares = shares_of(parameters, sharding, offload=offload, micro_steps=variant.micro_steps)
    computing = computing_layouts(parameters, sharding)
    whole = sum(map(parameter_bytes, computing))
    gradients = sum(parameter_bytes(parameter) for parameter in computing if parameter.trainable)
    added: dict[Phase, tuple[Category, int]] = {
        "forward": ("communication", shares.forward_bytes),
        "zero_grad": ("communication", shares.forward_bytes),
        "backward": ("communication", shares.backward_bytes),
        "optimizer_step": ("gradients", shares.step_gradients_bytes),
    }
    rank = OneRank(
        parameters=shares.parameters_bytes / max(1, whole),
        gradients=shares.gradients_bytes / max(1, gradients),
        held={"communication": shares.always_bytes, "optimizer_states": shares.masters_bytes},
        added=added,
    )
    return variants.memory(variant, step, rank)
