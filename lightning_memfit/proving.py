"""The proof of a plan: real steps at its settings, other plans where it does not stand, faster ones where it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.contest import Standing, fastest
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.evaluation_forecast import predicted_evaluation_peak
from lightning_memfit.observe.random_state import random_state_kept
from lightning_memfit.plan import Budget, Choice, Forecast, Measurement, PassedOver, Plan
from lightning_memfit.planning import Planning
from lightning_memfit.real_steps import Unrecomputable
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.search.reasons import choices_of
from lightning_memfit.steps_of_all_ranks import Steps
from lightning_memfit.trace.manual_step import MOST_BATCHES
from lightning_memfit.units import MIB, format_bytes, format_seconds
from lightning_memfit.validate.verdict import far_below, judge
from lightning_memfit.validate.warmup import silenced

MAX_ATTEMPTS = 4
"""Warm-ups of one fit: the first plan's, and those of plans made after a measurement above the budget."""
_NOTHING_PROVEN = (
    "NOT PROVEN: training_step gave no loss for the first batch (or, under manual optimization, an optimizer did not "
    f"step within {MOST_BATCHES} batches), so that the warm-up measured steps that do nothing"
)

Failed = tuple[Forecast, Measurement | None]
"""A plan's corrected forecast, and what its warm-up measured; ``None`` if it ran out of memory."""
Report = Callable[[Plan, str], None]


class Proving:
    """Runs plans on the live Trainer until one stands."""

    def __init__(self, planning: Planning, steps: Steps, validation: ScannedBatch | None) -> None:
        """Run nothing yet.

        Args:
            planning: searches again where a plan does not stand.
            steps: runs candidates for real.
            validation: the largest validation batch; ``None`` if the run does not validate.
        """
        self._planning = planning
        self._prepared = planning.prepared
        self._steps = steps
        self._validation = validation
        self._tried: list[PassedOver] = []

    def prove(self, plan: Plan, report: Report) -> tuple[Plan, Measurement]:
        """Run the warm-up; over the budget, correct the prediction, plan again and repeat, a bounded number of times.

        Of plans that are predicted to be nearly as fast as each other, each is run and timed, and the fastest is taken.

        Args:
            plan: the plan whose levers are on.
            report: told of every further plan, and in words of what the warm-up found that made it necessary.

        Returns:
            The plan that stands, its levers on, with what was measured.

        Raises:
            NoFeasiblePlanError: with the smallest measured peak, if no plan stands.
            ConfigurationError: if modules that the user asked to recompute cannot be.
        """
        budget = self._prepared.budget
        failed: list[Failed] = []
        evaluated: Measurement | None = None
        for attempt in range(MAX_ATTEMPTS):
            measurement, mismatch = self._warm_up(plan.forecast)
            if mismatch is not None:
                found = self._without_recomputation(plan, mismatch)
            else:
                verdict = judge(plan.forecast, measurement, budget)
                corrected = replace(plan.forecast, correction_bytes=verdict.correction_bytes)
                self._planning.corrections[plan.candidate] = verdict.correction_bytes
                if measurement is not None:
                    self._planning.measured_corrections[plan.candidate] = verdict.correction_bytes
                if measurement is not None and verdict.fits:
                    if _evaluation_fits(measurement, budget):
                        return self._settled(replace(plan, forecast=corrected), measurement)
                    found, evaluated = self._note_evaluation(plan, measurement), measurement
                else:
                    failed.append((corrected, measurement))
                    self._pass_over(corrected, verdict.reason)
                    found = "ran out of memory" if measurement is None else "needed more than predicted"
            self._steps.take_off()
            if attempt + 1 < MAX_ATTEMPTS:
                plan = self._plan_again(failed, evaluated)
                self._steps.put_on(plan.candidate)
                report(plan, found)
        raise self._nothing_stands(failed) if evaluated is None else _evaluation_does_not_fit(evaluated, budget)

    def _note_evaluation(self, plan: Plan, measurement: Measurement) -> str:
        """Count with the evaluation in further plans, whose optimizer states may leave it room."""
        budget = self._prepared.budget
        # Where it ran out of memory no number is known, only that it is more than the budget.
        needed = measurement.predicted_evaluation_peak_bytes or budget.budget_bytes + 1
        self._planning.require_evaluation(plan.forecast, needed)
        self._pass_over(plan.forecast, _evaluation_words(measurement))
        return "found that evaluation does not fit beside the optimizer's states"

    def _plan_again(self, failed: Sequence[Failed], evaluated: Measurement | None) -> Plan:
        try:
            plan = self._planning.search()
        except NoFeasiblePlanError as error:
            if evaluated is not None:
                raise _evaluation_does_not_fit(evaluated, self._prepared.budget) from error
            if not failed:
                raise
            raise self._nothing_stands(failed) from error
        return replace(plan, passed_over=(*self._tried, *plan.passed_over))

    def _pass_over(self, forecast: Forecast, reason: str) -> None:
        self._tried.append(
            PassedOver(
                candidate=forecast.candidate,
                predicted_peak_bytes=forecast.predicted_peak_bytes,
                reason=f"warm-up: {reason}",
            )
        )

    def _without_recomputation(self, plan: Plan, mismatch: Unrecomputable) -> str:
        """Recompute nothing in further plans, since recomputing gave something else than the first pass.

        Which module it was, torch does not tell.
        """
        asked, names = self._prepared.request.activation_checkpointing, plan.candidate.checkpointed_modules
        if asked != "auto":
            raise ConfigurationError(
                f"activation_checkpointing={asked!r} cannot be had: of {', '.join(names)}, one at least "
                f"{mismatch.error} Name the others by patterns, or use activation_checkpointing='none'."
            )
        reason = f"a module that was recomputed {mismatch.reason}"
        self._planning.rule_out_recomputation(f"not recomputed: {reason}")
        self._pass_over(plan.forecast, reason)
        return "found modules that cannot be recomputed"

    def _settled(self, plan: Plan, measurement: Measurement) -> tuple[Plan, Measurement]:
        """A plan stands: try what may be faster, and keep the fastest."""
        if not measurement.profiled_steps:
            return replace(plan, notes=(*plan.notes, _NOTHING_PROVEN)), measurement
        first = Standing(forecast=plan.forecast, measurement=measurement)
        rivals = [rival for rival in self._planning.contenders if rival.candidate != plan.candidate]
        rivals += self._freed_by(first, rivals)
        known = len(self._tried)
        outcome = fastest(first, rivals, self._prove_rival, self._retime, self._planning.is_out_of_time)
        winner, ruled_out = outcome.winner, self._tried[known:]
        others = [each for each in plan.passed_over if each.candidate not in {one.candidate for one in ruled_out}]
        plan = replace(plan, passed_over=(*ruled_out, *others))
        if winner.forecast.candidate != plan.candidate:
            plan = self._plan_of(winner, plan)
        self._steps.put_on(plan.candidate)
        plan = replace(plan, forecast=self._with_evaluation(plan.forecast), notes=(*plan.notes, *self._steps.notes))
        if outcome.reason:
            speed = Choice(lever="speed", value=f"{format_seconds(winner.seconds)} per step", reason=outcome.reason)
            plan = replace(plan, choices=(*plan.choices, speed))
        return plan, winner.measurement

    def _with_evaluation(self, forecast: Forecast) -> Forecast:
        """The forecast with that of the first evaluation steps, which waits for the validation loaders."""
        if self._validation is None:
            return forecast
        with random_state_kept(), silenced(self._prepared.trainer):
            peak = predicted_evaluation_peak(self._prepared, forecast, self._validation)
        return replace(forecast, predicted_evaluation_peak_bytes=peak)

    def _freed_by(self, standing: Standing, rivals: Sequence[Forecast]) -> list[Forecast]:
        """The next faster candidate, where the measured peak leaves it room that the prediction did not."""
        if self._planning.was_taken_over or self._planning.is_out_of_time():
            return []
        if not far_below(standing.forecast, standing.measurement):
            return []
        self._steps.take_off()
        found = self._planning.freed()
        known = {standing.forecast.candidate, *(rival.candidate for rival in rivals)}
        return [] if found.candidate in known else [found]

    def _prove_rival(self, rival: Forecast) -> tuple[Measurement | None, bool] | None:
        self._steps.put_on(rival.candidate)
        measurement, mismatch = self._warm_up(rival)
        if mismatch is not None:
            self._pass_over(rival, f"a module that was recomputed {mismatch.reason}")
            return None
        verdict = judge(rival, measurement, self._prepared.budget)
        fits_evaluating = measurement is None or _evaluation_fits(measurement, self._prepared.budget)
        return measurement, verdict.fits and fits_evaluating

    def _plan_of(self, winner: Standing, planned: Plan) -> Plan:
        """The plan of a rival that turned out to be faster."""
        measured = winner.measurement.measured_peak_allocated_bytes
        forecast = replace(winner.forecast, correction_bytes=measured - winner.forecast.memory.peak_allocated_bytes)
        slower = PassedOver(
            candidate=planned.candidate,
            predicted_peak_bytes=planned.forecast.predicted_peak_bytes,
            predicted_step_seconds=planned.forecast.predicted_step_seconds,
            reason="fits and was predicted to be fastest, but was measured to be slower",
        )
        prepared = self._prepared
        choices = choices_of(prepared.request, prepared.budget, self._planning.space, forecast, (planned.forecast,))
        passed = [other for other in planned.passed_over if other.candidate != forecast.candidate]
        return replace(planned, forecast=forecast, choices=choices, passed_over=(slower, *passed))

    def _warm_up(self, forecast: Forecast) -> tuple[Measurement | None, Unrecomputable | None]:
        """What was measured, ``None`` where memory ran out; or why modules cannot be recomputed."""
        steps = self._prepared.request.num_profiled_steps
        self._planning.announce(f"proving with {steps} real steps: {forecast.candidate.label}")
        ran = self._steps.warm_up(forecast, timed=len(self._planning.contenders) > 1)
        return ran.measurement, ran.mismatch

    def _retime(self, forecast: Forecast) -> float:
        self._planning.announce(f"timing again: {forecast.candidate.label}")
        return self._steps.retime(forecast)

    def _nothing_stands(self, failed: Sequence[Failed]) -> NoFeasiblePlanError:
        """The smallest that was measured, or where every warm-up ran out of memory, the smallest that was tried."""
        budget, measured = self._prepared.budget, [forecast for forecast, measurement in failed if measurement]
        best = min(
            measured or [forecast for forecast, _ in failed],
            key=lambda each: (each.predicted_peak_bytes, each.memory.peak_allocated_bytes),
        )
        message = no_fit_message(
            budget=budget,
            best=best,
            measured_peak_bytes=best.predicted_peak_bytes if measured else None,
            passed_over=self._tried,
            request=self._prepared.request,
            slicing_reason=self._planning.space.slicing_reason,
            states_reason=self._planning.space.states_reason,
            checkpointing_reason=self._planning.space.checkpointing_reason,
            withheld=self._planning.other_strategy(),
        )
        ran_out = [forecast.candidate.label for forecast, measurement in failed if measurement is None]
        if ran_out:
            message += f"\nWarm-ups that ran out of memory, so that their peaks are not known: {'; '.join(ran_out)}."
        untried = min(forecast.candidate.split.micro_batch_size for forecast, _ in failed)
        if len(failed) == MAX_ATTEMPTS and len(self._planning.space.num_slices) > 1 and untried > 1:
            message += (
                f"\nOne fit runs at most {MAX_ATTEMPTS} warm-ups, so that slices of fewer than {untried} samples were "
                "not tried: micro_batch_size= begins with them."
            )
        return NoFeasiblePlanError(message, budget_bytes=budget.budget_bytes, best_peak_bytes=best.predicted_peak_bytes)


def _evaluation_fits(measurement: Measurement, budget: Budget) -> bool:
    return (
        not measurement.evaluation_ran_out and (measurement.predicted_evaluation_peak_bytes or 0) <= budget.budget_bytes
    )


def _evaluation_words(measurement: Measurement) -> str:
    """What an evaluation needs, in words."""
    if measurement.predicted_evaluation_peak_bytes is None:
        return "an evaluation step ran out of memory"
    measured = f"{format_bytes(measurement.measured_evaluation_peak_bytes or 0)} (measured, allocated)"
    if not measurement.evaluation_kept_bytes or not measurement.evaluation_batches:
        return f"one evaluation step needs {measured}"
    return (
        f"an evaluation needs {format_bytes(measurement.predicted_evaluation_peak_bytes)} (predicted): its first steps "
        f"{measured}, and the module keeps {format_bytes(measurement.evaluation_kept_bytes)} of each of "
        f"{measurement.evaluation_batches} batches, such as predictions"
    )


def _evaluation_does_not_fit(measurement: Measurement, budget: Budget) -> NoFeasiblePlanError:
    peak, of = measurement.predicted_evaluation_peak_bytes, measurement.evaluation_batch or "its batch"
    missing = "" if peak is None else f", {format_bytes(peak - budget.budget_bytes)} too much"
    way_out = "make the validation loader's batch smaller"
    if measurement.evaluation_kept_bytes:
        way_out += ", keep less of each batch until the end of the evaluation, such as running sums"
    enough = "" if peak is None else f', or set budget="{-(-peak // MIB)}MiB" or more'
    return NoFeasiblePlanError(
        f"Training fits the budget of {format_bytes(budget.budget_bytes)}, but {_evaluation_words(measurement)}"
        f"{missing}, for {of}. MemFit does not divide evaluation batches: {way_out}{enough}.",
        budget_bytes=budget.budget_bytes,
        best_peak_bytes=budget.budget_bytes + 1 if peak is None else peak,
    )
