"""Forecasts and plans without a Trainer: :func:`forecast`, :func:`make_plan` and :func:`trace_step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lightning_memfit.batch_tree import batch_size_of, tensors_of
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.fingerprint import fingerprint_of
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.measure_rates import measure_rates
from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.hardware.roofline import roofline_rates
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.plan import (
    BatchSplit,
    Candidate,
    MemoryBreakdown,
    Offload,
    OptimizerImplementation,
    OptimizerStates,
    Plan,
    PlanRequest,
    Precision,
)
from lightning_memfit.predict.budget import form_budget
from lightning_memfit.probers import GpuProber, gpu_prober
from lightning_memfit.search.checkpointing import Recomputable, find_repeated_blocks, recomputable
from lightning_memfit.search.levers import TIERS, SearchSpace, search_space
from lightning_memfit.search.planner import search_plan
from lightning_memfit.search.strategies import check_num_devices, considered_strategies
from lightning_memfit.settings import plan_request
from lightning_memfit.several_devices import host_bytes_of, notes_on_devices, on_ranks
from lightning_memfit.sharding import Sharding
from lightning_memfit.targets import CudaTarget, FormulaProber, Prober, target_of
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import LossFunction, OptimizerFactory, program_of
from lightning_memfit.validate.splittable import batch_norm_obstacle


def trace_step(
    module: nn.Module,
    batch: Any,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "cpu",
    precision: Precision = "32-true",
    activation_checkpointing: str | Sequence[str] = "none",
    optimizer_states: OptimizerStates = "as-configured",
    optimizer_implementation: OptimizerImplementation = "as-configured",
    micro_batch_size: int | None = None,
) -> Timeline:
    """Follow one optimizer step without running it.

    :func:`~lightning_memfit.targets.target_of` a device says what memory the timeline takes there.

    Args:
        module: a ``LightningModule``, or a module together with ``loss`` and ``optimizer``; also on ``meta``.
        batch: one collated batch; its first dimension is the batch.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        device: as whose step it is followed; the distinct operators are kept for those of GPUs alone, where formulas
            tell what they hide.
        precision: in Lightning's words.
        activation_checkpointing: ``"none"``, ``"blocks"``, or patterns of module names.
        optimizer_states: ``"as-configured"`` or ``"8bit"``.
        optimizer_implementation: ``"as-configured"``, ``"single-tensor"``, ``"foreach"`` or ``"fused"``.
        micro_batch_size: samples of the largest slice; ``None`` does not divide the batch.

    Raises:
        TraceError: if the step needs the values of tensors.
        ConfigurationError: if a setting cannot be used.
    """
    request = _one_candidate(
        precision, activation_checkpointing, optimizer_states, optimizer_implementation, micro_batch_size
    )
    spec = detect_device(device)
    with _prober(spec, False, None) as prober:
        forecaster = _forecaster(module, batch, loss, optimizer, prober=prober, device=spec)
        return forecaster.timeline(_candidate(module, batch, request, forecaster))


def forecast(
    module: nn.Module,
    batch: Any,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "local",
    precision: Precision = "32-true",
    activation_checkpointing: str | Sequence[str] = "none",
    optimizer_states: OptimizerStates = "as-configured",
    optimizer_implementation: OptimizerImplementation = "as-configured",
    micro_batch_size: int | None = None,
    zero_gradients_early: bool = False,
    probe_operators: bool = True,
    cache_dir: Path | None = None,
    sharding: Sharding | None = None,
    offload: Offload = "never",
) -> MemoryBreakdown:
    """Predict the peak of one given candidate.

    Args:
        module: a ``LightningModule``, or a module together with ``loss`` and ``optimizer``.
        batch: one collated batch; its first dimension is the batch.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        device: ``"local"``, ``"cpu"``, ``"cuda:0"``, or a GPU of the catalogue such as ``"a100-40gb"``.
        precision: in Lightning's words.
        activation_checkpointing: ``"none"``, ``"blocks"``, or patterns of module names.
        optimizer_states: ``"as-configured"`` or ``"8bit"``.
        optimizer_implementation: ``"as-configured"``, ``"single-tensor"``, ``"foreach"`` or ``"fused"``.
        micro_batch_size: samples of the largest slice; ``None`` does not divide the batch.
        zero_gradients_early: gradients are dropped in front of the forward; Lightning drops them after it.
        probe_operators: run each distinct operator once, in a process of its own, for its hidden temporaries.
        cache_dir: keeps what probing found.
        sharding: how training is spread over several such devices; the forecast is that of one rank.
        offload: what DeepSpeed keeps on the host; ``"parameters"`` is optimizer and parameters, in stage 3.

    Returns:
        The peak in bytes of the torch allocator, by category and phase.

    Raises:
        ConfigurationError: if a setting cannot be used.

    Examples:
        >>> import torch
        >>> module = torch.nn.Linear(1000, 1000, bias=False)
        >>> memory = forecast(module, torch.zeros(10, 1000), loss=lambda m, x: m(x).sum(),
        ...                   optimizer=torch.optim.SGD, device="cpu", probe_operators=False)
        >>> memory.by_category["parameters"], memory.by_category["gradients"]
        (4000000, 4000000)
    """
    spec = detect_device(device)
    request = _one_candidate(
        precision, activation_checkpointing, optimizer_states, optimizer_implementation, micro_batch_size
    )
    with _prober(spec, probe_operators, cache_dir) as prober:
        forecaster = _forecaster(module, batch, loss, optimizer, prober=prober, device=spec)
        candidate = on_ranks(_candidate(module, batch, request, forecaster), sharding, offload)
        return forecaster(dataclasses.replace(candidate, zero_gradients_early=zero_gradients_early)).memory


def make_plan(
    module: nn.Module,
    batch: Any,
    *,
    effective_batch_size: int,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str = "local",
    budget: int | str = "auto",
    headroom: int | str = "auto",
    precision: Precision | str = "auto",
    activation_checkpointing: str | Sequence[str] = "auto",
    optimizer_states: str = "auto",
    optimizer_implementation: str = "auto",
    micro_batch_size: int | None = None,
    probe_operators: bool = True,
    cache_dir: Path | None = None,
    num_devices: int = 1,
    strategy: str = "auto",
    offload: str | None = None,
    host_memory: int | str | None = None,
) -> Plan:
    """Search for the plan of an effective batch, without a Trainer and without running a step.

    Args:
        module: a ``LightningModule``, or a module together with ``loss`` and ``optimizer``.
        batch: one collated batch as the loader of one rank gives it; ``effective_batch_size`` is a multiple of its
            samples times ``num_devices``.
        effective_batch_size: samples per optimizer step.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        device: ``"local"``, ``"cpu"``, ``"cuda:0"``, or a GPU of the catalogue such as ``"a100-40gb"``.
        budget: bytes of the torch allocator, text such as ``"700MiB"``, or ``"auto"``.
        headroom: bytes left free on purpose, text such as ``"256MiB"``, or ``"auto"``.
        precision: in Lightning's words, or ``"auto"``: the faster of those that the device offers and that fit.
        activation_checkpointing: ``"auto"``, ``"none"``, ``"blocks"``, or patterns of module names.
        optimizer_states: ``"auto"``, ``"as-configured"`` or ``"8bit"``.
        optimizer_implementation: ``"auto"``, ``"as-configured"``, ``"single-tensor"``, ``"foreach"`` or ``"fused"``.
        micro_batch_size: samples of the largest slice; ``None`` leaves the choice to the search.
        probe_operators: run each distinct operator once, in a process of its own, for its hidden temporaries.
        cache_dir: keeps what probing found, and the measured rates of the device.
        num_devices: devices of this kind in one node; every optimizer step is spread over all of them.
        strategy: ``"auto"``, ``"ddp"``, ``"deepspeed_stage_1"`` to ``"deepspeed_stage_3_offload"``, or ``"fsdp2"``; of
            one device ``"auto"`` or those of ``"_offload"``. As Lightning has them, stage 2 keeps the optimizer on the
            host, stage 3 the parameters too.
        offload: ``"auto"`` moves the optimizer to the host, with DeepSpeed on a GPU, only where nothing else fits, and
            the parameters too, in stage 3, where that is not enough; ``"optimizer"`` moves it whatever fits,
            ``"parameters"`` both, ``"never"`` nothing. ``None`` is ``"auto"`` for several devices and
            ``"never"`` for one, where training as planned would need another strategy than a plain Trainer has.
        host_memory: bytes of the node's host that all ranks together may use, text such as ``"1TiB"``, or ``None``
            where that is not known: the plan then says what it needs.

    Raises:
        NoFeasiblePlanError: if nothing fits.
        ConfigurationError: if a setting cannot be used.
    """
    (plan,) = make_plans(
        module,
        batch,
        devices=(device,),
        effective_batch_size=effective_batch_size,
        loss=loss,
        optimizer=optimizer,
        budget=budget,
        headroom=headroom,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        optimizer_states=optimizer_states,
        optimizer_implementation=optimizer_implementation,
        micro_batch_size=micro_batch_size,
        probe_operators=probe_operators,
        cache_dir=cache_dir,
        num_devices=num_devices,
        strategy=strategy,
        offload=offload,
        host_memory=host_memory,
    ).values()
    if isinstance(plan, NoFeasiblePlanError):
        raise plan
    return plan


def make_plans(
    module: nn.Module,
    batch: Any,
    *,
    devices: Sequence[str],
    effective_batch_size: int,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    budget: int | str = "auto",
    headroom: int | str = "auto",
    precision: Precision | str = "auto",
    activation_checkpointing: str | Sequence[str] = "auto",
    optimizer_states: str = "auto",
    optimizer_implementation: str = "auto",
    micro_batch_size: int | None = None,
    probe_operators: bool = True,
    cache_dir: Path | None = None,
    num_devices: int = 1,
    strategy: str = "auto",
    offload: str | None = None,
    host_memory: int | str | None = None,
) -> dict[str, Plan | NoFeasiblePlanError]:
    """Search for the plan of an effective batch on each of several devices.

    The plans are those of :func:`make_plan`. What does not depend on the device is traced and replayed once, so that
    the second GPU of a kind takes a fraction of the first one's time.

    Args:
        module: as in :func:`make_plan`, and so are the other arguments that are not named here.
        batch: one collated batch as the loader gives it; ``effective_batch_size`` is a multiple of its samples.
        devices: each as ``device`` of :func:`make_plan`.
        effective_batch_size: samples per optimizer step.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        budget: bytes of the torch allocator on each device, text such as ``"700MiB"``, or ``"auto"``.
        headroom: bytes left free on purpose on each, text such as ``"256MiB"``, or ``"auto"``.
        precision: in Lightning's words, or ``"auto"``.
        activation_checkpointing: ``"auto"``, ``"none"``, ``"blocks"``, or patterns of module names.
        optimizer_states: ``"auto"``, ``"as-configured"`` or ``"8bit"``.
        optimizer_implementation: ``"auto"``, ``"as-configured"``, ``"single-tensor"``, ``"foreach"`` or ``"fused"``.
        micro_batch_size: samples of the largest slice; ``None`` leaves the choice to the search.
        probe_operators: on the host, run each distinct operator once, for its hidden temporaries.
        cache_dir: keeps what probing found, and the measured rates of the host.
        num_devices: as in :func:`make_plan`, and so are the arguments after it.
        strategy: how training may be spread.
        offload: what may lie on the host.
        host_memory: what of the host may be used.

    Returns:
        By device: its plan, or the error that says why nothing fits there.

    Raises:
        ConfigurationError: if a setting cannot be used.
    """
    check_num_devices(num_devices)
    request = plan_request(
        effective_batch_size=effective_batch_size,
        budget=budget,
        headroom=headroom,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        optimizer_states=optimizer_states,
        optimizer_implementation=optimizer_implementation,
        micro_batch_size="auto" if micro_batch_size is None else micro_batch_size,
        offload=_default_offload(num_devices, strategy) if offload is None else offload,
    )
    devices_of_a_plan = _Devices(num_devices, strategy, host_bytes_of(host_memory))
    whole = _undivided(batch, effective_batch_size, num_devices)
    if isinstance(devices, str):
        raise ConfigurationError(f"devices={devices!r} is one text. Write devices=({devices!r},), or call make_plan.")
    specs = {device: detect_device(device) for device in devices}
    found: dict[str, Plan | NoFeasiblePlanError] = {}
    forecaster: Forecaster | None = None
    for device, spec in specs.items():
        with _prober(spec, probe_operators, cache_dir) as prober:
            rates = rates_of(spec, cache_dir=cache_dir)
            if forecaster is None:
                forecaster = _forecaster(module, batch, loss, optimizer, prober=prober, rates=rates, device=spec)
            else:
                forecaster = forecaster.for_device(target_of(spec), prober=prober, rates=rates)
            try:
                found[device] = _plan_of(module, batch, request, whole, forecaster, spec, devices_of_a_plan)
            except NoFeasiblePlanError as error:
                found[device] = error
    return found


def _default_offload(num_devices: int, strategy: str) -> str:
    """Several devices need a strategy anyway; on one, offloading takes another than a plain Trainer's."""
    return "auto" if num_devices > 1 or strategy.endswith("_offload") else "never"


def _undivided(batch: Any, effective_batch_size: int, ranks: int) -> BatchSplit:
    """An effective batch of whole Lightning batches.

    Raises:
        ConfigurationError: if it is not a multiple of the batches of all ranks.
    """
    if effective_batch_size is None:
        raise ConfigurationError("effective_batch_size=None: without a Trainer, give the samples per optimizer step.")
    samples = batch_size_of(batch)
    together = ranks * samples
    whole = effective_batch_size // together
    if effective_batch_size % together:
        below = f"{whole * together} and " if whole else ""
        of_ranks = f"{together} samples: {ranks} devices x a batch of {samples}"
        raise ConfigurationError(
            f"effective_batch_size={effective_batch_size} is not a multiple of "
            f"{f'the batch of {samples} samples' if ranks == 1 else of_ranks}. "
            f"Nearest: {below}{(whole + 1) * together}."
        )
    return BatchSplit(
        effective_batch_size=effective_batch_size,
        ranks=ranks,
        loader_batch_size=samples,
        accumulate_grad_batches=whole,
        slice_sizes=(samples,),
    )


class _Devices(NamedTuple):
    number: int
    strategy: str
    host_bytes: int | None


def _plan_of(
    module: nn.Module,
    batch: Any,
    request: PlanRequest,
    whole: BatchSplit,
    forecaster: Forecaster,
    spec: DeviceSpec,
    devices: _Devices,
) -> Plan:
    space = _space(module, request, whole, forecaster, spec, devices)
    found = search_plan(
        request,
        spec,
        form_budget(spec, request, resident_bytes=resident_bytes(module, batch)),
        space,
        forecaster,
        estimate=forecaster.estimate,
        floor=forecaster.floor_bytes,
    )
    fingerprint = fingerprint_of(
        module,
        batch,
        device=spec,
        request=request,
        optimizer=forecaster.optimizer_words,
        loader_batch_size=whole.loader_batch_size,
        accumulate_grad_batches=whole.accumulate_grad_batches,
    )
    notes = found.plan.notes
    if spec.kind == "cuda" and spec.context_high_bytes is None:
        notes += (f"what the context takes on {spec.name} is not known; it counts as nothing in the budget",)
    notes += notes_on_devices(found.plan, space.strategies)
    if found.plan.split.num_slices > 1:
        notes += ("slices were not compared with the undivided batch; MemFit compares them before it trains",)
    return dataclasses.replace(found.plan, fingerprint=fingerprint, notes=notes)


def resident_bytes(module: nn.Module, batch: Any) -> int:
    """Bytes of the distinct storages of a module and a batch, ``meta`` tensors not counted."""
    return storage_bytes([*module.parameters(), *module.buffers(), *tensors_of(batch)])


def _forecaster(
    module: nn.Module,
    batch: Any,
    loss: LossFunction | None,
    optimizer: OptimizerFactory | None,
    *,
    prober: Prober | None,
    rates: DeviceRates | None = None,
    device: DeviceSpec | None = None,
) -> Forecaster:
    return Forecaster(
        program_of(module, loss=loss, optimizer=optimizer),
        batch,
        prober=prober,
        rates=rates,
        target=None if device is None else target_of(device),
    )


def rates_of(device: DeviceSpec, *, cache_dir: Path | None = None) -> DeviceRates | None:
    """How fast a device is: measured on the host, assumed from the vendor's peaks for a GPU; ``None`` if unknown.

    Args:
        device: the device.
        cache_dir: keeps measured rates.
    """
    if device.kind == "cpu":
        return measure_rates(cache_dir=cache_dir)
    if device.bandwidth_bytes_per_second is None or not device.peak_flops.get("fp32"):
        return None
    return roofline_rates(device.name, device.peak_flops, device.bandwidth_bytes_per_second)


def device_precisions(device: DeviceSpec) -> tuple[Precision, ...]:
    """What ``precision="auto"`` may choose from: what a plain Trainer does, and mixed precision where it works.

    With ``float16`` only where a GPU has no units for ``bfloat16``.
    """
    if "bf16-mixed" in device.supported_precisions:
        return ("32-true", "bf16-mixed")
    return ("32-true", "16-mixed") if "16-mixed" in device.supported_precisions else ("32-true",)


def _space(
    module: nn.Module,
    request: PlanRequest,
    whole: BatchSplit,
    forecaster: Forecaster,
    spec: DeviceSpec,
    devices: _Devices,
) -> SearchSpace:
    facts = forecaster.facts
    found = _recomputable(module, request, whole, forecaster)
    obstacle = batch_norm_obstacle(module)
    slicing_reason = None if obstacle is None else f"not sliced: {obstacle}"
    return search_space(
        request,
        whole,
        blocks=found.blocks,
        matched=found.matched,
        recomputed_anyway=found.anyway,
        slicing_reason=slicing_reason,
        precisions=device_precisions(spec),
        implementations=facts.implementations,
        states_reason=facts.quantisation_obstacle,
        strategies=considered_strategies(
            request,
            num_devices=devices.number,
            device_kind=spec.kind,
            strategy=devices.strategy,
            blocks=find_repeated_blocks(module),
            parameter_elements=[each.numel() for each in module.parameters() if each.requires_grad],
            zero_obstacle=facts.zero_obstacle,
        ),
        host_budget_bytes=devices.host_bytes,
    )


def _recomputable(module: nn.Module, request: PlanRequest, whole: BatchSplit, forecaster: Forecaster) -> Recomputable:
    """What may be recomputed; where that is asked for, a traced step tells what it recomputes by itself."""
    asked, seen = request.activation_checkpointing, frozenset[str]()
    if asked != "none":
        seen = forecaster.recomputed_anyway(Candidate(precision=request.precision or "32-true", split=whole))
    return recomputable(module, asked, seen)


def _one_candidate(
    precision: Precision,
    activation_checkpointing: str | Sequence[str],
    optimizer_states: OptimizerStates,
    optimizer_implementation: OptimizerImplementation,
    micro_batch_size: int | None,
) -> PlanRequest:
    """A request that leaves nothing to choose.

    Raises:
        ConfigurationError: if a setting is left open.
    """
    settings = {
        "precision": precision,
        "activation_checkpointing": activation_checkpointing,
        "optimizer_states": optimizer_states,
        "optimizer_implementation": optimizer_implementation,
    }
    for name, value in settings.items():
        if value == "auto":
            raise ConfigurationError(
                f"{name}='auto' leaves a choice, and a forecast is of one setting. Name one, or let make_plan choose."
            )
    return plan_request(
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        optimizer_states=optimizer_states,
        optimizer_implementation=optimizer_implementation,
        micro_batch_size="auto" if micro_batch_size is None else micro_batch_size,
    )


def _candidate(module: nn.Module, batch: Any, request: PlanRequest, forecaster: Forecaster) -> Candidate:
    samples = batch_size_of(batch)
    whole = BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,))
    found = _recomputable(module, request, whole, forecaster)
    space = search_space(
        request,
        whole,
        blocks=found.blocks,
        matched=found.matched,
        recomputed_anyway=found.anyway,
        states_reason=forecaster.facts.quantisation_obstacle if request.optimizer_states == "8bit" else None,
    )
    setting = next(setting for tier in TIERS for setting in space.settings(tier))
    return space.candidate(setting, space.num_slices[0], zero_gradients_early=False)


@contextmanager
def _prober(device: DeviceSpec, probe_operators: bool, cache_dir: Path | None) -> Iterator[Prober | None]:
    if device.kind == "cuda":
        target = target_of(device)
        assert isinstance(target, CudaTarget)
        on_gpu = gpu_prober(device, target, cache_dir=cache_dir) if probe_operators else None
        with ExitStack() as ending:
            if isinstance(on_gpu, GpuProber):
                ending.callback(on_gpu.close)
            yield on_gpu or FormulaProber(target.architecture)
        return
    if not probe_operators:
        yield None
        return
    with OperatorProber(cache_dir=cache_dir) as prober:
        prober.start()
        yield prober
