"""What the first evaluation steps of a run need, traced: beside the training step, with its own batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lightning_memfit.applied_in_a_trace import autocast_context, floating_dtype
from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.errors import TraceError
from lightning_memfit.measurement import EVALUATION_STEPS
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.plan import Forecast
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.preparation import Preparation
from lightning_memfit.trace.evaluation_step import trace_evaluation_steps
from lightning_memfit.validate.arrived_batch import arrived_batch


def predicted_evaluation_peak(prepared: Preparation, forecast: Forecast, validation: ScannedBatch) -> int | None:
    """Bytes of torch's allocator at the peak of the first evaluation steps; ``None`` if they cannot be traced.

    Also ``None`` for a GPU, whose evaluation steps are measured alone.

    The optimizer's states are those of the candidate, and gradients are gone, as Lightning has it.

    Args:
        prepared: the run.
        forecast: the candidate's, for its states.
        validation: the validation batch.
    """
    if prepared.device.kind == "cuda":
        return None
    module, candidate = prepared.module, forecast.candidate
    arrived, floating = arrived_batch(prepared.trainer, module, validation.batch).batch, floating_dtype(candidate)
    parameters = inspect.signature(module.validation_step).parameters
    takes_loader = len(parameters) >= 3 and validation.dataloader_idx is not None

    def evaluate(batch: Any, index: int) -> Any:
        arguments = (batch, index, validation.dataloader_idx) if takes_loader else (batch, index)
        return module.validation_step(*arguments[: max(1, len(parameters))])

    try:
        timeline = trace_evaluation_steps(
            module,
            evaluate,
            arrived,
            num_steps=1 if validation.epoch_batches == 1 else EVALUATION_STEPS,
            prepare=module.on_validation_epoch_start,
            step_context=autocast_context(candidate.precision),
            floating=floating,
        )
    except TraceError:
        return None
    memory = predict_memory(timeline, prepared.forecaster.probe(timeline.signatures).results)
    states = forecast.memory.by_category.get("optimizer_states", 0)
    beside = replaced_bytes(validation.batch, arrived, floating)
    return memory.peak_allocated_bytes + states + beside + prepared.forecaster.callback_bytes


def replaced_bytes(loaded: Any, arrived: Any, floating: torch.dtype | None) -> int:
    """Bytes of the loader's batch that the step does not get: Lightning's evaluation loop holds them all the same."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(arrived) if not _converted(tensor, floating)}
    return storage_bytes([tensor for tensor in tensors_of(loaded) if tensor.untyped_storage().data_ptr() not in kept])


def _converted(tensor: torch.Tensor, floating: torch.dtype | None) -> bool:
    return floating is not None and tensor.is_floating_point() and tensor.dtype != floating
