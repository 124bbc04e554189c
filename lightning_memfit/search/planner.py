"""The search: in the lowest tier in which anything fits, the candidate that is predicted to be fastest.

Pure: candidates go in, forecasts come back from the functions it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Budget, Candidate, Forecast, Offload, PassedOver, Plan, PlanRequest
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.search.levers import TIERS, SearchSpace, Setting
from lightning_memfit.search.reasons import (
    beyond_the_host,
    choices_of,
    note_on_recomputation,
    reason_passed_over,
    strategy_words,
    who_keeps,
)
from lightning_memfit.search.strategies import Spread
from lightning_memfit.units import format_bytes

Evaluate = Callable[[Candidate], Forecast]
Floor = Callable[[Candidate, int], int]
"""(candidate, budget in bytes) to bytes that it needs at the least."""

MOST_CONTENDERS = 3
"""Candidates that are worth timing for real."""
CONTENDER_SHARE = 1.25
"""A candidate is worth timing if it is predicted to take at most this share of the fastest one's time."""
NEARLY_FITS = 1.02
"""Where nothing of a tier is estimated to fit, its smallest is traced if it is estimated at up to this share of the
budget."""
PLACES: tuple[tuple[Offload, ...], ...] = (("never", "optimizer"), ("parameters",))
"""What of a tier lies on the host, in the order in which it is looked at. Every forward and backward fetches parameters
that lie there, so that they are worth it only where nothing else of the tier fits."""
_LEVER_PAYS = 0.02
_PRECISION_PAYS = 0.05
_ENGINE_PAYS = 0.25
"""Another engine counts as faster than the plainest only where it saves most of what recomputing everything costs."""
_INTERPOLATED_STEPS = 2
_ANY_BUDGET = 2**63
_MOST_RETRIES = 3
_SECONDS = 3  # their place in a score


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found."""

    plan: Plan
    """The plan of the candidate that is predicted to be fastest."""
    contenders: tuple[Forecast, ...]
    """That candidate first, and those that are nearly as fast by prediction: which one is fastest, a clock must say."""


def search_plan(
    request: PlanRequest,
    device: DeviceSpec,
    budget: Budget,
    space: SearchSpace,
    evaluate: Evaluate,
    *,
    estimate: Evaluate | None = None,
    floor: Floor | None = None,
    contenders: int = 1,
    out_of_time: Callable[[], bool] = lambda: False,
    notes: tuple[str, ...] = (),
) -> Found:
    """Find the plan.

    1. Tier by tier: a higher one is looked at only where nothing of a lower one fits.
    2. For each setting of the other levers the fewest slices that fit are found. A larger slice never needs less
       memory, so that the number of slices is searched by interpolation between one that fits and one that does not.
    3. What fits is ranked by predicted seconds per optimizer step. A lever counts as faster only where it saves at
       least 2 % (a precision 5 %), so that nothing departs from the run as it is for less. Where seconds are not
       known, fewest recomputed FLOPs count, then fewest slices, then fewest departures. What keeps the optimizer on the
       host comes after all that does not, and what keeps the parameters there too is looked at only where nothing else
       of the tier fits. Of several strategies none but the plainest (DDP) is looked at where that fits with nothing
       divided or recomputed, and another engine counts as faster from 25 % on; unless seconds include what is
       exchanged, fewest exchanged bytes count first.
    4. The first of the ranking are forecast by ``evaluate``, if ``estimate`` derived them; one that does not fit
       after all is searched again with the difference added.

    Args:
        request: what the user asked for.
        device: where it will run.
        budget: what it may use.
        space: what may be chosen.
        evaluate: candidate to confirmed forecast.
        estimate: candidate to quick forecast; by default ``evaluate``.
        floor: candidate and budget to bytes that it needs whatever its slices and what is recomputed; settings whose
            floor is above the budget are not forecast.
        contenders: how many of the first are confirmed.
        out_of_time: whether planning has used its time; then no further settings are looked at.
        notes: what the user should know, put into the plan.

    Raises:
        NoFeasiblePlanError: if nothing fits; the message says by how much and what would help.
    """
    search = _Search(budget.budget_bytes, space, evaluate, estimate or evaluate, floor or _no_floor, out_of_time)
    finalists: list[Forecast] = []
    for tier in TIERS:
        if not finalists:
            finalists = search.finalists(tier, contenders)
    if not finalists:
        smallest = search.smallest()
        if not search.fits(smallest):
            raise _nothing_fits(request, budget, space, smallest, search)
        finalists = [smallest]
    chosen = finalists[0]
    others = search.others(chosen)
    passed = [
        PassedOver(
            candidate=other.candidate,
            predicted_peak_bytes=other.predicted_peak_bytes,
            predicted_step_seconds=other.predicted_step_seconds,
            reason=reason_passed_over(other, chosen, budget, host_budget_bytes=space.host_budget_bytes),
        )
        for other in others
    ]
    if space.recomputed_anyway:
        notes = (*notes, note_on_recomputation(space.recomputed_anyway))
    if search.cut_short:
        notes = (*notes, f"planning time was up: {search.cut_short} settings of the levers were not looked at")
    plan = Plan(
        request=request,
        device=device,
        budget=budget,
        forecast=chosen,
        choices=choices_of(request, budget, space, chosen, others, ruled_out=tuple(search.ruled_out.values())),
        passed_over=(*sorted(passed, key=_nearest_first(budget)), *search.ruled_out.values(), *search.unneeded),
        notes=(*notes, *chosen.notes),
    )
    return Found(plan=plan, contenders=tuple(finalists))


def withheld_that_fits(
    budget: Budget,
    space: SearchSpace,
    evaluate: Evaluate,
    *,
    estimate: Evaluate | None = None,
    floor: Floor | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Forecast | None:
    """What fits of the ways that nobody asked for, confirmed; ``None`` if nothing of them does.

    Args:
        budget: what it may use.
        space: what may be chosen; its :attr:`Considered.withheld` are searched, and nothing else.
        evaluate: as in :func:`search_plan`, and so are the arguments after it.
        estimate: candidate to quick forecast; by default ``evaluate``.
        floor: candidate and budget to bytes that it needs at the least.
        out_of_time: whether planning has used its time.
    """
    if not space.strategies.withheld:
        return None
    space = replace(space, strategies=replace(space.strategies, spreads=space.strategies.withheld))
    search = _Search(budget.budget_bytes, space, evaluate, estimate or evaluate, floor or _no_floor, out_of_time)
    found = next((found for tier in TIERS if (found := search.finalists(tier, 1))), [])
    return found[0] if found else None


@dataclass
class _Search:
    budget_bytes: int
    space: SearchSpace
    evaluate: Evaluate
    estimate: Evaluate
    floor: Floor
    out_of_time: Callable[[], bool]
    known: dict[Candidate, Forecast] = field(default_factory=dict)
    settings: dict[Candidate, Setting] = field(default_factory=dict)
    added: dict[Setting, int] = field(default_factory=dict)
    """By how much the confirmed forecast of a setting exceeded the estimated one."""
    unneeded: list[PassedOver] = field(default_factory=list)
    ruled_out: dict[Spread, PassedOver] = field(default_factory=dict)
    """Ways to spread training of which every setting so far has a floor above the budget."""
    floors: dict[Setting, int] = field(default_factory=dict)
    """Of each setting that recomputes least, and of those that recompute more with it."""
    cut_short: int = 0

    def finalists(self, tier: int, most: int) -> list[Forecast]:
        """The best of a tier, confirmed, fastest first; none if nothing of the tier fits."""
        for looked_at, places in enumerate(PLACES, start=1):
            found = self._finalists_of(tier, places, most)
            if found:
                self._pass_over_places(tier, PLACES[looked_at:])
                return found
        return []

    def _finalists_of(self, tier: int, places: tuple[Offload, ...], most: int) -> list[Forecast]:
        for _ in range(1 + _MOST_RETRIES):
            fitting = self._fitting(tier, places)
            confirmed = self._confirmed(fitting, most)
            if confirmed:
                return confirmed
            if not fitting:
                break  # otherwise estimates were too low: once more, with what they missed
        estimated = [
            known
            for known in self.known.values()
            if known.candidate.harm_tier == tier and known.candidate.offload in places and not known.confirmed
        ]
        for nearest in sorted(estimated, key=_peak)[:_MOST_RETRIES]:
            if nearest.predicted_peak_bytes > NEARLY_FITS * self.budget_bytes:
                break
            exact = self._exact(nearest)
            if self.fits(exact):
                return [exact]
        return []

    def smallest(self) -> Forecast:
        """The confirmed candidate of the smallest peak of all that were looked at; of the lowest floor if none was."""
        if not self.known:
            lowest = min(self.floors, key=self._whole_floor)
            self.forecast(lowest, self.space.num_slices[-1], early=self.space.gradients_reason is None)
        while not (smallest := min(self.known.values(), key=_peak)).confirmed:
            self._exact(smallest)
        return smallest

    def others(self, chosen: Forecast) -> list[Forecast]:
        """Every forecast of the chosen setting, and of every other setting the fastest that fits, or the smallest."""
        by_setting: dict[Setting, list[Forecast]] = {}
        for candidate, forecast in self.known.items():
            if forecast is not chosen:
                by_setting.setdefault(self.settings[candidate], []).append(forecast)
        mine = by_setting.pop(self.settings[chosen.candidate], [])
        return [*mine, *map(self._representative, by_setting.values())]

    def _representative(self, forecasts: list[Forecast]) -> Forecast:
        fitting = [forecast for forecast in forecasts if self.fits(forecast)]
        if fitting:
            return min(fitting, key=self.score)
        return min(forecasts, key=lambda forecast: forecast.predicted_peak_bytes)

    # Search

    def fits(self, forecast: Forecast) -> bool:
        return forecast.predicted_peak_bytes <= self.budget_bytes and not beyond_the_host(
            forecast, self.space.host_budget_bytes
        )

    def score(self, forecast: Forecast) -> tuple[float, ...]:
        """Smaller is better; forecasts without seconds come after those with."""
        candidate = forecast.candidate
        departures = self.space.departures(candidate)
        least = (float(departures), float(candidate.split.num_slices))
        offloads = float(candidate.kept_on_host)  # what it costs in time is in no seconds: it never competes
        if forecast.predicted_step_seconds is None:
            sent, slices = float(forecast.exchanged_bytes or 0), float(candidate.split.num_slices)
            return (offloads, 1.0, float(forecast.recomputed_flops or 0), slices, sent, *least)
        other_precision = candidate.precision != self.space.precisions[0]
        must_pay = departures * _LEVER_PAYS + other_precision * (_PRECISION_PAYS - _LEVER_PAYS)
        must_pay += self.space.is_of_another_engine(candidate) * (_ENGINE_PAYS - _LEVER_PAYS)
        sent = 0 if forecast.seconds_count_exchanges else forecast.exchanged_bytes or 0
        return (offloads, 0.0, float(sent), forecast.predicted_step_seconds * (1 + must_pay), *least)

    def _settings(self, tier: int, places: tuple[Offload, ...]) -> Iterator[Setting]:
        return (setting for setting in self.space.settings(tier) if setting.spread.offload in places)

    def _fitting(self, tier: int, places: tuple[Offload, ...]) -> list[Forecast]:
        found: list[Forecast] = []
        undivided: set[Setting] = set()
        self.unneeded.clear()
        for setting in self._settings(tier, places):
            without = self._without_checkpointing(setting)
            if without in undivided:
                self._pass_over_unneeded(setting)
                continue
            if found and self.out_of_time():
                self.cut_short += 1
                continue
            if self._fits_as_it_is(found, setting):
                continue
            if self._is_ruled_out(setting):
                continue
            best = self.fewest_slices(setting)
            if best is not None:
                found.append(best)
                if best.candidate.split.num_slices == self.space.num_slices[0]:
                    undivided.add(without)
        return found

    def _fits_as_it_is(self, found: list[Forecast], setting: Setting) -> bool:
        """Whether the plainest of several strategies fits and leaves the step alone, so that no other is looked at."""
        plainest, least = self.space.strategies.spreads[0], self.space.checkpointing[0]
        if setting.spread == plainest:
            return False
        for forecast in found:
            candidate = forecast.candidate
            alone = candidate.checkpointed_modules == least.modules
            if alone and candidate.split.num_slices == self.space.num_slices[0] and Spread.of(candidate) == plainest:
                reason = f"not forecast: {strategy_words(candidate)} fits with nothing divided or recomputed"
                other = self.space.candidate(setting, self.space.num_slices[0], zero_gradients_early=False)
                if all(Spread.of(passed.candidate) != setting.spread for passed in self.unneeded):
                    self.unneeded.append(PassedOver(candidate=other, predicted_peak_bytes=None, reason=reason))
                return True
        return False

    def _pass_over_places(self, tier: int, unseen: tuple[tuple[Offload, ...], ...]) -> None:
        """Say once of each spread that keeps more on the host why it was not looked at."""
        reason = "not forecast: a plan that keeps less on the host fits already"
        first: dict[Spread, Setting] = {}
        for setting in itertools.chain.from_iterable(self._settings(tier, places) for places in unseen):
            first.setdefault(setting.spread, setting)
        for setting in first.values():
            candidate = self.space.candidate(setting, self.space.num_slices[0], zero_gradients_early=False)
            self.unneeded.append(PassedOver(candidate=candidate, predicted_peak_bytes=None, reason=reason))

    def _whole_floor(self, setting: Setting) -> int:
        candidate = self.space.candidate(setting, self.space.num_slices[-1], zero_gradients_early=True)
        return self.floor(candidate, _ANY_BUDGET)

    def _is_ruled_out(self, setting: Setting) -> bool:
        candidate = self.space.candidate(setting, self.space.num_slices[-1], zero_gradients_early=True)
        alike = self._without_checkpointing(setting)  # what is recomputed does not change it
        if alike not in self.floors:
            self.floors[alike] = self.floor(candidate, self.budget_bytes)
        floor = self.floors[alike]
        over = floor - self.budget_bytes
        if over <= 0:
            self.ruled_out.pop(setting.spread, None)
        elif all(self.settings[known].spread != setting.spread for known in self.known):
            reason = (
                f"does not fit: {strategy_words(candidate)} holds {format_bytes(floor)} at the least all the time, "
                f"{format_bytes(over)} over the budget"
            )
            first = PassedOver(candidate=candidate, predicted_peak_bytes=None, reason=reason)
            self.ruled_out.setdefault(setting.spread, first)
        return over > 0

    def _without_checkpointing(self, setting: Setting) -> Setting:
        return Setting(
            precision=setting.precision,
            optimizer_states=setting.optimizer_states,
            optimizer_implementation=setting.optimizer_implementation,
            checkpointing=self.space.checkpointing[0],
            spread=setting.spread,
        )

    def _confirmed(self, found: list[Forecast], most: int) -> list[Forecast]:
        ranked = sorted(found, key=self.score)
        finalists: list[Forecast] = []
        retries: dict[Setting, int] = {}
        while ranked and len(finalists) < most:
            estimated = ranked.pop(0)
            if finalists and self._is_slower(estimated, finalists[0]):
                break
            exact = self._exact(estimated)
            if self.fits(exact):
                finalists.append(exact)
                continue
            setting = self.settings[exact.candidate]
            retries[setting] = retries.get(setting, 0) + 1
            # More than what was missed before, with which it would not have been tried.
            self.added[setting] = exact.predicted_peak_bytes - estimated.predicted_peak_bytes
            if retries[setting] <= _MOST_RETRIES:
                again = self.fewest_slices(setting) or self._smallest_untried(setting)
                if again is not None and again is not exact:
                    ranked = sorted([*ranked, again], key=self.score)
        return sorted(finalists, key=self.score)

    def _smallest_untried(self, setting: Setting) -> Forecast | None:
        """The smallest slices of a setting, where they are estimated to fit and were not confirmed.

        What the estimate of a large slice missed, a small one need not miss: on a GPU it is what lies between blocks.
        """
        most = self.space.num_slices[-1]
        moments = (False, True) if self.space.gradients_reason is None else (False,)
        untried = [self.forecast(setting, most, early=early) for early in moments]
        return next((each for each in untried if not each.confirmed and self.fits(each)), None)

    def _is_slower(self, forecast: Forecast, fastest: Forecast) -> bool:
        if forecast.predicted_step_seconds is None or fastest.predicted_step_seconds is None:
            return True
        return self.score(forecast)[_SECONDS] > CONTENDER_SHARE * self.score(fastest)[_SECONDS]

    def _exact(self, estimated: Forecast) -> Forecast:
        if not estimated.confirmed:
            self.known[estimated.candidate] = self.evaluate(estimated.candidate)
        return self.known[estimated.candidate]

    def forecast(self, setting: Setting, num_slices: int, *, early: bool) -> Forecast:
        candidate = self.space.candidate(setting, num_slices, zero_gradients_early=early)
        if candidate not in self.known:
            self.settings[candidate] = setting
            self.known[candidate] = self.estimate(candidate)
        return self.known[candidate]

    def _fits_by_estimate(self, forecast: Forecast) -> bool:
        added = 0 if forecast.confirmed else self.added.get(self.settings[forecast.candidate], 0)
        return forecast.predicted_peak_bytes + added <= self.budget_bytes and not beyond_the_host(
            forecast, self.space.host_budget_bytes
        )

    def best_at(self, setting: Setting, num_slices: int) -> Forecast:
        """Zeroing late is what the run does today; zeroing early is taken where only that fits."""
        late = self.forecast(setting, num_slices, early=False)
        if self._fits_by_estimate(late) or self.space.gradients_reason is not None:
            return late
        return self.forecast(setting, num_slices, early=True)

    def fewest_slices(self, setting: Setting) -> Forecast | None:
        counts = self.space.num_slices
        too_few = 0
        over = self.best_at(setting, counts[0])
        if self._fits_by_estimate(over):
            return over
        enough = len(counts) - 1
        best = self.best_at(setting, counts[enough])
        if not self._fits_by_estimate(best):
            return None
        steps = 0
        while enough - too_few > 1:
            steps += 1
            middle = (too_few + enough) // 2
            if steps <= _INTERPOLATED_STEPS:
                middle = self._between(counts, too_few, enough, over, best)
            forecast = self.best_at(setting, counts[middle])
            if self._fits_by_estimate(forecast):
                enough, best = middle, forecast
            else:
                too_few, over = middle, forecast
        return best

    def _between(self, counts: tuple[int, ...], too_few: int, enough: int, over: Forecast, best: Forecast) -> int:
        """Guess where the line between the two known peaks meets the budget; stay strictly between them.

        The peak is the largest of several straight lines in the slice's size, hence convex: the line through two known
        points lies above it and the guess mostly fits, so that the one just before it is what remains to be tried.
        Where it is not convex after all, halving takes over and bounds the number of forecasts.
        """
        high, low = over.candidate.split.micro_batch_size, best.candidate.split.micro_batch_size
        rise = over.predicted_peak_bytes - best.predicted_peak_bytes
        room = self.budget_bytes - best.predicted_peak_bytes
        size = low + (high - low) * room // max(rise, 1)
        samples = self.space.whole.loader_batch_size
        at_size = next((i for i, count in enumerate(counts) if -(-samples // count) <= size), enough)
        if at_size >= enough:
            return enough - 1
        return max(at_size, too_few + 1)

    def _pass_over_unneeded(self, setting: Setting) -> None:
        candidate = self.space.candidate(setting, self.space.num_slices[0], zero_gradients_early=False)
        reason = "not forecast: a plan that recomputes less fits already"
        self.unneeded.append(PassedOver(candidate=candidate, predicted_peak_bytes=None, reason=reason))


def _no_floor(candidate: Candidate, budget_bytes: int) -> int:
    return 0


def _peak(forecast: Forecast) -> int:
    return forecast.predicted_peak_bytes


def _nothing_fits(
    request: PlanRequest, budget: Budget, space: SearchSpace, best: Forecast, search: _Search
) -> NoFeasiblePlanError:
    message = no_fit_message(
        budget=budget,
        best=best,
        measured_peak_bytes=None,
        passed_over=tuple(
            PassedOver(
                candidate=other.candidate,
                predicted_peak_bytes=other.predicted_peak_bytes,
                reason=reason_passed_over(other, best, budget, host_budget_bytes=space.host_budget_bytes),
            )
            for other in _without(search.known.values(), best)
        )
        + tuple(search.ruled_out.values()),
        request=request,
        slicing_reason=space.slicing_reason,
        checkpointing_reason=space.checkpointing_reason,
        states_reason=space.states_reason,
        withheld=withheld_that_fits(
            budget,
            space,
            search.evaluate,
            estimate=search.estimate,
            floor=search.floor,
            out_of_time=search.out_of_time,
        ),
    )
    over = beyond_the_host(best, space.host_budget_bytes)
    if over:
        ranks, given = best.candidate.split.ranks, format_bytes(space.host_budget_bytes or 0)
        kept = format_bytes((best.host_bytes or 0) * ranks)
        who = f"{ranks} ranks keep" if ranks > 1 else who_keeps(best.candidate.offload)
        message = (
            f"No plan fits the host: of the smallest one, {who} {kept} in its memory, "
            f"{format_bytes(over)} more than the {given} that are given (host_memory).\n{message}"
        )
    return NoFeasiblePlanError(
        message, budget_bytes=budget.budget_bytes, best_peak_bytes=best.predicted_peak_bytes, smallest=best
    )


def _without(forecasts: Iterable[Forecast], best: Forecast) -> list[Forecast]:
    return [forecast for forecast in forecasts if forecast.candidate != best.candidate]


def _nearest_first(budget: Budget) -> Callable[[PassedOver], int]:
    return lambda passed: abs((passed.predicted_peak_bytes or 0) - budget.budget_bytes)
