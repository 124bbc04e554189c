"""Rows of sweeps that never ran."""

from __future__ import annotations

from typing import Any

from lightning_memfit.sweep.job import SweepJob
from lightning_memfit.sweep.job_end import JobEnd
from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.measured import Measured
from lightning_memfit.sweep.rows import Row
from lightning_memfit.units import MIB


def job(number: int, *overrides: str, config_digest: str = "d", no_fit_value: float | None = None) -> SweepJob:
    return SweepJob(
        number=number,
        overrides=overrides,
        subdir=str(number),
        config_digest=config_digest,
        config=None,
        no_fit_value=no_fit_value,
    )


def forecast(peak_mib: int = 50, budget_mib: int = 100, **more: Any) -> JobForecast:
    """Fits if it fits."""
    missing = max(0, peak_mib - budget_mib)
    settings = {
        "verdict": "does not fit" if missing else "fits",
        "reason": f"{missing} MiB too much" if missing else "fits",
        "plan_label": "undivided batch",
        "predicted_peak_bytes": peak_mib * MIB,
        "budget_bytes": budget_mib * MIB,
        "missing_bytes": missing * MIB,
        "effective_batch_size": 8,
        "predicted_step_seconds": 0.5,
        "optimizer_steps": 10,
    }
    return JobForecast(**{**settings, **more})


def end(of: SweepJob, status: Any = "completed", **more: Any) -> JobEnd:
    return JobEnd(status=status, number=of.number, overrides=of.overrides, config_digest=of.config_digest, **more)


def measured(seconds: float = 0.25) -> Measured:
    return Measured(
        plan_label="2 slices of <= 4",
        predicted_peak_bytes=48 * MIB,
        budget_bytes=100 * MIB,
        effective_batch_size=8,
        measured_peak_bytes=49 * MIB,
        measured_step_seconds=seconds,
    )


def row(number: int, *overrides: str, **parts: Any) -> Row:
    return Row(**{"job": job(number, *overrides), "forecast": None, "end": None, "measured": None, **parts})
