"""Everything that is known of each job of a sweep, in one row: predicted, launched, measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_memfit.sweep.job import SweepJob, shown_overrides
from lightning_memfit.sweep.job_end import JobEnd, read_job_end
from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.measured import Measured, measured_in

RowStatus = Literal["completed", "does not fit", "failed", "left out", "not run"]
RAN: tuple[RowStatus, ...] = ("completed", "does not fit", "failed")
NOT_FITTING: tuple[RowStatus, ...] = ("left out", "does not fit")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job with what is known of it."""

    job: SweepJob
    """The job."""
    forecast: JobForecast | None
    """What was predicted before the launch; ``None`` where an earlier run's is lost."""
    end: JobEnd | None
    """How it ended; ``None`` if it did not."""
    measured: Measured | None
    """What it measured; ``None`` where it left no plan."""
    from_before: bool = False
    """Whether it was completed by an earlier run of the sweep."""
    problem: str = ""
    """What went wrong with the launcher, where the job left no record."""

    @property
    def status(self) -> RowStatus:
        """What came of it."""
        if self.end is not None:
            return self.end.status
        if self.forecast is not None and self.forecast.verdict == "does not fit":
            return "left out"
        return "failed" if self.problem else "not run"

    @property
    def reason(self) -> str:
        """Why it was not completed, or why it could not be told before whether it fits; empty otherwise."""
        if self.end is not None and self.end.reason:
            return self.end.reason
        if self.end is None and self.problem:
            return self.problem
        if self.forecast is not None and self.forecast.verdict != "fits":
            prefix = "cannot tell: " if self.forecast.verdict == "cannot tell" else ""
            return f"{prefix}{self.forecast.reason}"
        return ""

    @property
    def objective(self) -> float | None:
        """What a completed job returned, or what ``memfit.no_fit_value`` puts in its place where none fits."""
        if self.status in NOT_FITTING:
            return self.job.no_fit_value
        return None if self.end is None else self.end.objective

    @property
    def other_seconds(self) -> float | None:
        """What the job took beside plan and proof: making model and data, training, validation, checkpoints."""
        planning = None if self.measured is None else self.measured.planning_seconds
        took = None if self.end is None else self.end.seconds
        return None if took is None or planning is None else took - planning

    @property
    def error_file(self) -> str | None:
        """The traceback of a job that failed, from the sweep's folder; ``None`` where there is none."""
        if self.end is None or self.end.error_file is None:
            return None
        return f"{self.job.subdir}/{self.end.error_file}"

    @property
    def plan_label(self) -> str | None:
        """The plan that was applied, or else the one that was predicted."""
        if self.measured is not None:
            return self.measured.plan_label
        return None if self.forecast is None else self.forecast.plan_label

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Of that plan: as the job predicted it, or else as it was before the launch."""
        if self.measured is not None:
            return self.measured.predicted_peak_bytes
        return None if self.forecast is None else self.forecast.predicted_peak_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What a plan might use: as the job found it, or else as it was before the launch."""
        own = [None if part is None else part.budget_bytes for part in (self.measured, self.end, self.forecast)]
        return next((budget for budget in own if budget is not None), None)

    @property
    def missing_bytes(self) -> int | None:
        """By how much the smallest plan misses the budget; ``None`` where one fits, or it is not known."""
        if self.end is not None:
            return self.end.missing_bytes
        return self.forecast.missing_bytes if self.forecast is not None and self.status == "left out" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, flat: one column each."""
        forecast, end, measured = self.forecast, self.end, self.measured
        return {
            "number": self.job.number,
            "overrides": " ".join(self.job.overrides),
            "folder": self.job.subdir,
            "status": self.status,
            "reason": self.reason,
            "error_file": self.error_file,
            "verdict": None if forecast is None else forecast.verdict,
            "plan": self.plan_label,
            "device": None if forecast is None else forecast.device,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "missing_bytes": self.missing_bytes,
            "forecast_plan": None if forecast is None else forecast.plan_label,
            "forecast_peak_bytes": None if forecast is None else forecast.predicted_peak_bytes,
            "measured_peak_bytes": None if measured is None else measured.measured_peak_bytes,
            "predicted_samples_per_second": None if forecast is None else forecast.predicted_samples_per_second,
            "measured_samples_per_second": None if measured is None else measured.measured_samples_per_second,
            "predicted_training_seconds": None if forecast is None else forecast.predicted_training_seconds,
            "forecast_seconds": None if forecast is None else forecast.seconds,
            "job_seconds": None if end is None else end.seconds,
            "planning_seconds": None if measured is None else measured.planning_seconds,
            "other_seconds": self.other_seconds,
            "objective": self.objective,
            "forecast_of_job": None if forecast is None else forecast.same_as,
            "from_before": self.from_before,
        }


def rows_of(
    jobs: Sequence[SweepJob],
    forecasts: Mapping[int, JobForecast],
    *,
    sweep_dir: Path,
    from_before: Iterable[int] = (),
    problems: Mapping[int, str] | None = None,
) -> list[Row]:
    """Put together what is known, reading what each job left in its folder.

    Args:
        jobs: in the sweep's order.
        forecasts: by number.
        sweep_dir: the folder that the jobs' folders are in.
        from_before: numbers of those that an earlier run completed.
        problems: by number, what went wrong with the launcher.
    """
    before = set(from_before)
    return [
        _row(job, forecasts.get(job.number), sweep_dir / job.subdir, job.number in before, (problems or {}))
        for job in jobs
    ]


def _row(
    job: SweepJob, forecast: JobForecast | None, folder: Path, from_before: bool, problems: Mapping[int, str]
) -> Row:
    end = read_job_end(folder)
    if end is not None and not is_end_of(job, end):
        end = None
    plan_file = None if end is None or end.plan_file is None else folder / end.plan_file
    return Row(
        job=job,
        forecast=forecast,
        end=end,
        measured=None if plan_file is None else measured_in(plan_file),
        from_before=from_before,
        problem=problems.get(job.number, ""),
    )


def is_end_of(job: SweepJob, end: JobEnd) -> bool:
    """Whether a record is of this very job: the same overrides, and the same config."""
    return is_of_overrides(job, end) and end.config_digest == job.config_digest


def is_of_overrides(job: SweepJob, end: JobEnd) -> bool:
    """Whether a record is of a job with the same overrides; its config may have changed since."""
    return list(end.overrides) == shown_overrides(job.overrides)
