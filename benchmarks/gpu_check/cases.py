"""A model at one setting: what is predicted of it, and what real training steps take."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from benchmarks.gpu_check.gauges import Gauge
from benchmarks.gpu_check.workloads import MODELS, Size, models_of
from benchmarks.zoo_models.workload import Workload
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.apply.optimizer_levers import with_levers
from lightning_memfit.errors import is_out_of_memory
from lightning_memfit.forecasting import forecast
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.search.checkpointing import find_repeated_blocks

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Stepping = Literal["foreach", "fused", "8bit"]
STEPS = 3
"""Real optimizer steps: the first makes the states, from the second on they repeat."""
_SCALE = 128.0  # low enough that no step overflows and is skipped


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is predicted and measured."""

    model: str
    """Key of ``workloads.models_of``."""
    size: Size
    """Which of its sizes."""
    precision: Precision
    """In Lightning's words."""
    checkpointing: Literal["none", "blocks"]
    """Whether the repeated blocks are recomputed."""
    stepping: Stepping
    """AdamW over lists of tensors, fused, or with 8-bit states."""
    samples: int | None = None
    """Samples of the batch; ``None`` is the model's own number."""

    @property
    def label(self) -> str:
        """Such as ``"gpt bf16-mixed blocks fused"``."""
        return " ".join((self.model, self.precision, self.checkpointing, self.stepping))


Setting = tuple[Precision, Literal["none", "blocks"], Stepping]


def settings_of(*, has_8bit: bool) -> list[Setting]:
    """The settings at which every model is checked on a GPU, the most telling first."""
    settings: list[Setting] = [
        ("32-true", "none", "foreach"),
        ("bf16-mixed", "none", "fused"),
        ("bf16-mixed", "blocks", "foreach"),
        ("16-mixed", "none", "foreach"),
        ("32-true", "blocks", "fused"),
    ]
    return [*settings[:3], ("32-true", "blocks", "8bit"), *settings[3:]] if has_8bit else settings


def all_cases(size: Size, names: list[str], *, has_8bit: bool) -> Iterator[Case]:
    """Every model at the first setting, then every model at the second: time that is cut short costs settings.

    The larger, published ones come after three settings of the others. Small ones are checked at one setting each.
    """
    if size == "small":
        for place, name in enumerate(names):
            precision, checkpointing, stepping = settings_of(has_8bit=False)[place % 3]
            yield Case(model=name, size=size, precision=precision, checkpointing=checkpointing, stepping=stepping)
        return
    settings = settings_of(has_8bit=has_8bit)
    own, larger = [name for name in names if name in MODELS], [name for name in names if name not in MODELS]
    for group, chosen in ((own, settings[:3]), (larger, settings[:2]), (own, settings[3:]), (larger, settings[2:])):
        for precision, checkpointing, stepping in chosen:
            for name in group:
                yield Case(model=name, size=size, precision=precision, checkpointing=checkpointing, stepping=stepping)


@cache
def _made(model: str, size: Size) -> Workload:
    return models_of(size)[model].workload(size)


def workload_of(case: Case) -> Workload:
    """The network, on the host, and a batch of the case's samples; a network is made once."""
    made = _made(case.model, case.size)
    if case.samples is None:
        return made
    batch = models_of(case.size)[case.model].batch(case.size, case.samples)
    return Workload(network=made.network, batch={k: v.contiguous() for k, v in batch.items()}, loss=made.loss)


def predicted(case: Case, device: str) -> MemoryBreakdown:
    """The forecast of a case, without operator probes on a host, so that it takes a moment."""
    workload = workload_of(case)
    return forecast(
        workload.network,
        workload.batch,
        loss=workload.loss,
        optimizer=adamw,
        device=device,
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
        optimizer_states="8bit" if case.stepping == "8bit" else "as-configured",
        optimizer_implementation="as-configured" if case.stepping == "8bit" else case.stepping,
        probe_operators=False,
    )


def triple(memory: MemoryBreakdown) -> dict[str, int | None]:
    """Allocated, reserved, and the least that is enough."""
    return {
        "predicted_peak_allocated_bytes": memory.peak_allocated_bytes,
        "predicted_peak_reserved_bytes": memory.peak_reserved_bytes,
        "predicted_minimum_feasible_bytes": memory.minimum_feasible_bytes,
    }


def measured(case: Case, gauge: Gauge, *, limit_bytes: int | None = None, steps: int = STEPS) -> dict[str, Any]:
    """Run real steps on the gauge's device, and say what they took.

    Args:
        case: what to run.
        gauge: of the device.
        limit_bytes: most bytes that the allocator may hold beyond what it holds now; ``None`` for no limit.
        steps: how many.

    Returns:
        Peaks in bytes, or ``"ran_out": True`` where memory ran out.
    """
    gauge.clean()
    before = gauge.live_bytes
    counted = gauge.counters()
    gauge.reset()
    seconds: list[float] = []
    error_text = None
    context: AbstractContextManager[None] = (
        nullcontext() if limit_bytes is None else gauge.limited(before + limit_bytes)
    )
    with context:
        try:
            _train(case, gauge, steps, seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error_text = str(error).splitlines()[0]
    after = gauge.counters()
    reserved = gauge.peak_reserved_bytes
    return {
        "allocated_before_bytes": before,
        "measured_peak_allocated_bytes": gauge.peak_bytes - before,
        "measured_peak_reserved_bytes": reserved,
        "measured_device_used_bytes": gauge.used_bytes,
        "measured_step_seconds": min(seconds, default=None),
        "ran_out": error_text is not None,
        "error": error_text,
        **{name: after[name] - counted[name] for name in after},
    }


def _train(case: Case, gauge: Gauge, steps: int, seconds: list[float]) -> None:
    """Optimizer steps in Lightning's order: forward, gradients dropped, backward, step."""
    workload = workload_of(case)
    network = copy.deepcopy(workload.network)
    if case.checkpointing == "blocks":
        checkpoint_modules(network, find_repeated_blocks(network))
    network.to(gauge.device)
    optimizer = with_levers(
        adamw(network.parameters()),
        network,
        optimizer_states="8bit" if case.stepping == "8bit" else "as-configured",
        implementation="as-configured" if case.stepping == "8bit" else case.stepping,
    )
    scaler = torch.amp.GradScaler(gauge.device.type, init_scale=_SCALE, enabled=case.precision == "16-mixed")
    for _ in range(steps):
        start = time.perf_counter()
        batch = {name: tensor.to(gauge.device, copy=True) for name, tensor in workload.batch.items()}
        with _autocast(case, gauge.device.type):
            loss = workload.loss(network, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        del loss
        gauge.synchronize()
        seconds.append(time.perf_counter() - start)


def _autocast(case: Case, device: str) -> AbstractContextManager[Any]:
    if case.precision == "32-true":
        return nullcontext()
    dtype = torch.bfloat16 if case.precision == "bf16-mixed" else torch.float16
    return torch.autocast(device, dtype=dtype, cache_enabled=False)  # as Lightning does


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every case, as configured."""
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-4)
