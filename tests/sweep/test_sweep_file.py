"""What is kept of a sweep, and what the same command finds of it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.job_end import write_job_end
from lightning_memfit.sweep.sweep_file import (
    FILE_NAME,
    completed_before,
    earlier_forecasts,
    write_sweep,
    write_table,
)
from tests.sweep.rowmaking import end, forecast, job, row


def test_only_what_is_completed_is_done(tmp_path: Path) -> None:
    jobs = [job(number, f"a={number}") for number in range(4)]
    write_job_end(tmp_path / "0", end(jobs[0]))
    write_job_end(tmp_path / "1", end(jobs[1], "failed"))
    write_job_end(tmp_path / "2", end(jobs[2], "does not fit"))
    assert completed_before(tmp_path, jobs) == {0}


def test_results_of_another_sweep_are_not_overwritten(tmp_path: Path) -> None:
    write_job_end(tmp_path / "0", end(job(0, "a=8")))
    with pytest.raises(ConfigurationError) as raised:
        completed_before(tmp_path, [job(0, "a=9", "hydra.verbose=true")])
    assert "its folder '0' has the results of (a=8), and job 0 is (a=9)" in str(raised.value)
    assert "Name another folder" in str(raised.value)


def test_results_of_another_config_are_not_overwritten(tmp_path: Path) -> None:
    jobs = [job(number, f"a={number}") for number in range(8)]
    write_job_end(tmp_path / "0", end(jobs[0]))
    for each in jobs[1:7]:
        write_job_end(tmp_path / each.subdir, end(job(each.number, *each.overrides, config_digest="changed")))
    # Nothing is lost where a job that failed is run with another config.
    write_job_end(tmp_path / "7", end(job(7, "a=7", config_digest="changed"), "failed"))
    with pytest.raises(ConfigurationError) as raised:
        completed_before(tmp_path, jobs)
    words = str(raised.value)
    assert "holds completed results of another config: 6 of 8 jobs have the same overrides" in words
    assert ": 1 (a=1), 2 (a=2), 3 (a=3), 4 (a=4), 5 (a=5) and 1 more." in words
    assert "Set another hydra.sweep.dir" in words and "delete the folders" in words


def test_a_sweep_may_be_extended_where_the_numbers_of_its_jobs_stay(tmp_path: Path) -> None:
    write_job_end(tmp_path / "0", end(job(0, "a=1")))
    assert completed_before(tmp_path, [job(0, "a=1"), job(1, "a=2")]) == {0}


def test_forecasts_of_an_earlier_run_are_known_for_the_very_same_jobs(tmp_path: Path) -> None:
    rows = [row(0, "a=1", forecast=forecast()), row(1, "a=2", forecast=forecast(peak_mib=120)), row(2, "a=3")]
    write_sweep(tmp_path, rows, arguments=["a=1,2,3"])
    jobs = [job(0, "a=1"), job(1, "a=2", config_digest="changed"), job(2, "a=3")]
    assert earlier_forecasts(tmp_path, jobs) == {0: forecast()}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema_version": 9, "jobs": []}',
        '{"schema_version": 1, "jobs": [3]}',
        '{"schema_version": 1, "jobs": [{"overrides": 5, "config_digest": "d"}]}',
    ],
)
def test_a_file_that_cannot_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert earlier_forecasts(tmp_path, [job(0)]) == {}
    assert earlier_forecasts(tmp_path / "nowhere", [job(0)]) == {}


def test_the_csv_has_a_line_for_each_job(tmp_path: Path) -> None:
    path = write_table(tmp_path, [row(0, "a=[1,2]", forecast=forecast()), row(1, "a=3")])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["overrides"] == "a=[1,2]" and int(first["predicted_peak_bytes"]) == 50 * 1024**2
    assert second["status"] == "not run" and second["predicted_peak_bytes"] == ""
