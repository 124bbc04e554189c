"""What a candidate needs: derived from few recorded steps, or traced itself, or measured small where it cannot be.

An estimate takes milliseconds once the steps that it is derived from are recorded. A forecast that is called for traces
the very candidate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer

from lightning_memfit.applied_in_a_trace import StepContext, autocast_context, checkpointed, floating_dtype
from lightning_memfit.apply.optimizer_levers import OptimizerFacts, faked_quantisation, optimizer_facts, with_levers
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.errors import BatchStructureError, TraceError, UnsupportedError
from lightning_memfit.fingerprint import optimizer_words
from lightning_memfit.observe.lone_rank import without_other_ranks
from lightning_memfit.observe.old_objects import old_objects_at_rest
from lightning_memfit.plan import BatchSplit, Candidate, Forecast, MemoryBreakdown, Precision
from lightning_memfit.predict.ddp import bucket_sizes
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.micro_batch_scaling import NotDerivableError
from lightning_memfit.predict.optimizer_step import OptimizerStepCost, optimizer_step_cost, with_optimizer_step
from lightning_memfit.predict.sharded import (
    RankStep,
    estimated_memory,
    floor_bytes,
    host_bytes,
    of_one_device,
    sharded_timeline,
)
from lightning_memfit.predict.shares import exchanged_bytes
from lightning_memfit.predict.variants import Variant
from lightning_memfit.predict.zero_layout import ZeroSettings, group_share
from lightning_memfit.recorded_steps import Divide, GivenBatch, Recorded, RecordedSteps
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.shared_work import SharedWork, probes_key
from lightning_memfit.targets import HostTarget, Prober, Target
from lightning_memfit.trace.closure_step import trace_closure_step
from lightning_memfit.trace.flat_step import trace_flat_steps
from lightning_memfit.trace.gradient_scaling import with_scaled_loss
from lightning_memfit.trace.op_probe import Probes
from lightning_memfit.trace.optimizer_step import look_at_optimizer, trace_optimizer_step
from lightning_memfit.trace.sharded_fakes import parameters_of
from lightning_memfit.trace.small_steps import PeakLine, measure_small_steps
from lightning_memfit.trace.step_program import StepProgram
from lightning_memfit.trace.timeline import GradientLayout, ParameterLayout, Signature, Timeline
from lightning_memfit.trace.training_step import trace_window

if TYPE_CHECKING:
    from lightning_memfit.hardware.rates import DeviceRates
    from lightning_memfit.predict.variant_seconds import StepSeconds, VariantSeconds

_AGREEMENT = 0.001
"""Share of the peak by which what is derived may differ from what is traced before the former is no longer believed."""
PrepareOptimizer = Callable[[Optimizer, Candidate], Optimizer]
"""(optimizer as configured, candidate) to the optimizer as the candidate wants it."""
_Layouts = tuple[GradientLayout | None, ...] | None


class Forecaster:
    """Says what candidates need, raw: nothing measured is in it.

    Args:
        program: the step without any lever; the context of its forward is replaced by that of the precision.
        batch: one collated batch of the loader's size.
        prober: finds the operators' hidden temporaries; ``None`` leaves them out.
        divide: divides the batch into slices of given sizes.
        samples_of: number of samples in a batch.
        resident_batches: batches alive at the same time.
        waiting_batch: one of the others, as the loader gives it; ``None`` if it is like ``batch``.
        step_contexts: precision to the context of a forward.
        prepare_optimizer: gives the optimizer a candidate's states and implementation; by default what
            :func:`~lightning_memfit.apply.optimizer_levers.with_levers` gives it. Also called under fake tensors.
        rates: how fast the device is; ``None`` leaves times out.
        callback_bytes: what callbacks hold beside the step.
        target: the device that is forecast for; the host by default.
    """

    def __init__(
        self,
        program: StepProgram,
        batch: Any,
        *,
        prober: Prober | None,
        divide: Divide = split_by_sizes,
        samples_of: Callable[[Any], int] = batch_size_of,
        resident_batches: int = 1,
        waiting_batch: Any = None,
        step_contexts: Callable[[Precision], StepContext] | None = None,
        prepare_optimizer: PrepareOptimizer | None = None,
        rates: DeviceRates | None = None,
        callback_bytes: int = 0,
        target: Target | None = None,
    ) -> None:
        self.untraceable: str | None = None
        """Why the step could not be traced, once it was tried and could not."""
        self._target: Target = HostTarget() if target is None else target
        self._program = replace(program, rules=self._target.rules)
        self._given = GivenBatch(
            batch=batch,
            divide=divide,
            samples_of=samples_of,
            resident_batches=resident_batches,
            waiting_batch=waiting_batch,
        )
        self._prober = prober
        self._contexts = step_contexts or autocast_context
        self._prepare = prepare_optimizer or self._with_levers
        self._rates = rates
        self.callback_bytes = callback_bytes
        self._shared = SharedWork()
        self._records = RecordedSteps(self._given, prober, find_repeated_blocks(program.module), rates)
        self._timelines: dict[Candidate, Timeline] = {}
        self._steps: dict[Any, _OptimizerStep] = {}
        self._lines: dict[Any, PeakLine] = {}
        self._derived_peaks: dict[Candidate, int] = {}

    def __call__(self, candidate: Candidate) -> Forecast:
        """Trace one candidate; where its step cannot be traced, measure two small ones.

        For a GPU the timeline is derived where it can be, since it is what a trace would give, and replayed.

        Raises:
            TraceError: if the step can neither be traced nor measured small.
            ConfigurationError: if what the user set cannot be used.
        """
        if self.untraceable is None:
            try:
                return self._replayed(candidate) or self._traced(candidate)
            except TraceError as error:
                self.untraceable = str(error)
        return self._measured_small(candidate)

    def estimate(self, candidate: Candidate) -> Forecast:
        """Derive one candidate from what was recorded of others; where that is not possible, trace it.

        Raises:
            TraceError: if the step can neither be traced nor measured small.
            ConfigurationError: if what the user set cannot be used.
        """
        if self.untraceable is not None:
            return self._measured_small(candidate)
        if self._needs_closure:
            return self(candidate)
        try:
            return self._derived(candidate)
        except NotDerivableError as error:
            forecast = self(candidate)
            note = f"not derived from the trace of another setting, but traced: {error}"
            return forecast if self.untraceable else replace(forecast, notes=(*forecast.notes, note))

    def floor_bytes(self, candidate: Candidate, budget_bytes: int) -> int:
        """Bytes that a rank holds whatever its slices and what is recomputed; 0 on one device, and where none is known.

        Without any recorded step: every trainable parameter counts as having a gradient.

        Args:
            candidate: how training is spread.
            budget_bytes: as soon as that is exceeded, nothing more is found out.
        """
        if candidate.sharding is None or self._needs_closure:
            return 0
        parameters = parameters_of(self._program.module, floating_dtype(of_one_device(candidate)))
        without_states = floor_bytes(parameters, 0, candidate)
        if without_states > budget_bytes or candidate.optimizer_states != "as-configured":
            return without_states
        plain = replace(candidate, optimizer_implementation="as-configured")
        try:
            return floor_bytes(parameters, self._step(plain, None).cost.states_bytes, candidate)
        except TraceError:
            return without_states

    @property
    def facts(self) -> OptimizerFacts:
        """What can be chosen for the optimizer; it is made over fakes, and thrown away.

        Raises:
            TraceError: if it cannot be made.
        """
        return self._seen_of_the_optimizer[0]

    @property
    def _is_of_a_gpu(self) -> bool:
        return self._target.rules.device_type != "cpu"

    @property
    def _needs_closure(self) -> bool:
        try:
            return self.facts.needs_closure
        except TraceError:
            return False

    @property
    def optimizer_words(self) -> str | None:
        """What a plan's fingerprint says of the optimizer; ``None`` if it cannot be made over fakes."""
        try:
            return self._seen_of_the_optimizer[1]
        except TraceError:
            return None

    @cached_property
    def _seen_of_the_optimizer(self) -> tuple[OptimizerFacts, str]:
        module = self._program.module
        with faked_quantisation():
            return self._shared.once(
                ("optimizer", self._target.rules.device_type),
                lambda: look_at_optimizer(
                    self._program, lambda optimizer: (optimizer_facts(optimizer, module), optimizer_words(optimizer))
                ),
            )

    def recomputed_anyway(self, candidate: Candidate) -> frozenset[str]:
        """Qualified names of the modules that the step recomputes by itself under a candidate that recomputes nothing.

        None if the step cannot be traced.

        Raises:
            ConfigurationError: if what the user set cannot be used.
        """
        try:
            return self._recorded(candidate, self._records.variant_of(candidate)).recomputed
        except (BatchStructureError, TraceError, NotDerivableError):
            return frozenset()

    def for_batch(self, batch: Any, waiting_batch: Any = None) -> Forecaster:
        """The same for another batch; what is known of the optimizer is shared."""
        other = copy.copy(self)
        other._given = replace(self._given, batch=batch, waiting_batch=waiting_batch)
        other._shared = SharedWork()
        other._records = self._records.for_batch(other._given)
        other.untraceable = None
        other._timelines, other._lines, other._derived_peaks = {}, {}, {}
        return other

    def for_device(self, target: Target, *, prober: Prober | None, rates: DeviceRates | None) -> Forecaster:
        """The same for another device; what was traced and replayed is shared where the device decides nothing.

        Args:
            target: the other device.
            prober: finds hidden temporaries of operators on it.
            rates: how fast it is.
        """
        other = copy.copy(self)
        other.__dict__.pop("_seen_of_the_optimizer", None)
        other._target, other._prober, other._rates = target, prober, rates
        other._program = replace(self._program, rules=target.rules)
        other._records = self._records.for_device(prober, rates)
        other.untraceable = None
        other._steps, other._timelines, other._lines, other._derived_peaks = {}, {}, {}, {}
        return other

    def timeline(self, candidate: Candidate) -> Timeline:
        """The traced step of a candidate.

        Raises:
            TraceError: if the step cannot be traced.
        """
        key = replace(candidate, zero_gradients_early=False)
        if key not in self._timelines:
            program, split = self._slices_of(candidate), candidate.split
            with faked_quantisation(), checkpointed(program.module, candidate.checkpointed_modules):
                window = trace_window(
                    program,
                    self._given.batch,
                    divide=lambda batch: self._given.slices(batch, split),
                    micro_steps=len(self._given.sizes(split)) * split.accumulate_grad_batches,
                    resident_batches=self._given.resident_batches,
                    waiting_batch=self._given.waiting_batch,
                    collect_signatures=self._prober is not None,
                    floating=floating_dtype(of_one_device(candidate)),
                    steps=False,
                )
            step = self._step(candidate, window.gradients)
            self._timelines[key] = _with_step(window, step, candidate, on_a_gpu=self._is_of_a_gpu)
        return self._timelines[key]

    def _traced_with_closure(self, candidate: Candidate) -> Forecast:
        """The step of an optimizer that runs forward and backward itself; how often, and so how long, is not known."""
        split = candidate.split
        if candidate.sharding is not None and candidate.sharding.engine != "ddp":
            raise TraceError(
                "an optimizer that runs forward and backward itself is forecast for several devices under DDP alone"
            )
        with faked_quantisation(), checkpointed(self._program.module, candidate.checkpointed_modules):
            timeline = trace_closure_step(
                self._slices_of(candidate),
                self._given.batch,
                divide=lambda batch: self._given.slices(batch, split),
                zero_gradients_early=candidate.zero_gradients_early,
                resident_batches=self._given.resident_batches,
                waiting_batch=self._given.waiting_batch,
                collect_signatures=self._prober is not None,
                floating=floating_dtype(candidate),
            )
        probes = self.probe(timeline.signatures)
        return Forecast(
            candidate=candidate,
            memory=self._with_buckets(self._target.memory(timeline, probes.results), candidate),
            notes=(*timeline.notes, *probes.notes),
        )

    def _traced(self, candidate: Candidate) -> Forecast:
        if self._needs_closure:
            return self._traced_with_closure(candidate)
        timeline = self.timeline(candidate)
        probes = self.probe(timeline.signatures)
        early = candidate.zero_gradients_early
        memory = self._target.memory(timeline, probes.results, zero_gradients_early=early)
        if candidate in self._derived_peaks:
            traced = predict_memory(timeline, probes.results, zero_gradients_early=early).peak_allocated_bytes
            if abs(traced - self._derived_peaks[candidate]) > _AGREEMENT * traced:
                self._records.distrust(of_one_device(candidate), self._records.variant_of(candidate))
        micro_steps = timeline.micro_steps
        parameters = parameters_of(self._program.module, floating_dtype(of_one_device(candidate)))
        sent = exchanged_bytes(parameters, candidate.sharding, micro_steps=micro_steps)
        return Forecast(
            candidate=candidate,
            memory=memory.beside(self.callback_bytes),
            flops=timeline.flops,
            recomputed_flops=timeline.recomputed_flops,
            predicted_step_seconds=self._with_exchanges(self._seconds(timeline, candidate.split), sent),
            exchanged_bytes=sent,
            seconds_count_exchanges=sent is not None and self._target.link_bytes_per_second is not None,
            host_bytes=(
                None
                if candidate.offload == "never"
                else self._host_bytes(parameters, candidate, self._step(candidate, None))
            ),
            notes=(*timeline.notes, *probes.notes),
        )

    def _host_bytes(
        self, parameters: Sequence[ParameterLayout], candidate: Candidate, step: _OptimizerStep
    ) -> int | None:
        groups = [each.parameters for each in step.step.flat] if self._is_of_a_gpu else ()  # a CPU pins nothing
        return host_bytes(parameters, step.cost.states_bytes, candidate, groups=groups)

    def _replayed(self, candidate: Candidate) -> Forecast | None:
        """The derived timeline replayed as the device would; ``None`` on the host, and where it cannot be derived."""
        if (self._target.rules.device_type == "cpu" and candidate.sharding is None) or self._needs_closure:
            return None
        try:
            derived = self._derived(candidate)
            variant = self._records.variant_of(candidate)
            recorded = self._recorded(candidate, variant)
            step = self._step(candidate, recorded.gradients)
        except NotDerivableError:
            return None
        timeline = cache(
            lambda: _timeline_of(variant, recorded, step, candidate, on_a_gpu=self._is_of_a_gpu)
        )  # large: made only where it is not known yet
        signatures = self._shared.once(("signatures", candidate, recorded.key, step.key), lambda: timeline().signatures)
        probes = self.probe(signatures)  # also of sizes that were not recorded
        early = candidate.zero_gradients_early
        memory = self._shared.once(
            ("replayed", candidate, self._target.counts_like, recorded.key, step.key, probes_key(probes.results)),
            lambda: self._counted(timeline(), probes, zero_gradients_early=early),
        )
        return replace(derived, memory=memory.beside(self.callback_bytes), confirmed=True)

    def _counted(self, timeline: Timeline, probes: Probes, *, zero_gradients_early: bool) -> MemoryBreakdown:
        with old_objects_at_rest():
            return self._target.memory(timeline, probes.results, zero_gradients_early=zero_gradients_early)

    def _derived(self, candidate: Candidate) -> Forecast:
        try:
            variant = self._records.variant_of(candidate)
            recorded = self._recorded(candidate, variant)
            step = self._step(candidate, recorded.gradients)
        except (BatchStructureError, TraceError) as error:
            raise NotDerivableError(str(error)) from error
        flops, recomputed_flops = recorded.variants.flops(variant)
        sent = exchanged_bytes(recorded.variants.parameters, candidate.sharding, micro_steps=variant.micro_steps)
        memory = estimated_memory(recorded.variants, variant, step.cost, candidate, on_a_gpu=self._is_of_a_gpu)
        self._derived_peaks[candidate] = memory.peak_allocated_bytes
        return Forecast(
            candidate=candidate,
            memory=memory.beside(self._target.kept_bytes, "temporaries").beside(self.callback_bytes),
            flops=flops,
            recomputed_flops=recomputed_flops,
            predicted_step_seconds=self._with_exchanges(_whole(recorded.seconds, variant, step.seconds), sent),
            exchanged_bytes=sent,
            seconds_count_exchanges=sent is not None and self._target.link_bytes_per_second is not None,
            host_bytes=self._host_bytes(recorded.variants.parameters, candidate, step),
            confirmed=False,
            notes=tuple(dict.fromkeys((*recorded.notes, *step.notes))),
        )

    def _recorded(self, candidate: Candidate, variant: Variant) -> Recorded:
        one = of_one_device(candidate)
        with faked_quantisation():
            return self._records.recorded(one, variant, self._slices_of(candidate), floating_dtype(one))

    def _step(self, candidate: Candidate, gradients: _Layouts) -> _OptimizerStep:
        """The optimizer's step, which depends on nothing in front of it but which gradients there are."""
        # DeepSpeed makes its copies of 32 bits whatever it computes in.
        levers, floating = _levers_of_the_step(candidate), floating_dtype(candidate)
        divides = candidate.sharding is not None and candidate.sharding.zero_stage is not None
        key = *levers, floating, None if divides else gradients
        if key not in self._steps:
            # Under the rules of every GPU the optimizer steps alike: they differ in attention alone.
            by = "step", self._target.rules.device_type, self._prober is not None, *key
            step = self._shared.once(by, lambda: self._traced_step(candidate, gradients))
            whole = step.whole
            probes = self.probe(whole.signatures)
            found = by, probes_key(probes.results)
            cost = self._shared.once(("cost", found), lambda: optimizer_step_cost(whole, probes.results))
            notes = (*whole.notes, *probes.notes)
            self._steps[key] = _OptimizerStep(step, cost, self._step_seconds(whole), notes, found)
        return self._steps[key]

    def _traced_step(self, candidate: Candidate, gradients: _Layouts) -> RankStep:
        program, collects = self._program_at(candidate), self._prober is not None
        with faked_quantisation():
            if candidate.sharding is not None and candidate.sharding.zero_stage is not None:
                share = partial(group_share, settings=ZeroSettings.of(candidate.sharding))
                return RankStep.of_groups(trace_flat_steps(program, share, collect_signatures=collects))
            step = trace_optimizer_step(
                program,
                gradients=gradients,
                collect_signatures=collects,
                floating=floating_dtype(candidate),
                sharding=candidate.sharding,
            )
            return RankStep(whole=step)

    def _slices_of(self, candidate: Candidate) -> StepProgram:
        """The step of one device at the candidate's precision; its optimizer, as configured, only zeroes and clips."""
        sharding, precision = candidate.sharding, of_one_device(candidate).precision
        program = replace(
            self._program,
            step_context=self._contexts(precision),
            group_precision=None if sharding is None else sharding.group_precision,
        )
        if precision == "16-mixed" and self._target.rules.device_type == "cuda":
            return with_scaled_loss(program)
        return program

    def _program_at(self, candidate: Candidate) -> StepProgram:
        """The step at the candidate's precision, with the optimizer as the candidate wants it."""
        make = self._program.make_optimizer
        return replace(self._slices_of(candidate), make_optimizer=lambda: self._prepare(make(), candidate))

    def _with_levers(self, optimizer: Optimizer, candidate: Candidate) -> Optimizer:
        states, implementation = candidate.optimizer_states, candidate.optimizer_implementation
        if states == implementation == "as-configured":
            return optimizer
        if implementation == "cpu-adam":  # in place and without temporaries, as torch's kernel
            implementation = "fused"
        return with_levers(optimizer, self._program.module, optimizer_states=states, implementation=implementation)

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """What operators need beside their results; nothing without a prober."""
        return Probes(results={}) if self._prober is None else self._prober.probe(signatures)

    def _step_seconds(self, step: Timeline) -> StepSeconds | None:
        if self._rates is None:
            return None
        from lightning_memfit.predict.variant_seconds import StepSeconds

        return StepSeconds(step, self._rates)

    def _seconds(self, timeline: Timeline, split: BatchSplit) -> float | None:
        if self._rates is None:
            return None
        from lightning_memfit.predict.step_time import predict_step_seconds

        return predict_step_seconds(timeline, self._rates, split=split)

    def _with_exchanges(self, seconds: float | None, sent: int | None) -> float | None:
        """Seconds of a step and of what ranks send one another meanwhile, as if neither ran beside the other."""
        link = self._target.link_bytes_per_second
        return seconds if seconds is None or sent is None or link is None else seconds + sent / link

    def _measured_small(self, candidate: Candidate) -> Forecast:
        if candidate.sharding is not None and candidate.sharding.engine != "ddp":
            raise TraceError(
                f"The step could not be traced ({self.untraceable}), and what a rank of {candidate.sharding.label} "
                f"needs can only be told from a trace. {_way_out(self.untraceable)}, or plan for one device."
            )
        if self._target.rules.device_type != "cpu":
            raise TraceError(
                f"The step could not be traced ({self.untraceable}), and without the GPU nothing can be measured "
                f"instead. {_way_out(self.untraceable)}, or plan on the machine with the GPU."
            )
        accumulates = candidate.split.num_slices * candidate.split.accumulate_grad_batches > 1
        key = (
            candidate.precision, candidate.checkpointed_modules, accumulates, candidate.zero_gradients_early,
            candidate.optimizer_states, candidate.optimizer_implementation,
        )  # fmt: skip
        if key not in self._lines:
            self._lines[key] = self._measured_now(candidate, accumulates)
        line = self._lines[key]
        return Forecast(
            candidate=candidate,
            memory=self._with_buckets(line.at(candidate.split.micro_batch_size), candidate),
            method="extrapolated",
            notes=(
                f"the step could not be traced ({self.untraceable}); its peak is a straight line through real steps of "
                f"{line.sizes[0]} and {line.sizes[1]} samples, and the warm-up will tell",
            ),
        )

    def _with_buckets(self, memory: MemoryBreakdown, candidate: Candidate) -> MemoryBreakdown:
        """What was found on one device, with DDP's buckets and what callbacks hold."""
        sharded = candidate.sharding is not None
        parameters = parameters_of(self._program.module, floating_dtype(candidate)) if sharded else ()
        return memory.beside(sum(bucket_sizes(parameters)), "communication").beside(self.callback_bytes)

    def _measured_now(self, candidate: Candidate, accumulates: bool) -> PeakLine:
        if self._needs_closure:
            raise TraceError(
                f"The step could not be traced ({self.untraceable}), and of an optimizer that runs forward and "
                "backward itself no small real steps are measured instead. Use a step that needs no values."
            )
        try:
            with without_other_ranks(), checkpointed(self._program.module, candidate.checkpointed_modules):
                return measure_small_steps(
                    self._program_at(candidate),
                    self._given.batch,
                    self._given.divide,
                    samples=self._given.samples_of(self._given.batch),
                    accumulates=accumulates,
                    zero_gradients_early=candidate.zero_gradients_early,
                    floating=floating_dtype(candidate),
                )
        except (TraceError, BatchStructureError, UnsupportedError) as error:
            raise TraceError(
                f"The step could not be traced ({self.untraceable}), and small real steps could not be measured "
                f"instead: {error}. Use a real module and a batch of at least two samples, or a step that needs no "
                "values."
            ) from error


class _OptimizerStep(NamedTuple):
    step: RankStep
    cost: OptimizerStepCost
    seconds: StepSeconds | None
    notes: tuple[str, ...]
    key: Hashable


def _timeline_of(
    variant: Variant, recorded: Recorded, step: _OptimizerStep, candidate: Candidate, *, on_a_gpu: bool
) -> Timeline:
    with old_objects_at_rest():
        window = recorded.variants.timeline(replace(variant, zero_gradients_early=False))
        return _with_step(window, step, candidate, on_a_gpu=on_a_gpu)


def _with_step(window: Timeline, step: _OptimizerStep, candidate: Candidate, *, on_a_gpu: bool) -> Timeline:
    if candidate.sharding is None:
        return with_optimizer_step(window, step.step.whole)
    return sharded_timeline(
        window,
        step.step,
        candidate.sharding,
        offload=candidate.offload,
        on_a_gpu=on_a_gpu,
        slices_per_batch=candidate.split.num_slices,
    )


def _levers_of_the_step(candidate: Candidate) -> tuple[Hashable, ...]:
    """What decides how the optimizer steps, and over which share."""
    sharding = candidate.sharding
    share: Hashable = None
    if sharding is not None and sharding.engine != "ddp":
        stage = sharding.zero_stage
        share = sharding.engine, 1 if stage == 2 else stage, sharding.ranks  # stages 1 and 2 step alike
    return candidate.optimizer_states, candidate.optimizer_implementation, share


def _whole(window: VariantSeconds | None, variant: Variant, step: StepSeconds | None) -> float | None:
    return None if window is None or step is None else window.of(variant, step)


def _way_out(reason: str | None) -> str:
    """What to do about a step that could not be traced, by what torch said."""
    said = (reason or "").lower()
    if "cuda" in said:
        return "Write x.device in place of 'cuda' in the step, which is followed without a GPU"
    if any(word in said for word in ("dynamicoutputshape", "datadependent", ".numpy()")):
        return "Use a step that needs no values of tensors"
    return "See that the step runs as it is given here, with dense tensors and without their values"
