"""Synthetic timelines replayed, worked out by hand, and properties. Run: ``pytest tests/predict/test_memory.py``."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memfit.plan import CATEGORIES, PHASES
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.timeline import Event, Free, Operation, Output, ProbeResult, Resident, Timeline


def op(
    *outputs: tuple[int, int],
    phase: Any = "forward",
    signature: int | None = None,
    into: int | None = None,
    module: str = "",
) -> Operation:
    """An operator that allocates (storage, bytes) pairs."""
    return Operation(
        f"op{signature}", module, phase, signature,
        tuple(Output(storage, index, size) for index, (storage, size) in enumerate(outputs)), into,
    )  # fmt: skip


def timeline(
    *events: Event, residents: tuple[Resident, ...] = (), categories: dict[int, Any] | None = None
) -> Timeline:
    return Timeline(
        residents=residents, events=events, categories=categories or {}, signatures=(), num_parameters=7,
        num_operations=0, flops=0, recomputed_flops=0,
    )  # fmt: skip


def test_a_step_without_events_is_what_is_there() -> None:
    memory = predict_memory(timeline(residents=(Resident(0, 100, "parameters"), Resident(1, 30, "inputs"))))
    assert memory.peak_allocated_bytes == 130
    assert memory.by_category == {"parameters": 100, "inputs": 30}
    assert (memory.peak_phase, memory.peak_op, memory.peak_module) == ("forward", None, None)
    assert memory.num_parameters == 7


def test_the_peak_is_the_highest_point_and_carries_its_place() -> None:
    memory = predict_memory(
        timeline(
            op((1, 50), signature=0),
            op((2, 70), signature=1, module="block"),  # 10 + 50 + 70
            Free(1, "forward"),
            op((3, 40), phase="backward", signature=2),  # 10 + 70 + 40
            residents=(Resident(0, 10, "parameters"),),
            categories={1: "activations", 2: "activations", 3: "gradients"},
        )
    )
    assert memory.peak_allocated_bytes == 130
    assert (memory.peak_phase, memory.peak_op, memory.peak_module) == ("forward", "op1", "block")
    assert memory.by_phase == {"forward": 130, "backward": 120}
    assert memory.by_category == {"parameters": 10, "activations": 120}


def test_what_probing_found_inside_an_operator_is_temporaries() -> None:
    events = (op((1, 50), signature=0), op((2, 20), signature=1))
    probes = {0: ProbeResult(peak_bytes=90, output_bytes={0: 50})}
    memory = predict_memory(timeline(*events), probes)
    assert memory.peak_allocated_bytes == 90  # 50 of output, 40 of temporaries; later 50 + 20
    assert memory.by_category == {"temporaries": 90}
    assert predict_memory(timeline(*events)).peak_allocated_bytes == 70


def test_the_real_size_of_an_output_replaces_the_traced_one() -> None:
    probes = {0: ProbeResult(peak_bytes=80, output_bytes={0: 80})}
    events = (op((1, 50), signature=0), Free(1, "forward"), op((2, 60), signature=1))
    memory = predict_memory(timeline(*events), probes)
    assert memory.peak_allocated_bytes == 80
    assert memory.by_phase == {"forward": 80}


def test_early_zeroing_takes_the_old_gradients_away_from_the_start() -> None:
    events = (op((2, 50), signature=0), Free(1, "zero_grad"), op((3, 100), phase="backward", signature=1))
    step = timeline(*events, residents=(Resident(0, 100, "parameters"), Resident(1, 100, "gradients")))
    assert predict_memory(step).by_phase == {"forward": 250, "backward": 250}
    assert predict_memory(step, zero_gradients_early=True).by_phase == {"forward": 150, "backward": 250}


def test_a_gradient_that_is_added_in_place_takes_no_second_buffer() -> None:
    accumulate = op((3, 50), phase="backward", signature=1, into=1)
    start = (op((1, 50), phase="backward", signature=0), op((2, 50), phase="backward", signature=0))
    in_place = timeline(*start, accumulate, Free(2, "backward"), Free(1, "backward"))
    assert predict_memory(in_place).peak_allocated_bytes == 100
    still_used = timeline(*start, accumulate, op((4, 1), phase="backward", signature=2), Free(1, "backward"))
    assert predict_memory(still_used).peak_allocated_bytes == 151


def test_the_sum_is_as_large_and_freed_once() -> None:
    events = (
        op((1, 50), phase="backward", signature=0),
        op((3, 50), phase="backward", signature=1, into=1),
        Free(1, "backward"),
        Free(3, "backward"),
        op((4, 60), phase="backward", signature=2),
    )
    assert predict_memory(timeline(*events)).peak_allocated_bytes == 60


@st.composite
def steps(draw: st.DrawFn, accumulating: bool = True) -> tuple[Timeline, dict[int, ProbeResult]]:
    """Any legal timeline: storages come once and go at most once."""
    residents = tuple(
        Resident(number, draw(st.integers(0, 50)), draw(st.sampled_from(("parameters", "gradients", "inputs"))))
        for number in range(draw(st.integers(0, 4)))
    )
    alive = [resident.storage for resident in residents]
    categories: dict[int, Any] = {}
    events: list[Event] = []
    following = 100
    for _ in range(draw(st.integers(0, 25))):
        phase = draw(st.sampled_from(PHASES))
        if alive and draw(st.booleans()):
            events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1))), phase))
            continue
        outputs = []
        for index in range(draw(st.integers(0, 2))):
            outputs.append(Output(following, index, draw(st.integers(0, 60))))
            categories[following] = draw(st.sampled_from(CATEGORIES))
            alive.append(following)
            following += 1
        into = draw(st.sampled_from(alive)) if accumulating and len(outputs) == 1 and draw(st.booleans()) else None
        if into is not None and into == outputs[0].storage:
            into = None
        events.append(Operation("op", "", phase, draw(st.integers(0, 3)), tuple(outputs), into))
    probes = {
        number: ProbeResult(
            peak_bytes=draw(st.integers(0, 100)),
            output_bytes=draw(st.dictionaries(st.integers(0, 1), st.integers(0, 60))),
        )
        for number in range(draw(st.integers(0, 4)))
    }
    return timeline(*events, residents=residents, categories=categories), probes


@settings(max_examples=200, deadline=None)
@given(steps())
def test_categories_add_up_to_the_peak_and_none_is_negative(step: tuple[Timeline, dict[int, ProbeResult]]) -> None:
    memory = predict_memory(*step)
    assert sum(memory.by_category.values()) == memory.peak_allocated_bytes
    assert min(memory.by_category.values(), default=0) >= 0
    assert set(memory.by_category) <= set(CATEGORIES)


@settings(max_examples=200, deadline=None)
@given(steps())
def test_early_zeroing_never_needs_more_and_saves_at_most_the_gradients(
    step: tuple[Timeline, dict[int, ProbeResult]],
) -> None:
    late, early = predict_memory(*step), predict_memory(*step, zero_gradients_early=True)
    gradients = sum(r.allocated_bytes for r in step[0].residents if r.category == "gradients")
    assert 0 <= late.peak_allocated_bytes - early.peak_allocated_bytes <= gradients


@settings(max_examples=200, deadline=None)
@given(steps(accumulating=False))
def test_the_peak_is_the_most_that_is_alive_or_inside_an_operator_at_any_moment(
    step: tuple[Timeline, dict[int, ProbeResult]],
) -> None:
    whole, probes = step
    sizes = {resident.storage: resident.allocated_bytes for resident in whole.residents}
    highest = sum(sizes.values())
    for event in whole.events:
        if isinstance(event, Free):
            del sizes[event.storage]
            continue
        found = probes.get(event.signature if event.signature is not None else -1)
        inside = sum(sizes.values()) + (found.peak_bytes if found else 0)
        for output in event.outputs:
            sizes[output.storage] = found.output_bytes.get(output.position, output.allocated_bytes) if found else (
                output.allocated_bytes
            )  # fmt: skip
        highest = max(highest, inside, sum(sizes.values()))
    assert predict_memory(whole, probes).peak_allocated_bytes == highest


@settings(max_examples=100, deadline=None)
@given(steps())
def test_knowing_more_temporaries_never_gives_a_smaller_peak(step: tuple[Timeline, dict[int, ProbeResult]]) -> None:
    whole, probes = step
    larger = {
        number: ProbeResult(peak_bytes=found.peak_bytes + 10, output_bytes=found.output_bytes)
        for number, found in probes.items()
    }
    assert predict_memory(whole, larger).peak_allocated_bytes >= predict_memory(whole, probes).peak_allocated_bytes
