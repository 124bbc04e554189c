"""Who forecasts a run: one for the step of automatic optimization, one for a ``training_step`` that steps itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_memfit.batch_functions import BatchFunctions
from lightning_memfit.errors import ConfigurationError, TraceError, UnsupportedError
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.manual_forecaster import ManualForecaster
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.observe.snapshot import reachable_tensors
from lightning_memfit.plan import Candidate, Forecast, MemoryBreakdown
from lightning_memfit.probers import Probers
from lightning_memfit.targets import CudaTarget, FormulaProber, Prober, target_of
from lightning_memfit.trace.closure_step import needs_closure
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.step_program import StepProgram, optimizers_of, program_of

if TYPE_CHECKING:
    from lightning_memfit.hardware.rates import DeviceRates

RunForecaster = Forecaster | ManualForecaster
"""Says what candidates of a run need."""


def forecaster_of(
    trainer: Any,
    module: Any,
    batch: Any,
    *,
    functions: BatchFunctions,
    probers: Probers | None,
    resident_batches: int,
    waiting_batch: Any,
    rates: DeviceRates | None,
    callback_bytes: int,
    device: DeviceSpec,
) -> RunForecaster:
    """The forecaster of a run.

    Args:
        trainer: the Trainer, fitting.
        module: its LightningModule.
        batch: one collated batch, as ``training_step`` gets it.
        functions: the user's functions for batches.
        probers: find the operators' hidden temporaries; without them formulas do on a GPU, and nothing on the host.
        resident_batches: batches alive at the same time.
        waiting_batch: one of the others, as the loader gives it.
        rates: how fast the device is.
        callback_bytes: what callbacks hold beside the step.
        device: where the fit runs.

    Raises:
        UnsupportedError: for manual optimization on a GPU.
    """
    target = target_of(device)
    if isinstance(target, CudaTarget) and not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__qualname__} has automatic_optimization=False, and training steps that step their own "
            "optimizers are not forecast for a GPU in this release. Use automatic optimization, or set MEMFIT=off "
            "in the environment."
        )
    prober: Prober | None = FormulaProber(target.architecture) if isinstance(target, CudaTarget) else None
    if probers is not None:
        prober = probers.of(device, target)
    if not module.automatic_optimization:
        assert prober is None or isinstance(prober, OperatorProber)
        return ManualForecaster(
            trainer,
            module,
            batch,
            prober=prober,
            resident_batches=resident_batches,
            waiting_batch=waiting_batch,
            rates=rates,
            callback_bytes=callback_bytes,
        )
    return Forecaster(
        _program(trainer, module),
        batch,
        prober=prober,
        divide=functions.divide,
        samples_of=functions.samples_of,
        resident_batches=resident_batches,
        waiting_batch=waiting_batch,
        rates=rates,
        callback_bytes=callback_bytes,
        target=target,
    )


def _program(trainer: Any, module: Any) -> StepProgram:
    def clip(optimizer: Any) -> None:
        module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    program = program_of(module, clip_gradients=clip)
    return replace(program, make_optimizer=lambda: _the_optimizer(trainer, module))


def floor_forecast(candidate: Candidate, module: Any, batch: Any, error: TraceError) -> Forecast:
    """What a step certainly needs that can neither be traced nor run before training begins."""
    parameters = list(module.parameters())
    by_category = {
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes([parameter for parameter in parameters if parameter.requires_grad]),
        "buffers": storage_bytes(list(module.buffers())),
        "inputs": storage_bytes(reachable_tensors([batch])),
    }
    return Forecast(
        candidate=candidate,
        memory=MemoryBreakdown(
            peak_allocated_bytes=sum(by_category.values()),
            by_category=by_category,
            peak_phase=None,
            num_parameters=sum(parameter.numel() for parameter in parameters),
        ),
        method="floor",
        notes=(
            f"before training begins the step can neither be traced nor run ({error}); the "
            "forecast is only what parameters, gradients, buffers and inputs take, and the warm-up will tell",
        ),
    )


def _the_optimizer(trainer: Any, module: Any) -> Optimizer:
    """The one optimizer that automatic optimization steps.

    Raises:
        ConfigurationError: if there is none, or more than one, or it cannot be accumulated for.
    """
    configured, name = module.configure_optimizers(), f"{type(module).__qualname__}.configure_optimizers()"
    try:
        found = optimizers_of(configured)
    except TraceError as error:
        raise ConfigurationError(
            f"{name} returned a {type(configured).__name__}, which holds no optimizer. Return one, such as "
            "torch.optim.AdamW(self.parameters())."
        ) from error
    if len(found) == 1:
        accumulate = trainer.accumulate_grad_batches  # the planned number, while a step is traced
        if needs_closure(found[0]) and accumulate > 1:
            raise ConfigurationError(
                f"{type(found[0]).__name__} runs its closure several times per optimizer step, so that with "
                f"{accumulate} accumulated batches the gradients of the last one would be added several times. Make "
                "the loader's batch as large as effective_batch_size (MemFit slices it exactly), or use another "
                "optimizer."
            )
        return found[0]
    if not found:
        raise ConfigurationError(
            f"{name} returned no optimizer, so that there is no optimizer step to plan. Return one, such as "
            "torch.optim.AdamW(self.parameters()), or set MEMFIT=off in the environment to run without."
        )
    raise ConfigurationError(
        f"{name} returned {len(found)} optimizers; automatic optimization steps 1. Return one, or set "
        "self.automatic_optimization = False and step them in training_step."
    )
