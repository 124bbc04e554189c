"""What a sweep says: the right numbers, every reason once, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.messages import done_before_words, failed_words, no_forecast_words, no_record_words
from tests.sweep.rowmaking import end, forecast, job, row


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (1, "1 of 3 jobs was completed by an earlier run in swept; the other 2 are looked at again"),
        (2, "2 of 3 jobs were completed by an earlier run in swept; the other 1 is looked at again"),
        (3, "3 of 3 jobs were completed by an earlier run in swept; there is nothing left to run"),
    ],
)
def test_one_is_and_several_are(done: int, words: str) -> None:
    assert done_before_words(done, 3, Path("swept")) == words


def test_that_nothing_could_be_forecast_is_said_with_its_reason() -> None:
    first, second = (JobForecast(verdict="cannot tell", reason=reason) for reason in ("no model", "no data"))
    words = "WARNING: no job is left out, since none could be forecast: no model"
    assert no_forecast_words([first, first]) == words
    assert no_forecast_words([first, second, first]) == f"{words} (and 1 other reason)"
    assert no_forecast_words([first, forecast()]) == ""
    assert no_forecast_words([first, forecast(peak_mib=120)]) == ""


def test_what_a_launcher_loses_with_a_killed_process_tells_how_to_lose_less() -> None:
    alone, among = (no_record_words("Terminated: SIGKILL", batch_size=size) for size in (1, 3))
    assert alone.endswith("(Terminated: SIGKILL)")
    assert "Any of the 3 jobs that the launcher was handed" in among and "hydra.sweeper.max_batch_size" in among
    assert "max_batch_size" not in no_record_words("", batch_size=3)


def test_failed_jobs_are_named_with_their_tracebacks_and_how_to_go_on() -> None:
    failed = end(job(1, "a=2"), "failed", reason="ValueError: x", error_file="job_error.txt")
    completed = row(0, "a=1", end=end(job(0)))
    assert failed_words([completed, row(1, "a=2", end=failed)], Path("swept")) == (
        "1 of 2 jobs failed:\n  - job 1 (a=2): ValueError: x [traceback: swept/1/job_error.txt]\n"
        "Everything else is done and written in swept. Once the cause is removed, run the same command with "
        "hydra.sweep.dir=swept: it runs what is not completed."
    )
    assert failed_words([completed], Path("swept")) == ""
