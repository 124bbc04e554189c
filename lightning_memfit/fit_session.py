"""One fit: plan before the optimizers exist, apply, prove before the first step, undo at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_memfit.agreement import check_evaluations
from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.apply.checkpoint_layouts import checkpoint_to_restore
from lightning_memfit.apply.cpu_adam import CpuAdam, find_cpu_adam
from lightning_memfit.apply.deepspeed_config import is_deepspeed, write_config
from lightning_memfit.apply.deepspeed_engine import let_lightning_accumulate
from lightning_memfit.apply.gradient_exchange import exchange_of
from lightning_memfit.apply.host_optimizer import step_on_host_with_cpu_adam
from lightning_memfit.apply.loader import TrainLoader, forget_validation_loader
from lightning_memfit.apply.sharding import is_ddp, set_bucket_view
from lightning_memfit.apply.step_levers import StepLevers
from lightning_memfit.batch_functions import BatchFunctions
from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.hardware.measure_rates import forget_rates
from lightning_memfit.kept_plans import KeptCorrections, KeptPlan
from lightning_memfit.observe.old_objects import frozen_objects_counted_once
from lightning_memfit.observe.random_state import random_state_kept
from lightning_memfit.plan import Candidate, Measurement, Plan, PlanRequest
from lightning_memfit.planning import Announce, Planning
from lightning_memfit.preparation import Preparation, WorstBatch, prepare
from lightning_memfit.probers import Probers
from lightning_memfit.proving import Proving, Report
from lightning_memfit.ranks import Ranks, Together
from lightning_memfit.real_steps import RealSteps
from lightning_memfit.run_key import corrections_key, plan_key, run_words
from lightning_memfit.slice_guard import COMPARING
from lightning_memfit.steps_of_all_ranks import Steps, StepsOfAllRanks, as_told, follow
from lightning_memfit.undo import set_instance_attribute
from lightning_memfit.validate.arrived_batch import ArrivedBatch

_COMPARE = "compare slices"
_CPU_ADAM = "find DeepSpeed's Adam"
_DISPROVED = 4
"""Predicted over measured seconds of a step from which on the device's rates are taken to be wrong. (Below, it may be
what a prediction leaves out: callbacks, logging, Lightning's own loop.)"""


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
        worst_batch: WorstBatch,
        cache_dir: Path | None,
        ranks: Ranks,
    ) -> None:
        """Take part in nothing yet.

        Args:
            trainer: the Trainer, fitting.
            module: its LightningModule, on the host, before optimizers exist.
            request: what the user asked for.
            functions: the user's functions for batches.
            worst_batch: the batch that the user gave as the largest, or a function that makes it; ``None`` if none.
            cache_dir: keeps what was measured of operators and device; ``None`` keeps nothing.
            ranks: the processes that train together.
        """
        self._ranks = ranks
        self._prepared: Preparation | None = None
        self.trainer = trainer
        self.plan: Plan | None = None
        self.measurement: Measurement | None = None
        self._module = module
        self._request = request
        self._functions = functions
        self._worst_batch = worst_batch
        self._cache_dir = cache_dir
        self._probers = Probers(cache_dir=cache_dir)
        self._loader: TrainLoader | None = None
        self._planning: Planning | None = None
        self._kept_plan: KeptPlan | None = None
        self._kept_corrections: KeptCorrections | None = None
        self._run_levers = ExitStack()
        self._levers = StepLevers(
            trainer, module, split_batch=functions.split_batch, loss_weight=functions.loss_weight, ranks=ranks
        )

    def make_plan(
        self, announce: Announce, given: Plan | None = None, resumed: Mapping[str, Any] | None = None
    ) -> Plan:
        """Look at the data and the device and search; everything is left as it was.

        Args:
            announce: is told of every candidate before its forecast.
            given: a plan made before; the search is skipped.
            resumed: the checkpoint that is resumed, where it is loaded already; a plan in it that is made for this
                run is used again. Of one that is loaded later the plan is read from its files.

        Raises:
            NoFeasiblePlanError: if nothing fits.
            ConfigurationError: if the request cannot be met exactly, the given plan is for something else, or the
                checkpoint is none that this run can go on from.
        """
        precision = self._request.precision or (given.candidate.precision if given is not None else None)
        to_restore = self._ranks.led(
            lambda: checkpoint_to_restore(self.trainer, precision), doing="looking at the checkpoint"
        )
        seconds = self._request.planning_seconds
        deadline = None if seconds is None else time.monotonic() + seconds
        if self._ranks.is_leader and self.trainer.strategy.root_device.type == "cpu":
            self._probers.start()
        announce("looking at the batches")
        with random_state_kept(), frozen_objects_counted_once(), ExitStack() as ending:
            ending.callback(self._probers.leave_gpu)  # before the module is moved there
            looked = self._ranks.each(self._look, doing="looking at batches and device", tell=Preparation.facts)
            self._prepared = replace(looked.own, saved_precision=to_restore.precision)
            if self._ranks.count > 1:
                self._prepared = self._prepared.agreed(looked.all, self._ranks.from_rank)
            self.plan = self._ranks.led(
                lambda: self._plan_for_all(deadline, announce, given, resumed or to_restore.carried),
                doing="planning for all ranks",
                together=self._together,
            )
            self._plan_for_the_same_batch()
        return self.plan

    @property
    def _together(self) -> Together:
        """What every rank does when rank 0 asks for it while it plans, also again between two warm-ups."""
        return {_COMPARE: self._compare_slices, _CPU_ADAM: self._cpu_adam_of_all}

    def _plan_for_the_same_batch(self) -> None:
        """Prove what was planned: rank 0 may have found that another batch than the largest needs more."""
        before = self._looked_at
        chosen = None if self._planning is None else self._planning.prepared
        if self._ranks.count == 1:
            self._prepared = chosen
            return
        batch = None if chosen is None or chosen.batch is before.batch else (chosen.batch, chosen.planned_batch)
        told = self._ranks.share(batch)
        if told is not None:
            self._prepared = before.with_batch(*told)

    def _compare_slices(self, asked: tuple[ArrivedBatch, int]) -> str | None:
        """On every rank: compare slices of one batch, whose forwards gather parameters from all of them."""
        arrived, micro_batch_size = asked
        prepared = replace(self._looked_at, arrived=arrived)
        guard = replace(prepared.guard, ranks=self._ranks)
        with random_state_kept(), prepared.as_planned(), self._ranks.failing(COMPARING):
            return guard.compare_slices(micro_batch_size)

    def _cpu_adam_of_all(self, asked: None) -> CpuAdam:
        """On every rank: whether DeepSpeed's Adam can be had; of ranks on one node one builds, and the others wait."""
        found: list[CpuAdam] = self._ranks.each(find_cpu_adam, doing="building DeepSpeed's Adam for the host").all
        return next((each for each in found if not each.works), found[0])

    def _look(self) -> Preparation:
        """What this rank sees."""
        self._loader = TrainLoader.request(self.trainer)
        return prepare(
            self.trainer,
            self._module,
            self._request,
            self._functions,
            self._loader,
            self._probers,
            worst_batch=self._worst_batch,
            cache_dir=self._cache_dir,
            leads=self._ranks.is_leader,
        )

    def _plan_for_all(
        self, deadline: float | None, announce: Announce, given: Plan | None, resumed: Mapping[str, Any] | None
    ) -> Plan:
        assert self._prepared is not None
        self._planning = Planning(
            self._prepared,
            deadline=deadline,
            announce=announce,
            compare_slices=(
                (
                    lambda micro_batch_size: self._ranks.call(
                        _COMPARE, (self._planned.prepared.arrived, micro_batch_size)
                    )
                )
                if self._prepared.gathers
                else None
            ),
            find_cpu_adam=lambda: self._ranks.call(_CPU_ADAM, None),
        )
        self._recall(self._planning)
        return self._planning.known_plan(given, resumed) or self._planned_once(self._planning, announce)

    def _recall(self, planning: Planning) -> None:
        """Find out where plans and errors of equal runs are kept, and count with the errors."""
        if self._cache_dir is None:
            return
        words = run_words(
            planning.fingerprint,
            self._module,
            beside=(*self.trainer.callbacks, *self._functions.given, *filter(callable, [self._worst_batch])),
        )
        self._kept_plan = KeptPlan(plans_folder(self._cache_dir), plan_key(words, self._request))
        self._kept_corrections = KeptCorrections(corrections_folder(self._cache_dir), corrections_key(words))
        planning.expect(self._kept_corrections.load())

    def _planned_once(self, planning: Planning, announce: Announce) -> Plan:
        """The plan of an equal run, or a search that runs equal to this one wait for."""
        if self._kept_plan is None:
            return planning.search()
        announce("looking for the plan of an equal run")
        began = time.monotonic()
        with self._kept_plan.alone() as note:
            planning.postpone(time.monotonic() - began)
            plan = planning.kept_plan(self._kept_plan.load())
            if plan is None:
                plan = planning.search()
                if self._request.mode == "apply":  # else it is neither proven nor timed beside others afterwards
                    self._keep(planning, plan)
        return plan if note is None else replace(plan, notes=(*plan.notes, note))

    def _keep(self, planning: Planning, plan: Plan) -> bool:
        """Keep a plan that was searched for in full; whether it is one."""
        if self._kept_plan is None or planning.was_taken_over or planning.is_out_of_time():
            return False
        self._kept_plan.save(plan)
        return True

    def _forget_kept_plan(self) -> None:
        if self._kept_plan is not None:
            self._kept_plan.forget()

    def apply(self) -> None:
        """Apply the plan to the Trainer and the module; levers of the optimizer wait for :meth:`connect`."""
        plan, loader_plan = self._chosen, self._looked_at.loader_plan
        self.install_loader(plan.split.loader_batch_size if loader_plan.rebuilt else None)
        self._run_levers.callback(
            set_instance_attribute(self.trainer, "accumulate_grad_batches", plan.split.accumulate_grad_batches)
        )
        self._configure_engine(plan.candidate)
        self._levers.put_on(plan.candidate)

    def _configure_engine(self, candidate: Candidate) -> None:
        """Write the plan into the strategy's settings: the engine is built of them next, and holds them fast."""
        strategy = self.trainer.strategy
        if candidate.sharding is None:
            return
        if self._planning is not None:
            self._planning.hold_fast(candidate)
        if is_ddp(strategy):
            self._run_levers.callback(set_bucket_view(strategy, candidate.sharding.gradient_as_bucket_view))
        if not is_deepspeed(strategy):
            return
        self._run_levers.callback(
            write_config(
                strategy,
                precision=candidate.precision,
                sharding=candidate.sharding,
                offload=candidate.offload,
                micro_batch_size=candidate.split.micro_batch_size,
                module=self._module,
                formatted_for=self._request.precision or "32-true",
            )
        )
        self._run_levers.callback(let_lightning_accumulate(strategy))
        if candidate.optimizer_implementation == "cpu-adam":
            self._run_levers.callback(step_on_host_with_cpu_adam(strategy))

    def connect(self) -> None:
        """Apply the levers of the optimizer, which has just been made."""
        self._levers.put_on_optimizer(self._chosen.candidate)

    def install_loader(self, batch_size: int | None = None) -> None:
        """Hand the loader that was asked for on to Lightning, so that the user's hook runs once."""
        assert self._loader is not None
        self._run_levers.callback(self._loader.install(batch_size))

    def prove(self, report: Report, announce: Announce) -> None:
        """Run the warm-up, of other plans too where the first does not stand; the plan that stands is in force.

        Args:
            report: told of every further plan, and in words of what the warm-up found that made it necessary.
            announce: is told what is being done.

        Raises:
            NoFeasiblePlanError: with the smallest measured peak, if no plan stands.
            RanksDisagreeError: if evaluations of different lengths would leave a rank waiting.
        """
        self._probers.leave_gpu()  # before it is looked at how much of it is free
        self._look_at_the_device_again()
        prepared = self._looked_at
        looked = self._ranks.each(
            prepared.validation_batch,
            doing="looking at the validation batches",
            tell=lambda found: 0 if found is None else found.epoch_batches,
        )
        if self._ranks.count > 1 and prepared.evaluation_gathers:
            check_evaluations(looked.all)
        validation = looked.own
        steps = RealSteps(prepared, self._levers, validation, ranks=self._ranks, leave_gpu=self._probers.leave_gpu)
        if self._ranks.count == 1:
            self._prove(steps, validation, report, announce)
        elif self._ranks.is_leader:
            self._prove_on_all_ranks(steps, validation, report, announce)
        else:
            exchange = exchange_of(self.trainer.strategy)
            self.plan, self.measurement = follow(self._ranks, steps, exchange, together=self._together)
        self._probers.close()

    def _look_at_the_device_again(self) -> None:
        """Count with what the poorest rank has now: neighbours come and grow."""
        before = self._looked_at
        looked = self._ranks.each(
            before.looked_at_again, doing="looking at the device again", tell=lambda now: (now.device, now.budget)
        )
        if looked.own is before and self._ranks.count == 1:
            return
        device, budget = min(looked.all, key=lambda each: each[1].budget_bytes)
        self._prepared = replace(looked.own, device=device, budget=budget)
        self.plan = replace(self._chosen, device=device, budget=budget)
        if self._planning is not None:
            self._planning.prepared = replace(self._planning.prepared, device=device, budget=budget)

    def _prove(self, steps: Steps, validation: ScannedBatch | None, report: Report, announce: Announce) -> None:
        planning = self._planned
        planning.announce = announce
        proving = Proving(planning, steps, validation)
        try:
            plan, self.measurement = proving.prove(self._chosen, report)
        except NoFeasiblePlanError:
            self._forget_kept_plan()
            raise
        self._remember(planning, plan)
        self.plan = self._rates_doubted(plan, self.measurement)

    def _prove_on_all_ranks(
        self, own: RealSteps, validation: ScannedBatch | None, report: Report, announce: Announce
    ) -> None:
        """The same where the other ranks follow; they are told how it ends, unless they were part of the error."""
        budget = self._looked_at.budget.budget_bytes
        steps = StepsOfAllRanks(self._ranks, own, exchange_of(self.trainer.strategy), budget_bytes=budget)
        try:
            with self._ranks.leading(self._together):
                self._prove(steps, validation, report, announce)
        except Exception as error:
            if not self._ranks.knows(error):
                self._ranks.share(as_told(error))
            raise
        assert self.plan is not None and self.measurement is not None
        steps.end(self.plan, self.measurement)

    def _remember(self, planning: Planning, plan: Plan) -> None:
        """Keep what stood in place of what was searched, and by how much forecasts were off."""
        if not self._keep(planning, plan) and plan.candidate != self._chosen.candidate:
            self._forget_kept_plan()  # it did not stand
        if self._kept_corrections is not None and planning.measured_corrections:
            self._kept_corrections.add(planning.measured_corrections)

    def keep_out_of(self, checkpoint: dict[str, Any]) -> None:
        """Save optimizers as the user configured them, whatever implementation runs their step."""
        self._levers.keep_out_of(checkpoint)

    def undo(self) -> None:
        """Take every lever back, and end what was started. Calling it twice is harmless."""
        self._planning = self._prepared = None
        with ExitStack() as ending:  # last in, first out, also where one of them raises
            if self._loader is not None:
                ending.callback(forget_validation_loader, self.trainer)
                ending.callback(self._loader.close)
            ending.callback(self._probers.close)
            ending.callback(self._ranks.close)
            ending.callback(self._run_levers.close)
            ending.callback(self._levers.end)

    def _rates_doubted(self, plan: Plan, measurement: Measurement) -> Plan:
        """Forget rates by which the step should have taken several times as long as it did."""
        predicted, measured = plan.forecast.predicted_step_seconds, measurement.measured_step_seconds
        if (
            plan.device.kind == "cuda"
            or self._cache_dir is None
            or predicted is None
            or predicted <= _DISPROVED * measured
        ):
            return plan
        forget_rates(self._cache_dir)
        self._forget_kept_plan()
        note = (
            f"the step was predicted to take {predicted / measured:.0f} times as long as it does, so that what was "
            "chosen by speed is doubtful: the device's rates were measured while it was disturbed; the next run "
            "measures them anew"
        )
        return replace(plan, notes=(*plan.notes, note))

    @property
    def _chosen(self) -> Plan:
        assert self.plan is not None, "make_plan comes first"
        return self.plan

    @property
    def _looked_at(self) -> Preparation:
        assert self._prepared is not None, "make_plan comes first"
        return self._prepared

    @property
    def _planned(self) -> Planning:
        assert self._planning is not None, "make_plan comes first"
        return self._planning


def plans_folder(cache_dir: Path) -> Path:
    """Where plans of earlier runs are kept."""
    return cache_dir / "plans"


def corrections_folder(cache_dir: Path) -> Path:
    """Where it is kept by how much the forecasts of earlier runs were off."""
    return cache_dir / "corrections"
