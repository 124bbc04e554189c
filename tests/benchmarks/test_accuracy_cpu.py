"""The accuracy benchmark's own arithmetic: errors, summaries, targets, causes and tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.accuracy_case import CaseResult
from benchmarks.accuracy_cpu import (
    ErrorSummary,
    as_json,
    as_markdown,
    cause_of,
    missed_targets,
    percent,
    summarise,
)
from benchmarks.machine import this_machine
from lightning_memfit.units import MIB

# Measured 1000 MiB; raw 0.1 % too little, exact after the warm-up, a tenth missing without probes.
RESULT = CaseResult(
    label="gpt 32-true none adamw",
    model="gpt",
    measured_peak_bytes=1000 * MIB,
    predicted_raw_bytes=999 * MIB,
    predicted_unprobed_bytes=900 * MIB,
    predicted_after_warm_up_bytes=1000 * MIB,
    warm_up_peak_bytes=1000 * MIB,
    peak_phase="backward",
    peak_op="aten.mm.default",
    left_by_fit_bytes=0,
    notes=(),
)


def test_errors_are_shares_of_the_measured_peak_and_negative_where_too_little_is_predicted() -> None:
    assert RESULT.raw_error == pytest.approx(-0.001)
    assert RESULT.unprobed_error == pytest.approx(-0.1)
    assert RESULT.warm_up_error == 0


def test_a_summary_is_of_the_sizes_of_errors() -> None:
    # Sizes 1, 2, 3 and 8 %: the median lies between 2 and 3.
    assert ErrorSummary.of([0.01, -0.08, 0.03, -0.02]) == ErrorSummary(median=0.025, largest=0.08)


def test_there_is_a_row_per_model_and_one_over_all() -> None:
    other = replace(RESULT, model="lstm", measured_peak_bytes=2000 * MIB, predicted_raw_bytes=2000 * MIB)
    rows = summarise([RESULT, other, RESULT])
    assert [(row.name, row.cases) for row in rows] == [("GPT", 2), ("LSTM", 1), ("all", 3)]
    assert rows[-1].smallest_peak_bytes == 1000 * MIB
    assert rows[-1].largest_peak_bytes == 2000 * MIB
    # 0.1, 0.1 and 0 %.
    assert rows[-1].raw == ErrorSummary(median=pytest.approx(0.001), largest=pytest.approx(0.001))


def test_a_median_and_a_case_above_their_targets_are_named() -> None:
    good = replace(RESULT, predicted_raw_bytes=1000 * MIB)
    bad = replace(RESULT, label="unet", predicted_raw_bytes=950 * MIB)
    assert missed_targets([good, good, bad]) == ["missed: unet: -5.000 %, target 0.500 %"]
    # One of 0.1 % alone is within a case's target, but above the median's.
    assert missed_targets([RESULT]) == ["missed: raw median 0.100 %, target 0.050 %"]
    assert missed_targets([good]) == []


def test_the_cause_of_a_case_within_its_target_is_empty() -> None:
    assert cause_of(RESULT) == ""


def test_a_gap_that_the_warm_up_closes_is_inside_the_step() -> None:
    bad = replace(RESULT, predicted_raw_bytes=950 * MIB)
    assert cause_of(bad) == ("inside the step at aten.mm.default: the warm-up measured 50.00 MiB more than predicted")


def test_a_gap_that_the_warm_up_does_not_see_is_outside_the_step() -> None:
    bad = replace(
        RESULT,
        predicted_raw_bytes=950 * MIB,
        predicted_after_warm_up_bytes=950 * MIB,
        warm_up_peak_bytes=950 * MIB,
    )
    assert cause_of(bad) == "outside the step: the fit held 50.00 MiB that the warm-up's steps did not"


def test_what_a_forecast_says_about_itself_comes_first() -> None:
    bad = replace(RESULT, predicted_raw_bytes=900 * MIB, notes=("aten.foo could not be probed",))
    assert cause_of(bad) == "aten.foo could not be probed"


def test_the_markdown_has_a_line_per_row() -> None:
    machine = this_machine()
    lines = as_markdown(summarise([RESULT]), machine).splitlines()
    assert lines[2] == "| GPT | 1 | 1000-1000 MiB | 0.100 % | 0.100 % | 0 % | 0 % | 10.000 % |"
    assert lines[3].startswith("| all | 1 |")
    assert machine.torch in lines[-1]


def test_the_json_holds_bytes_and_errors_of_every_case() -> None:
    plain = json.loads(json.dumps(as_json([RESULT], summarise([RESULT]), this_machine())))
    assert plain["cases"][0]["predicted_raw_bytes"] == 999 * MIB
    assert plain["cases"][0]["raw_error"] == pytest.approx(-0.001)
    assert plain["targets"]["missed"] == missed_targets([RESULT])


def test_a_tiny_share_is_not_shown_as_zero() -> None:
    assert (percent(0.0), percent(-4e-8), percent(0.0123)) == ("0 %", "< 0.001 %", "1.230 %")
