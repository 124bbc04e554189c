"""One fit: plan before the optimizers exist, apply, prove before the first step, undo at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.apply.loader import TrainLoader, forget_validation_loader, request_validation_batch
from lightning_memfit.apply.micro_batches import Slicer
from lightning_memfit.apply.stepping_batches import answering_num_batches
from lightning_memfit.errors import NoFeasiblePlanError, is_out_of_memory
from lightning_memfit.observe.random_state import random_state_kept
from lightning_memfit.plan import Budget, Candidate, Forecast, Measurement, PassedOver, Plan, PlanRequest
from lightning_memfit.preparation import BatchFunctions, Preparation, prepare
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.search.levers import SearchSpace
from lightning_memfit.search.planner import search_plan
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.undo import set_instance_attribute
from lightning_memfit.units import MIB, format_bytes
from lightning_memfit.validate.verdict import expected_correction, judge
from lightning_memfit.validate.warmup import run_warmup

MAX_ATTEMPTS = 4
"""Warm-ups of one fit: the first plan's, and those of plans made after a measurement above the budget."""

_NOTHING_PROVEN = (
    "NOT PROVEN: training_step gave no loss for the first batch, so that the warm-up measured steps that do nothing"
)

Failed = tuple[Forecast, Measurement | None]
"""A plan's corrected forecast, and what its warm-up measured; ``None`` if it ran out of memory."""
Report = Callable[[Plan, Measurement | None], None]
Announce = Callable[[str], None]
"""Is told, in a few words, what is being done now."""


class FitSession:
    """Plans one fit and keeps what must be undone at its end.

    Attributes:
        trainer: the Trainer.
        plan: the plan in force, once there is one.
        measurement: what the warm-up of that plan measured, once it stands.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        request: PlanRequest,
        functions: BatchFunctions,
        *,
        cache_dir: Path | None,
    ) -> None:
        """Take part in nothing yet.

        Args:
            trainer: the Trainer, fitting.
            module: its LightningModule, on the host, before optimizers exist.
            request: what the user asked for.
            functions: the user's functions for batches.
            cache_dir: keeps what operator probing found; ``None`` keeps nothing.
        """
        self.trainer = trainer
        self.plan: Plan | None = None
        self.measurement: Measurement | None = None
        self._module = module
        self._request = request
        self._functions = functions
        self._prober = OperatorProber(cache_dir=cache_dir)
        self._loader: TrainLoader | None = None
        self._preparation: Preparation | None = None
        self._space: SearchSpace | None = None
        self._notes: tuple[str, ...] = ()
        self._slices_compared = False
        self._corrections: dict[Candidate, int] = {}
        self._tried: list[PassedOver] = []
        self._announce: Announce = lambda words: None
        self._run_levers = ExitStack()
        self._step_levers = ExitStack()

    # Plan

    def make_plan(self, announce: Announce) -> Plan:
        """Look at the data and the device and search; everything is left as it was.

        Args:
            announce: is told of every candidate before its forecast.

        Raises:
            NoFeasiblePlanError: if nothing fits.
            ConfigurationError: if the request cannot be met exactly.
        """
        self._announce = announce
        self._prober.start()
        announce("looking at the first batch")
        self._loader = TrainLoader.request(self.trainer)
        with random_state_kept():
            prepared = self._preparation = prepare(
                self.trainer, self._module, self._request, self._functions, self._loader, self._prober
            )
            self._notes = prepared.notes
            self._space = prepared.space(prepared.slicing_obstacle())
            self.plan = self._guarded_search()
        return self.plan

    def _guarded_search(self) -> Plan:
        """Before slices are used, they are compared with the whole; where they differ, the search goes without them."""
        plan = self._search()
        if plan.split.num_slices == 1 or self._slices_compared:
            return plan
        self._slices_compared = True
        if self._request.allow_inexact_slicing:
            self._notes += ("allow_inexact_slicing=True: slices were not compared with the undivided batch",)
        else:
            self._announce("comparing slices with the undivided batch")
            obstacle = self._prepared.compare_slices(plan.split.micro_batch_size)
            if obstacle is None:
                return plan
            self._space = self._prepared.space(obstacle)
        return self._search()

    def _search(self) -> Plan:
        prepared = self._prepared
        assert self._space is not None
        with answering_num_batches(
            self.trainer,
            num_batches=prepared.num_batches,
            accumulate_grad_batches=prepared.loader_plan.accumulate_grad_batches,
        ):
            return search_plan(
                self._request, prepared.device, prepared.budget, self._space, self._forecast, notes=self._notes
            )

    def _forecast(self, candidate: Candidate) -> Forecast:
        self._announce(f"forecasting: {candidate.label}")
        forecast = self._prepared.forecast(candidate)
        return replace(forecast, correction_bytes=expected_correction(candidate, self._corrections))

    # Apply and undo

    def apply(self) -> None:
        """Apply the plan to the Trainer and the module."""
        split, loader_plan = self._chosen.split, self._prepared.loader_plan
        self.install_loader(split.loader_batch_size if loader_plan.rebuilt else None)
        self._run_levers.callback(
            set_instance_attribute(self.trainer, "accumulate_grad_batches", split.accumulate_grad_batches)
        )
        self._apply_step_levers()

    def install_loader(self, batch_size: int | None = None) -> None:
        """Hand the loader that was asked for on to Lightning, so that the user's hook runs once."""
        assert self._loader is not None
        self._run_levers.callback(self._loader.install(batch_size))

    def undo(self) -> None:
        """Take every lever back, and end what was started. Calling it twice is harmless."""
        self._step_levers.close()
        self._run_levers.close()
        self._prober.close()
        if self._loader is not None:
            self._loader.close()
            forget_validation_loader(self.trainer)
        self._preparation = None

    def _apply_step_levers(self) -> None:
        plan = self._chosen
        self._step_levers.callback(checkpoint_modules(self._module, plan.candidate.checkpointed_modules))
        slicer = Slicer(
            trainer=self.trainer,
            module=self._module,
            split=plan.split,
            split_batch=self._functions.split_batch,
            loss_weight=self._functions.loss_weight,
            zero_gradients_early=plan.candidate.zero_gradients_early,
        )
        self._step_levers.callback(slicer.apply())

    # Prove

    def prove(self, report: Report, announce: Announce) -> None:
        """Run the warm-up; over the budget, correct the prediction, plan again and repeat, a bounded number of times.

        Args:
            report: told of every further plan, and of the measurement that made it necessary.
            announce: is told what is being done.

        Raises:
            NoFeasiblePlanError: with the smallest measured peak, if no plan stands.
        """
        self._announce = announce
        budget = self._prepared.budget
        validation_batch = request_validation_batch(self.trainer)
        failed: list[Failed] = []
        for attempt in range(MAX_ATTEMPTS):
            plan = self._chosen
            announce(f"proving with {self._request.num_profiled_steps} real steps: {plan.candidate.label}")
            measurement = self._warm_up(plan, validation_batch)
            verdict = judge(plan.forecast, measurement, budget)
            corrected = replace(plan.forecast, correction_bytes=verdict.correction_bytes)
            if measurement is not None and verdict.fits:
                _check_evaluation(measurement, budget)
                notes = plan.notes if measurement.profiled_steps else (*plan.notes, _NOTHING_PROVEN)
                self.plan, self.measurement = replace(plan, forecast=corrected, notes=notes), measurement
                self._prober.close()
                return
            failed.append((corrected, measurement))
            self._tried.append(
                PassedOver(
                    candidate=plan.candidate,
                    predicted_peak_bytes=corrected.predicted_peak_bytes,
                    reason=f"warm-up: {verdict.reason}",
                )
            )
            self._corrections[plan.candidate] = verdict.correction_bytes
            self._step_levers.close()
            if attempt + 1 < MAX_ATTEMPTS:
                self._plan_again(failed)
                self._apply_step_levers()
                report(self._chosen, measurement)
        raise self._nothing_stands(failed)

    def _plan_again(self, failed: Sequence[Failed]) -> None:
        with random_state_kept():
            try:
                plan = self._guarded_search()
            except NoFeasiblePlanError as error:
                raise self._nothing_stands(failed) from error
        self.plan = replace(plan, passed_over=(*self._tried, *plan.passed_over))

    def _nothing_stands(self, failed: Sequence[Failed]) -> NoFeasiblePlanError:
        """The smallest that was measured, or where every warm-up ran out of memory, the smallest that was tried."""
        budget, measured = self._prepared.budget, [forecast for forecast, measurement in failed if measurement]
        best = min(measured or [forecast for forecast, _ in failed], key=lambda each: each.predicted_peak_bytes)
        message = no_fit_message(
            budget=budget,
            best=best,
            measured_peak_bytes=best.predicted_peak_bytes if measured else None,
            passed_over=self._tried,
            request=self._request,
            slicing_reason=None if self._space is None else self._space.slicing_reason,
        )
        ran_out = [forecast.candidate.label for forecast, measurement in failed if measurement is None]
        if ran_out:
            message += f"\nWarm-ups that ran out of memory, so that their peaks are not known: {'; '.join(ran_out)}."
        return NoFeasiblePlanError(message, budget_bytes=budget.budget_bytes, best_peak_bytes=best.predicted_peak_bytes)

    def _warm_up(self, plan: Plan, validation_batch: Any) -> Measurement | None:
        try:
            return run_warmup(
                trainer=self.trainer,
                module=self._module,
                batch=self._prepared.batch,
                validation_batch=validation_batch,
                accumulate_grad_batches=plan.split.accumulate_grad_batches,
                num_profiled_steps=self._request.num_profiled_steps,
                spare_bytes=_spare_bytes(plan),
                resident_batches=self._prepared.resident_batches,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None  # outside of the except block: the error's traceback keeps the step's tensors alive

    @property
    def _chosen(self) -> Plan:
        assert self.plan is not None, "make_plan comes first"
        return self.plan

    @property
    def _prepared(self) -> Preparation:
        assert self._preparation is not None, "make_plan comes first"
        return self._preparation


def _spare_bytes(plan: Plan) -> int:
    """What the plan's peak leaves of what the process could hold; the snapshot of the warm-up shares it."""
    return plan.budget.capacity_bytes - plan.budget.non_torch_bytes - plan.forecast.predicted_peak_bytes


def _check_evaluation(measurement: Measurement, budget: Budget) -> None:
    peak = measurement.measured_evaluation_peak_bytes
    if peak is None or peak <= budget.budget_bytes:
        return
    raise NoFeasiblePlanError(
        f"Training fits the budget of {format_bytes(budget.budget_bytes)}, but one evaluation step needs "
        f"{format_bytes(peak)} (measured, allocated), {format_bytes(peak - budget.budget_bytes)} too much. MemFit does "
        "not divide evaluation batches: make the validation loader's batch smaller, or set "
        f'budget="{-(-peak // MIB)}MiB" or more.',
        budget_bytes=budget.budget_bytes,
        best_peak_bytes=peak,
    )


def default_cache_dir() -> Path:
    """Where probing results are kept: ``$XDG_CACHE_HOME/lightning_memfit``, or below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_memfit"
