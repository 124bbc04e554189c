"""Measures what operators cost beside their kernels: steps of a model so small that its kernels take next to nothing.

What is left of them is Python, autograd, and the loops of the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memfit.hardware.rate_samples import Call, Halves
from lightning_memfit.hardware.rates import CallSeconds, RateCurve
from lightning_memfit.hardware.sampled_curves import Clock, operations_of, seconds_of
from lightning_memfit.predict.operator_kinds import work_of
from lightning_memfit.trace.timeline import Operation
from lightning_memfit.trace.tracer import StepTracer

_MOST_SECONDS = 1e-4
"""More than that per tensor is no cost of the optimizer: another process held the call up."""
_BLOCKS = 6
_REPEATS = 10
_IMPLEMENTATIONS: Mapping[str, Callable[..., Optimizer]] = {
    "single-tensor": partial(torch.optim.AdamW, lr=0.0, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=0.0, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.0, fused=True),
}


def call_seconds(halves: Halves, curves: Mapping[str, Mapping[str, RateCurve]], clock: Clock) -> CallSeconds:
    """Measure the fixed costs.

    Args:
        halves: what is copied between two layers.
        curves: seconds of kernels, whose fixed costs are taken off.
        clock: seconds.
    """
    with torch.random.fork_rng(devices=[]):  # constructors draw weights
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(_BLOCKS)]
    model = nn.Sequential(*blocks)
    fixed = {kind: by_dtype["float32"].fixed_seconds for kind, by_dtype in curves.items() if "float32" in by_dtype}
    forward, backward = _per_operator(halves, model, fixed, clock)
    optimizers = {name: _per_tensor(model, make, clock) for name, make in _IMPLEMENTATIONS.items()}
    return CallSeconds(
        forward=forward,
        backward=backward,
        optimizer_step=min(max(0.0, optimizers["single-tensor"] - fixed["elementwise"]), _MOST_SECONDS),
        foreach_tensor=min(optimizers["foreach"], _MOST_SECONDS),
        fused_tensor=min(optimizers["fused"], _MOST_SECONDS),
        recomputed_block=_per_recomputed_block(blocks, clock),
    )


def _per_operator(halves: Halves, model: nn.Module, fixed: Mapping[str, float], clock: Clock) -> tuple[float, float]:
    """Seconds per operator of a forward and of a backward.

    Between two layers something large is copied, as kernels of real sizes do: they leave Python and autograd with cold
    caches, in which they take two to three times as long (measured: 2 cores of an EPYC, torch 2.13).
    """
    layers = [layer for block in model.children() for layer in block.children()]
    steps = [_layer_times(halves, layers, clock) for _ in range(_REPEATS)]
    found = []
    for operations, runs in zip(_operations_of(layers), zip(*steps, strict=True), strict=True):
        seconds = sum(min(times) for times in zip(*runs, strict=True))
        kinds = [work_of(operation).kind for operation in operations]
        kernels = sum(fixed.get(kind, fixed["elementwise"]) for kind in kinds if kind is not None)
        found.append(max(0.0, seconds - kernels) / sum(1 + operation.views for operation in operations))
    return found[0], found[1]


class _Pause(torch.autograd.Function):
    """Nothing in the forward; tells in the backward when the layer above it is done and that below begins."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, pause: Call) -> torch.Tensor:
        """Pass on."""
        ctx.pause = pause
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass on."""
        ctx.pause()
        return gradient, None


class _Intervals:
    """Times from the end of one pause to the beginning of the next."""

    def __init__(self, halves: Halves, clock: Clock) -> None:
        self.seconds: list[float] = []
        self._flush = halves.flush
        self._clock = clock
        self._began = 0.0

    def begin(self) -> None:
        """Time runs from here on."""
        self._flush()
        self._began = self._clock()

    def end(self) -> None:
        """Note the time."""
        self.seconds.append(self._clock() - self._began)

    def pause(self) -> None:
        """End one interval and begin the next."""
        self.end()
        self.begin()


def _layer_times(halves: Halves, layers: list[nn.Module], clock: Clock) -> tuple[list[float], list[float]]:
    """Seconds of every layer's forward, and of its backward from the last layer to the first."""
    forward, backward = _Intervals(halves, clock), _Intervals(halves, clock)
    hidden = torch.full((2, 8), 0.5, requires_grad=True)
    for layer in layers:
        layer.zero_grad()
        paused = _Pause.apply(hidden, backward.pause)  # type: ignore[no-untyped-call]
        forward.begin()
        hidden = layer(paused)
        forward.end()
    loss = hidden.sum()
    backward.begin()
    loss.backward()  # type: ignore[no-untyped-call]
    return forward.seconds, backward.seconds


def _operations_of(layers: list[nn.Module]) -> tuple[list[Operation], list[Operation]]:
    """Operators of a forward and of the backward."""
    tracer = StepTracer({}, collect_signatures=False)
    with tracer:
        hidden = torch.full((2, 8), 0.5, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden)
        forward = operations_of(tracer)
        hidden.sum().backward()  # type: ignore[no-untyped-call]
    return forward, operations_of(tracer)[len(forward) :]


def _per_recomputed_block(blocks: list[nn.Sequential], clock: Clock) -> float:
    """What a recomputed block costs beside its second forward."""

    def step(recomputing: bool) -> tuple[float, float]:
        hidden = torch.full((2, 8), 0.5, requires_grad=True)
        start = clock()
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if recomputing else block(hidden)
        middle = clock()
        hidden.sum().backward()  # type: ignore[no-untyped-call]
        return middle - start, clock() - start

    plain, recomputed = ([step(recomputing) for _ in range(_REPEATS)] for recomputing in (False, True))
    second_forward = min(forward for forward, _ in plain)
    extra = min(total for _, total in recomputed) - min(total for _, total in plain) - second_forward
    return max(0.0, extra / len(blocks))


def _per_tensor(model: nn.Module, make: Callable[..., Optimizer], clock: Clock) -> float:
    """Seconds of an optimizer step per operator, or per tensor of the lists that its operators take."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(model.parameters())
    optimizer.step()
    best = min(seconds_of(optimizer.step, 1, clock) for _ in range(_REPEATS))
    tracer = StepTracer({}, collect_signatures=False)
    with tracer:
        optimizer.step()
    return best / sum(operation.inner_calls + operation.views for operation in operations_of(tracer))
