"""The search for one fit's plan, with all that is learnt on the way: obstacles, corrections, time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_memfit.apply.cpu_adam import CpuAdam, find_cpu_adam
from lightning_memfit.apply.deepspeed_config import notes_on_precision
from lightning_memfit.apply.fsdp2 import notes_on_policy
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.fingerprint import check_fresh, harmless_differences, stale_reasons
from lightning_memfit.observe.random_state import random_state_kept
from lightning_memfit.plan import Candidate, Forecast, OptimizerImplementation, Plan, Precision
from lightning_memfit.plan_reuse import check_conflicts, conflicts, plan_from_checkpoint
from lightning_memfit.preparation import Preparation
from lightning_memfit.run_space import cpu_adam_obstacle, space_of
from lightning_memfit.search.levers import SearchSpace
from lightning_memfit.search.planner import MOST_CONTENDERS, Found, search_plan, withheld_that_fits
from lightning_memfit.slice_guard import COMPARING
from lightning_memfit.validate.verdict import expected_correction

BUDGET_SHARE = 0.05
"""By what share the budget may differ from that of an equal run whose plan is used again."""
Announce = Callable[[str], None]
"""Is told, in a few words, what is being done now."""


_CORRECTED = "forecasts are corrected by what the warm-ups of earlier runs of this model measured"
_NOT_COMPARED = "allow_inexact_slicing=True: slices were not compared with the undivided batch"


class Planning:
    """Searches, also again after a warm-up that showed something else than predicted.

    Attributes:
        prepared: what was looked at.
        space: what may be chosen.
        contenders: the forecasts of the last search that are nearly as fast as its plan's, and that one first.
        was_taken_over: whether the plan was made before, so that nothing else is tried unless it does not fit.
        corrections: by how many bytes the raw forecasts of candidates were off that ran, in the order of running.
        measured_corrections: those of them that this fit's warm-ups measured; where memory ran out, nothing was.
        fingerprint: what a plan for this run is made for.
    """

    def __init__(
        self,
        prepared: Preparation,
        *,
        deadline: float | None,
        announce: Announce,
        compare_slices: Callable[[int], str | None] | None = None,
        find_cpu_adam: Callable[[], CpuAdam] = find_cpu_adam,
    ) -> None:
        """Find out what may be chosen.

        Args:
            prepared: what was looked at.
            deadline: ``time.monotonic()`` at which planning has used its time; ``None`` for no limit.
            announce: is told of every candidate before its forecast.
            compare_slices: why slices of at most so many samples differ from the whole, ``None`` if they do not; by
                default what the guard of ``prepared`` says.
            find_cpu_adam: whether DeepSpeed's Adam for the host can be had on every rank; may build it.

        Raises:
            ConfigurationError: if a pinned lever cannot be had.
        """
        self._find_cpu_adam = find_cpu_adam
        self._host_implementation: tuple[OptimizerImplementation, str] | None = None
        self.announce = announce
        self._compare_slices = compare_slices
        self.contenders: tuple[Forecast, ...] = ()
        self.corrections: dict[Candidate, int] = {}
        self.measured_corrections: dict[Candidate, int] = {}
        self._has_kept_corrections = False
        self.was_taken_over = False
        self._evaluation_bytes: dict[Precision, int] = {}
        self._deadline = deadline
        self._slices_compared = False
        self._recomputation_obstacle: str | None = None
        self._built_for: Candidate | None = None
        self._recomputation_seen = False
        with prepared.as_planned():
            self.prepared = prepared.of_the_more_demanding_batch()
            self.fingerprint = dict(self.prepared.fingerprint())
        self._notes = (*self.prepared.notes, *self.prepared.scan_notes)
        self.space = self._space_given(self.prepared.guard.visible_obstacle())

    def search(self) -> Plan:
        """The plan, random states kept.

        Before slices are used, they are compared with the whole; where they differ, the search goes without them.

        Raises:
            NoFeasiblePlanError: if nothing fits.
        """
        self.was_taken_over = False
        try:
            found = self._found_with_host_optimizer()
        except NoFeasiblePlanError:
            if not self._has_kept_corrections:
                raise
            self._forget_kept_corrections()  # the run may have become another one since
            found = self._found_with_host_optimizer()
        self.contenders = found.contenders
        return self._labelled(found.plan)

    def expect(self, kept: Mapping[Candidate, int]) -> None:
        """Correct forecasts by what the warm-ups of earlier runs measured, until this run's own say more.

        Args:
            kept: bytes by candidate, in the order in which they ran.
        """
        if not any(kept.values()):
            return
        self.corrections = {**kept, **self.corrections}
        self._has_kept_corrections = True
        self._notes += (_CORRECTED,)

    def _forget_kept_corrections(self) -> None:
        self.corrections, self._has_kept_corrections = dict(self.measured_corrections), False
        self._notes = tuple(note for note in self._notes if note != _CORRECTED)

    def freed(self) -> Forecast:
        """What would be chosen with today's corrections; neither plan nor contenders change."""
        return self._found_exact().plan.forecast

    def other_strategy(self) -> Forecast | None:
        """What would fit with another strategy by forecasts that are corrected as today's; ``None`` if nothing would.

        The corrections are those of the strategy that ran: what a warm-up showed beside a forecast belongs to the
        module and its samples, as far as anybody knows.
        """
        with random_state_kept(), self.prepared.as_planned():
            return withheld_that_fits(
                self.prepared.budget,
                self.space,
                self._forecast,
                estimate=self._estimate,
                out_of_time=self.is_out_of_time,
            )

    def known_plan(self, given: Plan | None, resumed: Mapping[str, Any] | None) -> Plan | None:
        """A plan that was given, or else one that a checkpoint carries; ``None`` if there is none for this run.

        Args:
            given: the user's plan.
            resumed: the checkpoint that is resumed.

        Raises:
            ConfigurationError: if the given plan is for something else, by the name of what differs, or if it divides
                batches that may not be divided.
        """
        request, budget, fingerprint = self.prepared.request, self.prepared.budget, self.fingerprint
        if given is not None:
            check_fresh(given, fingerprint, source="The plan given as plan=")
            check_conflicts(given, request, source="The plan given as plan=", budget=budget)
            obstacle = self._obstacle_to_slices_in(given)
            if obstacle is not None:
                raise ConfigurationError(
                    f"The plan given as plan= divides the batch into {given.split.num_slices} slices, but here it is "
                    f"{obstacle} Leave plan= out to plan anew."
                )
            missing = self._obstacle_to_host_step_of(given)
            if missing is not None:
                raise ConfigurationError(
                    f"The plan given as plan= steps the optimizer on the host with DeepSpeed's Adam, but {missing} "
                    "Leave plan= out to plan anew."
                )
            return self._taken_over(given, "the plan was given")
        if resumed is None:
            return None
        plan, note = plan_from_checkpoint(resumed, source=str(self.prepared.trainer.ckpt_path))
        if plan is not None:
            reasons = (*stale_reasons(plan, fingerprint), *conflicts(plan, request, budget=budget))
            obstacle = None if reasons else self._obstacle_to_slices_in(plan)
            if obstacle is not None:
                reasons = (f"it divides the batch, which is {obstacle}",)
            missing = None if reasons else self._obstacle_to_host_step_of(plan)
            if missing is not None:
                reasons = (f"it steps the optimizer with DeepSpeed's Adam, but {missing}",)
            if not reasons:
                return self._taken_over(plan, "the plan came with the checkpoint")
            note = f"the checkpoint's plan is not used again: {'; '.join(reasons)}"
        self._notes += (note,) if note else ()
        return None

    def kept_plan(self, kept: Plan | None) -> Plan | None:
        """A plan of an equal run, where it is one for what the device leaves now; ``None`` if the run must search.

        Args:
            kept: the plan of the same key.
        """
        request, budget = self.prepared.request, self.prepared.budget
        if kept is None or stale_reasons(kept, self.fingerprint) or conflicts(kept, request, budget=budget):
            return None
        before, now = kept.budget.budget_bytes, budget.budget_bytes
        if abs(now - before) > BUDGET_SHARE * before or self._obstacle_to_slices_in(kept) is not None:
            return None
        if self._obstacle_to_host_step_of(kept) is not None:
            return None
        return self._taken_over(kept, "the plan is that of an equal run before")

    def hold_fast(self, candidate: Candidate) -> None:
        """Search on only among what an engine can run that was built for a candidate."""
        self._built_for = candidate
        self.space = self.space.built(candidate)
        same: tuple[str, ...] = ("sharding",)
        if candidate.sharding is not None and candidate.sharding.engine == "deepspeed":
            same = ("sharding", "offload", "precision", "optimizer_states", "optimizer_implementation")
        self.contenders = tuple(
            each
            for each in self.contenders
            if all(getattr(each.candidate, name) == getattr(candidate, name) for name in same)
        )

    def rule_out_recomputation(self, reason: str) -> None:
        """Recompute nothing in the searches that follow.

        Args:
            reason: why, in words that begin with ``"not recomputed: "``.
        """
        self._recomputation_obstacle = reason
        self.space = self.space.without_recomputation(reason)

    def require_evaluation(self, forecast: Forecast, peak_bytes: int) -> None:
        """Let the searches that follow count with an evaluation that was measured.

        Args:
            forecast: of the candidate under which it was.
            peak_bytes: its peak in bytes, with that candidate's optimizer states.
        """
        self._evaluation_bytes[forecast.candidate.precision] = peak_bytes - _states_bytes(forecast)

    def postpone(self, seconds: float) -> None:
        """Let planning have as much time as before it waited so long."""
        if self._deadline is not None:
            self._deadline += seconds

    def is_out_of_time(self) -> bool:
        """Whether planning has used its time."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _taken_over(self, known: Plan, origin: str) -> Plan:
        """A plan made before, for today's request, device and budget; it is proven like any other."""
        plan = replace(
            known,
            request=self.prepared.request,
            device=self.prepared.device,
            budget=self.prepared.budget,
            notes=(
                *(note for note in self._notes if note != _CORRECTED),  # nothing is forecast
                f"{origin}, so that nothing was searched",
                *harmless_differences(known, self.fingerprint),
            ),
        )
        self.contenders, self.was_taken_over = (plan.forecast,), True
        return self._labelled(plan)

    def _labelled(self, plan: Plan) -> Plan:
        dtypes = (*notes_on_precision(plan.candidate), *notes_on_policy(plan.candidate.sharding))
        notes = dict.fromkeys((*plan.notes, *dtypes))
        return replace(
            plan, planned_batch=self.prepared.planned_batch, fingerprint=dict(self.fingerprint), notes=tuple(notes)
        )

    def _found_with_host_optimizer(self) -> Found:
        """What the search finds; who steps on the host is found out as soon as a plan keeps the optimizer there.

        DeepSpeed's Adam takes a minute or more to build, which a plan that fits on the device need not wait for.
        """
        try:
            found = self._found_exact()
        except NoFeasiblePlanError:
            if not self._choose_host_implementation():
                raise
            return self._found_exact()
        if found.plan.candidate.offload != "never" and self._choose_host_implementation():
            return self._found_exact()
        return found

    def _choose_host_implementation(self) -> bool:
        """Whether it became known just now how an optimizer on the host steps."""
        offloads = any(spread.offload != "never" for spread in self.space.strategies.spreads)
        asked = self.prepared.request.optimizer_implementation
        if not offloads or asked != "auto" or self._host_implementation is not None or self._built_for is not None:
            return False
        self._look_for_cpu_adam()
        return True

    def _look_for_cpu_adam(self) -> tuple[OptimizerImplementation, str]:
        """Find out, once, what steps an optimizer that is kept on the host, and why."""
        if self._host_implementation is None:
            implementation: OptimizerImplementation = "as-configured"
            with self.prepared.as_planned():
                reason = cpu_adam_obstacle(self.prepared)
            if reason is None:
                self.announce("building DeepSpeed's Adam for the host")
                found = self._find_cpu_adam()
                implementation, reason = ("cpu-adam" if found.works else "as-configured"), found.reason
            self._host_implementation = implementation, reason
            self.space = self.space.with_host_implementation(implementation, reason)
        return self._host_implementation

    def _obstacle_to_host_step_of(self, plan: Plan) -> str | None:
        """Why a plan that was made before cannot step on this host as it did; ``None`` if it can."""
        if plan.candidate.optimizer_implementation != "cpu-adam":
            return None
        implementation, reason = self._look_for_cpu_adam()
        return None if implementation == "cpu-adam" else reason

    def _found_exact(self) -> Found:
        """What the search finds, slices compared with the whole as soon as the plan or a contender has some."""
        with random_state_kept():
            self._see_recomputation()
            found = self._found()
            largest = max((_sliced_size(forecast) for forecast in found.contenders), default=0)
            if not largest or self._slices_compared:
                return found
            self._slices_compared = True
            if self.prepared.request.allow_inexact_slicing:
                self._notes += (_NOT_COMPARED,)
                return self._found()  # once more, for the note; the forecasts are known
            obstacle = self._obstacle_to_slices_of(largest)
            if obstacle is None:
                return found
            self.space = self._space_given(obstacle)
            return self._found()

    def _see_recomputation(self) -> None:
        """Take out of what may be recomputed the blocks that a traced step recomputes by itself."""
        if self._recomputation_seen or not any(option.modules for option in self.space.checkpointing):
            return
        self._recomputation_seen = True
        self.announce("looking for blocks that are recomputed anyway")
        with self.prepared.as_planned():
            self.prepared = self.prepared.seen_recomputing()
        if self.prepared.recomputed:
            self.space = self._space_given(self._obstacle)

    def _obstacle_to_slices_of(self, micro_batch_size: int) -> str | None:
        self.announce(COMPARING)
        compare = self._compare_slices or self.prepared.guard.compare_slices
        return compare(micro_batch_size)

    def _obstacle_to_slices_in(self, plan: Plan) -> str | None:
        """Why a plan that was made before must not slice this run's batches; ``None`` if it may, or does not."""
        if plan.split.num_slices == 1:
            return None
        self._slices_compared = True
        if self.prepared.request.allow_inexact_slicing:
            self._notes += (_NOT_COMPARED,)
        with random_state_kept(), self.prepared.as_planned():
            obstacle = self.prepared.guard.visible_obstacle()
            if obstacle is None and not self.prepared.request.allow_inexact_slicing:
                obstacle = self._obstacle_to_slices_of(plan.split.micro_batch_size)
        if obstacle is not None:
            self.space = self._space_given(obstacle)
        return obstacle

    def _found(self) -> Found:
        with self.prepared.as_planned():
            return search_plan(
                self.prepared.request,
                self.prepared.device,
                self.prepared.budget,
                self.space,
                self._forecast,
                estimate=self._estimate,
                contenders=MOST_CONTENDERS,
                out_of_time=self.is_out_of_time,
                notes=self._notes,
            )

    def _space_given(self, obstacle: str | None) -> SearchSpace:
        self._obstacle = obstacle
        with self.prepared.as_planned():
            space = space_of(self.prepared, obstacle)
        if self._host_implementation is not None:
            space = space.with_host_implementation(*self._host_implementation)
        if self._built_for is not None:
            space = space.built(self._built_for)
        ruled_out = self._recomputation_obstacle
        return space if ruled_out is None else space.without_recomputation(ruled_out)

    def _forecast(self, candidate: Candidate) -> Forecast:
        self.announce(f"forecasting: {candidate.label}")
        return self._corrected(self.prepared.forecast(candidate))

    def _estimate(self, candidate: Candidate) -> Forecast:
        self.announce(f"estimating: {candidate.label}")
        return self._corrected(self.prepared.estimate(candidate))

    def _corrected(self, forecast: Forecast) -> Forecast:
        beside_states = self._evaluation_bytes.get(forecast.candidate.precision)
        return replace(
            forecast,
            correction_bytes=expected_correction(forecast.candidate, self.corrections),
            evaluation_peak_bytes=None if beside_states is None else beside_states + _states_bytes(forecast),
        )


def _states_bytes(forecast: Forecast) -> int:
    return forecast.memory.by_category.get("optimizer_states", 0)


def _sliced_size(forecast: Forecast) -> int:
    """Samples of the largest slice; 0 if the batch is not divided."""
    split = forecast.candidate.split
    return split.micro_batch_size if split.num_slices > 1 else 0
