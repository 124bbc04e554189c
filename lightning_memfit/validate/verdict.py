"""Whether a plan stands after its warm-up, and what the next search must know if it does not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_memfit.plan import Budget, Candidate, Forecast, Measurement
from lightning_memfit.units import format_bytes

OUT_OF_MEMORY_SHARE = 0.1
"""How far above the budget, or the prediction where that is higher, a peak is taken to be that ended in an
out-of-memory error and has no number. The next plan must need clearly less: another that just fits would fail too."""
FAR_BELOW_SHARE = 0.02
"""How far below the prediction a measured peak must be before the search is repeated with what was learnt."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one warm-up."""

    fits: bool
    """Whether the plan may be used for training."""
    correction_bytes: int
    """What the raw prediction was off by, in bytes."""
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
        least = forecast.memory.least_bytes  # what the correction is added to
        assumed = int(max(budget.budget_bytes, least) * (1 + OUT_OF_MEMORY_SHARE)) + 1
        return Verdict(fits=False, correction_bytes=assumed - least, reason="the warm-up ran out of memory")
    measured = measurement.measured_peak_allocated_bytes
    over = measured - budget.budget_bytes
    reason = f"measured {format_bytes(measured)} of {format_bytes(budget.budget_bytes)}"
    if over > 0:
        reason = f"measured {format_bytes(measured)}, {format_bytes(over)} over the budget"
    return Verdict(fits=over <= 0, correction_bytes=measured - predicted, reason=reason)


def far_below(forecast: Forecast, measurement: Measurement) -> bool:
    """Whether so much less was measured than predicted that a candidate predicted too large may fit after all."""
    predicted = forecast.memory.peak_allocated_bytes
    return measurement.measured_peak_allocated_bytes < (1 - FAR_BELOW_SHARE) * predicted


def expected_correction(candidate: Candidate, known: Mapping[Candidate, int]) -> int:
    """What the raw prediction of a candidate is probably off by, after the warm-ups of others.

    1. A candidate that ran is off by what it was off by.
    2. After one warm-up the error is taken to be in proportion to the micro-batch: what a trace cannot see mostly holds
       values of samples. Where it does not, the next warm-up shows it.
    3. After two of different sizes it is the straight line through the last two, which has a fixed part as well. A line
       that falls with the size is no line: then it is what the last one was off by.

    Args:
        candidate: the candidate.
        known: errors of those that ran, in bytes, in the order in which they ran.
    """
    if candidate in known or not known:
        return known.get(candidate, 0)
    points = [(ran.split.micro_batch_size, error) for ran, error in known.items()]
    size, error = points[-1]
    other_size, other_error = next((point for point in reversed(points) if point[0] != size), (0, 0))
    slope = max(0.0, (error - other_error) / (size - other_size))
    return round(error + slope * (candidate.split.micro_batch_size - size))
