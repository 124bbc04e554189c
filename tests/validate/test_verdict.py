"""The verdict on a warm-up, and what it teaches about plans that were not run. Numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, Measurement, MemoryBreakdown, balanced_slices
from lightning_memfit.validate.verdict import expected_correction, judge


def of(num_slices: int, *modules: str) -> Candidate:
    split = BatchSplit(effective_batch_size=64, loader_batch_size=64, slice_sizes=balanced_slices(64, num_slices))
    return Candidate(precision="32-true", split=split, checkpointed_modules=modules)


def forecast(peak: int) -> Forecast:
    memory = MemoryBreakdown(peak_allocated_bytes=peak, peak_phase="forward", num_parameters=1)
    return Forecast(candidate=of(1), memory=memory)


def measurement(peak: int) -> Measurement:
    return Measurement(
        measured_peak_allocated_bytes=peak,
        measured_evaluation_peak_bytes=None,
        measured_peak_rss_bytes=None,
        measured_step_seconds=1.0,
        profiled_steps=2,
    )


BUDGET = Budget(budget_bytes=1000, capacity_bytes=5000, headroom_bytes=0, non_torch_bytes=0, reason="as given")


def test_a_measurement_at_the_budget_stands() -> None:
    verdict = judge(forecast(900), measurement(1000), BUDGET)
    assert (verdict.fits, verdict.correction_bytes) == (True, 100)
    assert verdict.reason == "measured 1000 B of 1000 B"


def test_one_byte_above_the_budget_does_not_stand() -> None:
    """Reported in microsoft/WSL#11050."""
    verdict = judge(forecast(900), measurement(1001), BUDGET)
    assert (verdict.fits, verdict.correction_bytes) == (False, 101)
    assert verdict.reason == "measured 1001 B, 1 B over the budget"


def test_a_warm_up_that_ran_out_of_memory_is_taken_to_be_above_budget_and_prediction() -> None:
    assert judge(forecast(900), None, BUDGET).correction_bytes == 201  # 1000 x 1.1 + 1 - 900
    assert judge(forecast(2000), None, BUDGET).correction_bytes == 201  # 2000 x 1.1 + 1 - 2000
    assert not judge(forecast(1), None, BUDGET).fits


def test_a_warm_up_that_ran_out_of_memory_on_a_gpu_is_compared_with_what_must_be_reserved() -> None:
    raw = forecast(700)
    memory = replace(raw.memory, peak_reserved_bytes=950, minimum_feasible_bytes=900)
    verdict = judge(replace(raw, memory=memory), None, BUDGET)
    assert verdict.correction_bytes == 201  # 1000 x 1.1 + 1 - 900
    corrected = replace(raw, memory=memory, correction_bytes=verdict.correction_bytes)
    assert corrected.predicted_peak_bytes == 1101


def test_nothing_is_corrected_before_a_warm_up() -> None:
    assert expected_correction(of(1), {}) == 0


def test_one_warm_up_corrects_in_proportion_to_the_samples() -> None:
    known = {of(1): 640}  # 10 bytes for each of 64 samples
    assert expected_correction(of(1), known) == 640
    assert expected_correction(of(2), known) == 320
    assert expected_correction(of(3), known) == 220  # 22 samples


def test_two_warm_ups_tell_a_fixed_part_from_one_per_sample() -> None:
    known = {of(1): 740, of(2): 420}  # 100 + 10 for each of 64 and 32 samples
    assert expected_correction(of(4), known) == 260
    assert expected_correction(of(2), known) == 420


def test_an_error_that_grows_while_slices_shrink_is_taken_as_it_is() -> None:
    assert expected_correction(of(4), {of(1): 100, of(2): 300}) == 300


def test_what_ran_is_believed_more_than_any_line() -> None:
    known = {of(1): 640, of(1, "block"): 64}
    assert expected_correction(of(1), known) == 640
    assert expected_correction(of(2, "block"), known) == 32, "the last one, in proportion"
