"""Whether a plan stands after its warm-up, and what the next search must know if it does not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memfit.plan import Budget, Forecast, Measurement
from lightning_memfit.units import format_bytes

OUT_OF_MEMORY_SHARE = 0.05
"""How far above the prediction a peak is taken to be that ended in an out-of-memory error and has no number."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one warm-up."""

    fits: bool
    """Whether the plan may be used for training."""
    correction_bytes: int
    """What the raw prediction was off by; to be added to every prediction of the next search."""
    reason: str
    """Why, in words."""


def judge(forecast: Forecast, measurement: Measurement | None, budget: Budget) -> Verdict:
    """Compare the measured training peak with the budget.

    Args:
        forecast: what was predicted for the plan.
        measurement: what its warm-up measured; ``None`` if it ran out of memory.
        budget: what it may use.
    """
    predicted = forecast.memory.peak_allocated_bytes
    if measurement is None:
        assumed = max(budget.budget_bytes, int(predicted * (1 + OUT_OF_MEMORY_SHARE))) + 1
        return Verdict(fits=False, correction_bytes=assumed - predicted, reason="the warm-up ran out of memory")
    measured = measurement.measured_peak_allocated_bytes
    over = measured - budget.budget_bytes
    reason = f"measured {format_bytes(measured)} of {format_bytes(budget.budget_bytes)}"
    if over > 0:
        reason = f"measured {format_bytes(measured)}, {format_bytes(over)} over the budget"
    return Verdict(fits=over <= 0, correction_bytes=measured - predicted, reason=reason)
