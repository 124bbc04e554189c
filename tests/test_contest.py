"""Which of several plans is the fastest, on made-up times. Run: ``pytest tests/test_contest.py``."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_memfit.contest import Outcome, Standing, fastest
from lightning_memfit.plan import BatchSplit, Candidate, Forecast, Measurement, MemoryBreakdown, OptimizerImplementation

SPLIT = BatchSplit(effective_batch_size=4, loader_batch_size=4, slice_sizes=(4,))


def forecast(step: OptimizerImplementation, predicted: float = 1.0) -> Forecast:
    return Forecast(
        candidate=Candidate(precision="32-true", split=SPLIT, optimizer_implementation=step),
        memory=MemoryBreakdown(peak_allocated_bytes=100, peak_phase="backward", num_parameters=1),
        predicted_step_seconds=predicted,
    )


def measured(seconds: float) -> Measurement:
    return Measurement(
        measured_peak_allocated_bytes=101,
        measured_evaluation_peak_bytes=None,
        measured_peak_rss_bytes=None,
        measured_step_seconds=seconds,
        profiled_steps=2,
    )


class Contest:
    """Rivals with times of their own; ``None`` runs out of memory, a negative one is above the budget, 0 cannot run."""

    def __init__(self, first: float, again: dict[str, float] | None = None, **rivals: float | None) -> None:
        self.times = rivals
        self.again = again or {}
        self.first = Standing(forecast=forecast("as-configured"), measurement=measured(first))
        self.proved: list[str] = []
        self.retimed: list[str] = []

    def prove(self, rival: Forecast) -> tuple[Measurement | None, bool] | None:
        name = rival.candidate.optimizer_implementation
        self.proved.append(name)
        seconds = self.times[name]
        if seconds == 0:
            return None
        return (None, False) if seconds is None else (measured(abs(seconds)), seconds > 0)

    def retime(self, standing: Forecast) -> float:
        name = standing.candidate.optimizer_implementation
        self.retimed.append(name)
        return self.again.get(name, 99.0)

    def outcome(self, *, out_of_time: bool = False) -> Outcome:
        rivals = [forecast(name) for name in self.times]  # type: ignore[arg-type]
        return fastest(self.first, rivals, self.prove, self.retime, lambda: out_of_time)


def winner(outcome: Outcome) -> str:
    return outcome.winner.forecast.candidate.optimizer_implementation


def test_the_fastest_that_stays_within_the_budget_wins_and_every_time_is_kept() -> None:
    contest = Contest(1.0, foreach=0.5, fused=-0.1, **{"single-tensor": None})
    outcome = contest.outcome()
    assert winner(outcome) == "foreach"
    timed = outcome.winner.measurement.timed_plans
    assert [(plan.candidate.optimizer_implementation, plan.measured_step_seconds) for plan in timed] == [
        ("as-configured", 1.0),
        ("foreach", 0.5),
        ("fused", None),
        ("single-tensor", None),
    ]
    assert [plan.measured_peak_allocated_bytes for plan in timed] == [101, 101, 101, None]
    assert outcome.reason == "the fastest of 4 that were timed"
    assert contest.retimed == []


def test_less_than_two_percent_does_not_replace_the_plan() -> None:
    assert winner(Contest(1.0, foreach=0.99).outcome()) == "as-configured"
    assert winner(Contest(1.0, foreach=0.97).outcome()) == "foreach"


def test_those_that_are_close_are_timed_again_in_turn_and_the_smaller_time_counts() -> None:
    contest = Contest(1.0, {"as-configured": 1.2, "foreach": 0.8}, foreach=1.1, fused=2.0)
    outcome = contest.outcome()
    assert contest.retimed == ["as-configured", "foreach"]
    assert winner(outcome) == "foreach"
    assert outcome.winner.measurement.measured_step_seconds == 0.8
    assert [plan.measured_step_seconds for plan in outcome.winner.measurement.timed_plans] == [1.0, 0.8, 2.0]


def test_time_that_is_up_leaves_rivals_out_and_says_so() -> None:
    contest = Contest(1.0, foreach=0.1)
    outcome = contest.outcome(out_of_time=True)
    assert (winner(outcome), contest.proved) == ("as-configured", [])
    assert outcome.reason == "planning time was up before 1 more could be timed"


def test_without_rivals_nothing_is_said_and_nothing_changes() -> None:
    contest = Contest(1.0)
    outcome = contest.outcome()
    assert outcome.reason == "" and contest.retimed == []
    assert outcome.winner == replace(contest.first, measurement=measured(1.0))


def test_what_cannot_be_run_takes_no_part_and_is_not_listed() -> None:
    outcome = Contest(1.0, fused=0, foreach=0.5).outcome()
    assert winner(outcome) == "foreach"
    steps = [timed.candidate.optimizer_implementation for timed in outcome.winner.measurement.timed_plans]
    assert steps == ["as-configured", "foreach"]


def test_a_second_time_that_could_not_be_had_leaves_the_first() -> None:
    outcome = Contest(1.0, {"as-configured": math.inf, "fused": math.inf}, fused=0.9).outcome()
    assert winner(outcome) == "fused"
    assert outcome.winner.seconds == 0.9
