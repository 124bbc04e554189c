"""The prediction for one published setting: the one place where the benchmark asks the package.

Nothing of the setting runs, and no GPU is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.kept_outputs import with_kept_outputs
from benchmarks.published_models import MODELS, classification_loss
from benchmarks.published_models.perceptrons import perceptron
from benchmarks.published_rows import Setting
from benchmarks.zoo_models.workload import Workload
from lightning_memfit import detect_device, trace_step
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.targets import CudaTarget, FormulaProber, target_of
from lightning_memfit.trace.timeline import ProbeResult


@dataclass(frozen=True, kw_only=True)
class PublishedPrediction:
    """What is predicted of one setting. Bytes of the torch allocator."""

    peak_allocated_bytes: int
    """The most bytes alive at one moment."""
    peak_reserved_bytes: int | None
    """The most bytes that the caching allocator holds; ``None`` where none is modelled."""
    minimum_feasible_bytes: int | None
    """Smallest capacity in which the step survives; ``None`` where it is not known."""
    num_parameters: int
    """Distinct parameters."""
    peak_phase: str | None
    """The phase in which the peak occurs."""
    peak_op: str | None
    """The operator at the peak."""
    seconds: float
    """How long the prediction took, the network's making included."""


def predict(setting: Setting, *, device: str | None = None) -> PublishedPrediction:
    """Predict the peak of one optimizer step.

    Args:
        setting: what the step is made of.
        device: ``None`` for the setting's own; ``"cpu"`` shows what the rules of a CPU say, without reserved bytes.
    """
    begin = time.perf_counter()
    workload = workload_of(setting)
    memory = _memory(workload, setting, device or setting.device)
    return PublishedPrediction(
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        minimum_feasible_bytes=memory.minimum_feasible_bytes,
        num_parameters=memory.num_parameters,
        peak_phase=memory.peak_phase,
        peak_op=memory.peak_op,
        seconds=time.perf_counter() - begin,
    )


def workload_of(setting: Setting) -> Workload:
    """The network, its batch and its loss; all of them on ``meta``."""
    with torch.device("meta"):
        if setting.model == "mlp":
            batch = {
                "inputs": torch.empty(setting.batch, setting.shape),
                "targets": torch.empty(setting.batch, dtype=torch.long),
            }
            network = perceptron(setting.shape, setting.layers)
            return Workload(network=network, batch=batch, loss=classification_loss)
        model = MODELS[setting.model]
        batch = model.batch(setting.batch, setting.shape)
        return Workload(network=model.make(), batch=batch, loss=model.loss)


def _memory(workload: Workload, setting: Setting, device: str) -> MemoryBreakdown:
    early = setting.zero_gradients == "before forward"
    timeline = trace_step(
        workload.network,
        workload.batch,
        loss=workload.loss,
        optimizer=partial(_optimizer, setting),
        device=device,
        precision=setting.precision,  # type: ignore[arg-type]  # checked by trace_step
        activation_checkpointing=setting.activation_checkpointing,
        optimizer_states="8bit" if setting.optimizer_implementation == "8bit" else "as-configured",
        micro_batch_size=setting.micro_batch,
    )
    timeline = with_kept_outputs(timeline, setting.kept_outputs)
    target = target_of(detect_device(device))
    probes: Mapping[int, ProbeResult] = {}
    if isinstance(target, CudaTarget):
        architecture = replace(target.architecture, cublas_workspace_config=setting.cublas_workspace)
        target = replace(target, architecture=architecture)
        probes = FormulaProber(target.architecture).probe(timeline.signatures).results
    return target.memory(timeline, probes, zero_gradients_early=early)


def _optimizer(setting: Setting, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Over those that train, with the implementation named: the parameters of a trace let torch choose another."""
    flags = _IMPLEMENTATIONS.get(setting.optimizer_implementation, {})
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = OPTIMIZERS[setting.optimizer](trained, **flags)
    if setting.zero_gradients == "in place":
        # As until torch 1.13 by default.
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return optimizer


def _adafactor(parameters: list[nn.Parameter]) -> Optimizer:
    """As transformers' Trainer configures it."""
    from transformers.optimization import Adafactor

    optimizer: Optimizer = Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False)
    return optimizer


_IMPLEMENTATIONS: Mapping[str, Mapping[str, bool]] = {
    "single-tensor": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": _adafactor,
}
"""By the word in the data."""
