"""Writes what a run leaves: ``plan.yaml`` (plan, measurement, versions), the report as text, or why nothing fits."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs

from lightning_memfit._version import __version__
from lightning_memfit.measurement import SecondsSpent
from lightning_memfit.no_fit import NO_FIT_FILE, NoFit, no_fit_record
from lightning_memfit.plan import Measurement, Plan
from lightning_memfit.plan_file import FILE_NAME, to_yaml, write_whole
from lightning_memfit.report.table import REPORT_BEGINS, report_text

REPORT_FILE = "memfit_report.txt"
"""The report as it is printed, beside the plan."""
# The first that is installed counts: users have Lightning under one of two names.
_LIGHTNING = ("lightning", "pytorch-lightning")


def write_record(
    plan: Plan, measurement: Measurement | None, directory: str | Path, *, spent: SecondsSpent | None = None
) -> str:
    """Write ``plan.yaml`` and the report into ``directory``, each whole or not at all, and return the path of the plan.

    The file holds the fields of :meth:`Plan.to_dict`, so that ``Plan.load`` reads it, and beside them ``measured``
    (``null`` without a warm-up), ``seconds_spent``, ``versions`` and ``written_at`` (UTC, ISO 8601).

    Args:
        plan: the plan.
        measurement: what its warm-up measured; ``None`` if none ran.
        spent: what planning and proving took; ``None`` if that is not known.
        directory: made if it does not exist; an earlier plan in it is replaced. Also a URL of a file system that
            fsspec knows, such as ``"s3://bucket/run"``, as Lightning takes them.

    Raises:
        OSError: if the directory cannot be written to, or has a file of that name that is no plan; that one is then
            untouched.
    """
    content = {
        **plan.to_dict(),
        "measured": None if measurement is None else _measured(measurement),
        "seconds_spent": None if spent is None else dataclasses.asdict(spent),
        "versions": _versions(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path = _write(directory, FILE_NAME, to_yaml(content))
    _write(directory, REPORT_FILE, report_text(plan, measurement), is_ours=_is_report)
    if not _is_url(directory):
        _drop_no_fit(Path(directory) / NO_FIT_FILE)
    return path


def _drop_no_fit(path: Path) -> None:
    """Of an earlier run: this one fits. A file of the user's that has the name stays."""
    if path.is_file() and _is_record(path.read_text(encoding="utf-8", errors="replace")):
        path.unlink(missing_ok=True)


def write_no_fit(no_fit: NoFit, directory: str | Path) -> str:
    """Write ``no_fit.yaml`` into ``directory``, as :func:`write_record` does a plan, and return its path.

    Raises:
        OSError: as :func:`write_record` does.
    """
    return _write(directory, NO_FIT_FILE, to_yaml(no_fit_record(no_fit)))


def _write(directory: str | Path, name: str, text: str, *, is_ours: Callable[[str], bool] | None = None) -> str:
    if not _is_url(directory):
        path = Path(directory) / name
        if path.exists() and not (is_ours or _is_record)(path.read_text(encoding="utf-8", errors="replace")):
            raise FileExistsError(f"{path} is there and is no file of MemFit's")
        return str(write_whole(path, text))
    file_system, folder = url_to_fs(str(directory))
    file_system.makedirs(folder, exist_ok=True)
    file_system.pipe_file(f"{folder}/{name}", text.encode())
    return f"{str(directory).rstrip('/')}/{name}"


def _is_url(directory: str | Path) -> bool:
    return "://" in str(directory)


def _is_record(text: str) -> bool:
    return re.search(r"^schema_version:", text, re.MULTILINE) is not None


def _is_report(text: str) -> bool:
    return not text.strip() or text.startswith(REPORT_BEGINS)


def _measured(measurement: Measurement) -> dict[str, Any]:
    return {**dataclasses.asdict(measurement), "measured_peak_bytes": measurement.measured_peak_bytes}


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": _lightning_version(),
        "lightning_memfit": __version__,
    }


def _lightning_version() -> str | None:
    for distribution in _LIGHTNING:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
