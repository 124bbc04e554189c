"""From a module and a batch to forecasts: traced where the step can be traced, measured small where it cannot.

The public functions :func:`forecast`, :func:`make_plan` and :func:`trace_step` need no Trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes, tensors_of
from lightning_memfit.errors import BatchStructureError, ConfigurationError, MemFitError, TraceError
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.plan import (
    BatchSplit,
    Candidate,
    Forecast,
    MemoryBreakdown,
    Plan,
    PlanRequest,
    Precision,
    balanced_slices,
)
from lightning_memfit.predict.budget import form_budget
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.search.checkpointing import find_repeated_blocks, match_modules
from lightning_memfit.search.levers import SearchSpace, search_space
from lightning_memfit.search.planner import search_plan
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.small_steps import PeakLine, measure_small_steps
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import (
    LossFunction,
    OptimizerFactory,
    StepProgram,
    program_of,
    trace_window,
)
from lightning_memfit.units import parse_bytes

Divide = Callable[[Any, Sequence[int]], Sequence[Any]]
"""(batch, slice sizes) to slices."""


class Forecaster:
    """Says what a candidate needs, raw. One trace serves all candidates that differ only in when gradients are zeroed.

    Args:
        program: the step without checkpointing.
        batch: one collated batch of the loader's size.
        prober: finds the operators' hidden temporaries; ``None`` leaves them out.
        divide: divides the batch into slices of given sizes.
        samples_of: number of samples in a batch.
        resident_batches: batches alive at the same time.
    """

    def __init__(
        self,
        program: StepProgram,
        batch: Any,
        *,
        prober: OperatorProber | None,
        divide: Divide = split_by_sizes,
        samples_of: Callable[[Any], int] = batch_size_of,
        resident_batches: int = 1,
    ) -> None:
        self.untraceable: str | None = None
        """Why the step could not be traced, once it was tried and could not."""
        self._program = program
        self._batch = batch
        self._prober = prober
        self._divide = divide
        self._samples_of = samples_of
        self._resident_batches = resident_batches
        self._timelines: dict[tuple[tuple[str, ...], tuple[int, ...], int], Timeline] = {}
        self._lines: dict[tuple[tuple[str, ...], bool, bool], PeakLine] = {}

    def __call__(self, candidate: Candidate) -> Forecast:
        """Forecast one candidate.

        Raises:
            TraceError: if the step can neither be traced nor measured small.
        """
        if self.untraceable is None:
            try:
                return self._traced(candidate)
            except TraceError as error:
                if isinstance(error.__cause__, MemFitError):  # what the user set, not what cannot be traced
                    raise error.__cause__ from None
                self.untraceable = str(error)
        return self._extrapolated(candidate)

    def timeline(self, candidate: Candidate) -> Timeline:
        """The traced step of a candidate.

        Raises:
            TraceError: if the step cannot be traced.
        """
        split = candidate.split
        key = (candidate.checkpointed_modules, split.slice_sizes, split.accumulate_grad_batches)
        if key not in self._timelines:
            with checkpointed(self._program.module, candidate.checkpointed_modules):
                self._timelines[key] = trace_window(
                    self._program,
                    self._batch,
                    divide=self._divider(split),
                    micro_steps=_micro_steps(candidate),
                    resident_batches=self._resident_batches,
                    collect_signatures=self._prober is not None,
                )
        return self._timelines[key]

    def _divider(self, split: BatchSplit) -> Callable[[Any], Sequence[Any]]:
        if split.num_slices == 1:
            return lambda batch: [batch]
        samples = self._samples_of(self._batch)
        sizes = split.slice_sizes
        if samples != sum(sizes):  # a data set smaller than the loader's batch
            sizes = balanced_slices(samples, -(-samples // split.micro_batch_size))
        return lambda batch: self._divide(batch, sizes)

    def _traced(self, candidate: Candidate) -> Forecast:
        timeline = self.timeline(candidate)
        notes = timeline.notes
        results = None
        if self._prober is not None:
            probes = self._prober.probe(timeline.signatures)
            results, notes = probes.results, (*notes, *probes.notes)
        return Forecast(
            candidate=candidate,
            memory=predict_memory(timeline, results, zero_gradients_early=candidate.zero_gradients_early),
            flops=timeline.flops,
            recomputed_flops=timeline.recomputed_flops,
            notes=notes,
        )

    def _extrapolated(self, candidate: Candidate) -> Forecast:
        key = (candidate.checkpointed_modules, _micro_steps(candidate) > 1, candidate.zero_gradients_early)
        if key not in self._lines:
            self._lines[key] = self._measured(candidate)
        line = self._lines[key]
        return Forecast(
            candidate=candidate,
            memory=line.at(candidate.split.micro_batch_size),
            method="extrapolated",
            notes=(
                f"the step could not be traced ({self.untraceable}); its peak is a straight line through real steps of "
                f"{line.sizes[0]} and {line.sizes[1]} samples, and the warm-up will tell",
            ),
        )

    def _measured(self, candidate: Candidate) -> PeakLine:
        try:
            with checkpointed(self._program.module, candidate.checkpointed_modules):
                return measure_small_steps(
                    self._program,
                    self._batch,
                    self._divide,
                    samples=self._samples_of(self._batch),
                    accumulates=_micro_steps(candidate) > 1,
                    zero_gradients_early=candidate.zero_gradients_early,
                )
        except (TraceError, BatchStructureError) as error:
            raise TraceError(
                f"The step could not be traced ({self.untraceable}), and small real steps could not be measured "
                f"instead: {error}. Use a real module and a batch of at least two samples, or a step that needs no "
                "values."
            ) from error


def _micro_steps(candidate: Candidate) -> int:
    return candidate.split.num_slices * candidate.split.accumulate_grad_batches


@contextmanager
def checkpointed(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Recompute the named modules within this context."""
    undo = checkpoint_modules(module, names)
    try:
        yield
    finally:
        undo()


def autocast_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """The forward's context for a precision, as Lightning's plugins make it.

    Source: ``lightning/pytorch/plugins/precision/amp.py``, 2.6: autocast without a cache of casted weights.

    Raises:
        ConfigurationError: for a precision that is not forecast yet.
    """
    if precision == "32-true":
        return nullcontext
    if precision == "bf16-mixed":
        return lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    raise ConfigurationError(f"precision={precision!r} is not forecast on a CPU. Choose '32-true' or 'bf16-mixed'.")


def trace_step(
    module: nn.Module,
    batch: Any,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    precision: Precision = "32-true",
    activation_checkpointing: str | Sequence[str] = "none",
    micro_batch_size: int | None = None,
) -> Timeline:
    """Follow one optimizer step without running it.

    Args:
        module: a ``LightningModule``, or a module together with ``loss`` and ``optimizer``; also on ``meta``.
        batch: one collated batch; its first dimension is the batch.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        precision: ``"32-true"`` or ``"bf16-mixed"``.
        activation_checkpointing: ``"none"``, ``"blocks"``, or patterns of module names.
        micro_batch_size: samples of the largest slice; ``None`` does not divide the batch.

    Raises:
        TraceError: if the step needs the values of tensors.
        ConfigurationError: if a setting cannot be used.
    """
    program = program_of(module, loss=loss, optimizer=optimizer, step_context=autocast_context(precision))
    candidate = _candidate(module, batch, precision, activation_checkpointing, micro_batch_size)
    return Forecaster(program, batch, prober=None).timeline(candidate)


def forecast(
    module: nn.Module,
    batch: Any,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "local",
    precision: Precision = "32-true",
    activation_checkpointing: str | Sequence[str] = "none",
    optimizer_states: str = "as-configured",
    micro_batch_size: int | None = None,
    probe_operators: bool = True,
    cache_dir: Path | None = None,
) -> MemoryBreakdown:
    """Predict the peak of one given candidate.

    Args:
        module: a ``LightningModule``, or a module together with ``loss`` and ``optimizer``.
        batch: one collated batch; its first dimension is the batch.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        device: ``"local"`` or ``"cpu"``.
        precision: ``"32-true"`` or ``"bf16-mixed"``.
        activation_checkpointing: ``"none"``, ``"blocks"``, or patterns of module names.
        optimizer_states: ``"as-configured"``; quantised states are not forecast yet.
        micro_batch_size: samples of the largest slice; ``None`` does not divide the batch.
        probe_operators: run each distinct operator once, in a process of its own, for its hidden temporaries.
        cache_dir: keeps what probing found.

    Returns:
        The peak in bytes of the torch allocator, by category and phase.

    Raises:
        ConfigurationError: if a setting cannot be used.

    >>> module = torch.nn.Linear(1000, 1000, bias=False)
    >>> memory = forecast(module, torch.zeros(10, 1000), loss=lambda m, x: m(x).sum(),
    ...                   optimizer=torch.optim.SGD, probe_operators=False)
    >>> memory.by_category["parameters"], memory.by_category["gradients"]
    (4000000, 4000000)
    """
    detect_device(device)
    if optimizer_states != "as-configured":
        raise ConfigurationError(f"optimizer_states={optimizer_states!r} is not forecast yet; use 'as-configured'.")
    program = program_of(module, loss=loss, optimizer=optimizer, step_context=autocast_context(precision))
    candidate = _candidate(module, batch, precision, activation_checkpointing, micro_batch_size)
    with _prober(probe_operators, cache_dir) as prober:
        return Forecaster(program, batch, prober=prober)(candidate).memory


def make_plan(
    module: nn.Module,
    batch: Any,
    *,
    effective_batch_size: int,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "local",
    budget: int | str = "auto",
    precision: Precision = "32-true",
    activation_checkpointing: str | Sequence[str] = "auto",
    micro_batch_size: int | None = None,
    probe_operators: bool = True,
    cache_dir: Path | None = None,
) -> Plan:
    """Search for the plan of an effective batch, without a Trainer and without running a step.

    Args:
        module: a ``LightningModule``, or a module together with ``loss`` and ``optimizer``.
        batch: one collated batch as the loader gives it; ``effective_batch_size`` is a multiple of its samples.
        effective_batch_size: samples per optimizer step.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        device: ``"local"`` or ``"cpu"``.
        budget: bytes of the torch allocator, text such as ``"700MiB"``, or ``"auto"``.
        precision: ``"32-true"`` or ``"bf16-mixed"``.
        activation_checkpointing: ``"auto"``, ``"none"``, ``"blocks"``, or patterns of module names.
        micro_batch_size: samples of the largest slice; ``None`` leaves the choice to the search.
        probe_operators: run each distinct operator once, in a process of its own, for its hidden temporaries.
        cache_dir: keeps what probing found.

    Raises:
        NoFeasiblePlanError: if nothing fits.
        ConfigurationError: if a setting cannot be used.
    """
    request = PlanRequest(
        effective_batch_size=effective_batch_size,
        budget=None if budget == "auto" else parse_bytes(budget, setting="budget"),
        precision=precision,
        activation_checkpointing=_checkpointing_request(activation_checkpointing),
        micro_batch_size=micro_batch_size,
    )
    samples = batch_size_of(batch)
    if effective_batch_size % samples:
        raise ConfigurationError(
            f"effective_batch_size={effective_batch_size} is not a multiple of the batch of {samples} samples. "
            f"Nearest: {effective_batch_size // samples * samples or samples} and "
            f"{(effective_batch_size // samples + 1) * samples}."
        )
    spec = detect_device(device)
    program = program_of(module, loss=loss, optimizer=optimizer, step_context=autocast_context(precision))
    whole = BatchSplit(
        effective_batch_size=effective_batch_size,
        loader_batch_size=samples,
        accumulate_grad_batches=effective_batch_size // samples,
        slice_sizes=(samples,),
    )
    space = _space(module, request, whole)
    with _prober(probe_operators, cache_dir) as prober:
        return search_plan(
            request,
            spec,
            form_budget(spec, request, resident_bytes=resident_bytes(module, batch)),
            space,
            Forecaster(program, batch, prober=prober),
        )


def resident_bytes(module: nn.Module, batch: Any) -> int:
    """Bytes of the distinct storages of a module and a batch, ``meta`` tensors not counted."""
    return storage_bytes([*module.parameters(), *module.buffers(), *tensors_of(batch)])


def _space(module: nn.Module, request: PlanRequest, whole: BatchSplit) -> SearchSpace:
    asked = request.activation_checkpointing
    matched = match_modules(module, asked) if isinstance(asked, tuple) else ()
    return search_space(request, whole, blocks=find_repeated_blocks(module), matched=matched)


def _checkpointing_request(value: str | Sequence[str]) -> Any:
    return value if isinstance(value, str) else tuple(value)


def _candidate(
    module: nn.Module,
    batch: Any,
    precision: Precision,
    activation_checkpointing: str | Sequence[str],
    micro_batch_size: int | None,
) -> Candidate:
    request = PlanRequest(
        precision=precision,
        activation_checkpointing=_checkpointing_request(activation_checkpointing),
        micro_batch_size=micro_batch_size,
    )
    samples = batch_size_of(batch)
    whole = BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,))
    space = _space(module, request, whole)
    count = space.num_slices[0] if micro_batch_size is not None else 1
    candidate = space.candidate(space.checkpointing[0], count, zero_gradients_early=False)
    return dataclasses.replace(candidate, split=dataclasses.replace(whole, slice_sizes=balanced_slices(samples, count)))


@contextmanager
def _prober(probe_operators: bool, cache_dir: Path | None) -> Iterator[OperatorProber | None]:
    if not probe_operators:
        yield None
        return
    with OperatorProber(cache_dir=cache_dir) as prober:
        prober.start()
        yield prober
