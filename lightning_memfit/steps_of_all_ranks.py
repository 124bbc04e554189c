"""Real steps on every rank at once: rank 0 says what to run, all run it, and the worst of them decides.

A warm-up first runs on each rank for itself, without any exchange, where the engine can do that: a rank that runs out
of memory there leaves nobody waiting. What stands is then run together, as training will be.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from lightning_memfit.apply.gradient_exchange import GradientExchange
from lightning_memfit.errors import MemFitError, RankFailedError, first_line
from lightning_memfit.plan import Candidate, Forecast, Measurement, Plan
from lightning_memfit.ranks import Ranks, Together
from lightning_memfit.real_steps import WARMING_UP, Ran, Unrecomputable


class Steps(Protocol):
    """Runs candidates for real."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What refers to the optimizer as configured and could not follow."""

    def put_on(self, candidate: Candidate) -> None:
        """Let the Trainer run a candidate."""

    def take_off(self) -> None:
        """Take the levers back, but those of the optimizer."""

    def warm_up(self, forecast: Forecast, *, timed: bool) -> Ran:
        """Run the memory warm-up of the candidate that is on."""

    def retime(self, forecast: Forecast) -> float:
        """Seconds of a step of a candidate."""


class OwnSteps(Steps, Protocol):
    """Those of one rank."""

    def settle(self, forecast: Forecast) -> Unrecomputable | None:
        """Run two steps that nothing is measured of; why modules cannot be recomputed, if they show it."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What rank 0 tells the others to do."""

    action: Literal["put on", "take off", "warm up", "retime", "end"]
    about: Any = None
    """Candidate or forecast, or at the end the plan that stands with its measurement."""
    timed: bool = False
    budget_bytes: int = 0


class StepsOfAllRanks:
    """On rank 0: runs candidates on every rank."""

    def __init__(self, ranks: Ranks, own: OwnSteps, exchange: GradientExchange, *, budget_bytes: int) -> None:
        """Run nothing yet; every other rank is about to :func:`follow`.

        Args:
            ranks: the processes of the run.
            own: runs candidates on this rank.
            exchange: how the ranks exchange gradients.
            budget_bytes: what a plan may use on the poorest rank.
        """
        self._ranks, self._own, self._exchange, self._budget_bytes = ranks, own, exchange, budget_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of this rank."""
        return self._own.notes

    def put_on(self, candidate: Candidate) -> None:
        """Let every Trainer run a candidate."""
        self._ranks.share(_Order(action="put on", about=candidate))
        with self._ranks.failing(WARMING_UP):
            self._own.put_on(candidate)

    def take_off(self) -> None:
        """Take the levers back on every rank."""
        self._ranks.share(_Order(action="take off"))
        with self._ranks.failing(WARMING_UP):
            self._own.take_off()

    def warm_up(self, forecast: Forecast, *, timed: bool) -> Ran:
        """Run the warm-up on every rank; what the worst one measured.

        Raises:
            RankFailedError: if it failed on another rank.
        """
        order = _Order(action="warm up", about=forecast, timed=timed, budget_bytes=self._budget_bytes)
        return _warm_up(self._ranks, self._own, self._exchange, self._ranks.share(order))

    def retime(self, forecast: Forecast) -> float:
        """Seconds of a step of the slowest rank."""
        self._ranks.share(_Order(action="retime", about=forecast))
        return _retime(self._ranks, self._own, forecast)

    def end(self, plan: Plan, measurement: Measurement) -> None:
        """Tell every rank which plan stands."""
        self._ranks.share(_Order(action="end", about=(plan, measurement)))


def follow(ranks: Ranks, own: OwnSteps, exchange: GradientExchange, *, together: Together) -> tuple[Plan, Measurement]:
    """On the other ranks: do as rank 0 says, until a plan stands.

    Args:
        ranks: the processes of the run.
        own: runs candidates on this rank.
        exchange: how the ranks exchange gradients.
        together: by name, what every rank does when rank 0 asks for it while it plans again.

    Raises:
        MemFitError: what rank 0 ended with.
        RankFailedError: if another rank failed.
    """
    while True:
        order: _Order | BaseException = ranks.share(together=together)
        if isinstance(order, BaseException):
            raise order
        if order.action == "put on":
            with ranks.failing(WARMING_UP):
                own.put_on(order.about)
        elif order.action == "take off":
            with ranks.failing(WARMING_UP):
                own.take_off()
        elif order.action == "warm up":
            _warm_up(ranks, own, exchange, order)
        elif order.action == "retime":
            _retime(ranks, own, order.about)
        else:
            plan, measurement = order.about
            return plan, measurement


def as_told(error: Exception) -> Exception:
    """An error of rank 0 as the others raise it: one of MemFit's own as it is, of others the words."""
    if isinstance(error, MemFitError) and _can_be_sent(error):
        return error
    return RankFailedError(f"rank 0 failed while {WARMING_UP}: {type(error).__name__}: {first_line(error)}", rank=0)


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # it holds something of the user's; its words are told all the same
        return False
    return True


def _warm_up(ranks: Ranks, own: OwnSteps, exchange: GradientExchange, order: _Order) -> Ran:
    forecast: Forecast = order.about
    context = exchange.never()
    if context is not None:

        def by_itself() -> Ran:
            with ranks.alone(), context:
                return own.warm_up(forecast, timed=False)

        worst = worst_of(ranks.each(by_itself, doing=WARMING_UP).all)
        alone = worst.measurement
        # A step that takes more than training will is not held to the budget: only whether the device has it counts.
        if alone is None or (alone.measured_peak_bytes > order.budget_bytes and not exchange.alone_takes_more):
            return worst
    with ranks.failing(WARMING_UP):
        mismatch = own.settle(forecast) if exchange.settles else None
        together = Ran(mismatch=mismatch) if mismatch is not None else own.warm_up(forecast, timed=order.timed)
    return worst_of(ranks.each(lambda: together, doing=WARMING_UP).all)


def _retime(ranks: Ranks, own: OwnSteps, forecast: Forecast) -> float:
    with ranks.failing("timing a step"):
        seconds = own.retime(forecast)
    return float(max(ranks.each(lambda: seconds, doing="timing a step").all))


def worst_of(outcomes: Sequence[Ran]) -> Ran:
    """What counts of the warm-ups of several ranks: the largest of every number; where one failed, that.

    Args:
        outcomes: by rank.
    """
    for outcome in outcomes:
        if outcome.mismatch is not None:
            return outcome
    measured = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
    if len(measured) < len(outcomes):
        return Ran()
    worst = max(measured, key=lambda each: each.measured_peak_allocated_bytes)
    largest: dict[str, Any] = {
        name: max((value for each in measured if (value := getattr(each, name)) is not None), default=None)
        for name in (
            "measured_evaluation_peak_bytes",
            "evaluation_kept_bytes",
            "measured_peak_rss_bytes",
            "measured_peak_reserved_bytes",
            "measured_device_total_bytes",
            "measured_step_seconds",
        )
    }
    return Ran(
        measurement=replace(
            worst,
            **largest,
            evaluation_ran_out=any(each.evaluation_ran_out for each in measured),
            profiled_steps=min(each.profiled_steps for each in measured),
            measured_peak_bytes_by_rank=tuple(each.measured_peak_allocated_bytes for each in measured),
        )
    )
