"""What a candidate needs under manual optimization: its training steps traced whole.

Nothing is derived from other candidates' traces or measured small: only ``training_step`` knows where it runs backward
and steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed, floating_dtype
from lightning_memfit.apply.optimizer_levers import (
    OptimizerFacts,
    faked_quantisation,
    joint_facts,
    optimizer_facts,
    with_levers_it_can_have,
)
from lightning_memfit.apply.scheduler_binding import Exchange, rebind
from lightning_memfit.errors import TraceError
from lightning_memfit.fingerprint import optimizer_words
from lightning_memfit.plan import Candidate, Forecast
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.manual_step import MOST_BATCHES, ManualProgram, look_at_optimizers, trace_manual_steps
from lightning_memfit.trace.op_probe import OperatorProber, Probes
from lightning_memfit.trace.timeline import Signature, Timeline

if TYPE_CHECKING:
    from lightning_memfit.hardware.rates import DeviceRates


class ManualForecaster:
    """Says what candidates of a run under manual optimization need, raw: nothing measured is in it.

    Args:
        trainer: the Trainer that the module is attached to.
        module: a LightningModule with ``automatic_optimization = False``.
        batch: one collated batch, as ``training_step`` gets it.
        prober: finds the operators' hidden temporaries; ``None`` leaves them out.
        resident_batches: batches alive at the same time.
        waiting_batch: one of the others, as the loader gives it; ``None`` if it is like ``batch``.
        rates: how fast the device is; ``None`` leaves times out.
        callback_bytes: what callbacks hold beside the step.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        batch: Any,
        *,
        prober: OperatorProber | None,
        resident_batches: int = 1,
        waiting_batch: Any = None,
        rates: DeviceRates | None = None,
        callback_bytes: int = 0,
    ) -> None:
        self.callback_bytes = callback_bytes
        self._trainer = trainer
        self._module = module
        self._batch = batch
        self._prober = prober
        self._resident_batches = resident_batches
        self._waiting_batch = waiting_batch
        self._rates = rates
        self._untraceable: str | None = None
        self._forecasts: dict[Candidate, Forecast] = {}
        self._recomputed: dict[Candidate, frozenset[str]] = {}

    def __call__(self, candidate: Candidate) -> Forecast:
        """Trace one candidate.

        Raises:
            TraceError: if its step cannot be traced.
        """
        if candidate not in self._forecasts:
            if self._untraceable is not None:
                raise TraceError(self._untraceable)
            try:
                self._forecasts[candidate] = self._forecast(candidate)
            except TraceError as error:
                self._untraceable = str(error)
                raise
        return self._forecasts[candidate]

    def estimate(self, candidate: Candidate) -> Forecast:
        """The same: every candidate is traced.

        Raises:
            TraceError: if its step cannot be traced.
        """
        return self(candidate)

    @property
    def facts(self) -> OptimizerFacts:
        """What can be chosen for the optimizers; they are made over fakes, and thrown away.

        Raises:
            TraceError: if they cannot be made.
        """
        return self._seen_of_the_optimizers[0]

    @property
    def optimizer_words(self) -> str | None:
        """What a plan's fingerprint says of the optimizers; ``None`` if they cannot be made over fakes."""
        try:
            return self._seen_of_the_optimizers[1]
        except TraceError:
            return None

    @cached_property
    def _seen_of_the_optimizers(self) -> tuple[OptimizerFacts, str]:
        def look(optimizer: Optimizer) -> tuple[OptimizerFacts, str]:
            return optimizer_facts(optimizer, self._module), optimizer_words(optimizer)

        with faked_quantisation():
            seen = look_at_optimizers(self._program(None), look)
        return joint_facts([facts for facts, _ in seen]), " + ".join(words for _, words in seen)

    def recomputed_anyway(self, candidate: Candidate) -> frozenset[str]:
        """Qualified names of the modules that the step recomputes by itself under a candidate that recomputes nothing.

        None if the step cannot be traced.
        """
        try:
            self(candidate)
        except TraceError:
            return frozenset()
        return self._recomputed.get(candidate, frozenset())

    def for_batch(self, batch: Any, waiting_batch: Any = None) -> ManualForecaster:
        """The same for another batch; what is known of the optimizers is shared."""
        other = copy.copy(self)
        other._batch, other._waiting_batch, other._untraceable = batch, waiting_batch, None
        other._forecasts, other._recomputed = {}, {}
        return other

    def timeline(self, candidate: Candidate) -> Timeline:
        """The traced training steps of a candidate.

        Raises:
            TraceError: if they cannot be traced.
        """
        with faked_quantisation(), checkpointed(self._module, candidate.checkpointed_modules):
            return trace_manual_steps(
                self._program(candidate),
                self._batch,
                resident_batches=self._resident_batches,
                waiting_batch=self._waiting_batch,
                collect_signatures=self._prober is not None,
                floating=floating_dtype(candidate),
            )

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """What operators need beside their results; nothing without a prober."""
        return Probes(results={}) if self._prober is None else self._prober.probe(signatures)

    def _forecast(self, candidate: Candidate) -> Forecast:
        timeline = self.timeline(candidate)
        self._recomputed[candidate] = frozenset(call.module for call in timeline.calls if call.recomputed)
        probes = self.probe(timeline.signatures)
        memory = predict_memory(timeline, probes.results)
        batches, known = timeline.micro_steps, not self.facts.needs_closure
        work = "; seconds and FLOPs are those of one batch, on average" if known else ""
        return Forecast(
            candidate=candidate,
            memory=memory.beside(self.callback_bytes),
            flops=timeline.flops // batches if known else None,
            recomputed_flops=timeline.recomputed_flops // batches if known else None,
            predicted_step_seconds=self._seconds(timeline) if known else None,
            notes=(
                f"manual optimization: {batches} batches were followed one after the other, until every optimizer has "
                f"stepped or {MOST_BATCHES} are done{work}",
                *timeline.notes,
                *probes.notes,
            ),
        )

    def _seconds(self, timeline: Timeline) -> float | None:
        """Seconds per batch, on average over those that were followed."""
        if self._rates is None or self.facts.needs_closure:
            return None
        from lightning_memfit.predict.step_time import predict_step_seconds

        return predict_step_seconds(timeline, self._rates) / timeline.micro_steps

    def _program(self, candidate: Candidate | None) -> ManualProgram:
        def prepare(optimizer: Optimizer) -> Optimizer:
            return optimizer if candidate is None else with_levers_it_can_have(optimizer, self._module, candidate)

        def follow(pairs: Sequence[tuple[Optimizer, Optimizer]]) -> None:
            exchange, seen = Exchange(pairs, {}), set[int]()
            for part in self._module.modules() if pairs else ():
                rebind(part, exchange, seen)

        return ManualProgram(
            module=self._module,
            trainer=self._trainer,
            step_context=autocast_context("32-true" if candidate is None else candidate.precision),
            prepare_optimizer=prepare,
            follow=follow,
        )
