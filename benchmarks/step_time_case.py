"""Predicted and measured step times of one model over its candidates, for ``benchmarks.step_time``.

    python -m benchmarks.step_time_case gpt --rounds 5 --cache-dir DIR

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo import ZooCase, build
from benchmarks.zoo_models import MODELS
from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed
from lightning_memfit.apply.optimizer_levers import with_levers
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.hardware.measure_rates import measure_rates
from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import BatchSplit, Candidate, balanced_slices
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.trace.step_program import Unobserved, program_of, run_window

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
"""Processor time is of use with one thread, on a machine that others use too."""

_TIMED_STEPS = 2
"""Steps that are timed in a row, after one that is not: every other candidate ran before."""
_UNTIMED_ROUNDS = 2  # steps create the states of optimizers, grow the heap and compile the kernels of oneDNN

# Slices, checkpointing, precision and implementation of the optimizer's step; None: states in 8 bits.
_SETTINGS: tuple[tuple[int, str, str, str | None], ...] = (
    *((count, blocks, precision, "fused") for count in (1, 2, 4) for blocks in ("none", "blocks")
      for precision in ("32-true", "bf16-mixed")),
    *((1, "none", precision, how) for precision in ("32-true", "bf16-mixed") for how in ("single-tensor", "foreach")),
    *((1, blocks, precision, None) for blocks in ("none", "blocks") for precision in ("32-true", "bf16-mixed")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CandidateTimes:
    """One candidate, predicted and measured."""

    label: str
    """Such as ``"2 slices, blocks, bf16-mixed, fused"``."""
    harm_tier: int
    """Of the candidate: plans are ranked within one."""
    predicted_seconds: float
    """One optimizer step, from its trace and the device's rates."""
    measured_seconds: tuple[float, ...]
    """The fastest timed step of every round."""

    @property
    def seconds(self) -> float:
        """The fastest step of all rounds: what else runs on the machine only makes steps longer."""
        return min(self.measured_seconds)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.seconds - 1


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """All candidates of one model."""

    model: str
    """Key of ``MODELS``."""
    candidates: tuple[CandidateTimes, ...]
    twins: tuple[tuple[CandidateTimes, CandidateTimes], ...]
    """Candidates that were built and timed twice, as if they were two: what the measurement is worth."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--cache-dir", type=Path, help="holds the device's rates")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    clock = CLOCKS[chosen.clock]
    rates = measure_rates(cache_dir=chosen.cache_dir, quantised=has_bitsandbytes(), clock=clock)
    print(json.dumps(dataclasses.asdict(time_model(chosen.model, rates, chosen.rounds, clock))))


def has_bitsandbytes() -> bool:
    """Whether candidates with states in 8 bits can run."""
    return importlib.util.find_spec("bitsandbytes") is not None


def time_model(name: str, rates: DeviceRates, rounds: int, clock: Clock) -> ModelTimes:
    """Predict all candidates of a model, then run them in turns."""
    candidates = candidates_of(name)
    predicted = dict(zip(candidates, _predicted(name, candidates, rates), strict=True))
    by_prediction = sorted(candidates, key=predicted.__getitem__)
    # The fastest is the one that matters, the middle one stands for the others.
    twins = (by_prediction[0], by_prediction[len(by_prediction) // 2])
    runners = [StepRunner(name, candidate, clock) for candidate in (*candidates, *twins)]
    measured = measure(runners, rounds)
    found = [
        CandidateTimes(
            label=label_of(runner.candidate),
            harm_tier=runner.candidate.harm_tier,
            predicted_seconds=predicted[runner.candidate],
            measured_seconds=times,
        )
        for runner, times in zip(runners, measured, strict=True)
    ]
    own, repeated = found[: len(candidates)], found[len(candidates) :]
    pairs = tuple((own[candidates.index(twin)], again) for twin, again in zip(twins, repeated, strict=True))
    return ModelTimes(model=name, candidates=tuple(own), twins=pairs)


def candidates_of(name: str) -> list[Candidate]:
    """The settings of the levers that are compared; those with states in 8 bits where bitsandbytes is installed."""
    module, batch = build(_case(name))
    samples, blocks = batch_size_of(batch), find_repeated_blocks(module)
    found = []
    for count, checkpointing, precision, implementation in _SETTINGS:
        if implementation is None and not has_bitsandbytes():
            continue
        levers: dict[str, Any] = (
            {"optimizer_states": "8bit"} if implementation is None else {"optimizer_implementation": implementation}
        )
        recomputed = {"activation_checkpointing": "blocks", "checkpointed_modules": blocks}
        split = BatchSplit(
            effective_batch_size=samples, loader_batch_size=samples, slice_sizes=balanced_slices(samples, count)
        )
        levers |= recomputed if checkpointing == "blocks" else {}
        found.append(Candidate(precision=precision, split=split, **levers))  # type: ignore[arg-type]
    return found


def label_of(candidate: Candidate) -> str:
    """Such as ``"2 slices, blocks, bf16-mixed, fused"``."""
    count = candidate.split.num_slices
    how = candidate.optimizer_states if candidate.optimizer_states == "8bit" else candidate.optimizer_implementation
    parts = ("undivided" if count == 1 else f"{count} slices", candidate.activation_checkpointing, candidate.precision)
    return ", ".join([part for part in (*parts, how) if part != "none"])


def _case(name: str) -> ZooCase:
    return ZooCase(name, "32-true", "none", "adamw")


def _predicted(name: str, candidates: Sequence[Candidate], rates: DeviceRates) -> Iterator[float]:
    module, batch = build(_case(name))
    forecaster = Forecaster(program_of(module), batch, prober=None, rates=rates)
    for candidate in candidates:
        seconds = forecaster(candidate).predicted_step_seconds
        assert seconds is not None
        yield seconds


class StepRunner:
    """Runs real steps of one candidate on a module of its own."""

    def __init__(self, name: str, candidate: Candidate, clock: Clock) -> None:
        self.candidate = candidate
        self._clock = clock
        self._module, batch = build(_case(name))
        self._slices = split_by_sizes(batch, candidate.split.slice_sizes)
        self._program = program_of(self._module, step_context=autocast_context(candidate.precision))
        self._optimizer = with_levers(
            self._program.make_optimizer(),
            self._module,
            optimizer_states=candidate.optimizer_states,
            implementation=candidate.optimizer_implementation,
        )

    def step(self) -> float:
        """Seconds of one optimizer step."""
        with checkpointed(self._module, self.candidate.checkpointed_modules), unlogged(self._module):
            start = self._clock()
            run_window(self._program, self._optimizer, self._slices, Unobserved())
            return self._clock() - start


def measure(runners: Sequence[StepRunner], rounds: int) -> list[tuple[float, ...]]:
    """Run all in turns, in another order every round; the fastest step of each round, per runner."""
    order = list(range(len(runners)))
    shuffle = random.Random(0).shuffle
    found: list[list[float]] = [[] for _ in runners]
    torch.manual_seed(0)
    for number in range(_UNTIMED_ROUNDS + rounds):
        shuffle(order)
        for index in order:
            runners[index].step()
            times = [runners[index].step() for _ in range(_TIMED_STEPS)]
            if number >= _UNTIMED_ROUNDS:
                found[index].append(min(times))
    return [tuple(times) for times in found]


if __name__ == "__main__":
    main()
