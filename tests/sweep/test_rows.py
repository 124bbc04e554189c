"""What came of a job, from what was predicted, recorded and measured."""

from __future__ import annotations

from pathlib import Path

from lightning_memfit.sweep.job_end import write_job_end
from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.rows import rows_of
from lightning_memfit.units import MIB
from tests.sweep.rowmaking import end, forecast, job, measured, row


def test_a_status_follows_from_the_end_or_else_from_the_forecast() -> None:
    first = job(0)
    assert row(0).status == "not run"
    assert row(0, forecast=forecast(peak_mib=120)).status == "left out"
    assert row(0, forecast=forecast(), problem="killed").status == "failed"
    assert row(0, forecast=forecast(), end=end(first)).status == "completed"
    # A job that ran is told by its end, whatever was predicted.
    assert row(0, forecast=forecast(peak_mib=120), end=end(first, "failed")).status == "failed"


def test_reasons_say_why_not_and_what_could_not_be_told() -> None:
    unknown = JobForecast(verdict="cannot tell", reason="no model")
    assert row(0, forecast=forecast(peak_mib=120)).reason == "20 MiB too much"
    assert row(0, forecast=forecast()).reason == ""
    assert row(0, forecast=unknown, end=end(job(0))).reason == "cannot tell: no model"
    assert row(0, forecast=unknown, end=end(job(0), "failed", reason="ValueError: x")).reason == "ValueError: x"
    assert row(0, forecast=forecast(), problem="killed").reason == "killed"


def test_predicted_numbers_stay_beside_measured_ones() -> None:
    found = row(0, forecast=forecast(), end=end(job(0), objective=1.5, seconds=9.0), measured=measured()).to_dict()
    # The job took another plan than was predicted before the launch: sizes of one line are of one plan.
    assert (found["plan"], found["forecast_plan"]) == ("2 slices of <= 4", "undivided batch")
    assert (found["predicted_peak_bytes"], found["measured_peak_bytes"]) == (48 * MIB, 49 * MIB)
    assert found["forecast_peak_bytes"] == 50 * MIB
    # 8 samples in 0.5 s as predicted, in 0.25 s as measured.
    assert (found["predicted_samples_per_second"], found["measured_samples_per_second"]) == (16.0, 32.0)
    assert (found["objective"], found["job_seconds"]) == (1.5, 9.0)
    assert found["missing_bytes"] is None


def test_where_none_fits_the_objective_is_what_the_user_puts_in_its_place() -> None:
    valued, skipped = job(0, no_fit_value=9.0), job(0)
    left_out = forecast(peak_mib=120)
    assert row(0, job=valued, forecast=left_out).to_dict()["objective"] == 9.0
    assert row(0, job=valued, forecast=forecast(), end=end(valued, "does not fit")).objective == 9.0
    assert row(0, job=skipped, forecast=left_out).objective is None
    assert row(0, job=valued, forecast=forecast(), end=end(valued, objective=1.5)).objective == 1.5
    assert row(0, job=valued, forecast=forecast(), end=end(valued, "failed")).objective is None


def test_a_record_of_another_job_in_the_folder_is_not_taken_for_its_end(tmp_path: Path) -> None:
    write_job_end(tmp_path / "0", end(job(0, "a=1", config_digest="other")))
    write_job_end(tmp_path / "1", end(job(1, "a=2")))
    first, second = rows_of([job(0, "a=1"), job(1, "a=2")], {}, sweep_dir=tmp_path, from_before=[1])
    assert (first.status, second.status) == ("not run", "completed")
    assert second.from_before and not first.from_before
