"""Writes ``plan.yaml``: the plan, what a warm-up measured, and with which versions."""

from __future__ import annotations

import dataclasses
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs

from lightning_memfit._version import __version__
from lightning_memfit.plan import Measurement, Plan
from lightning_memfit.plan_file import FILE_NAME, to_yaml, write_whole

# The first that is installed counts: users have Lightning under one of two names.
_LIGHTNING = ("lightning", "pytorch-lightning")


def write_record(plan: Plan, measurement: Measurement | None, directory: str | Path) -> str:
    """Write ``plan.yaml`` into ``directory``, whole or not at all, and return its path.

    The file holds the fields of :meth:`Plan.to_dict`, so that ``Plan.load`` reads it, and beside them ``measured``
    (``null`` without a warm-up), ``versions`` and ``written_at`` (UTC, ISO 8601).

    Args:
        plan: the plan.
        measurement: what its warm-up measured; ``None`` if none ran.
        directory: made if it does not exist; an earlier plan in it is replaced. Also a URL of a file system that
            fsspec knows, such as ``"s3://bucket/run"``, as Lightning takes them.

    Raises:
        OSError: if the directory cannot be written to, or has a file of that name that is no plan; that one is then
            untouched.
    """
    content = {
        **plan.to_dict(),
        "measured": None if measurement is None else _measured(measurement),
        "versions": _versions(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = to_yaml(content)
    if "://" not in str(directory):
        path = Path(directory) / FILE_NAME
        if path.exists() and not _is_record(path):
            raise FileExistsError(f"{path} is there and is no plan of MemFit's")
        return str(write_whole(path, text))
    file_system, folder = url_to_fs(str(directory))
    file_system.makedirs(folder, exist_ok=True)
    file_system.pipe_file(f"{folder}/{FILE_NAME}", text.encode())
    return f"{str(directory).rstrip('/')}/{FILE_NAME}"


def _is_record(path: Path) -> bool:
    return re.search(r"^schema_version:", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE) is not None


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
