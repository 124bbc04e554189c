"""Training loops that hold on to what a module returned, written into a timeline as what it does to storages.

A loop of the form ``outputs = model(inputs)`` keeps the name until the next forward has returned: what it stands for
lives through the backward, the optimizer's step and the next forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_memfit.trace.timeline import Event, Free, ModuleCall, Resident, Timeline

Held = Literal["not at all", "until the step ends", "into the next forward"]
"""How long a loop holds on to what the root module returned."""


def with_kept_outputs(timeline: Timeline, held: Held) -> Timeline:
    """Make storages live as long as a loop that holds on to outputs lets them.

    1. What the root module returns is not freed before its next forward has returned, or not in this step.
    2. What is held into the next forward was there when the step began, and goes when its first forward has returned.

    Args:
        timeline: one optimizer step in the steady state.
        held: how long.

    Returns:
        The timeline without its calls, whose positions no longer hold.
    """
    if held == "not at all":
        return timeline
    forwards = [call for call in timeline.calls if call.module == "" and not call.recomputed]
    kept = _kept(timeline, forwards)
    before = _residents(timeline, kept, forwards[-1].micro_step) if held == "into the next forward" else ()
    let_go: dict[int, list[int]] = {forwards[0].end_event: [resident.storage for resident in before]}
    for earlier, later in itertools.pairwise(forwards):
        let_go.setdefault(later.end_event, []).extend(kept.of(earlier.micro_step))
    return replace(
        timeline,
        residents=(*timeline.residents, *before),
        events=tuple(_events(timeline, frozenset(kept.sizes), let_go)),
        calls=(),
    )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    sizes: Mapping[int, int]
    """Bytes by storage."""
    micro_steps: Mapping[int, int]
    """Of the call that returned it, by storage."""

    def of(self, micro_step: int) -> list[int]:
        return [storage for storage, step in self.micro_steps.items() if step == micro_step]


def _kept(timeline: Timeline, forwards: Sequence[ModuleCall]) -> _Kept:
    made = {
        output.storage: output.allocated_bytes
        for event in timeline.events
        if not isinstance(event, Free)
        for output in event.outputs
    }
    micro_steps = {storage: call.micro_step for call in forwards for storage in call.outputs if storage in made}
    return _Kept(sizes={storage: made[storage] for storage in micro_steps}, micro_steps=micro_steps)


def _residents(timeline: Timeline, kept: _Kept, micro_step: int) -> tuple[Resident, ...]:
    first = 1 + max([*(resident.storage for resident in timeline.residents), *timeline.categories], default=0)
    return tuple(
        Resident(first + index, kept.sizes[storage], timeline.categories.get(storage, "activations"))
        for index, storage in enumerate(kept.of(micro_step))
    )


def _events(timeline: Timeline, kept: frozenset[int], let_go: Mapping[int, Sequence[int]]) -> Iterator[Event]:
    for position, event in enumerate(timeline.events):
        yield from (Free(storage, "forward") for storage in let_go.get(position, ()))
        if not (isinstance(event, Free) and event.storage in kept):
            yield event
    yield from (Free(storage, "forward") for storage in let_go.get(len(timeline.events), ()))
