"""What a memory warm-up measured: the values beside the plan. Frozen, plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `plan.py` offers these classes too, and hence imports this module
    from lightning_memfit.plan import Candidate


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """Time and calls of one operator in the profiled steps."""

    name: str
    """Operator name as the profiler shows it."""
    self_seconds: float
    """Time in the operator itself over all profiled steps, in seconds."""
    calls: int
    """Number of calls."""


@dataclass(frozen=True, kw_only=True)
class TimedPlan:
    """A candidate that was run for real because it was predicted to be among the fastest."""

    candidate: Candidate
    """The setting of the levers."""
    predicted_step_seconds: float | None
    """Wall-clock seconds of one optimizer step as predicted."""
    measured_step_seconds: float | None
    """As measured, without the profiler; ``None`` if it did not fit."""
    measured_peak_allocated_bytes: int | None
    """Its measured peak; ``None`` if it ran out of memory."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStatesMeasurement:
    """What the optimizer's states really are after a step."""

    optimizer: str
    """Qualified name of the optimizer's class."""
    quantised_parameters: int
    """Parameter elements whose states are quantised."""
    quantised_bytes: int
    """Bytes of their states, scales included."""
    kept_parameters: int
    """Parameter elements whose states are kept in 32 bits."""
    kept_bytes: int
    """Bytes of their states."""
    saved_bytes: int
    """Bytes that the states in 32 bits would take beyond these."""
    kept_reason: str
    """Why some are kept, in words; empty if none are."""


EVALUATION_STEPS = 2
"""Evaluation steps of a warm-up, if there are as many: the second shows what the first one keeps."""


@dataclass(frozen=True, kw_only=True)
class SecondsSpent:
    """What MemFit took of a run before its first step, in wall-clock seconds."""

    planning: float
    """Looking at data and device, and searching; also waiting for an equal run that does."""
    proving: float
    """The warm-up, with all plans that it ran; 0 where none ran."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the memory warm-up measured at the final settings."""

    measured_peak_allocated_bytes: int
    """Most bytes of the torch allocator alive at one moment of the profiled training steps."""
    measured_evaluation_peak_bytes: int | None
    """The same for the first evaluation steps; ``None`` if the run does not validate, or if they ran out of memory."""
    evaluation_ran_out: bool = False
    """Whether the evaluation steps ran out of memory."""
    evaluation_kept_bytes: int = 0
    """Bytes per evaluation batch that the module keeps until the end of the evaluation, such as predictions: measured
    with the largest batch, and scaled to the mean bytes of those that were looked at."""
    evaluation_batches: int | None = None
    """Batches of one evaluation, over all its loaders; ``None`` if unknown."""
    evaluation_batch: str | None = None
    """Which validation batch that step had, and how it was found, in words."""
    measured_peak_rss_bytes: int | None
    """Highest resident set size seen during the warm-up; ``None`` where the system does not tell."""
    measured_peak_reserved_bytes: int | None = None
    """Most bytes that the caching allocator held during the profiled training steps; ``None`` on a host."""
    measured_device_total_bytes: int | None = None
    """What the driver called used on the device at their end, other processes included; ``None`` on a host."""
    measured_peak_bytes_by_rank: tuple[int, ...] = ()
    """By rank, what ``measured_peak_allocated_bytes`` is the largest of; empty on one device."""
    measured_step_seconds: float
    """Wall-clock seconds of one optimizer step: the fastest of those that were run without the profiler."""
    profiled_steps: int
    """Optimizer steps that were run; 0 if ``training_step`` gave no loss, so that nothing is proven."""
    costliest_ops: tuple[OperatorCost, ...] = ()
    """The operators that took the most time."""
    timed_plans: tuple[TimedPlan, ...] = ()
    """The candidates that were run for their speed, the one taken included; empty if there was no choice."""
    optimizer_states: OptimizerStatesMeasurement | None = None
    """The verified format of the optimizer's states; ``None`` where they are as configured."""

    @property
    def predicted_evaluation_peak_bytes(self) -> int | None:
        """What was measured of the first evaluation steps, and what the module keeps of the others."""
        measured = self.measured_evaluation_peak_bytes
        if measured is None:
            return None
        further = max(0, (self.evaluation_batches or 0) - EVALUATION_STEPS)
        return measured + self.evaluation_kept_bytes * further

    @property
    def measured_peak_bytes(self) -> int:
        """The larger of the training and the evaluation peak."""
        return max(self.measured_peak_allocated_bytes, self.measured_evaluation_peak_bytes or 0)
