"""What the plugin costs per training step when its plan changes nothing: runs with and without it, interleaved.

    python -m benchmarks.overhead [--rounds 20] [--json PATH]

Planning and warm-up are left out: a step is timed from one ``on_train_batch_start`` to the next, from the fifth batch
on, and the lower quartile of a fit's steps stands for it, since other processes only ever make steps longer. Each round
fits a pair (without, with) and a pair (without, without), in turning order; the second kind is the noise floor. Beside
the times stands a number without noise: the function calls of a step, counted by ``cProfile`` in fits of their own.
Ends with code 1 if the target is missed, or cannot be decided, on the model that it is for.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import logging
import math
import pstats
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.machine import this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from benchmarks.zoo import Batch, ZooCase, ZooModule, build
from benchmarks.zoo_models.feed_forward import MLP
from benchmarks.zoo_models.workload import Workload as Trained
from lightning_memfit import MemFit
from lightning_memfit.plan import Candidate
from lightning_memfit.units import GIB

TARGET = 0.02
"""Overhead of the plugin with a plan that changes nothing, as a share of the step without it."""
FIRST_TIMED_BATCH = 5
COUNTED_STEPS = 10
_AMPLE_BUDGET = 64 * GIB  # so that the plan changes nothing on every machine


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model to train, and for how long."""

    name: str
    build: Callable[[], tuple[LightningModule, Batch]]
    """The same module and batch every time."""
    timed_steps: int
    """Per fit."""
    has_target: bool
    """Whether the target is for it; steps of a millisecond are reported for what they are."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Ratios of pairs, less one."""

    median: float
    lower_quartile: float
    upper_quartile: float
    pairs: int

    @property
    def uncertainty(self) -> float:
        """Half the width of the median's 95 % interval.

        Source: McGill, Tukey and Larsen, Variations of Box Plots (1978): 1.57 interquartile ranges / sqrt(pairs).
        """
        return 1.57 * (self.upper_quartile - self.lower_quartile) / math.sqrt(self.pairs)

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Spread:
        """Summarise at least two ratios."""
        lower, median, upper = statistics.quantiles([ratio - 1 for ratio in ratios], n=4, method="inclusive")
        return cls(median=median, lower_quartile=lower, upper_quartile=upper, pairs=len(ratios))


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What was measured for one workload."""

    name: str
    step_seconds: float
    """Step without the plugin, the median over all fits."""
    ratios: tuple[float, ...]
    """Step with the plugin by that without it, per pair."""
    noise_ratios: tuple[float, ...]
    """The same of pairs without it on both sides."""
    cpu_ratios: tuple[float, ...]
    """As ``ratios``, in processor time: other processes disturb it less."""
    calls_per_step: float
    """Function calls of a step without the plugin, Python's and built-in ones."""
    extra_calls_per_step: float
    """What the plugin adds to them."""
    has_target: bool

    @property
    def overhead(self) -> Spread:
        """Of the plugin."""
        return Spread.of(self.ratios)

    @property
    def noise(self) -> Spread:
        """What the measurement says where there is no difference."""
        return Spread.of(self.noise_ratios)

    @property
    def cpu_overhead(self) -> Spread:
        """Of the plugin, in processor time."""
        return Spread.of(self.cpu_ratios)

    @property
    def is_undecided(self) -> bool:
        """Whether the target is for this workload, and lies within what the pairs leave open."""
        return self.has_target and abs(self.overhead.median - TARGET) <= self.uncertainty

    @property
    def missed(self) -> bool:
        """Whether the target is for this workload, and missed by more than the pairs leave open."""
        return self.has_target and self.overhead.median - self.uncertainty > TARGET

    @property
    def uncertainty(self) -> float:
        """How far the median may be off: the larger of its own 95 % interval and that of the noise floor."""
        return max(self.overhead.uncertainty, self.noise.uncertainty)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One fit's step: the lower quartile of all that were timed."""

    seconds: float
    """Wall clock."""
    cpu_seconds: float
    """Of this process, over all threads."""


class StepTimer(Callback):
    """Times steps from one batch's start to the next one's, so that all of the loop is in them."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._cpu_starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        if batch_idx >= FIRST_TIMED_BATCH:
            self._starts.append(time.perf_counter())
            self._cpu_starts.append(time.process_time())

    @property
    def step(self) -> StepTime:
        """The fit's step, each clock by itself."""
        return StepTime(seconds=_lower_quartile(self._starts), cpu_seconds=_lower_quartile(self._cpu_starts))


def _lower_quartile(starts: Sequence[float]) -> float:
    intervals = [after - before for before, after in itertools.pairwise(starts)]
    return statistics.quantiles(intervals, n=4, method="inclusive")[0]


class CallCounter(Callback):
    """Counts the function calls of ``COUNTED_STEPS`` whole steps."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin or end."""
        if batch_idx == FIRST_TIMED_BATCH:
            self._profile.enable()
        elif batch_idx == FIRST_TIMED_BATCH + COUNTED_STEPS:
            self._profile.disable()

    @property
    def calls_per_step(self) -> float:
        """The mean over the counted steps."""
        total: int = pstats.Stats(self._profile).total_calls  # type: ignore[attr-defined]  # set by its constructor
        return total / COUNTED_STEPS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="pairs of each kind, at least 2")
    parser.add_argument("--json", type=Path, help="write every ratio here")
    chosen = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    console, machine = open_console(), this_machine()
    with progress_bar(console) as progress:
        found = [measure(workload, chosen.rounds, progress) for workload in WORKLOADS]
    console.print(_table(found))
    console.print(machine.caption, style="dim")
    failed = any(result.missed or result.is_undecided for result in found)
    console.print("\n".join(verdict(result) for result in found), style="red" if failed else "green")
    if chosen.json is not None:
        content = {
            "benchmark": "overhead",
            "machine": machine.to_dict(),
            "target": TARGET,
            "rounds": chosen.rounds,
            "workloads": [
                {
                    **asdict(result),
                    "overhead": asdict(result.overhead),
                    "noise": asdict(result.noise),
                    "cpu_overhead": asdict(result.cpu_overhead),
                    "verdict": verdict(result),
                }
                for result in found
            ],
        }
        write_text(chosen.json, json.dumps(content, indent=1))
    return int(failed)


def measure(workload: Workload, rounds: int, progress: Progress) -> Overhead:
    """Fit the pairs of every round; who goes first in a pair changes from round to round."""
    task = progress.add_task(workload.name, total=rounds)
    pairs, noise_pairs = [], []
    with tempfile.TemporaryDirectory() as directory:
        cache_dir = Path(directory)
        _time_step(workload, cache_dir, with_memfit=True)  # fills torch's and the probes' caches, and is not counted
        for number in range(rounds):
            swapped = number % 2 == 1
            pairs.append(_pair(workload, cache_dir, with_memfit=True, swapped=swapped))
            noise_pairs.append(_pair(workload, cache_dir, with_memfit=False, swapped=swapped))
            progress.advance(task)
        calls = {
            with_memfit: _count_calls(workload, cache_dir, with_memfit=with_memfit) for with_memfit in (False, True)
        }
    plain = [pair[0] for pair in pairs] + [step for pair in noise_pairs for step in pair]
    return Overhead(
        name=workload.name,
        step_seconds=statistics.median(step.seconds for step in plain),
        ratios=tuple(other.seconds / base.seconds for base, other in pairs),
        noise_ratios=tuple(other.seconds / base.seconds for base, other in noise_pairs),
        cpu_ratios=tuple(other.cpu_seconds / base.cpu_seconds for base, other in pairs),
        calls_per_step=calls[False],
        extra_calls_per_step=calls[True] - calls[False],
        has_target=workload.has_target,
    )


def _pair(workload: Workload, cache_dir: Path, *, with_memfit: bool, swapped: bool) -> tuple[StepTime, StepTime]:
    """A fit without the plugin and another one; ``swapped`` runs the other one first."""
    order = (with_memfit, False) if swapped else (False, with_memfit)
    first, second = (_time_step(workload, cache_dir, with_memfit=plugged) for plugged in order)
    return (second, first) if swapped else (first, second)


def _time_step(workload: Workload, cache_dir: Path, *, with_memfit: bool) -> StepTime:
    timer = StepTimer()
    _fit(workload, timer, workload.timed_steps, cache_dir, with_memfit=with_memfit)
    return timer.step


def _count_calls(workload: Workload, cache_dir: Path, *, with_memfit: bool) -> float:
    counter = CallCounter()
    _fit(workload, counter, COUNTED_STEPS, cache_dir, with_memfit=with_memfit)
    return counter.calls_per_step


def _fit(workload: Workload, observer: Callback, observed: int, cache_dir: Path, *, with_memfit: bool) -> None:
    """One fit of the workload, watched by a callback."""
    module, batch = workload.build()
    memfit = MemFit(
        precision="32-true",
        optimizer_states="as-configured",
        optimizer_implementation="as-configured",
        budget=_AMPLE_BUDGET,
        cache_dir=cache_dir,
        verbose=False,
    )
    steps = FIRST_TIMED_BATCH + observed + 1
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            plugins=[memfit] if with_memfit else None,
            callbacks=[observer],
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        gc.collect()  # of the last fit, so that this one does not pay for it
        trainer.fit(module, DataLoader([batch] * steps, batch_size=None))  # type: ignore[arg-type]
    if with_memfit:
        _check_no_lever(memfit)


def _check_no_lever(memfit: MemFit) -> None:
    assert memfit.plan is not None
    candidate = memfit.plan.candidate
    if candidate != Candidate(precision="32-true", split=candidate.split) or len(candidate.split.slice_sizes) != 1:
        raise RuntimeError(f"the plan changes something ({candidate.label}): this is not the overhead of a no-op plan")


def _small_gpt() -> tuple[LightningModule, Batch]:
    module, batch = build(ZooCase("gpt", "32-true", "none", "adamw"))
    return module, {name: tensor[:2] for name, tensor in batch.items()}


def _tiny_mlp() -> tuple[LightningModule, Batch]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = MLP(features=16, width=16, depth=1)
        batch = {"inputs": torch.randn(8, 16), "targets": torch.randint(10, (8,))}
    return ZooModule(Trained(network=network, batch=batch), ZooCase("mlp", "32-true", "none", "sgd")), batch


WORKLOADS = (
    Workload(name="small GPT", build=_small_gpt, timed_steps=24, has_target=True),
    Workload(name="tiny MLP", build=_tiny_mlp, timed_steps=300, has_target=False),
)
"""A step that computes something, and one that is little but Lightning's own loop."""


def _table(found: Sequence[Overhead]) -> Table:
    table = plain_table("Time per step with a plan that changes nothing, against no plugin: median (quartiles)")
    table.add_column("model")
    for column in ("step without", "overhead", "noise floor", "overhead, CPU time", "calls a step", "target"):
        table.add_column(column, justify="right")
    for result in found:
        table.add_row(
            result.name,
            f"{1000 * result.step_seconds:.2f} ms",
            _spread_cell(result.overhead),
            _spread_cell(result.noise),
            _spread_cell(result.cpu_overhead),
            f"{result.calls_per_step:,.0f}\n{result.extra_calls_per_step:+,.0f}",
            f"<= {100 * TARGET:.0f} %" if result.has_target else "none",
        )
    return table


def _spread_cell(spread: Spread) -> str:
    quartiles = f"{100 * spread.lower_quartile:+.1f} .. {100 * spread.upper_quartile:+.1f}"
    return f"{100 * spread.median:+.2f} %\n({quartiles})"


def verdict(result: Overhead) -> str:
    """Whether the target was met, and what that is worth."""
    if not result.has_target:
        return f"{result.name}: {100 * result.overhead.median:+.2f} %, no target"
    median, uncertainty = 100 * result.overhead.median, 100 * result.uncertainty
    text = f"{result.name}: {median:+.2f} +- {uncertainty:.2f} %, target {100 * TARGET:.0f} %"
    if result.is_undecided:
        return f"undecided: {text}. Repeat it on a quiet machine, or with more --rounds"
    return f"{'missed' if result.missed else 'met'}: {text}"


if __name__ == "__main__":
    sys.exit(main())
