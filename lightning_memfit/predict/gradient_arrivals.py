"""When each parameter's gradient is complete in a backward: the moment at which engines are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_memfit.trace.timeline import Event, Free, Operation, Timeline

_OF_TRANSPOSED = "aten.mm.default"


class Arrival(NamedTuple):
    """The gradient of one backward, complete for one parameter."""

    parameter: int
    """Index into :attr:`Timeline.parameters`."""
    storage: int
    """What holds it: the new gradient, or what has been added to one of an earlier slice."""
    accumulates: bool
    """Whether it has been added to the gradient of an earlier slice."""


def gradient_arrivals(timeline: Timeline, *, weights_last: bool = True) -> dict[int, list[Arrival]]:
    """By index of an event: the gradients that are complete after it.

    Autograd tells its hooks once an operator's gradients are all there and what it had saved is gone: a gradient
    arrives after the frees behind the operator that made it, and behind the others of the same backward operator.

    Args:
        timeline: the step.
        weights_last: a linear layer's weight comes after its bias, since the forward transposed it, which is a backward
            operator more. Not so where one function computes the layer, as in ZeRO 3.
    """
    found: dict[int, list[Arrival]] = {}
    transposed: dict[int, list[Arrival]] = {}
    events = timeline.events
    old = {resident.storage for resident in timeline.residents}
    for index, event in enumerate(events):
        if isinstance(event, Free) or event.phase != "backward":
            continue
        made = [output.storage for output in event.outputs if output.storage in timeline.gradient_of]
        arrivals = [Arrival(timeline.gradient_of[storage], storage, False) for storage in made]
        (transposed if weights_last and event.op == _OF_TRANSPOSED else found).setdefault(
            _end_of_node(events, index), []
        ).extend(arrivals)
        if event.outputs or "add_" not in event.op:
            continue
        into = next((each for each in event.reads if each in timeline.gradient_of and each not in old), None)
        added = next((each for each in event.reads if each not in timeline.gradient_of), None)
        if into is not None and added is not None:
            place = end_of_frees(events, index)  # behind the end of what was added
            found.setdefault(place, []).append(Arrival(timeline.gradient_of[into], added, True))
    for index, arrivals in transposed.items():
        found.setdefault(index, []).extend(arrivals)
    return found


def backward_ends(timeline: Timeline) -> dict[int, int]:
    """By index of the last event of each slice's backward: the slice."""
    last: dict[int, int] = {}
    micro_step = 0
    for index, event in enumerate(timeline.events):
        if isinstance(event, Operation):
            micro_step = event.micro_step
        if event.phase == "backward":
            last[micro_step] = index
    return {index: micro_step for micro_step, index in last.items()}


def end_of_frees(events: Sequence[Event], index: int) -> int:
    """Index of the last of the frees that directly follow an event; its own where none does."""
    while index + 1 < len(events) and isinstance(events[index + 1], Free):
        index += 1
    return index


def _end_of_node(events: Sequence[Event], index: int) -> int:
    module, end = getattr(events[index], "module", ""), index
    while end + 1 < len(events):
        following, present = events[end + 1], events[end]
        if isinstance(following, Operation):
            other = following.module != module or following.phase != "backward"
            if other or isinstance(present, Free) or following.accumulates_into is not None:
                break
        end += 1
    return end
