"""From a timeline to what torch's caching allocator needs on a GPU: allocated, reserved, and the least that is enough.

Sizes are rounded as the allocator rounds them, workspaces of libraries stand beside the step, and the requests of
several steps are replayed in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from lightning_memfit.plan import MemoryBreakdown, Phase
from lightning_memfit.predict.allocator_settings import AllocatorSettings
from lightning_memfit.predict.caching_allocator import Allocate, Release, Request, minimum_feasible_bytes, replay
from lightning_memfit.predict.cuda_temporaries import Workspace
from lightning_memfit.predict.memory import accumulates_in_place, predict_memory
from lightning_memfit.trace.timeline import Free, Operation, ProbeResult, Resident, Timeline

_STEPS = 3
"""Steps that are replayed: the first makes the optimizer's states, from the second on they repeat."""


def predict_cuda_memory(
    timeline: Timeline,
    probes: Mapping[int, ProbeResult] | None = None,
    *,
    zero_gradients_early: bool = False,
    workspaces: Sequence[Workspace] = (),
    settings: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
) -> MemoryBreakdown:
    """Replay a timeline through the caching allocator.

    Args:
        timeline: one optimizer step in the steady state.
        probes: by signature; an operator without a result counts with its outputs alone.
        zero_gradients_early: the old gradients are gone before the first forward.
        workspaces: what libraries keep; counted as temporaries.
        settings: how the allocator is set up; torch's defaults if left out.
        allowed_bytes: what torch allows itself, where a memory fraction is set: from a share of it on, cached segments
            are given back if the settings say so.

    Ignores: blocks of other streams, and what evaluation and checkpoints leave behind.
    """
    settings = AllocatorSettings() if settings is None else settings
    probes, size_of = probes or {}, cache(settings.rounded_bytes)
    allocated = predict_memory(
        _rounded(timeline, workspaces, size_of),
        {number: _rounded_probe(probe, size_of) for number, probe in probes.items()},
        zero_gradients_early=zero_gradients_early,
    )
    requests = requests_of(timeline, probes, zero_gradients_early=zero_gradients_early, workspaces=workspaces)
    unlimited = replay(requests, settings, allowed_bytes=allowed_bytes)
    return replace(
        allocated,
        peak_reserved_bytes=unlimited.peak_reserved_bytes,
        minimum_feasible_bytes=minimum_feasible_bytes(requests, settings, unlimited=unlimited),
    )


Rounded = Callable[[int], int]
"""A requested size to the size of its block."""


def _rounded(timeline: Timeline, workspaces: Sequence[Workspace], size_of: Rounded) -> Timeline:
    first = 1 + max([*(r.storage for r in timeline.residents), *timeline.categories], default=0)
    kept = [Resident(first + i, each.high_bytes, "temporaries") for i, each in enumerate(workspaces)]
    residents = (*timeline.residents, *kept)
    return replace(
        timeline,
        residents=tuple(each._replace(allocated_bytes=size_of(each.allocated_bytes)) for each in residents),
        events=tuple(
            event if isinstance(event, Free) else _rounded_operation(event, size_of) for event in timeline.events
        ),
    )


def _rounded_operation(operation: Operation, size_of: Rounded) -> Operation:
    outputs = tuple(output._replace(allocated_bytes=size_of(output.allocated_bytes)) for output in operation.outputs)
    return operation._replace(outputs=outputs)


def _rounded_probe(probe: ProbeResult, size_of: Rounded) -> ProbeResult:
    hidden = None if probe.hidden_bytes is None else size_of(probe.hidden_bytes)
    outputs = {position: size_of(size) for position, size in probe.output_bytes.items()}
    return replace(probe, peak_bytes=size_of(probe.peak_bytes), output_bytes=outputs, hidden_bytes=hidden)


def requests_of(
    timeline: Timeline,
    probes: Mapping[int, ProbeResult] | None = None,
    *,
    zero_gradients_early: bool = False,
    workspaces: Sequence[Workspace] = (),
) -> list[Request]:
    """What a run asks of the allocator, from the move of the module to the device to the end of the third step.

    1. Parameters and buffers are moved one after the other; so are buckets made in which ranks exchange.
    2. Each step lets go of the last batch and moves its own, as a loop does that gives both the same name: Lightning's
       (``loops/training_epoch_loop.py``, ``advance``) and ``for inputs, labels in loader``.
    3. The first step meets no gradients, and makes the optimizer's states in front of its optimizer step, and so the
       gradients that steps never let go of. The others repeat the timeline: the old gradients, and whatever else a
       step lets go of that was there before it, are what the step before left.

    Args:
        timeline: one optimizer step in the steady state.
        probes: by signature; temporaries inside an operator come after its outputs and go with its end.
        zero_gradients_early: the old gradients are gone before the first forward.
        workspaces: blocks that are taken once and stay.
    """
    run = _Run(timeline, probes or {}, workspaces)
    for resident in timeline.residents:
        if resident.category in ("parameters", "buffers", "communication"):
            run.take(resident.storage, resident.allocated_bytes)
    for step in range(_STEPS):
        run.step(first=step == 0, zero_gradients_early=zero_gradients_early)
    return run.requests


class _Carried(NamedTuple):
    old_gradients: tuple[int, ...]
    """Storages of the gradients that a step begins with."""
    left: Mapping[int, int]
    """Storage of each resident that a step replaces to the one that takes its place when the step ends."""


class _Run:
    """Writes down requests; storages of the timeline get a new block each time they are allocated."""

    def __init__(self, timeline: Timeline, probes: Mapping[int, ProbeResult], workspaces: Sequence[Workspace]) -> None:
        self.requests: list[Request] = []
        self._timeline, self._probes = timeline, probes
        self._waiting = list(workspaces)
        self._blocks: dict[int, int] = {}
        self._next = 0
        self._carried = _carried_by(timeline)
        self._inputs = [r for r in timeline.residents if r.category == "inputs"]
        states = [r for r in timeline.residents if r.category in ("optimizer_states", "callbacks")]
        freed = {event.storage for event in timeline.events if isinstance(event, Free)}
        gradients = [r for r in timeline.residents if r.category == "gradients" and r.storage not in freed]
        self._made_once = [*(r for r in gradients if r.storage not in self._carried.left), *states]

    def take(self, storage: int, size: int) -> None:
        if size:
            self._blocks[storage] = self._new_block(size)

    def _new_block(self, size: int) -> int:
        self._next += 1
        self.requests.append(Allocate(self._next, size))
        return self._next

    def let_go(self, storage: int) -> None:
        block = self._blocks.pop(storage, None)
        if block is not None:
            self.requests.append(Release(block))

    def step(self, *, first: bool, zero_gradients_early: bool) -> None:
        self._move_batch()
        if zero_gradients_early:
            for storage in self._carried.old_gradients:
                self.let_go(storage)
        has_states = not first
        for position, event in enumerate(self._timeline.events):
            if event.phase == "optimizer_step" and not has_states:
                self._make_what_stays()
                has_states = True
            if isinstance(event, Free):
                self.let_go(event.storage)
            else:
                self._run(position, event)
        if not has_states:
            self._make_what_stays()
        self._end()

    def _move_batch(self) -> None:
        for each in self._inputs:
            self.let_go(each.storage)
        for each in self._inputs:
            self.take(each.storage, each.allocated_bytes)

    def _make_what_stays(self) -> None:
        for each in self._made_once:
            self.take(each.storage, each.allocated_bytes)

    def _run(self, position: int, operation: Operation) -> None:
        if operation.flops:
            self._make_workspaces(operation.phase)
        probe = None if operation.signature is None else self._probes.get(operation.signature)
        if accumulates_in_place(self._timeline.events, position, operation):
            assert operation.accumulates_into is not None
            block = self._blocks.pop(operation.accumulates_into, None)
            if block is not None:
                self._blocks[operation.outputs[0].storage] = block
        else:
            for output in operation.outputs:
                real = None if probe is None else probe.output_bytes.get(output.position)
                self.take(output.storage, output.allocated_bytes if real is None else real)
        hidden = 0 if probe is None else probe.temporary_bytes
        if hidden:
            self.requests.append(Release(self._new_block(hidden)))

    def _make_workspaces(self, phase: Phase) -> None:
        for each in [each for each in self._waiting if each.first_phase == phase]:
            self._waiting.remove(each)
            self._new_block(each.high_bytes)

    def _end(self) -> None:
        """What the step leaves takes the place of what it met, gradients above all; everything else goes with it."""
        stays = {each.storage for each in self._timeline.residents}
        left = {new: old for old, new in self._carried.left.items()}
        for storage in list(self._blocks):
            if storage in left:
                self._blocks[left[storage]] = self._blocks.pop(storage)
            elif storage not in stays:
                self.let_go(storage)


def _carried_by(timeline: Timeline) -> _Carried:
    """What a step replaces, and which of its storages take the places: of one category and size, in order."""
    freed = {event.storage for event in timeline.events if isinstance(event, Free)}
    made: dict[tuple[str | None, int], list[int]] = {}
    for storage, size in _allocated(timeline):
        if storage not in freed:
            made.setdefault((timeline.categories.get(storage), size), []).append(storage)
    gradients = tuple(resident.storage for resident in timeline.residents if resident.category == "gradients")
    left = {}
    for resident in timeline.residents:
        candidates = made.get((resident.category, resident.allocated_bytes))
        if candidates and (resident.category == "gradients" or resident.storage in freed):
            left[resident.storage] = candidates.pop(0)
    return _Carried(gradients, left)


def _allocated(timeline: Timeline) -> Iterator[tuple[int, int]]:
    for event in timeline.events:
        if not isinstance(event, Free):
            yield from ((output.storage, output.allocated_bytes) for output in event.outputs)
