"""What a job measured, as the ``plan.yaml`` in its output folder says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_memfit.errors import PlanFileError
from lightning_memfit.plan_schema import load_measurement, load_plan, load_seconds_spent


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a job's plan once it ran."""

    plan_label: str
    """The plan that was applied."""
    predicted_peak_bytes: int
    """What was predicted of that plan, raw: no measurement is in it."""
    budget_bytes: int
    """What it might use."""
    effective_batch_size: int
    """Samples per optimizer step."""
    measured_peak_bytes: int | None
    """Most allocated bytes while training or evaluating; ``None`` where no warm-up ran."""
    measured_step_seconds: float | None
    """Wall-clock seconds of one optimizer step."""
    planning_seconds: float | None = None
    """Wall-clock seconds that MemFit took for plan and proof; ``None`` where the record does not say."""

    @property
    def measured_samples_per_second(self) -> float | None:
        """Of an optimizer step; what a run does besides is left out. ``None`` where it is not known."""
        return self.effective_batch_size / self.measured_step_seconds if self.measured_step_seconds else None


def measured_in(plan_file: Path) -> Measured | None:
    """Read what a job measured; ``None`` where the file cannot be read."""
    try:
        plan, measurement = load_plan(plan_file), load_measurement(plan_file)
        spent = load_seconds_spent(plan_file)
    except PlanFileError:
        return None
    return Measured(
        plan_label=plan.candidate.label,
        predicted_peak_bytes=plan.forecast.memory.least_bytes,
        budget_bytes=plan.budget.budget_bytes,
        effective_batch_size=plan.split.effective_batch_size,
        measured_peak_bytes=None if measurement is None else measurement.measured_peak_bytes,
        measured_step_seconds=None if measurement is None else measurement.measured_step_seconds,
        planning_seconds=None if spent is None else spent.planning + spent.proving,
    )
