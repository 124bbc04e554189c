"""How a job ended, in the file ``job.json`` of its output folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_memfit.plan_file import write_whole
from lightning_memfit.sweep.plain_fields import fields_of

FILE_NAME = "job.json"
"""What a job calls the record of its end."""
ERROR_FILE = "job_error.txt"
"""The whole traceback of a job that failed, beside that record."""
SCHEMA_VERSION = 1
_NOT_FINITE = ("nan", "inf", "-inf")
EndStatus = Literal["completed", "does not fit", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended."""

    status: EndStatus
    """``"does not fit"`` where MemFit found no plan within the budget once the job ran."""
    number: int | None
    """Its place in the sweep; ``None`` where the sweep did not say."""
    overrides: tuple[str, ...]
    """The overrides of its config, those of Hydra itself left out."""
    config_digest: str
    """Stands for its config, the ``hydra`` part left out."""
    objective: float | None = None
    """What the task of a completed job returned, if that is a plain number."""
    seconds: float | None = None
    """Wall-clock seconds of the task."""
    reason: str = ""
    """Why it did not complete, in words."""
    budget_bytes: int | None = None
    """What a plan might have used, where none fits."""
    best_peak_bytes: int | None = None
    """The smallest peak that was found, where none fits; the reason says whether it is predicted or measured."""
    missing_bytes: int | None = None
    """By how much that misses the budget."""
    plan_file: str | None = None
    """The ``plan.yaml`` that the job wrote, from its output folder."""
    error_file: str | None = None
    """The traceback of a job that failed, from its output folder."""
    ended_at: str = ""
    """When it ended, in UTC, ISO 8601."""


def write_job_end(folder: Path, end: JobEnd) -> Path:
    """Write ``job.json`` into a job's output folder, whole or not at all.

    Raises:
        OSError: if the folder cannot be written to.
    """
    return write_whole(folder / FILE_NAME, to_json({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(end)}))


def read_job_end(folder: Path) -> JobEnd | None:
    """Read how a job ended; ``None`` where there is no such record, or it is not one of this version."""
    try:
        return job_end_of(json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def job_end_of(data: Any) -> JobEnd | None:
    """What plain data says of a job's end; ``None`` where it is no record of this version."""
    if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
        return None
    numbers = {"objective": _read_number(data.get("objective"))}
    known = fields_of(JobEnd, {**data, **numbers})
    return None if known is None else JobEnd(**known)


def _read_number(value: Any) -> Any:
    """JSON has no word for what is not finite: it stands there as text."""
    return float(value) if value in _NOT_FINITE else value


def to_json(data: Any) -> str:
    """Plain data as JSON text that every reader takes: numbers that are not finite become text, such as ``"nan"``."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
