"""What the user should know of a run before it is planned: its loader, its batch, its rates, its device."""

from __future__ import annotations

from typing import Any

from lightning_memfit.apply.loader import TrainLoader
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.measure_rates import MOST_NOISE
from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.plan import PlanRequest
from lightning_memfit.preconditions import notes_on_offload
from lightning_memfit.search.batch_arithmetic import LoaderPlan, last_window_is_short, optimizer_steps_per_epoch
from lightning_memfit.search.checkpointing import is_compiled
from lightning_memfit.validate.arrived_batch import ArrivedBatch


def notes_of_run(
    trainer: Any,
    module: Any,
    request: PlanRequest,
    *,
    loader: TrainLoader,
    loader_plan: LoaderPlan,
    arrived: ArrivedBatch,
    device: DeviceSpec,
    rates: DeviceRates | None,
) -> tuple[str, ...]:
    """A sentence for each thing.

    Args:
        trainer: the Trainer, fitting.
        module: its LightningModule.
        request: what the user asked for.
        loader: the train loader.
        loader_plan: batch size and accumulation that form the effective batch.
        arrived: the planned batch behind the transfer hooks.
        device: where the fit runs.
        rates: how fast it is; ``None`` if that is not known.
    """
    return (
        *_on_steps(trainer, loader, loader_plan),
        *notes_on_offload(trainer, request),
        *_not_arrived(arrived),
        *_rough_rates(rates),
        *_compiled(module),
        *_on_gpu(device),
    )


def _on_steps(trainer: Any, loader: TrainLoader, loader_plan: LoaderPlan) -> tuple[str, ...]:
    notes = [loader_plan.reason] if loader_plan.rebuilt else []
    batches, accumulate = loader.num_batches_at(loader_plan.rebuilt_batch_size), loader_plan.accumulate_grad_batches
    before = optimizer_steps_per_epoch(loader.num_batches, trainer.accumulate_grad_batches)
    after = optimizer_steps_per_epoch(batches, accumulate)
    if before != after:
        notes.append(f"optimizer steps per epoch: {after} instead of {before}; learning rates are not changed")
    if batches is None:
        notes.append(
            "the train loader has no length: optimizer steps per epoch are not known, and Lightning fetches one batch "
            "ahead, so that two are counted as inputs"
        )
    if last_window_is_short(batches, accumulate):
        notes.append(
            "the last optimizer step of an epoch has fewer batches: it takes the exact mean over its own samples, "
            "where Lightning alone would scale it down"
        )
    if accumulate > 1:
        notes.append("accumulated batches are weighed by their samples; Lightning alone weighs them equally")
    return tuple(notes)


def _not_arrived(arrived: ArrivedBatch) -> tuple[str, ...]:
    if arrived.failure is None:
        return ()
    return (
        f"the transfer hooks cannot run before training begins ({arrived.failure}): the forecast is that of the batch "
        "as the loader gives it, and the warm-up will tell",
    )


def _on_gpu(device: DeviceSpec) -> tuple[str, ...]:
    if device.kind == "cpu":
        return ()
    return (
        "forecast and warm-up on a GPU were built without one and have not been checked on one: the warm-up runs under "
        "the budget as torch's own limit, and training runs without it",
    )


def _rough_rates(rates: DeviceRates | None) -> tuple[str, ...]:
    if rates is None or rates.noise <= MOST_NOISE:
        return ()
    return (
        f"the device's rates were measured while other processes held it up (disturbance {rates.noise:.0%}): predicted "
        "seconds are rough, and so is what was chosen by them",
    )


def _compiled(module: Any) -> tuple[str, ...]:
    names = [name or type(module).__name__ for name, part in module.named_modules() if is_compiled(part)]
    if not names:
        return ()
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"compiled by torch.compile: {shown}. The forecast is that of the same code uncompiled, and the warm-up "
        "measures the compiled one; compiled modules are not recomputed",
    )
