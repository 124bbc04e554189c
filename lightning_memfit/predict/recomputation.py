"""What non-reentrant activation checkpointing does to one call of a block, told from a recorded step.

1. In the forward, autograd's hold on what the block saves is not there; its inputs are held instead.
2. When the backward first asks for something the block saved, the block's forward is repeated in front of that node, up
   to the last tensor that it saves.
3. What the repeated operators save lives until the node that asked for it has returned, everything else dies at the
   end. (What is saved without repetition lives until autograd has also summed the node's results to their shapes.)
4. When the block's last node has run, its inputs are let go.

Source: ``torch/utils/checkpoint.py``, 2.13: ``_checkpoint_hook``, ``_recomputation_hook`` and ``_CheckpointFrame``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_memfit.trace.step_record import BlockCall, MarkKind, StepRecord
from lightning_memfit.trace.timeline import Free, Operation


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """How one call is recomputed. Moments are positions in :class:`Moments`."""

    call: BlockCall
    """The call."""
    saved: tuple[int, ...]
    """What autograd saves within it: indices into :attr:`StepRecord.saved`."""
    begins: float
    """Moment in front of which the block is repeated; infinite if nothing asks for what it saved."""
    stops: float
    """Moment *in the forward* at which the repetition ends: when the last tensor is saved."""
    ends: float
    """Moment at which the last of its nodes has run, and its inputs are let go."""
    obstacle: str | None
    """Why it cannot be derived; ``None`` if it can."""


class Moments:
    """One order for everything in a record: events, and between them the marks of autograd."""

    def __init__(self, record: StepRecord) -> None:
        before = np.array([mark.event for mark in record.marks], dtype=np.int64)
        self.of_mark = before + np.arange(len(before))
        events = np.arange(len(record.events) + 1)
        self.of_event = events + np.searchsorted(before, events, side="right")
        self._record = record

    def in_front_of(self, call: BlockCall) -> float:
        """The moment just before a call."""
        return call.first_event + call.first_mark - 0.5

    def behind(self, call: BlockCall) -> float:
        """The moment just after a call."""
        return call.end_event + call.end_mark - 0.5

    @cached_property
    def freed(self) -> Mapping[int, float]:
        """Storage to the moment at which the program lets go of it; those that live on are left out."""
        events = self._record.events
        return {
            event.storage: float(self.of_event[index]) for index, event in enumerate(events) if isinstance(event, Free)
        }

    @cached_property
    def made(self) -> Mapping[int, float]:
        """Storage to the moment at which it was allocated; those that were there before the step are left out."""
        found: dict[int, float] = {}
        for index, event in enumerate(self._record.events):
            if isinstance(event, Operation):
                found.update((output.storage, float(self.of_event[index])) for output in event.outputs)
        return found

    @cached_property
    def used(self) -> Mapping[int, float]:
        """Saved tensor to the moment at which the node that asked for it has returned; only those asked for."""
        return self._last("used")

    @cached_property
    def released(self) -> tuple[float, ...]:
        """By saved tensor, the moment at which autograd lets go of it; infinite if it never does."""
        found = self._last("released")
        return tuple(
            max(found.get(number, math.inf), self.used.get(number, -math.inf))
            for number in range(len(self._record.saved))
        )

    def _last(self, kind: MarkKind) -> dict[int, float]:
        marks = enumerate(self._record.marks)
        return {mark.saved: float(self.of_mark[index]) for index, mark in marks if mark.kind == kind}


def recomputations(record: StepRecord, moments: Moments) -> tuple[Recomputation, ...]:
    """How each call of a followed block would be recomputed, in the order of the calls."""
    unpacked: dict[int, float] = {}
    for index, mark in enumerate(record.marks):
        if mark.kind == "unpacked":
            unpacked.setdefault(mark.saved, float(moments.of_mark[index]))
    repeating = {event.module for event in record.events if isinstance(event, Operation) and event.recomputed}
    return tuple(_recomputation(record, moments, call, unpacked, repeating) for call in record.blocks)


def _recomputation(
    record: StepRecord, moments: Moments, call: BlockCall, unpacked: Mapping[int, float], repeating: set[str]
) -> Recomputation:
    marks = range(call.first_mark, call.end_mark)
    saving = [
        (record.marks[index].saved, float(moments.of_mark[index]))
        for index in marks
        if record.marks[index].kind == "saved"
    ]
    begins = min((unpacked[number] for number, _ in saving if number in unpacked), default=math.inf)
    obstacle = "it is given a key/value cache, and would not be where it is recomputed" if call.has_cache else None
    if obstacle is None and begins < moments.of_event[record.forward_ends[call.micro_step]]:
        obstacle = "its gradients are asked for within the forward"
    if obstacle is None and any(name == call.module or name.startswith(f"{call.module}.") for name in repeating):
        obstacle = "it recomputes activations itself"
    return Recomputation(
        call=call,
        saved=tuple(number for number, _ in saving),
        begins=begins,
        stops=max((moment for _, moment in saving), default=-math.inf),
        ends=max((moments.released[number] for number, _ in saving), default=moments.behind(call)),
        obstacle=obstacle,
    )
