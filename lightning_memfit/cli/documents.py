"""What the commands found, as JSON: plain data, sizes in bytes, times in seconds, unknown as ``null``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_memfit._version import __version__
from lightning_memfit.application.outcomes import Outcome
from lightning_memfit.application.subject import Subject
from lightning_memfit.no_fit import NoFit
from lightning_memfit.plan import Forecast, Measurement, Plan
from lightning_memfit.plan_file import plain_data
from lightning_memfit.sweep.sweep_file import FILE_NAME as SWEEP_FILE

SCHEMA_VERSION = 1
"""Version of the documents' structure."""


def plan_document(subject: Subject, outcomes: Sequence[Outcome], notes: Sequence[str], *, exit_code: int) -> str:
    """The document of ``memfit plan``: one entry under ``devices`` for each device."""
    return _document(
        exit_code, subject=subject.words, notes=[*notes, *subject.notes], devices=[_outcome(each) for each in outcomes]
    )


def hardware_document(devices: Sequence[dict[str, Any]]) -> str:
    """The document of ``memfit hardware``."""
    return _document(0, devices=list(devices))


def explain_document(
    path: Path,
    *,
    exit_code: int,
    plan: Plan | None = None,
    measurement: Measurement | None = None,
    no_fit: NoFit | None = None,
) -> str:
    """The document of ``memfit explain``: a plan and what was measured of it, or why nothing fits."""
    return _document(
        exit_code, path=str(path), plan=None if plan is None else plan.to_dict(), measured=measurement, no_fit=no_fit
    )


def fit_document(output_dir: str | None, record: Mapping[str, Any], *, exit_code: int) -> str:
    """The document of ``memfit fit``: where the run left its files, and what its plan or its record says."""
    return _document(exit_code, output_dir=output_dir, **record)


def sweep_document(folder: Path | None, *, exit_code: int) -> str:
    """The document of ``memfit sweep``: what its ``sweep.json`` says; ``null`` under another sweeper."""
    found = None if folder is None else json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
    return _document(exit_code, sweep_dir=None if folder is None else str(folder), sweep=found)


def error_document(error: BaseException, *, exit_code: int, of_devices: bool) -> str:
    """The document of a request that cannot be used, or of a failure.

    Args:
        error: what is wrong.
        exit_code: of the process.
        of_devices: whether the command's document has an entry for each device.
    """
    found: dict[str, Any] = {"devices": []} if of_devices else {}
    return _document(exit_code, **found, error={"kind": type(error).__name__, "message": str(error)})


def _document(exit_code: int, **content: Any) -> str:
    document = {
        "schema_version": SCHEMA_VERSION, "lightning_memfit": __version__, "exit_code": exit_code, **content,
    }  # fmt: skip
    return json.dumps(plain_data(document), indent=2, allow_nan=False)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    total, device = outcome.device_total_bytes, outcome.asked.device
    return {
        "asked": outcome.asked.name,
        "device": None if device is None else dataclasses.asdict(device),
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "budget_bytes": outcome.budget_bytes,
        "missing_bytes": outcome.missing_bytes,
        "predicted": None if outcome.forecast is None else _predicted(outcome.forecast, total),
        "rates": _rates(outcome),
        "explanation": outcome.explanation,
        "catalogue_with_room": list(outcome.catalogue_with_room),
        "plan": None if outcome.plan is None else outcome.plan.to_dict(),
    }


def _predicted(forecast: Forecast, total: tuple[int, int] | None) -> dict[str, Any]:
    """What the plan, or the smallest that was found, is predicted to need."""
    memory = forecast.memory
    return {
        "candidate": forecast.candidate.label,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "minimum_feasible_bytes": memory.minimum_feasible_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "device_total_bytes": None if total is None else {"low": total[0], "high": total[1]},
        "by_category": dict(memory.by_category),
        "by_phase": dict(memory.by_phase),
        "peak_phase": memory.peak_phase,
        "peak_op": memory.peak_op,
        "peak_module": memory.peak_module,
        "num_parameters": memory.num_parameters,
        "bytes_per_parameter": memory.bytes_per_parameter,
        "step_seconds": forecast.predicted_step_seconds,
        "notes": list(forecast.notes),
    }


def _rates(outcome: Outcome) -> str | None:
    """What ``step_seconds`` rests on: ``"measured"`` rates of this host, or ``"assumed"`` ones; ``None`` without it."""
    device, forecast = outcome.asked.device, outcome.forecast
    if device is None or forecast is None or forecast.predicted_step_seconds is None:
        return None
    return "measured" if device.kind == "cpu" else "assumed"
