"""The step-time benchmark's own arithmetic, and that its candidates run. Times are never asserted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks import step_time_case
from benchmarks.machine import this_machine
from benchmarks.step_time import (
    ModelResult,
    as_json,
    as_markdown,
    rank_correlation,
    read_times,
    summarise,
)
from benchmarks.step_time_case import CandidateTimes, ModelTimes, StepRunner, candidates_of, label_of, measure


def candidate(label: str, predicted: float, *measured: float, tier: int = 0) -> CandidateTimes:
    return CandidateTimes(label=label, harm_tier=tier, predicted_seconds=predicted, measured_seconds=measured)


def times(*candidates: CandidateTimes, twins: Any = ()) -> ModelTimes:
    return ModelTimes(model="gpt", candidates=candidates, twins=twins)


def test_the_fastest_round_is_a_candidates_time_and_the_error_is_of_the_prediction() -> None:
    one = candidate("a", 1.1, 1.3, 1.0, 1.2)
    assert one.seconds == 1.0
    assert one.error == pytest.approx(0.1)


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3], [10, 200, 3000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 0, 1, 2, 3 against 1, 0, 3, 2: sum of squared differences 4, 1 - 6 x 4 / (4 x 15) = 0.6.
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    # Equal values share the mean of their ranks: (0.5, 0.5, 2) against (0, 1, 2).
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)


def test_the_fastest_of_the_first_three_by_prediction_is_taken() -> None:
    # The predicted best takes 1.3, the third by prediction 1.1; the very best, 1.0, is predicted to be the fourth.
    result = summarise(
        times(candidate("a", 10, 1.3), candidate("b", 11, 1.4), candidate("c", 12, 1.1), candidate("d", 12.1, 1.0))
    )
    (tier,) = result.tiers
    assert (tier.best, tier.predicted_best, tier.taken) == ("d", "a", "c")
    assert tier.regret_unchecked == pytest.approx(0.3)
    assert tier.regret == pytest.approx(0.1)
    assert [line.partition(" takes")[0] for line in result.missed] == [
        "missed: gpt rank correlation -0.800, target 0.9", "missed: gpt tier 0",
    ]  # fmt: skip


def test_a_candidate_predicted_to_take_a_quarter_more_is_not_timed() -> None:
    (tier,) = summarise(times(candidate("a", 10, 1.3), candidate("b", 12.6, 1.0))).tiers
    assert (tier.taken, tier.best) == ("a", "b")


def test_a_contender_must_be_2_percent_faster_than_the_predicted_best() -> None:
    (tier,) = summarise(times(candidate("a", 10, 1.0, 1.0), candidate("b", 11, 0.99, 0.9))).tiers
    assert (tier.taken, tier.best) == ("a", "b")


def test_what_every_other_round_chooses_is_judged_by_the_rounds_between() -> None:
    # "b" was lucky in a round that chooses.
    (tier,) = summarise(times(candidate("a", 10, 1.0, 1.0, 1.0), candidate("b", 11, 1.2, 1.2, 0.9))).tiers
    assert (tier.taken, tier.best) == ("b", "a")
    assert tier.regret == pytest.approx(0.2)


def test_every_tier_has_its_own_choice_and_ranks_are_over_all() -> None:
    result = summarise(
        times(candidate("a", 1, 1.0), candidate("b", 2, 2.0), candidate("8bit", 3, 3.0, tier=1), candidate("c", 9, 9.0))
    )
    assert [(tier.harm_tier, tier.candidates, tier.taken) for tier in result.tiers] == [(0, 3, "a"), (1, 1, "8bit")]
    assert result.rank_correlation == pytest.approx(1)
    assert (result.fastest_seconds, result.slowest_seconds) == (1.0, 9.0)
    assert not result.missed


def test_errors_keep_their_sign_and_twins_tell_the_noise() -> None:
    pair = candidate("a", 1, 1.0), candidate("a", 1, 0.8)
    result = summarise(
        times(candidate("a", 1.1, 1.0), candidate("b", 1.0, 2.0), candidate("c", 3.9, 3.0), twins=(pair,))
    )
    # +10, -50 and +30 %.
    assert result.median_error == pytest.approx(0.3)
    assert result.largest_error == pytest.approx(-0.5)
    assert result.noise == pytest.approx(0.25)


def test_what_a_child_prints_comes_back_and_everything_can_be_written() -> None:
    original = times(
        candidate("a", 1, 1.0, 1.5), candidate("b", 2, 2.0), twins=((candidate("a", 1, 1), candidate("a", 1, 1)),)
    )
    assert read_times(json.loads(json.dumps(asdict(original)))) == original
    results: list[ModelResult] = [summarise(original)]
    settings = {"rounds": 5, "clock": "wall", "contenders": 3}
    written = json.loads(json.dumps(as_json([original], results, settings, this_machine())))
    assert written["times"][0]["candidates"][0]["measured_seconds"] == [1.0, 1.5]
    assert written["models"][0]["rank_correlation"] == pytest.approx(1)
    assert written["targets"]["missed"] == []
    text = as_markdown(results, settings, this_machine())
    assert "| gpt | 2 | 1000 to 2000 ms | 1.000 | 0 % (+0 %) | 0.0 % | 0.0 % | 0.0 % |" in text
    missed = as_json([original], [replace(results[0], rank_correlation=0.5)], settings, this_machine())
    assert missed["targets"]["missed"] == ["missed: gpt rank correlation 0.500, target 0.9"]


def test_candidates_differ_in_every_lever_and_are_told_apart_by_their_labels() -> None:
    candidates = candidates_of("mlp")
    labels = [label_of(each) for each in candidates]
    assert len(set(labels)) == len(labels) >= 16
    assert {"undivided, 32-true, single-tensor", "4 slices, blocks, bf16-mixed, fused"} <= set(labels)
    assert {each.split.num_slices for each in candidates} == {1, 2, 4}
    assert {each.harm_tier for each in candidates} <= {0, 1}


def test_candidates_run_in_turns_and_every_round_counts_its_fastest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    class Runner:
        def __init__(self, name: str, seconds: list[float]) -> None:
            self.name, self.seconds = name, iter(seconds)

        def step(self) -> float:
            ran.append(self.name)
            return next(self.seconds)

    # Three steps a round, the first two rounds and the first step of each not counted.
    a, b = Runner("a", [9] * 6 + [9, 2, 1, 9, 3, 4]), Runner("b", [0] * 6 + [0, 5, 6, 0, 8, 7])
    runners: Any = [a, b]
    assert measure(runners, rounds=2) == [(1, 3), (5, 7)]
    assert sorted(ran) == ["a"] * 12 + ["b"] * 12
    assert all(len(set(ran[start : start + 3])) == 1 for start in range(0, 24, 3))


def test_a_candidate_really_steps_with_its_levers() -> None:
    sliced = next(each for each in candidates_of("mlp") if label_of(each) == "4 slices, blocks, bf16-mixed, fused")
    ticks = iter([10.0, 12.5])
    runner = StepRunner("mlp", sliced, lambda: next(ticks))
    before = [parameter.detach().clone() for parameter in runner._module.parameters()]
    assert runner.step() == 2.5
    assert any((old != new).any() for old, new in zip(before, runner._module.parameters(), strict=True))
    assert len(runner._slices) == 4
    assert runner._optimizer.param_groups[0]["fused"]
    # The recomputed blocks are given back after the step.
    assert not any("forward" in vars(part) for part in runner._module.modules())


def test_without_bitsandbytes_there_are_no_candidates_of_the_second_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time_case, "has_bitsandbytes", lambda: False)
    assert {each.harm_tier for each in candidates_of("mlp")} == {0}
