"""Which of several plans that are predicted to be nearly equally fast is the fastest: a clock decides. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lightning_memfit.plan import Forecast, Measurement, TimedPlan

FASTER_SHARE = 0.02
"""A rival replaces the plan that stands only if it is faster by at least this share: less is within the noise."""
CLOSE_SHARE = 0.15
"""Rivals slower by less than this share than the fastest are timed a second time."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A forecast whose warm-up stayed within the budget."""

    forecast: Forecast
    """What was predicted."""
    measurement: Measurement
    """What its warm-up measured."""

    @property
    def seconds(self) -> float:
        """Measured wall-clock seconds of one optimizer step."""
        return self.measurement.measured_step_seconds


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a contest."""

    winner: Standing
    """The fastest that stood; its measurement lists every plan that was timed."""
    reason: str
    """How it was found, in words."""


Prove = Callable[[Forecast], tuple[Measurement | None, bool] | None]
"""Runs a forecast's plan: what was measured (``None``: out of memory), and whether it stayed within the budget; or
``None`` if it cannot be run at all, and takes no part."""
Retime = Callable[[Forecast], float]
"""Seconds of one optimizer step of a plan that stood already."""


def fastest(
    first: Standing, rivals: Iterable[Forecast], prove: Prove, retime: Retime, out_of_time: Callable[[], bool]
) -> Outcome:
    """Run every rival, and return what is fastest.

    Whatever is close to the fastest is timed a second time in turn, and of the two times the smaller counts, so that a
    moment of noise on the machine does not decide.

    Args:
        first: the plan that is predicted to be fastest, proven and timed.
        rivals: the others.
        prove: proves and times one of them.
        retime: times one again.
        out_of_time: whether planning has used its time; then no further rival is run.
    """
    standing, timed, left_out = [first], [_timed(first.forecast, first.measurement, stood=True)], 0
    for rival in rivals:
        if out_of_time():
            left_out += 1
            continue
        proven = prove(rival)
        if proven is None:
            continue
        measurement, stood = proven
        timed.append(_timed(rival, measurement, stood=stood))
        if measurement is not None and stood:
            standing.append(Standing(forecast=rival, measurement=measurement))
    limit = (1 + CLOSE_SHARE) * min(one.seconds for one in standing)
    close = [one for one in standing if one.seconds <= limit]
    if len(close) > 1 and not out_of_time():
        again = {id(one): min(one.seconds, retime(one.forecast)) for one in close}
        standing = [_at(one, again.get(id(one), one.seconds)) for one in standing]
        timed = [_with_best_time(plan, standing) for plan in timed]
    winner = standing[0]
    for one in standing[1:]:
        if one.seconds < (1 - FASTER_SHARE) * winner.seconds:
            winner = one
    measurement = replace(winner.measurement, timed_plans=tuple(timed) if len(timed) > 1 else ())
    said = [f"the fastest of {len(timed)} that were timed"] if len(timed) > 1 else []
    if left_out:
        said.append(f"planning time was up before {left_out} more could be timed")
    reason = "; ".join(said)
    return Outcome(winner=replace(winner, measurement=measurement), reason=reason)


def _at(standing: Standing, seconds: float) -> Standing:
    return replace(standing, measurement=replace(standing.measurement, measured_step_seconds=seconds))


def _with_best_time(plan: TimedPlan, standing: Iterable[Standing]) -> TimedPlan:
    for one in standing:
        if one.forecast.candidate == plan.candidate:
            return replace(plan, measured_step_seconds=one.seconds)
    return plan


def _timed(forecast: Forecast, measurement: Measurement | None, *, stood: bool) -> TimedPlan:
    return TimedPlan(
        candidate=forecast.candidate,
        predicted_step_seconds=forecast.predicted_step_seconds,
        measured_step_seconds=measurement.measured_step_seconds if measurement is not None and stood else None,
        measured_peak_allocated_bytes=None if measurement is None else measurement.measured_peak_allocated_bytes,
    )
