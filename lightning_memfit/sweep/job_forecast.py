"""What is known of a job before it is launched: whether it fits, what it needs, and what it will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memfit.application.outcomes import Outcome, Verdict
from lightning_memfit.sweep.plain_fields import fields_of


@dataclass(frozen=True, kw_only=True)
class JobForecast:
    """What was found out about a job. Every number in it is predicted, apart from its own seconds."""

    verdict: Verdict
    """Whether training fits; ``"cannot tell"`` where no forecast could be made."""
    reason: str
    """By how much, or why it cannot be told; one line."""
    device: str | None = None
    """What it was planned for."""
    plan_label: str | None = None
    """The plan that was found, or the smallest one where none fits."""
    predicted_peak_bytes: int | None = None
    """What that needs: allocated bytes on a host; on a GPU the least that must be reserved."""
    budget_bytes: int | None = None
    """What a plan may use of torch's allocator."""
    missing_bytes: int = 0
    """What the smallest plan needs beyond the budget."""
    effective_batch_size: int | None = None
    """Samples per optimizer step."""
    predicted_step_seconds: float | None = None
    """Wall-clock seconds of one optimizer step."""
    optimizer_steps: int | None = None
    """Optimizer steps of the whole run."""
    same_as: int | None = None
    """The number of an equal job whose forecast this is."""
    seconds: float = 0.0
    """Wall-clock seconds that the forecast took."""

    @property
    def predicted_training_seconds(self) -> float | None:
        """Of all optimizer steps; what a run does besides is left out. ``None`` where it is not known."""
        if self.predicted_step_seconds is None or self.optimizer_steps is None:
            return None
        return self.predicted_step_seconds * self.optimizer_steps

    @property
    def predicted_samples_per_second(self) -> float | None:
        """Of the plan that was found, or of the smallest one; ``None`` where it is not known."""
        if not self.predicted_step_seconds or self.effective_batch_size is None:
            return None
        return self.effective_batch_size / self.predicted_step_seconds


def forecast_of(outcome: Outcome, *, optimizer_steps: int | None, seconds: float) -> JobForecast:
    """What the planning of a job found.

    Args:
        outcome: what was found for the device.
        optimizer_steps: of the whole run; ``None`` where that is not known.
        seconds: what the planning took.
    """
    forecast = outcome.forecast
    return JobForecast(
        verdict=outcome.verdict,
        reason=outcome.reason,
        device=outcome.asked.name,
        plan_label=None if forecast is None else forecast.candidate.label,
        predicted_peak_bytes=None if forecast is None else forecast.predicted_peak_bytes,
        budget_bytes=outcome.budget_bytes,
        missing_bytes=outcome.missing_bytes,
        effective_batch_size=None if forecast is None else forecast.candidate.split.effective_batch_size,
        predicted_step_seconds=None if forecast is None else forecast.predicted_step_seconds,
        optimizer_steps=optimizer_steps,
        seconds=seconds,
    )


def forecast_from(data: Any) -> JobForecast | None:
    """What a sweep's file says; ``None`` where it says nothing that can be read."""
    known = fields_of(JobForecast, data) if isinstance(data, Mapping) else None
    return None if known is None else JobForecast(**known)


def launch_order(forecasts: Mapping[int, JobForecast]) -> list[int]:
    """The jobs that are launched, cheapest first: by predicted seconds, then those of which they are not known.

    Those by the seconds of a step, and at last in the sweep's order. What cannot fit is not among them.
    """

    def cost(number: int) -> tuple[Any, ...]:
        whole = forecasts[number].predicted_training_seconds
        step = forecasts[number].predicted_step_seconds
        return whole is None, whole or 0.0, step is None, step or 0.0, number

    return sorted((number for number in forecasts if forecasts[number].verdict != "does not fit"), key=cost)
