"""What counts of the warm-ups of several ranks."""

from __future__ import annotations

from typing import Any

from lightning_memfit.measurement import Measurement
from lightning_memfit.real_steps import Ran, Unrecomputable
from lightning_memfit.steps_of_all_ranks import worst_of


def ran(**changes: Any) -> Ran:
    facts: dict[str, Any] = {
        "measured_peak_allocated_bytes": 10,
        "measured_evaluation_peak_bytes": None,
        "measured_peak_rss_bytes": None,
        "measured_step_seconds": 1.0,
        "profiled_steps": 2,
    }
    return Ran(measurement=Measurement(**facts | changes))


def test_the_largest_of_every_number_counts() -> None:
    first = ran(measured_peak_rss_bytes=7, measured_step_seconds=2.0)
    second = ran(measured_peak_allocated_bytes=30, measured_evaluation_peak_bytes=5, profiled_steps=0)
    worst = worst_of([first, second]).measurement
    assert worst == Measurement(
        measured_peak_allocated_bytes=30,
        measured_evaluation_peak_bytes=5,
        measured_peak_rss_bytes=7,
        measured_step_seconds=2.0,
        profiled_steps=0,
        measured_peak_bytes_by_rank=(10, 30),
    )


def test_memory_that_ran_out_on_one_rank_ran_out() -> None:
    assert worst_of([ran(), Ran(), ran()]) == Ran()


def test_modules_that_one_rank_cannot_recompute_are_not_recomputed() -> None:
    mismatch = Unrecomputable(error="computes something else.", reason="gave something else")
    assert worst_of([ran(), Ran(mismatch=mismatch)]) == Ran(mismatch=mismatch)
