"""The way out where a step cannot be traced: two small real steps, and a straight line through their peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memfit.batch_tree import map_tensors, tensors_of
from lightning_memfit.errors import TraceError
from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.observe.uncompiled import uncompiled
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.trace.step_program import StepProgram, Unobserved, run_window


@dataclass(frozen=True, kw_only=True)
class PeakLine:
    """A peak that grows in a straight line with the micro-batch."""

    fixed_bytes: int
    """Peak of no samples."""
    bytes_per_sample: int
    """Rise per sample of the micro-batch."""
    sizes: tuple[int, int]
    """The micro-batch sizes that were measured."""
    parameter_bytes: int
    """Bytes of the parameters, the only category that is known for sure."""
    num_parameters: int
    """Distinct parameters."""

    def at(self, micro_batch_size: int) -> MemoryBreakdown:
        """The extrapolated peak for a micro-batch of this many samples."""
        peak = max(self.fixed_bytes + self.bytes_per_sample * micro_batch_size, self.parameter_bytes)
        return MemoryBreakdown(
            peak_allocated_bytes=peak,
            by_category={"parameters": self.parameter_bytes, "unattributed": peak - self.parameter_bytes},
            peak_phase=None,
            num_parameters=self.num_parameters,
        )


def measure_small_steps(
    program: StepProgram,
    batch: Any,
    divide: Callable[[Any, Sequence[int]], Sequence[Any]],
    *,
    samples: int,
    accumulates: bool,
    zero_gradients_early: bool,
    floating: torch.dtype | None = None,
) -> PeakLine:
    """Run two optimizer steps at each of two small micro-batches for real, and put everything back.

    Args:
        program: the step; its module's tensors are real.
        batch: one collated batch.
        divide: (batch, sizes) to slices.
        samples: samples in the batch.
        accumulates: whether an optimizer step has more than one slice, so that gradients live through a forward.
        zero_gradients_early: gradients are dropped before the forward.
        floating: dtype that the module's parameters must have; the batch is converted to it.

    Raises:
        TraceError: if the batch has fewer than two samples, so that there is no line, or the module is on ``meta`` or
            of another dtype.
    """
    if floating is not None:
        _check_dtype(program.module, floating)
        batch = map_tensors(batch, lambda tensor: tensor.to(floating) if tensor.is_floating_point() else tensor)
    if any(tensor.device.type == "meta" for tensor in (*program.module.parameters(), *tensors_of(batch))):
        raise TraceError("tensors on meta cannot be run")
    if samples < 2:
        raise TraceError(f"a batch of {samples} sample is too small to measure two sizes")
    small, large = (2, 4) if samples >= 4 else (1, 2)
    parts = {size: divide(batch, (size, samples - size))[0] if size < samples else batch for size in (small, large)}
    peaks = {size: _peak(program, batch, parts[size], 1 + accumulates, zero_gradients_early) for size in (small, large)}
    slope = max(0, (peaks[large] - peaks[small]) // (large - small))
    parameters = list(program.module.parameters())
    return PeakLine(
        fixed_bytes=peaks[small] - slope * small,
        bytes_per_sample=slope,
        sizes=(small, large),
        parameter_bytes=storage_bytes(parameters),
        num_parameters=sum(parameter.numel() for parameter in parameters),
    )


def _check_dtype(module: torch.nn.Module, floating: torch.dtype) -> None:
    others = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()} - {floating}
    if others:
        raise TraceError(f"parameters are {sorted(map(str, others))[0]}, and real steps need them in {floating}")


def _peak(program: StepProgram, batch: Any, part: Any, repeats: int, zero_gradients_early: bool) -> int:
    module = program.module
    with take_snapshot(module), unlogged(module), uncompiled():
        for parameter in module.parameters():
            parameter.grad = None
        optimizer = program.make_optimizer()
        resident = storage_bytes([*module.parameters(), *module.buffers(), *tensors_of(batch)])
        with AllocationMeter(resident) as meter:
            for _ in range(2):
                run_window(
                    program, optimizer, [part] * repeats, Unobserved(), zero_gradients_early=zero_gradients_early
                )
        return meter.peak_allocated_bytes
