"""What a sweep says of its jobs, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_memfit.sweep.job_end import FILE_NAME as JOB_FILE
from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.rows import Row

_NO_RECORD = f"it left no {JOB_FILE}: its process was killed, or could not write into its output folder"


def counted_jobs(count: int) -> str:
    """So many jobs.

    >>> counted_jobs(1), counted_jobs(2)
    ('1 job', '2 jobs')
    """
    return f"{count} job{'' if count == 1 else 's'}"


def done_before_words(done: int, count: int, sweep_dir: Path) -> str:
    """What an earlier run completed, and what becomes of the rest.

    >>> done_before_words(1, 3, Path("swept"))
    '1 of 3 jobs was completed by an earlier run in swept; the other 2 are looked at again'
    """
    left = count - done
    rest = (
        f"the other {left} {'is' if left == 1 else 'are'} looked at again" if left else "there is nothing left to run"
    )
    begun = f"{done} of {counted_jobs(count)} {'was' if done == 1 else 'were'} completed"
    return f"{begun} by an earlier run in {sweep_dir}; {rest}"


def no_forecast_words(forecasts: Iterable[JobForecast]) -> str:
    """That the sweep is an ordinary one, since of no job it can be told whether it fits; empty if of one it can."""
    found = list(forecasts)
    if any(forecast.verdict != "cannot tell" for forecast in found):
        return ""
    first, *others = dict.fromkeys(forecast.reason for forecast in found)
    more = f" (and {len(others)} other reason{'' if len(others) == 1 else 's'})" if others else ""
    return f"WARNING: no job is left out, since none could be forecast: {first}{more}"


def no_record_words(problem: str, *, batch_size: int) -> str:
    """Why a job left no record; where one process takes a whole batch with it, how to lose fewer.

    Args:
        problem: what went wrong with the launcher; empty for nothing.
        batch_size: jobs that it was handed at a time.
    """
    if not problem:
        return _NO_RECORD
    if batch_size == 1:
        return f"{_NO_RECORD} ({problem})"
    return (
        f"{_NO_RECORD} ({problem}). Any of the {batch_size} jobs that the launcher was handed at a time may be the "
        "cause; a small hydra.sweeper.max_batch_size loses fewer with it"
    )


def failed_words(rows: Sequence[Row], sweep_dir: Path) -> str:
    """Which jobs failed, why, and how to go on; empty if none did."""
    failed = [row for row in rows if row.status == "failed"]
    if not failed:
        return ""
    lines = "".join(f"\n  - job {row.job.number} ({row.job.words}): {_why(row, sweep_dir)}" for row in failed)
    return (
        f"{len(failed)} of {counted_jobs(len(rows))} failed:{lines}\nEverything else is done and written in "
        f"{sweep_dir}. Once the cause is removed, run the same command with hydra.sweep.dir={sweep_dir}: it runs what "
        "is not completed."
    )


def _why(row: Row, sweep_dir: Path) -> str:
    return row.reason if row.error_file is None else f"{row.reason} [traceback: {sweep_dir / row.error_file}]"
