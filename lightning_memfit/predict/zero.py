"""What one rank allocates and frees under DeepSpeed's ZeRO, from the step of one device that holds everything.

Stages 1 and 2 are here, stage 3 is in ``zero3.py``. Every number is read from DeepSpeed 0.19.8: where it is not said
otherwise, from ``deepspeed/runtime/zero/stage_1_and_2.py``; a fit is compared with it in ``benchmarks``.

The engine zeroes gradients after each step itself, clips them itself, and gives the optimizer one flat ``float32``
tensor for each parameter group. So of the traced step the forwards and backwards stay, but for where gradients go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import Offload
from lightning_memfit.predict.gradient_arrivals import backward_ends, gradient_arrivals
from lightning_memfit.predict.step_writer import Memory, StepWriter
from lightning_memfit.predict.zero3 import ShardedParameters
from lightning_memfit.predict.zero_flat import FlatPartitions
from lightning_memfit.predict.zero_layout import Collectives, FlatGroup, ZeroSettings, elements_of
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import FlatStep, Free, Timeline

_ENGINES_OWN = ("gradient_clipping", "optimizer_step")


def zero_timeline(
    timeline: Timeline,
    sharding: Sharding,
    steps: Sequence[FlatStep],
    *,
    offload: Offload = "never",
    rank: int | None = None,
    memory: Memory = "device",
    collectives: Collectives = "nccl",
    settings: ZeroSettings | None = None,
) -> Timeline:
    """The step of one rank.

    Args:
        timeline: one optimizer step of the whole module on one device, traced in the dtype of the parameters:
            DeepSpeed holds all of them in 16 bits in ``bf16-mixed`` too. An optimizer's step in it is left out.
        sharding: stage, ranks, sizes of buckets; ``None`` means DeepSpeed's own default.
        steps: by parameter group the optimizer's step over one rank's share, as
            :func:`~lightning_memfit.trace.flat_step.trace_flat_steps` follows it.
        offload: ``"optimizer"`` keeps master weights and states on the host, and steps there; ``"parameters"`` keeps
            the shares of stage 3 there too.
        rank: whose step; by default the one with the most gradients.
        memory: whose memory. With ``"both"`` host and device are one, as for a run on a CPU.
        collectives: what exchanges between ranks; gloo allocates copies.
        settings: those of ``sharding``, where DeepSpeed is set to more than it has words for.

    Returns:
        A timeline of that memory alone, with the optimizer's step at its end.

    Raises:
        UnsupportedError: if the sharding is none of DeepSpeed, parameters are offloaded that are not divided, or are of
            a dtype that ZeRO does not divide.

    Ignores: tensors of a few bytes (norms, flags), sub-groups of stage 3 of more than 10^9 elements, what gradients of
    another dtype than the parameters would add (``data_types.grad_accum_dtype``), ``contiguous_gradients=False``,
    what ``pin_memory=True`` rounds up on the host.
    """
    settings = ZeroSettings.of(sharding) if settings is None else settings
    if offload == "parameters" and settings.stage < 3:
        raise UnsupportedError(
            f"offload='parameters' in stage {settings.stage} of ZeRO: parameters are divided, and kept on the host, in "
            "stage 3 alone. Choose zero_stage=3, or offload='optimizer'."
        )
    writer = StepWriter(timeline)
    engine: FlatPartitions | ShardedParameters
    if settings.stage == 3:
        engine = ShardedParameters(
            timeline,
            writer,
            settings,
            steps,
            offload=offload,
            collectives=collectives,
            host_is_device=memory == "both",
        )
    else:
        engine = FlatPartitions(
            timeline,
            writer,
            settings,
            steps,
            rank=heaviest_rank(timeline, sharding, steps) if rank is None else rank,
            offloads=offload != "never",
            collectives=collectives,
        )
    _write(timeline, writer, engine)
    residents, events = writer.parts(memory)
    return replace(
        timeline,
        residents=residents,
        events=events,
        categories=writer.categories,
        signatures=writer.signatures,
        calls=(),
        gradients=(),
        parameters=(),
        gradient_of={},
        notes=tuple(dict.fromkeys((*timeline.notes, *(note for each in steps for note in each.step.notes)))),
    )


def heaviest_rank(timeline: Timeline, sharding: Sharding, steps: Sequence[FlatStep]) -> int:
    """The rank with the most gradients in stages 1 and 2, where a parameter that is cut counts whole on both sides.

    In stage 3 all ranks hold the same.
    """
    settings = ZeroSettings.of(sharding)
    if settings.stage == 3:
        return 0
    elements = {index: elements_of(each) for index, each in enumerate(timeline.parameters)}
    groups = [FlatGroup.of(each.parameters, elements, settings.ranks) for each in steps]
    held = [
        sum(elements[index] for group in groups for index in group.parameters_of(rank))
        for rank in range(settings.ranks)
    ]
    return held.index(max(held))


def _write(timeline: Timeline, writer: StepWriter, engine: FlatPartitions | ShardedParameters) -> None:
    arrivals = gradient_arrivals(timeline, weights_last=engine.weights_last)
    ends = backward_ends(timeline)
    gone = {r.storage for r in timeline.residents if r.category in ("gradients", "optimizer_states")}
    own = {
        output.storage
        for event in timeline.events
        if not isinstance(event, Free) and event.phase in _ENGINES_OWN
        for output in event.outputs
    }
    for resident in timeline.residents:
        if resident.category not in ("gradients", "optimizer_states") and not engine.replaces(resident.storage):
            writer.keep_resident(resident)
    taken = gone | own | {each.storage for found in arrivals.values() for each in found if engine.takes(each)}
    last = max(ends.values(), default=0)
    for index, event in enumerate(timeline.events):
        engine.before(index)
        if isinstance(event, Free):
            if event.storage not in taken:
                writer.keep(event)
        elif event.phase not in _ENGINES_OWN:
            writer.phase, writer.micro_step = event.phase, event.micro_step
            writer.keep(event)
        for arrival in arrivals.get(index, ()):
            engine.gradient(arrival, is_boundary=writer.micro_step == last)
        engine.after(index)
        if index in ends:
            engine.backward_ended(is_boundary=ends[index] == last)
    writer.phase, writer.micro_step = "optimizer_step", last
    engine.step()
