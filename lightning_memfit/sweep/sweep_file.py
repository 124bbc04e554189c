"""The state of a sweep, in ``sweep.json``, and what the same command finds when it is run again."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_memfit._version import __version__
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan_file import write_whole
from lightning_memfit.sweep.config_changes import changes_words
from lightning_memfit.sweep.job import SweepJob
from lightning_memfit.sweep.job_end import read_job_end, to_json
from lightning_memfit.sweep.job_forecast import JobForecast, forecast_from
from lightning_memfit.sweep.rows import Row, is_end_of, is_of_overrides

FILE_NAME = "sweep.json"
TABLE_NAME = "sweep.csv"
SCHEMA_VERSION = 1
_MOST_NAMED = 5  # jobs in a message


def write_sweep(sweep_dir: Path, rows: Sequence[Row], *, arguments: Sequence[str]) -> Path:
    """Write ``sweep.json``, whole or not at all, and return its path.

    Args:
        sweep_dir: the sweep's folder.
        rows: what is known of each job by now.
        arguments: the overrides that the sweep was started with.

    Raises:
        OSError: if the folder cannot be written to.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "lightning_memfit": __version__,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": list(arguments),
        "jobs": [_job(row) for row in rows],
    }
    return write_whole(sweep_dir / FILE_NAME, to_json(content))


def _job(row: Row) -> dict[str, Any]:
    return {
        **row.to_dict(),
        "overrides": list(row.job.overrides),
        "config_digest": row.job.config_digest,
        "forecast": None if row.forecast is None else dataclasses.asdict(row.forecast),
        "measured": None if row.measured is None else dataclasses.asdict(row.measured),
    }


def write_table(sweep_dir: Path, rows: Sequence[Row]) -> Path:
    """Write ``sweep.csv``, a line for each job with bytes and seconds as plain numbers, and return its path.

    Raises:
        OSError: if the folder cannot be written to.
    """
    text = io.StringIO(newline="")
    lines = [row.to_dict() for row in rows]
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return write_whole(sweep_dir / TABLE_NAME, text.getvalue())


def completed_before(sweep_dir: Path, jobs: Sequence[SweepJob]) -> set[int]:
    """The numbers of the jobs that an earlier run of the sweep completed: same overrides, same config.

    Raises:
        ConfigurationError: if a job would overwrite the results of another one, or its own under another config.
    """
    done, changed = set(), []
    for job in jobs:
        end = read_job_end(sweep_dir / job.subdir)
        if end is None or end.status != "completed":
            continue
        if not is_of_overrides(job, end):
            raise ConfigurationError(
                f"hydra.sweep.dir={str(sweep_dir)!r} holds another sweep: its folder {job.subdir!r} has the results of "
                f"({' '.join(end.overrides)}), and job {job.number} is ({job.words}). Name another folder, or run the "
                "command that began this one."
            )
        if is_end_of(job, end):
            done.add(job.number)
        else:
            changed.append(job)
    if changed:
        raise ConfigurationError(_changed_words(sweep_dir, changed, num_jobs=len(jobs)))
    return done


def _changed_words(sweep_dir: Path, changed: Sequence[SweepJob], *, num_jobs: int) -> str:
    named = ", ".join(f"{job.number} ({job.words})" for job in changed[:_MOST_NAMED])
    more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
    changes = changes_words(changed[0].config, sweep_dir / changed[0].subdir)
    told = f" Of job {changed[0].number}, {changes}." if changes else ""
    return (
        f"hydra.sweep.dir={str(sweep_dir)!r} holds completed results of another config: {len(changed)} of {num_jobs} "
        f"jobs have the same overrides as before, and something else in their config has changed: {named}{more}.{told} "
        "Running them would overwrite these results. Set another hydra.sweep.dir, take the change back, or delete the "
        "folders of these jobs to run them anew."
    )


def earlier_forecasts(sweep_dir: Path, jobs: Sequence[SweepJob]) -> dict[int, JobForecast]:
    """What an earlier run predicted of these very jobs, by number; empty where its file cannot be read."""
    try:
        content = json.loads((sweep_dir / FILE_NAME).read_text(encoding="utf-8"))
        entries = list(content["jobs"]) if content["schema_version"] == SCHEMA_VERSION else []
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    told = {_identity(entry): forecast_from(entry.get("forecast")) for entry in entries if _is_readable(entry)}
    found = {job.number: told.get((job.overrides, job.config_digest)) for job in jobs}
    return {number: forecast for number, forecast in found.items() if forecast is not None}


def _is_readable(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("overrides"), list)


def _identity(entry: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    return tuple(str(each) for each in entry["overrides"]), str(entry.get("config_digest"))
