"""The benchmark of ranks: its own arithmetic, its cases, and what its committed table says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy_ranks import CASE_TARGET, RankResult, as_json, as_markdown, missed_targets
from benchmarks.machine import this_machine
from benchmarks.rank_cases import ALL_CASES, build, fsdp2_sharding, select_cases, slices_of
from lightning_memfit.units import MIB

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy_ranks.json"

# Measured 100 MiB on the second rank; traced exactly, transformed 2 % too little.
RESULT = RankResult(
    label="fsdp2 gpt 2 ranks 32-true adamw 1x1 saved",
    engine="fsdp2",
    measured_peak_bytes=100 * MIB,
    measured_by_rank_bytes=(99 * MIB, 100 * MIB),
    predicted_traced_bytes=100 * MIB,
    predicted_transformed_bytes=98 * MIB,
    predicted_one_device_bytes=150 * MIB,
    peak_phase="backward",
    by_category={"parameters": 100 * MIB},
)


def test_errors_are_shares_of_the_measured_peak_and_negative_where_too_little_is_predicted() -> None:
    assert RESULT.traced_error == 0 and RESULT.transformed_error == pytest.approx(-0.02)
    assert replace(RESULT, predicted_traced_bytes=None).traced_error is None


def test_a_missed_target_is_named_with_the_way_of_predicting() -> None:
    assert missed_targets([RESULT]) == [
        "fsdp2 gpt 2 ranks 32-true adamw 1x1 saved: transformed is off by -2.000 %, more than 1.000 %"
    ]


def test_the_table_shows_what_one_device_would_need_beside_a_rank() -> None:
    row = as_markdown([RESULT], this_machine()).splitlines()[2]
    assert row == "| fsdp2 gpt 2 ranks 32-true adamw 1x1 saved | 150.0 MiB | 100.0 MiB | 0 % | -2.000 % |"


def test_everything_is_plain_data() -> None:
    data = json.loads(json.dumps(as_json([RESULT], this_machine())))
    assert data["cases"][0]["transformed_error"] == pytest.approx(-0.02)


def test_labels_are_of_one_case_each_and_cases_can_be_built() -> None:
    assert len({case.label for case in ALL_CASES}) == len(ALL_CASES)
    for case in ALL_CASES:
        assert select_cases(case.label) == (case,)
        network, batch, _ = build(case)
        assert len(slices_of(case, batch)) == case.slices
        assert len(fsdp2_sharding(case, network).shard_groups) >= 4  # three blocks or more, and the root
    with pytest.raises(ValueError, match="no case matches 'ddp nothing'"):
        select_cases("ddp nothing")


def test_every_committed_case_is_one_of_todays_and_within_the_target() -> None:
    cases = json.loads(RESULTS.read_text())["cases"]
    assert {case["label"] for case in cases} == {case.label for case in ALL_CASES}
    for case in cases:
        assert abs(case["traced_error"]) <= CASE_TARGET and abs(case["transformed_error"]) <= CASE_TARGET
