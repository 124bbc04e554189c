"""Calls of modules in a timeline that was derived, which tells modules by its operators alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_memfit.trace.timeline import ModuleCall, Operation, Timeline


def with_module_calls(timeline: Timeline) -> Timeline:
    """The same timeline with a call for every module that operators of a forward belong to, if it tells of none.

    A call lasts from a module's first operator, or the first of a module in it, to the last of them in a row.

    Ignores: that a module may be called twice in a row, which looks like one call; what calls return.
    """
    if timeline.calls:
        return timeline
    calls: list[ModuleCall] = []
    for micro_step in range(timeline.followed_micro_steps):
        for recomputed in (False, True):
            forward = [
                (index, event.module)
                for index, event in enumerate(timeline.events)
                if isinstance(event, Operation) and _is_of(event, micro_step, recomputed)
            ]
            calls += _calls(forward, micro_step, recomputed=recomputed)
    return replace(timeline, calls=tuple(calls))


def _is_of(event: Operation, micro_step: int, recomputed: bool) -> bool:
    if event.micro_step != micro_step or event.recomputed != recomputed:
        return False
    return recomputed or event.phase == "forward"


def _calls(forward: Sequence[tuple[int, str]], micro_step: int, *, recomputed: bool) -> Iterator[ModuleCall]:
    """Calls in the order in which they end."""
    open_calls: list[tuple[str, int]] = []
    last = 0
    for index, module in forward:
        around = _itself_and_around(module)
        while open_calls and open_calls[-1][0] not in around:
            name, first = open_calls.pop()
            yield ModuleCall(name, micro_step, first, last + 1, (), recomputed)
        known = {name for name, _ in open_calls}
        open_calls += [(name, index) for name in around if name not in known]
        last = index
    while open_calls:
        name, first = open_calls.pop()
        yield ModuleCall(name, micro_step, first, last + 1, (), recomputed)


def _itself_and_around(module: str) -> list[str]:
    """A module's qualified name and those it lies in, the root first.

    >>> _itself_and_around("blocks.0.mlp")
    ['', 'blocks', 'blocks.0', 'blocks.0.mlp']
    """
    parts = module.split(".") if module else []
    return ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]
