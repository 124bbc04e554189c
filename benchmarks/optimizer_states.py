"""Optimizer states in 8 bits beside those in 32: bytes, seconds per step, and the losses of a training run.

    python -m benchmarks.optimizer_states [--json PATH] [--markdown PATH] [--picture PATH]

Bytes are those of the real states after steps on the demo's GPT; steps of both forms are timed in turns. The training
runs share weights, data and schedule: their first losses must be equal. Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.child_process import run_child
from benchmarks.figures import save_figure
from benchmarks.machine import Machine, this_machine
from benchmarks.optimizer_states_case import OPTIMIZERS, StateBytes, StatesResult, TrainingResult
from benchmarks.optimizer_states_picture import draw
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text

BYTES_TARGET = 0.005
"""Largest deviation of measured bytes per parameter from those by design, as a share."""
LOSS_TARGET = 0.005
"""Mean difference of the validation losses, as a share of the loss, that is allowed where seeds differ by less."""
BLOCK = 256
"""Elements that share a scale of 4 bytes. Source: bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """Validation losses after the last step, 8 bits against 32 over the same seeds, in nats per byte."""

    full: tuple[float, ...]
    """With states in 32 bits, by seed."""
    quantised: tuple[float, ...]
    """With states in 8 bits, by seed."""

    @classmethod
    def of(cls, runs: Sequence[TrainingResult]) -> LossComparison:
        """Sort runs by their states and seeds."""
        ordered = sorted(runs, key=lambda run: run.seed)
        return cls(
            full=tuple(run.validation_loss for run in ordered if run.optimizer_states == "as-configured"),
            quantised=tuple(run.validation_loss for run in ordered if run.optimizer_states == "8bit"),
        )

    @property
    def difference(self) -> float:
        """Mean over the seeds of the loss in 8 bits less that in 32; positive where 8 bits are worse."""
        return statistics.fmean(b - a for a, b in zip(self.full, self.quantised, strict=True))

    @property
    def allowed(self) -> float:
        """Largest difference that is no miss, in nats per byte."""
        return max(self.spread, LOSS_TARGET * statistics.fmean(self.full))

    @property
    def spread(self) -> float:
        """Largest less smallest loss in 32 bits: what another seed alone changes."""
        return max(self.full) - min(self.full)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each form of each optimizer")
    parser.add_argument("--seeds", type=int, default=3, help="training runs of each form")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--picture", type=Path, help="path without ending: draw a PNG and an SVG (needs matplotlib)")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    states, runs = measure(console, rounds=chosen.rounds, seeds=chosen.seeds, steps=chosen.steps)
    comparison = LossComparison.of(runs)
    console.print(_states_table(states))
    console.print(_loss_title(comparison, chosen.steps))
    console.print(_loss_table(comparison))
    console.print(machine.caption, style="dim")
    missed = missed_targets(states, runs)
    console.print("\n".join(missed) if missed else "all targets met", style="red" if missed else "green")
    results = as_json(states, runs, machine)
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(results, indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(states, comparison, chosen.steps, machine))
    if chosen.picture is not None:
        save_figure(draw(results), chosen.picture)
    return int(bool(missed))


def measure(
    console: Console, *, rounds: int, seeds: int, steps: int
) -> tuple[list[StatesResult], list[TrainingResult]]:
    """Run everything in child processes, one after the other, under a progress bar."""
    case = "benchmarks.optimizer_states_case"
    states, runs = [], []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(OPTIMIZERS) + 2 * seeds)
        for name in OPTIMIZERS:
            progress.update(task, description=f"{name:24}")
            states.append(_states_result(run_child(case, ["states", name, "--rounds", str(rounds)])))
            progress.advance(task)
        for seed in range(seeds):
            for optimizer_states in ("as-configured", "8bit"):
                progress.update(task, description=f"{f'seed {seed}, {optimizer_states}':24}")
                arguments = ["--seed", str(seed), "--optimizer-states", optimizer_states, "--steps", str(steps)]
                found = run_child(case, ["train", *arguments])
                runs.append(TrainingResult(**{**found, "train_losses": tuple(found["train_losses"])}))
                progress.advance(task)
    return states, runs


def _states_result(found: dict[str, Any]) -> StatesResult:
    seconds = {name: tuple(found[name]) for name in ("full_seconds", "quantised_seconds")}
    of_bytes = {name: StateBytes(**found[name]) for name in ("quantised", "kept", "full")}
    return StatesResult(**{**found, **seconds, **of_bytes})


def bytes_by_design(optimizer: str) -> tuple[float, float]:
    """Bytes per parameter with states in 8 bits, scales included, and in 32 bits.

    >>> bytes_by_design("AdamW")
    (2.03125, 8)
    """
    averages = OPTIMIZERS[optimizer].running_averages
    return averages * (1 + 4 / BLOCK), averages * 4


def slowdown(result: StatesResult) -> float:
    """Seconds of a step in 8 bits over those in 32: the median over steps taken one after the other."""
    return statistics.median(b / a for a, b in zip(result.full_seconds, result.quantised_seconds, strict=True))


def missed_targets(states: Sequence[StatesResult], runs: Sequence[TrainingResult]) -> list[str]:
    """The targets that were missed, in words; none if all were met."""
    missed = []
    for result in states:
        in_8_bits, in_32_bits = bytes_by_design(result.optimizer)
        for name, measured, wanted in (
            ("quantised", result.quantised.per_parameter, in_8_bits),
            ("kept", result.kept.per_parameter, in_32_bits),
        ):
            if measured is None or abs(measured / wanted - 1) > BYTES_TARGET:
                missed.append(f"missed: {result.optimizer}: {measured} bytes per {name} parameter, not {wanted}")
    for seed in sorted({run.seed for run in runs}):
        first = {run.train_losses[0] for run in runs if run.seed == seed}
        if len(first) > 1:
            missed.append(f"missed: seed {seed}: first losses {sorted(first)} differ: not the same weights and batch")
    comparison = LossComparison.of(runs)
    if comparison.difference > comparison.allowed:
        missed.append(
            f"missed: validation loss {comparison.difference:+.4f} in 8 bits, allowed {comparison.allowed:+.4f} "
            f"(seeds differ by {comparison.spread:.4f})"
        )
    return missed


def as_json(states: Sequence[StatesResult], runs: Sequence[TrainingResult], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    comparison = LossComparison.of(runs)
    return {
        "benchmark": "optimizer_states",
        "statistic": "bytes of the real states after steps; wall-clock seconds of optimizer.step(); nats per byte",
        "machine": machine.to_dict(),
        "targets": {
            "deviation_of_bytes_per_parameter": BYTES_TARGET,
            "loss_difference": comparison.allowed,
            "missed": missed_targets(states, runs),
        },
        "optimizers": [
            {
                **asdict(result),
                "bytes_per_quantised_parameter": result.quantised.per_parameter,
                "bytes_per_kept_parameter": result.kept.per_parameter,
                "bytes_per_parameter_by_design": bytes_by_design(result.optimizer),
                "slowdown": slowdown(result),
            }
            for result in states
        ],
        "validation_loss": {
            **asdict(comparison),
            "mean_difference": comparison.difference,
            "spread_of_seeds": comparison.spread,
        },
        "runs": [asdict(run) for run in runs],
    }


_COLUMNS = (
    "optimizer",
    "bytes per quantised parameter",
    "per kept parameter",
    "all states, 32 bits",
    "all states, 8 bits",
    "step, 32 bits",
    "step, 8 bits",
    "ratio",
)


def _cells(result: StatesResult) -> list[str]:
    in_8_bits = result.quantised.state_bytes + result.kept.state_bytes + result.table_bytes
    return [
        result.optimizer,
        f"{result.quantised.per_parameter or 0:.4f}",
        f"{result.kept.per_parameter or 0:.4f}",
        f"{result.full.state_bytes / 2**20:.2f} MiB",
        f"{in_8_bits / 2**20:.2f} MiB",
        f"{1000 * statistics.median(result.full_seconds):.1f} ms",
        f"{1000 * statistics.median(result.quantised_seconds):.1f} ms",
        f"{slowdown(result):.1f}",
    ]


def _loss_rows(comparison: LossComparison) -> list[list[str]]:
    rows = [
        [f"seed {seed}", f"{full:.4f}", f"{quantised:.4f}", f"{quantised - full:+.4f}"]
        for seed, (full, quantised) in enumerate(zip(comparison.full, comparison.quantised, strict=True))
    ]
    means = (statistics.fmean(comparison.full), statistics.fmean(comparison.quantised))
    return [*rows, ["mean", *(f"{mean:.4f}" for mean in means), f"{comparison.difference:+.4f}"]]


def _loss_title(comparison: LossComparison, steps: int) -> str:
    return (
        f"Validation loss after {steps} steps of AdamW, nats per byte; the seeds differ by {comparison.spread:.4f} "
        "in 32 bits"
    )


def as_markdown(states: Sequence[StatesResult], comparison: LossComparison, steps: int, machine: Machine) -> str:
    """Both tables."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" + "|--:" * (len(_COLUMNS) - 1) + "|"]
    lines += [f"| {' | '.join(_cells(result))} |" for result in states]
    lines += [
        "",
        f"{_loss_title(comparison, steps)}:",
        "",
        "| run | 32 bits | 8 bits | difference |",
        "|---|--:|--:|--:|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in _loss_rows(comparison)]
    return "\n".join([*lines, "", f"{machine.caption}.", ""])


def _states_table(states: Sequence[StatesResult]) -> Table:
    table = plain_table("States after steps on the demo's GPT, and the time of optimizer.step()")
    table.add_column(_COLUMNS[0], no_wrap=True)
    for column in _COLUMNS[1:]:
        table.add_column(column, justify="right")
    for result in states:
        table.add_row(*_cells(result))
    return table


def _loss_table(comparison: LossComparison) -> Table:
    table = plain_table("Loss of each seed")
    table.add_column("run")
    for column in ("32 bits", "8 bits", "difference"):
        table.add_column(column, justify="right")
    for row in _loss_rows(comparison):
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
