"""A step predicted by the trace and the same step measured: both for one description, so that they can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed
from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import MemoryBreakdown, Precision
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.op_probe import OperatorProber, Probes
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import program_of, run_window, trace_window


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One optimizer step, predicted and measured."""

    predicted: MemoryBreakdown
    measured_bytes: int
    timeline: Timeline
    probes: Probes

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted.peak_allocated_bytes / self.measured_bytes - 1


class Unobserved:
    """An observer for real steps."""

    def enter(self, phase: Any) -> None:
        return None

    def after_forward(self) -> None:
        return None

    def after_backward(self) -> None:
        return None


@pytest.fixture(scope="session")
def prober() -> Iterator[OperatorProber]:
    """One probing process for all tests."""
    with OperatorProber() as prober:
        yield prober


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Some operators keep a buffer per thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compare(prober: OperatorProber) -> Callable[..., Compared]:
    """Trace, probe and replay one step; run three for real; both peaks."""

    def run(
        module: nn.Module,
        batch: Any,
        *,
        loss: Any = None,
        optimizer: Any = None,
        precision: Precision = "32-true",
        clip: Any = None,
        divide: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
        accumulate: int = 1,
        checkpoint: Sequence[str] = (),
        early: bool = False,
    ) -> Compared:
        program = program_of(
            module, loss=loss, optimizer=optimizer, step_context=autocast_context(precision), clip_gradients=clip
        )
        with checkpointed(module, checkpoint):
            count = len(divide(batch)) * accumulate
            timeline = trace_window(program, batch, divide=divide, micro_steps=count)
        probes = prober.probe(timeline.signatures)
        predicted = predict_memory(timeline, probes.results, zero_gradients_early=early)
        with checkpointed(module, checkpoint), unlogged(module):
            attributes = [value for part in module.modules() for value in tensors_of(vars(part))]
            with AllocationMeter(storage_bytes([*attributes, *tensors_of(batch)])) as meter:
                real = program.make_optimizer()
                for _ in range(3):
                    slices = [part for _ in range(accumulate) for part in divide(batch)]
                    run_window(program, real, slices, Unobserved(), zero_gradients_early=early)
                    del slices
        return Compared(
            predicted=predicted, measured_bytes=meter.peak_allocated_bytes, timeline=timeline, probes=probes
        )

    return run
