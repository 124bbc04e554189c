"""When forward and backward reach each module: where engines gather parameters, look ahead and let go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_memfit.predict.gradient_arrivals import end_of_frees
from lightning_memfit.trace.timeline import Free, ModuleCall, Operation, Timeline


class Visit(NamedTuple):
    """A module is reached, or left."""

    module: str
    """Its qualified name."""
    parameters: tuple[int, ...]
    """Those of its own, if any: indices into :attr:`Timeline.parameters`."""
    enters: bool
    """Whether it is reached; else it is left."""
    leaves_late: bool = False
    """Whether nothing tells that its backward is over, because its inputs have no gradient."""


@dataclass(frozen=True, kw_only=True)
class SliceVisits:
    """Of one slice."""

    before: Mapping[int, Sequence[Visit]] = field(default_factory=dict)
    """By index of the event that they happen in front of."""
    after: Mapping[int, Sequence[Visit]] = field(default_factory=dict)
    """By index of the event that they happen behind."""
    order: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Every module that is reached, in order: forward, then backward."""


def module_visits(timeline: Timeline) -> dict[int, SliceVisits]:
    """By slice that was followed, the visits to modules; parts without parameters of their own are visited too.

    A parameter is its module's own by its name; and a module's that reads it, where it is tied or used from outside.
    """
    owners = _owners(timeline)
    return {step: _of_slice(timeline, step, owners) for step in range(timeline.followed_micro_steps)}


def _owners(timeline: Timeline) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {call.module: set() for call in timeline.calls}
    by_storage: dict[int, list[int]] = {}
    for index, parameter in enumerate(timeline.parameters):
        found.setdefault(parameter.name.rpartition(".")[0], set()).add(index)
        by_storage.setdefault(parameter.storage, []).append(index)
    for event in timeline.events:
        if isinstance(event, Operation) and event.phase == "forward":
            for storage in event.reads:
                if storage in by_storage:
                    found.setdefault(event.module, set()).update(by_storage[storage])
    return {module: tuple(sorted(own)) for module, own in found.items()}


def _of_slice(timeline: Timeline, micro_step: int, owners: Mapping[str, tuple[int, ...]]) -> SliceVisits:
    before: dict[int, list[Visit]] = {}
    after: dict[int, list[Visit]] = {}
    order: list[tuple[int, int, tuple[str, tuple[int, ...]]]] = []
    calls = [call for call in timeline.calls if call.micro_step == micro_step]
    without_gradient = {call.module for call in calls if not call.recomputed and _has_plain_inputs(timeline, call)}
    for call, enters in _nested(calls):
        own = owners[call.module]
        if enters:
            order.append((call.first_event, len(order), (call.module, own)))
            before.setdefault(call.first_event, []).append(Visit(call.module, own, True))
        else:
            before.setdefault(call.end_event, []).append(Visit(call.module, own, False))
    spans = _backward_spans(timeline, micro_step, owners)
    for module, (first, last) in sorted(spans.items(), key=lambda item: (item[1][0], -item[1][1])):
        own = owners[module]
        order.append((first, len(order), (module, own)))
        before.setdefault(first, []).append(Visit(module, own, True))
        after.setdefault(last, []).insert(0, Visit(module, own, False, module in without_gradient))
    return SliceVisits(before=before, after=after, order=tuple(each for _, _, each in sorted(order)))


def _nested(calls: Sequence[ModuleCall]) -> Iterator[tuple[ModuleCall, bool]]:
    """Beginnings and ends in order; calls come in the order in which they ended."""
    waiting: list[tuple[ModuleCall, list[tuple[ModuleCall, bool]]]] = []
    for call in calls:
        inside: list[tuple[ModuleCall, bool]] = []
        while waiting and _is_within(waiting[-1][0], call):
            inside = [*waiting.pop()[1], *inside]
        waiting.append((call, [(call, True), *inside, (call, False)]))
    for _, moments in waiting:
        yield from moments


def _is_within(inner: ModuleCall, outer: ModuleCall) -> bool:
    by_name = not outer.module or inner.module.startswith(outer.module + ".")
    return by_name and inner.first_event >= outer.first_event


def _backward_spans(
    timeline: Timeline, micro_step: int, owners: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, int]]:
    """First and last event of each module's backward, what is inside it included, and the frees behind it."""
    spans: dict[str, tuple[int, int]] = {}
    events = timeline.events
    for index, event in enumerate(events):
        if isinstance(event, Free) or event.phase != "backward" or event.micro_step != micro_step or event.recomputed:
            continue
        for module in _itself_and_around(event.module):
            if module in owners:
                first = spans.get(module, (index, index))[0]
                spans[module] = (first, end_of_frees(events, index))
    return spans


def _itself_and_around(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _has_plain_inputs(timeline: Timeline, call: ModuleCall) -> bool:
    """Whether all that a call reads from outside was there before the step: nothing of it has a gradient."""
    residents = {resident.storage for resident in timeline.residents}
    made: set[int] = set()
    for event in timeline.events[call.first_event : call.end_event]:
        if isinstance(event, Operation):
            if not set(event.reads) <= residents | made:
                return False
            made.update(output.storage for output in event.outputs)
    return True
