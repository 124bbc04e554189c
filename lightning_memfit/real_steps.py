"""Real steps of a candidate on the live Trainer: the warm-up of this rank, and how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from torch.utils.checkpoint import CheckpointError

from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.apply.fsdp2 import start_anew, underway
from lightning_memfit.apply.quantised_states import verify_all_quantised
from lightning_memfit.apply.step_levers import StepLevers
from lightning_memfit.errors import first_line, is_out_of_memory
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.observe.cuda_memory import limit_of, meter_of
from lightning_memfit.plan import Budget, Candidate, Forecast, Measurement
from lightning_memfit.preparation import Preparation
from lightning_memfit.ranks import Ranks
from lightning_memfit.validate.warmup import run_warmup, time_steps

WARMING_UP = "running the memory warm-up"
"""What is being done, for messages."""
TIMED_SECONDS = 0.5
"""Seconds of unprofiled steps with which each of the nearly fastest plans is timed; at least one step."""


@dataclass(frozen=True, kw_only=True)
class Unrecomputable:
    """Why modules cannot be recomputed, as the warm-up found."""

    error: str
    """What one of them does, in sentences."""
    reason: str
    """The same in few words."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a warm-up ended."""

    measurement: Measurement | None = None
    """What was measured; ``None`` where memory ran out, or modules cannot be recomputed."""
    mismatch: Unrecomputable | None = None
    """Why modules cannot be recomputed."""


class RealSteps:
    """Runs candidates on this rank."""

    def __init__(
        self,
        prepared: Preparation,
        levers: StepLevers,
        validation: ScannedBatch | None,
        *,
        ranks: Ranks,
        leave_gpu: Callable[[], None] = lambda: None,
    ) -> None:
        """Run nothing yet.

        Args:
            prepared: what was looked at.
            levers: puts candidates on the Trainer.
            validation: the largest validation batch; ``None`` if the run does not validate.
            ranks: the processes that train together.
            leave_gpu: ends what a search left running on the GPU, before anything is measured there.
        """
        self._prepared = prepared
        self._levers = levers
        self._validation = validation
        self._ranks = ranks
        self._leave_gpu = leave_gpu

    def put_on(self, candidate: Candidate) -> None:
        """Let the Trainer run a candidate."""
        self._levers.put_on(candidate)

    def take_off(self) -> None:
        """Take the levers back, but those of the optimizer."""
        self._levers.take_off()

    @property
    def notes(self) -> tuple[str, ...]:
        """What refers to the optimizer as configured and could not follow."""
        return self._levers.notes

    def warm_up(self, forecast: Forecast, *, timed: bool) -> Ran:
        """Run the memory warm-up of the candidate that is on.

        Args:
            forecast: its forecast.
            timed: whether steps are timed without the profiler, too.
        """
        candidate, request = forecast.candidate, self._prepared.request
        verify = (
            partial(verify_all_quantised, module=self._prepared.module)
            if candidate.optimizer_states == "8bit"
            else None
        )
        self._leave_gpu()
        measurement = mismatch = None
        try:
            with self._prepared.loaders_in_sight(), self._limited():
                measurement = run_warmup(
                    trainer=self._prepared.trainer,
                    module=self._prepared.module,
                    batch=self._prepared.batch,
                    validation_batch=None if self._validation is None else self._validation.batch,
                    accumulate_grad_batches=candidate.split.accumulate_grad_batches,
                    num_profiled_steps=request.num_profiled_steps,
                    spare_bytes=_spare_bytes(self._prepared.device, self._prepared.budget, forecast),
                    resident_batches=self._prepared.resident_batches,
                    meter=meter_of(self._prepared.trainer.strategy.root_device),
                    timed_seconds=TIMED_SECONDS if timed else 0.0,
                    verify_states=verify,
                    validation_loader=None if self._validation is None else self._validation.dataloader_idx,
                    validation_batches=None if self._validation is None else self._validation.epoch_batches,
                    agreed=self._ranks.mean,
                )
        except Exception as error:
            mismatch = self._mismatch(error, candidate)
            if mismatch is None and not self._may_run_out(error):
                raise
        # Outside of the except block: the error's traceback keeps the step's tensors alive.
        if measurement is not None and self._validation is not None:
            kept = round(measurement.evaluation_kept_bytes * self._validation.mean_share)
            measurement = replace(measurement, evaluation_batch=self._validation.describe(), evaluation_kept_bytes=kept)
        return Ran(measurement=measurement, mismatch=mismatch)

    def settle(self, forecast: Forecast) -> Unrecomputable | None:
        """Run two steps that nothing is measured of; why modules cannot be recomputed, if they show it."""
        try:
            with self._prepared.loaders_in_sight():
                for _ in range(2):
                    time_steps(
                        trainer=self._prepared.trainer,
                        module=self._prepared.module,
                        batch=self._prepared.batch,
                        seconds=0.0,
                        accumulate_grad_batches=forecast.candidate.split.accumulate_grad_batches,
                        spare_bytes=_spare_bytes(self._prepared.device, self._prepared.budget, forecast),
                        agreed=self._ranks.mean,
                    )
        except Exception as error:
            mismatch = self._mismatch(error, forecast.candidate)
            if mismatch is None:
                raise
            return mismatch
        return None

    def retime(self, forecast: Forecast) -> float:
        """Seconds of a step; infinite where it does not run a second time, so that the first time counts."""
        self._levers.put_on(forecast.candidate)
        self._leave_gpu()
        try:
            with self._prepared.loaders_in_sight(), self._limited():
                return time_steps(
                    trainer=self._prepared.trainer,
                    module=self._prepared.module,
                    batch=self._prepared.batch,
                    seconds=TIMED_SECONDS,
                    accumulate_grad_batches=forecast.candidate.split.accumulate_grad_batches,
                    spare_bytes=_spare_bytes(self._prepared.device, self._prepared.budget, forecast),
                    agreed=self._ranks.mean,
                )
        except Exception as error:
            if not self._may_run_out(error):
                raise
        return math.inf

    def _mismatch(self, error: Exception, candidate: Candidate) -> Unrecomputable | None:
        """Why modules cannot be recomputed, if an error says so; on several ranks only where it does on all of them.

        Raises:
            Exception: the error itself, where others wait for this rank in the midst of the step.
        """
        if not candidate.checkpointed_modules:
            return None  # of a checkpoint of the user's own
        if isinstance(error, CheckpointError):
            found = _gave_something_else(error)
        elif _is_of_the_compiler(error):
            found = _not_compiled(error)
        else:
            return None
        sharding, module = self._prepared.sharding, self._prepared.module
        if sharding is not None and sharding.engine == "deepspeed":
            error.add_note(
                "MemFit does not plan again: DeepSpeed's engine cannot leave a backward that has begun. Set "
                "MemFit(activation_checkpointing='none')."
            )
            return None
        self._ranks.alike(error, f"{type(error).__name__}, under way: {underway(module)}", doing=WARMING_UP)
        start_anew(module)
        return found

    def _may_run_out(self, error: Exception) -> bool:
        """Whether memory ran out and nobody waits in the midst of the step: others would wait for ever."""
        return self._ranks.is_alone and is_out_of_memory(error)

    def _limited(self) -> AbstractContextManager[None]:
        return limit_of(self._prepared.trainer.strategy.root_device, self._prepared.budget.budget_bytes)


def _gave_something_else(error: CheckpointError) -> Unrecomputable:
    said = first_line(error).removeprefix("torch.utils.checkpoint: ").rstrip(".")
    return Unrecomputable(
        error=(
            f"computes something else when it is recomputed ({said}). Its result depends on more than its inputs and "
            "torch's random numbers, such as a counter."
        ),
        reason=f"gave something else than in its first pass ({said})",
    )


def _is_of_the_compiler(error: Exception) -> bool:
    return any(base.__module__ == "torch._dynamo.exc" for base in type(error).__mro__)


def _not_compiled(error: Exception) -> Unrecomputable:
    """A function, or a ``forward``, under ``torch.compile`` calls the module: which one cannot be seen beforehand."""
    said = first_line(error).rstrip(".")
    why = f"is called by code under torch.compile, which cannot be compiled when it is recomputed ({said})"
    return Unrecomputable(error=f"{why}.", reason=why)


def _spare_bytes(device: DeviceSpec, budget: Budget, forecast: Forecast) -> int:
    """What the plan's peak leaves of the host's memory; the snapshot of the warm-up shares it."""
    if device.kind == "cuda":
        return detect_device("cpu").available_bytes
    return budget.capacity_bytes - budget.non_torch_bytes - forecast.predicted_peak_bytes
