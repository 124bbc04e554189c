"""The search: among what fits in the lowest tier, fewest recomputed FLOPs, then fewest slices.

Pure: candidates go in, forecasts come back from the function it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Budget, Candidate, Choice, Forecast, PassedOver, Plan, PlanRequest
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.search.levers import CheckpointingOption, SearchSpace
from lightning_memfit.units import format_bytes

Evaluate = Callable[[Candidate], Forecast]

_INTERPOLATED_STEPS = 2


def search_plan(
    request: PlanRequest,
    device: DeviceSpec,
    budget: Budget,
    space: SearchSpace,
    evaluate: Evaluate,
    *,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Find the plan.

    For each way of checkpointing, least recomputed work first, the fewest slices that fit are found. A larger slice
    never needs less memory, so that the number of slices is searched by interpolation between one that fits and one
    that does not.

    Args:
        request: what the user asked for.
        device: where it will run.
        budget: what it may use.
        space: what may be chosen.
        evaluate: candidate to forecast; called once for each candidate.
        notes: what the user should know, put into the plan.

    Raises:
        NoFeasiblePlanError: if nothing fits; the message says by how much and what would help.
    """
    search = _Search(budget.budget_bytes, space, evaluate)
    chosen: Forecast | None = None
    for option in space.checkpointing:
        if chosen is None:
            chosen = search.fewest_slices(option)
        else:
            search.pass_over_unneeded(option)
    forecasts = [forecast for forecast in search.known.values() if forecast is not chosen]
    if chosen is None:
        best = min(forecasts, key=lambda forecast: forecast.predicted_peak_bytes)
        others = tuple(_too_large(f, budget) for f in forecasts if f is not best)
        message = no_fit_message(
            budget=budget,
            best=best,
            measured_peak_bytes=None,
            passed_over=others,
            request=request,
            slicing_reason=space.slicing_reason,
        )
        raise NoFeasiblePlanError(message, budget_bytes=budget.budget_bytes, best_peak_bytes=best.predicted_peak_bytes)
    passed = [
        _too_large(f, budget) if f.predicted_peak_bytes > budget.budget_bytes else _fits_but(f, chosen)
        for f in forecasts
    ]
    return Plan(
        request=request,
        device=device,
        budget=budget,
        forecast=chosen,
        choices=_choices(request, space, chosen, search),
        passed_over=(*sorted(passed, key=_nearest_first(budget)), *search.unneeded),
        notes=(*notes, *chosen.notes),
    )


@dataclass
class _Search:
    budget_bytes: int
    space: SearchSpace
    evaluate: Evaluate
    known: dict[Candidate, Forecast] = field(default_factory=dict)
    unneeded: list[PassedOver] = field(default_factory=list)

    def forecast(self, option: CheckpointingOption, num_slices: int, *, early: bool) -> Forecast:
        candidate = self.space.candidate(option, num_slices, zero_gradients_early=early)
        if candidate not in self.known:
            self.known[candidate] = self.evaluate(candidate)
        return self.known[candidate]

    def fits(self, forecast: Forecast) -> bool:
        return forecast.predicted_peak_bytes <= self.budget_bytes

    def best_at(self, option: CheckpointingOption, num_slices: int) -> Forecast:
        """Zeroing late is what the run does today; zeroing early is taken where only that fits."""
        late = self.forecast(option, num_slices, early=False)
        return late if self.fits(late) else self.forecast(option, num_slices, early=True)

    def fewest_slices(self, option: CheckpointingOption) -> Forecast | None:
        counts = self.space.num_slices
        too_few = 0
        over = self.best_at(option, counts[0])
        if self.fits(over):
            return over
        enough = len(counts) - 1
        best = self.best_at(option, counts[enough])
        if not self.fits(best):
            return None
        steps = 0
        while enough - too_few > 1:
            steps += 1
            middle = (too_few + enough) // 2
            if steps <= _INTERPOLATED_STEPS:
                middle = self._between(counts, too_few, enough, over, best)
            forecast = self.best_at(option, counts[middle])
            if self.fits(forecast):
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

    def pass_over_unneeded(self, option: CheckpointingOption) -> None:
        candidate = self.space.candidate(option, self.space.num_slices[0], zero_gradients_early=False)
        reason = "not forecast: a plan that recomputes less fits already"
        self.unneeded.append(PassedOver(candidate=candidate, predicted_peak_bytes=None, reason=reason))


def _nearest_first(budget: Budget) -> Callable[[PassedOver], int]:
    return lambda passed: abs((passed.predicted_peak_bytes or 0) - budget.budget_bytes)


def _too_large(forecast: Forecast, budget: Budget) -> PassedOver:
    over = forecast.predicted_peak_bytes - budget.budget_bytes
    return PassedOver(
        candidate=forecast.candidate,
        predicted_peak_bytes=forecast.predicted_peak_bytes,
        reason=f"does not fit: {format_bytes(over)} over the budget",
    )


def _fits_but(forecast: Forecast, chosen: Forecast) -> PassedOver:
    mine, taken = forecast.candidate, chosen.candidate
    if mine.activation_checkpointing != taken.activation_checkpointing:
        reason = "fits, but recomputes more"
    elif mine.split.num_slices > taken.split.num_slices:
        reason = f"fits, but divides the batch into {mine.split.num_slices} slices instead of {taken.split.num_slices}"
    else:
        reason = "fits, but departs further from what the run does today"
    return PassedOver(candidate=mine, predicted_peak_bytes=forecast.predicted_peak_bytes, reason=reason)


def _choices(request: PlanRequest, space: SearchSpace, chosen: Forecast, search: _Search) -> tuple[Choice, ...]:
    return (
        _batch_choice(request, chosen),
        _precision_choice(request, chosen),
        _checkpointing_choice(request, space, chosen),
        _slicing_choice(space, chosen, search),
        _zeroing_choice(chosen),
        Choice(
            lever="optimizer_states",
            value="as configured",
            reason="as given" if request.optimizer_states == "as-configured" else "this release does not quantise them",
        ),
    )


def _batch_choice(request: PlanRequest, chosen: Forecast) -> Choice:
    split = chosen.candidate.split
    asked = "as asked" if request.effective_batch_size is not None else "what the run does today"
    return Choice(
        lever="effective_batch_size",
        value=str(split.effective_batch_size),
        reason=(
            f"{asked}: {split.ranks} rank x accumulate_grad_batches {split.accumulate_grad_batches} x loader batch "
            f"{split.loader_batch_size}"
        ),
    )


def _precision_choice(request: PlanRequest, chosen: Forecast) -> Choice:
    reason = "as given" if request.precision is not None else "'auto' means 32-true in this release"
    return Choice(lever="precision", value=chosen.candidate.precision, reason=reason)


def _checkpointing_choice(request: PlanRequest, space: SearchSpace, chosen: Forecast) -> Choice:
    candidate = chosen.candidate
    if candidate.activation_checkpointing == "none":
        reason = "fits without recomputing anything"
        if request.activation_checkpointing == "none":
            reason = "as given"
        elif len(space.checkpointing) == 1:
            reason = "no repeated blocks found"
        return Choice(lever="activation_checkpointing", value="none", reason=reason)
    reason = "as given" if request.activation_checkpointing != "auto" else "does not fit without, at any slice size"
    if chosen.flops and chosen.recomputed_flops is not None:
        share = chosen.recomputed_flops / max(1, chosen.flops - chosen.recomputed_flops)
        reason += f"; costs {share:.0%} more FLOPs"
    value = f"{len(candidate.checkpointed_modules)} modules ({_abbreviated(candidate.checkpointed_modules)})"
    return Choice(lever="activation_checkpointing", value=value, reason=reason)


def _abbreviated(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


def _slicing_choice(space: SearchSpace, chosen: Forecast, search: _Search) -> Choice:
    split = chosen.candidate.split
    fewer = [
        forecast
        for candidate, forecast in search.known.items()
        if candidate.checkpointed_modules == chosen.candidate.checkpointed_modules
        and candidate.split.num_slices < split.num_slices
    ]
    value = f"{split.micro_batch_size}" + ("" if split.num_slices == 1 else f" ({split.num_slices} slices per batch)")
    if space.slicing_reason:
        reason = space.slicing_reason
    elif split.num_slices == 1:
        reason = "the whole batch fits"
    else:
        nearest = min(fewer, key=lambda forecast: forecast.predicted_peak_bytes)
        reason = (
            f"the fewest slices that fit: {nearest.candidate.split.num_slices} would need "
            f"{format_bytes(nearest.predicted_peak_bytes)}; costs {split.num_slices} smaller passes per batch"
        )
    return Choice(lever="micro_batch_size", value=value, reason=reason)


def _zeroing_choice(chosen: Forecast) -> Choice:
    if chosen.candidate.zero_gradients_early:
        reason = "the old gradients would not fit beside the next forward; costs nothing"
        return Choice(lever="zero_gradients_early", value="before the forward", reason=reason)
    return Choice(lever="zero_gradients_early", value="after the forward", reason="Lightning's own order fits")
