"""The overhead benchmark's own arithmetic. Its times are never asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import overhead
from benchmarks.overhead import COUNTED_STEPS, FIRST_TIMED_BATCH, CallCounter, Overhead, Spread, StepTimer, verdict


def measured(ratio: float, noise: float, *, has_target: bool = True) -> Overhead:
    return Overhead(
        name="small GPT",
        step_seconds=0.05,
        ratios=(ratio, ratio),
        noise_ratios=(1 - noise, 1 + noise),
        cpu_ratios=(ratio, ratio),
        calls_per_step=2000,
        extra_calls_per_step=14,
        has_target=has_target,
    )


def test_a_spread_has_the_median_and_the_quartiles_of_ratios_less_one() -> None:
    # 0, 1, 2, 3 and 4 %.
    spread = Spread.of([1.04, 1.0, 1.02, 1.03, 1.01])
    assert (spread.lower_quartile, spread.median, spread.upper_quartile) == pytest.approx((0.01, 0.02, 0.03))


def test_steps_are_timed_from_start_to_start_and_the_first_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Batches 0 to 4 do not look at the clock; intervals of 2, 3 and 10 seconds follow, and of 1, 1 and 2 on the other.
    wall, cpu = iter([100.0, 102.0, 105.0, 115.0]), iter([1.0, 2.0, 3.0, 5.0])
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(overhead.time, "process_time", lambda: next(cpu))
    timer = StepTimer()
    nothing: Any = None
    for index in range(FIRST_TIMED_BATCH + 4):
        timer.on_train_batch_start(nothing, nothing, nothing, index)
    # Half way from the shortest to the middle one of three.
    assert (timer.step.seconds, timer.step.cpu_seconds) == (2.5, 1.0)


def test_calls_are_counted_within_the_counted_steps_only() -> None:
    counter = CallCounter()
    nothing: Any = None
    for index in range(FIRST_TIMED_BATCH + COUNTED_STEPS + 3):
        counter.on_train_batch_start(nothing, nothing, nothing, index)
        for _ in range(100):
            abs(-1)
    # 100 calls a step, and the few of the hook itself.
    assert 100 <= counter.calls_per_step <= 103


def test_the_target_is_for_workloads_that_have_one() -> None:
    assert measured(1.03, 0.0).missed
    assert not measured(1.01, 0.0).missed
    assert not measured(1.03, 0.0, has_target=False).missed


def test_pairs_that_scatter_too_much_decide_nothing() -> None:
    # Noise ratios 0.999 and 1.001: quartiles of 0.05 % to either side, 1.57 x 0.1 % / sqrt(2) = 0.11 %.
    assert verdict(measured(1.01, 0.001)) == "met: small GPT: +1.00 +- 0.11 %, target 2 %"
    assert verdict(measured(1.03, 0.001)) == "missed: small GPT: +3.00 +- 0.11 %, target 2 %"
    assert measured(1.0195, 0.001).is_undecided
    # Noise ratios 0.9 and 1.1: quartiles of 5 % to either side, 1.57 x 10 % / sqrt(2) = 11.1 %.
    wide = measured(1.03, 0.1)
    assert wide.is_undecided
    assert not wide.missed
    assert verdict(wide).startswith("undecided: small GPT: +3.00 +- 11.10 %, target 2 %. ")


def test_a_workload_without_a_target_is_only_reported() -> None:
    without = measured(1.2, 0.1, has_target=False)
    assert not without.is_undecided
    assert verdict(without) == "small GPT: +20.00 %, no target"


@pytest.mark.parametrize("workload", overhead.WORKLOADS, ids=lambda workload: workload.name)
def test_the_plan_of_every_workload_changes_nothing(workload: overhead.Workload, tmp_path: Path) -> None:
    timer = overhead.StepTimer()
    overhead._fit(workload, timer, 2, tmp_path, with_memfit=True)  # raises where the plan has a lever
    assert timer.step.seconds > 0
