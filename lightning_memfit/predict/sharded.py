"""The timeline of one rank of a step that is spread over several devices, whoever spreads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_memfit.plan import Candidate, Category, MemoryBreakdown, Offload, Phase, Precision
from lightning_memfit.predict.ddp import ddp_timeline, parameter_bytes
from lightning_memfit.predict.module_calls import with_module_calls
from lightning_memfit.predict.optimizer_step import OptimizerStepCost, moved, renumbered, with_optimizer_step
from lightning_memfit.predict.shares import Shares, shares_of
from lightning_memfit.predict.step_writer import Memory
from lightning_memfit.predict.variants import OneRank, StepVariants, Variant
from lightning_memfit.predict.zero import zero_timeline
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import (
    Event,
    FlatStep,
    Free,
    Operation,
    Output,
    ParameterLayout,
    Resident,
    Timeline,
)


def sharded_timeline(
    window: Timeline, step: RankStep, sharding: Sharding, *, offload: Offload = "never", on_a_gpu: bool = True
) -> Timeline:
    """The timeline of one rank, the one that holds most.

    Args:
        window: one optimizer step on one device, up to its optimizer's step.
        step: the optimizer's step over the rank's share.
        sharding: how training is spread.
        offload: what lies in the host's memory.
        on_a_gpu: ranks exchange by NCCL; else by gloo, which works on copies.
    """
    if sharding.engine == "ddp":
        return with_optimizer_step(ddp_timeline(window, sharding), step.whole)
    if sharding.engine == "deepspeed":
        return _of_zero(window, step, sharding, offload, "device" if on_a_gpu else "both", on_a_gpu)
    shares = shares_of(window.parameters, sharding, offload=offload, micro_steps=window.micro_steps)
    return _by_shares(with_optimizer_step(window, step.whole), shares)


def host_timeline(window: Timeline, step: RankStep, sharding: Sharding, *, offload: Offload) -> Timeline:
    """What one rank of DeepSpeed allocates and frees in the host's memory; arguments as above."""
    return _of_zero(window, step, sharding, offload, "host", True)


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

    DeepSpeed runs forward and backward in 16 bits where Lightning's precision is a mixed one.

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


def host_bytes(parameters: Sequence[ParameterLayout], states_bytes: int, candidate: Candidate) -> int | None:
    """Bytes that one rank keeps in the host's memory; ``None`` where nothing is offloaded.

    Args:
        parameters: of the module, in its dtype of the forward.
        states_bytes: the rank's share of the optimizer's states.
        candidate: how training is spread, and what is offloaded.
    """
    if candidate.sharding is None or candidate.offload == "never":
        return None
    return states_bytes + shares_of(parameters, candidate.sharding, offload=candidate.offload).host_bytes


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
    variants: StepVariants, variant: Variant, step: OptimizerStepCost, candidate: Candidate
) -> MemoryBreakdown:
    """The peak of one rank, told in milliseconds from sums: what strategies are ranked by before one is confirmed.

    What is alive beside the parameters is exact at each moment, gradients scaled to the rank's share of them; what
    exchanging takes counts with its most in each phase.

    Args:
        variants: of the recorded step on one device.
        variant: the slices, and what is recomputed.
        step: the optimizer's step over the rank's share.
        candidate: how training is spread, and what is offloaded; on one device the peak is the variant's own.

    Raises:
        NotDerivableError: if the variant cannot be told from the record.
    """
    sharding, offload = candidate.sharding, candidate.offload
    if sharding is None:
        return variants.memory(variant, step)
    parameters = variants.parameters
    if offload != "never":
        step = replace(step, states_bytes=0, memory=replace(step.memory, peak_allocated_bytes=0, by_category={}))
    shares = shares_of(parameters, sharding, offload=offload, micro_steps=variant.micro_steps)
    whole = sum(map(parameter_bytes, parameters))
    gradients = sum(parameter_bytes(parameter) for parameter in parameters if parameter.trainable)
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


def _by_shares(step: Timeline, shares: Shares) -> Timeline:
    """A step in which each parameter and gradient is of its share, and exchanging takes its most in each phase."""
    first = 1 + max([*(each.storage for each in step.residents), *step.categories], default=0)
    trainable = [parameter for parameter in step.parameters if parameter.trainable]
    share = {
        "parameters": shares.parameters_bytes / max(1, sum(map(parameter_bytes, step.parameters))),
        "gradients": shares.gradients_bytes / max(1, sum(map(parameter_bytes, trainable))),
    }
    residents = [
        *(each._replace(allocated_bytes=int(each.allocated_bytes * share.get(each.category, 1)))
          for each in step.residents),
        Resident(first, shares.masters_bytes, "optimizer_states"),
        Resident(first + 1, shares.always_bytes, "communication"),
    ]  # fmt: skip
    scaled = [_scaled(event, step.categories, share) for event in step.events]
    exchanges = {
        "forward": Resident(first + 2, shares.forward_bytes, "communication"),
        "backward": Resident(first + 3, shares.backward_bytes, "communication"),
        "optimizer_step": Resident(first + 4, shares.step_gradients_bytes, "gradients"),
    }
    return replace(
        step,
        residents=tuple(each for each in residents if each.allocated_bytes),
        events=tuple(_with_exchanges(scaled, exchanges)),
        categories={**step.categories, **{taken.storage: taken.category for taken in exchanges.values()}},
    )


def _scaled(event: Event, categories: Mapping[int, Category], share: Mapping[str, float]) -> Event:
    if isinstance(event, Free):
        return event
    outputs = (
        output._replace(allocated_bytes=int(output.allocated_bytes * share.get(categories[output.storage], 1)))
        for output in event.outputs
    )
    return event._replace(outputs=tuple(outputs))


def _with_exchanges(events: Sequence[Event], exchanges: Mapping[str, Resident]) -> Iterator[Event]:
    """The events, with what exchanging takes from the first operator of a phase on to the next one's."""
    held: Resident | None = None
    phase: str | None = None
    for event in events:
        if isinstance(event, Operation) and event.phase not in (phase, "zero_grad"):
            phase = event.phase
            if held is not None:
                yield Free(held.storage, event.phase)
            held = exchanges.get(phase)
            if held is not None:
                taken = (Output(held.storage, 0, held.allocated_bytes),)
                yield Operation("exchange", "", event.phase, None, taken, micro_step=event.micro_step)
        yield event
    if held is not None:
        yield Free(held.storage, "optimizer_step")
