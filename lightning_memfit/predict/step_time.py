"""How long one optimizer step takes: the operators of a timeline, each at the device's rate for its kind and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memfit.hardware.rates import CallSeconds, DeviceRates
from lightning_memfit.plan import BatchSplit
from lightning_memfit.predict.new_memory import new_bytes
from lightning_memfit.predict.operator_kinds import Work, work_of
from lightning_memfit.trace.timeline import Operation, Timeline

_ONCE = ("gradient_clipping", "optimizer_step")
"""Phases that come once per optimizer step, however many slices there are."""
_OVERLAP = 1.5
"""Between 1, where moving and computing add up, and infinity, where the longer one hides the other."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Predicted seconds of one optimizer step, and what they are spent on."""

    kernels: float
    """In operators that compute or move memory, those below included."""
    recomputed: float
    """In operators that activation checkpointing repeats."""
    optimizer: float
    """In gradient clipping and the optimizer's own step."""
    calls: float
    """Beside kernels: Python, autograd, the bookkeeping of recomputed blocks."""
    new_memory: float
    """Fetching memory from the system."""

    @property
    def total(self) -> float:
        """The whole step."""
        return self.kernels + self.calls + self.new_memory


def predict_step_seconds(timeline: Timeline, rates: DeviceRates, *, split: BatchSplit | None = None) -> float:
    """Predict the wall-clock seconds of one optimizer step: every slice, recomputation and the optimizer included.

    Args:
        timeline: one optimizer step in the steady state.
        rates: how fast the device is.
        split: sizes of the slices; without them the slices that were not followed count as large as the last followed.

    Ignores: loading of data, logging, and what Lightning's loop does between steps; all candidates share them.
    """
    return step_seconds(timeline, rates, split=split).total


def step_seconds(timeline: Timeline, rates: DeviceRates, *, split: BatchSplit | None = None) -> StepSeconds:
    """As :func:`predict_step_seconds`, divided into what the time is spent on."""
    repeats = _Repeats(timeline, split)
    kernels = recomputed = optimizer = calls = 0.0
    for operation, times in _grouped(timeline, repeats):
        kernel, beside = _kernel_seconds(operation, rates), _call_seconds(operation, rates.calls)
        kernels += times * kernel
        calls += times * beside
        if operation.recomputed:
            recomputed += times * kernel
        if operation.phase in _ONCE:
            optimizer += times * (kernel + beside)
    calls += _recomputed_blocks(timeline, repeats) * rates.calls.recomputed_block
    return StepSeconds(
        kernels=kernels,
        recomputed=recomputed,
        optimizer=optimizer,
        calls=calls,
        new_memory=new_bytes(timeline, rates.allocator, repeats.of) * rates.allocator.seconds_per_new_byte,
    )


class _Repeats:
    """How often what was followed once happens in the whole window.

    The first slice is followed, and the second where there is more than one; the last one followed stands for all
    further ones, whose work grows with their samples.
    """

    def __init__(self, timeline: Timeline, split: BatchSplit | None) -> None:
        self._last = timeline.followed_micro_steps - 1
        self._times = float(timeline.micro_steps - self._last)
        if split is not None and self._last == 1:
            first = split.slice_sizes[0]
            # With accumulation over several batches, the second that was followed is the next batch's first.
            second = first if split.accumulate_grad_batches > 1 else split.slice_sizes[1]
            self._times = (split.loader_batch_size * split.accumulate_grad_batches - first) / second

    def of(self, micro_step: int, phase: str) -> float:
        """Times that an operator of this slice and phase happens in the window."""
        return self._times if micro_step == self._last and phase not in _ONCE else 1.0


def _grouped(timeline: Timeline, repeats: _Repeats) -> Iterator[tuple[Operation, float]]:
    """Operators that cost the same, one of each, with how often they happen: layers repeat themselves."""
    found: dict[Any, Operation] = {}
    times: Counter[Any] = Counter()
    for event in timeline.events:
        if isinstance(event, Operation):
            written = sum(output.allocated_bytes for output in event.outputs)
            key = (
                event.op, event.dtype, event.flops, event.moved_bytes, written, event.phase, event.recomputed,
                event.views, event.inner_calls, event.micro_step,
            )  # fmt: skip
            found.setdefault(key, event)
            times[key] += 1
    for key, operation in found.items():
        yield operation, times[key] * repeats.of(operation.micro_step, operation.phase)


def _kernel_seconds(operation: Operation, rates: DeviceRates) -> float:
    work = work_of(operation)
    if work.kind is None:
        return 0.0
    kind: str = work.kind
    takes_list = _takes_list(operation)
    if operation.phase in _ONCE and not takes_list and kind in ("elementwise", "transcendental"):
        kind = f"cached_{kind}"  # one operator after the other works on the same parameter
    seconds = _seconds(kind, work.amount, operation.dtype, rates)
    if takes_list:  # what a tensor of the list costs at least is in `calls`
        seconds -= rates.curve(kind, operation.dtype)[0].fixed_seconds
    return work.steps * _with_memory(seconds, work, operation, rates)


def _with_memory(seconds: float, work: Work, operation: Operation, rates: DeviceRates) -> float:
    """Add what moving arguments and results takes, where computing does not hide it."""
    moved = operation.moved_bytes / work.steps
    match work.kind:
        case "convolution" | "convolution_backward":
            # Images are brought into the library's own order before, and back after: neither hidden nor wholly beside.
            memory = _seconds(f"depthwise_{work.kind}", moved, operation.dtype, rates)
            return float((seconds**_OVERLAP + memory**_OVERLAP) ** (1 / _OVERLAP))
        case "matmul":
            return max(seconds, _seconds("thin_matmul", moved, operation.dtype, rates))
        case "scatter":
            return seconds + _seconds("fill", sum(o.allocated_bytes for o in operation.outputs), operation.dtype, rates)
        case _:
            return seconds


def _seconds(kind: str, amount: float, dtype: str, rates: DeviceRates) -> float:
    curve, factor = rates.curve(kind, dtype)
    return curve.seconds_of(amount) * factor


def _takes_list(operation: Operation) -> bool:
    return operation.op.startswith(("aten._foreach", "aten._fused_adam", "aten._fused_sgd"))


def _call_seconds(operation: Operation, calls: CallSeconds) -> float:
    if operation.op.startswith("aten._foreach"):
        return operation.inner_calls * calls.foreach_tensor
    if operation.op.startswith("aten._fused"):
        return operation.inner_calls * calls.fused_tensor
    if operation.phase in _ONCE:
        return (1 + operation.views) * calls.optimizer_step
    in_forward = operation.phase == "forward" or operation.recomputed
    return (1 + operation.views) * (calls.forward if in_forward else calls.backward)


def _recomputed_blocks(timeline: Timeline, repeats: _Repeats) -> float:
    """Calls of modules that were recomputed, the outermost of each."""
    blocks, end = 0.0, -1
    for call in sorted((c for c in timeline.calls if c.recomputed), key=lambda c: (c.first_event, -c.end_event)):
        if call.first_event >= end:
            blocks += repeats.of(call.micro_step, "backward")
            end = call.end_event
    return blocks
