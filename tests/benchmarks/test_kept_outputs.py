"""Loops that hold on to what a network returned. Run: ``pytest tests/benchmarks/test_kept_outputs.py``."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.kept_outputs import Held, with_kept_outputs
from lightning_memfit import trace_step
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.timeline import Free, Operation, Timeline

RESULT_BYTES = 64 * 1000 * 4
"""Of 64 samples of 1000 numbers."""


def _timeline(micro_batch_size: int | None = None) -> Timeline:
    return trace_step(
        nn.Linear(10, 1000, bias=False),
        torch.zeros(64, 10),
        loss=lambda module, batch: module(batch).sum(),
        optimizer=torch.optim.SGD,
        micro_batch_size=micro_batch_size,
    )


def _freed(timeline: Timeline) -> set[int]:
    return {event.storage for event in timeline.events if isinstance(event, Free)}


def _result(timeline: Timeline) -> int:
    """The largest storage: what the network returned."""
    outputs = [each for event in timeline.events if isinstance(event, Operation) for each in event.outputs]
    return max(outputs, key=lambda output: output.allocated_bytes).storage


def test_a_loop_that_holds_on_to_nothing_is_left_as_it_is() -> None:
    timeline = _timeline()
    assert with_kept_outputs(timeline, "not at all") is timeline


def test_what_is_held_until_the_step_ends_is_not_freed_in_it() -> None:
    timeline = _timeline()
    kept = with_kept_outputs(timeline, "until the step ends")
    assert _result(timeline) in _freed(timeline)
    assert _freed(kept) == _freed(timeline) - {_result(timeline)}
    assert kept.residents == timeline.residents


def test_what_is_held_into_the_next_forward_is_there_before_and_goes_when_that_has_returned() -> None:
    kept = with_kept_outputs(_timeline(), "into the next forward")
    before = kept.residents[-1]
    assert (before.allocated_bytes, before.category) == (RESULT_BYTES, kept.categories[_result(kept)])
    places = {
        event.storage if isinstance(event, Free) else event.outputs[0].storage: position
        for position, event in enumerate(kept.events)
        if isinstance(event, Free) or event.outputs
    }
    assert places[before.storage] == places[_result(kept)] + 1


def test_a_slice_holds_on_to_its_result_until_the_next_slice_has_returned_its_own() -> None:
    def peak(held: Held, micro_batch_size: int | None = None) -> int:
        return predict_memory(with_kept_outputs(_timeline(micro_batch_size), held)).by_phase["forward"]

    # The loss, 4 bytes, is made after the old result has gone.
    assert peak("into the next forward") - peak("not at all") == RESULT_BYTES - 4
    # Halves: one result beside the other, of 32 samples each.
    assert peak("until the step ends", 32) - peak("not at all", 32) == RESULT_BYTES // 2 - 4
