"""Calls of modules read off the operators of a timeline. Run: ``pytest tests/predict/test_module_calls.py``."""

from __future__ import annotations

from dataclasses import replace

from lightning_memfit.predict.module_calls import with_module_calls
from lightning_memfit.trace.timeline import Event, Free, ModuleCall, Operation, Timeline


def ran(module: str, phase: str = "forward", *, micro_step: int = 0, recomputed: bool = False) -> Operation:
    return Operation("op", module, phase, None, (), micro_step=micro_step, recomputed=recomputed)  # type: ignore[arg-type]


def timeline(*events: Event, slices: int = 1) -> Timeline:
    return Timeline(
        residents=(), events=events, categories={}, signatures=(), num_parameters=0, num_operations=len(events),
        flops=0, recomputed_flops=0, micro_steps=slices, followed_micro_steps=slices,
    )  # fmt: skip


def spans(found: Timeline) -> list[tuple[str, int, int]]:
    return [(call.module, call.first_event, call.end_event) for call in found.calls]


def test_a_call_lasts_from_the_first_operator_of_a_module_to_the_last_and_inner_ones_end_first() -> None:
    events = (ran("a.up"), Free(1, "forward"), ran("a"), ran("a.down"), ran("b"), ran("b", "backward"))
    assert spans(with_module_calls(timeline(*events))) == [
        ("a.up", 0, 1), ("a.down", 3, 4), ("a", 0, 4), ("b", 4, 5), ("", 0, 5),
    ]  # fmt: skip


def test_slices_and_repetitions_are_calls_of_their_own() -> None:
    events = (ran("a"), ran("a", "backward", recomputed=True), ran("a", micro_step=1))
    calls = with_module_calls(timeline(*events, slices=2)).calls
    assert [(call.module, call.micro_step, call.recomputed) for call in calls if call.module] == [
        ("a", 0, False), ("a", 0, True), ("a", 1, False),
    ]  # fmt: skip


def test_a_timeline_that_tells_its_calls_is_left_alone() -> None:
    known = replace(timeline(ran("a")), calls=(ModuleCall("a", 0, 0, 1, (), False),))
    assert with_module_calls(known) is known
