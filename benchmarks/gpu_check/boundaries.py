"""Whether a step runs out of memory where it is predicted to: limits around the least that is predicted to be enough.

Two questions. Of one case: at which limit does it stop to run? Of one limit: at which batch?
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu_check.cases import Case, measured, predicted
from benchmarks.gpu_check.gauges import Gauge
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.units import GIB

BUDGETS_GB = (8, 16, 24, 48)
"""Budgets, in GiB."""
_DOWNWARD = (0.98, 0.95, 0.9, 0.8)
_UPWARD = (1.02, 1.05, 1.1, 1.25)
_STEPS = 2


def least_enough(memory: MemoryBreakdown) -> int:
    """Bytes in which a step is predicted to run; on a host what is allocated."""
    feasible = memory.minimum_feasible_bytes
    return memory.peak_allocated_bytes if feasible is None else feasible


def limits_of(case: Case, device: str, gauge: Gauge) -> dict[str, Any]:
    """Find between which limits a case begins to run, from the predicted one on up or down."""
    predicted_bytes = least_enough(predicted(case, device))
    runs: list[dict[str, Any]] = []

    def survives(factor: float) -> bool:
        outcome = measured(case, gauge, limit_bytes=int(factor * predicted_bytes), steps=_STEPS)
        runs.append({"share_of_predicted": factor, **_outcome(outcome)})
        return not outcome["ran_out"]

    enough, too_little = None, None
    if survives(1.0):
        enough = 1.0
        for factor in _DOWNWARD:
            if not survives(factor):
                too_little = factor
                break
            enough = factor
    else:
        too_little = 1.0
        for factor in _UPWARD:
            if survives(factor):
                enough = factor
                break
            too_little = factor
    return {
        "label": case.label,
        "predicted_minimum_feasible_bytes": predicted_bytes,
        "survives_at_share": enough,
        "runs_out_at_share": too_little,
        "runs": runs,
    }


def budgets_of(case: Case, device: str, gauge: Gauge, budgets: list[int]) -> Iterator[dict[str, Any]]:
    """For each budget, run the largest batch that is predicted to fit and the next, and 5 % fewer and more samples."""
    feasible: dict[int, int] = {}

    def needs(samples: int) -> int:
        if samples not in feasible:
            feasible[samples] = least_enough(predicted(replace(case, samples=samples), device))
        return feasible[samples]

    for budget in budgets:
        fits = largest_that_fits(needs, budget)
        row: dict[str, Any] = {"label": case.label, "budget_bytes": budget, "samples_predicted_to_fit": fits}
        if not fits:
            yield row
            continue
        further = max(1, fits // 20)
        row["runs"] = [
            {
                "samples": samples,
                "predicted_minimum_feasible_bytes": needs(samples),
                "predicted_to_run": needs(samples) <= budget,
                **_outcome(measured(replace(case, samples=samples), gauge, limit_bytes=budget, steps=_STEPS)),
            }
            for samples in sorted({max(1, fits - further), fits, fits + 1, fits + further})
        ]
        row["as_predicted"] = all(run["predicted_to_run"] != run["ran_out"] for run in row["runs"])
        yield row


def largest_that_fits(needs: Callable[[int], int], budget: int, most_looks: int = 6) -> int:
    """The most samples whose need is within the budget, by a straight line through what was looked at; 0 if none.

    Args:
        needs: samples to bytes, never falling.
        budget: bytes.
        most_looks: calls of ``needs``, after which the best that was seen is taken.

    >>> largest_that_fits(lambda samples: 100 + 7 * samples, 800)
    100
    """
    known = {1: needs(1), 2: needs(2)}
    for _ in range(most_looks):
        fitting = [samples for samples, size in known.items() if size <= budget]
        if not fitting:
            return 0
        best = max(fitting)
        if known.get(best + 1, 0) > budget:
            return best
        seen = sorted(known)
        right = min(max(bisect.bisect_right(seen, best), 1), len(seen) - 1)
        low, high = seen[right - 1], seen[right]
        slope = max(1.0, (known[high] - known[low]) / (high - low))
        guess = max(1, int(best + (budget - known[best]) / slope))
        if guess in known:
            guess = best + 1
        known[guess] = needs(guess)
    return max((samples for samples, size in known.items() if size <= budget), default=0)


def budgets_for(gauge: Gauge, total_bytes: int | None) -> list[int]:
    """The budgets that a device can have; on a host one that the small models meet."""
    if total_bytes is None:
        return [GIB // 128]
    used = (gauge.used_bytes or 0) - (gauge.peak_reserved_bytes or 0)
    return [gb * GIB for gb in BUDGETS_GB if gb * GIB <= total_bytes - max(0, used)]


def _outcome(outcome: dict[str, Any]) -> dict[str, Any]:
    kept = ("ran_out", "measured_peak_allocated_bytes", "measured_peak_reserved_bytes", "retries", "ooms", "error")
    return {name: outcome[name] for name in kept}
