"""What one trace costs: Llama-shaped modules of 125M to 70B parameters, without their weights.

    python -m benchmarks.planning_cost [--sizes 125M 7B] [--precision 32-true] [--json PATH] [--markdown PATH]

Each trace runs in a fresh process, the best of three counts. Beside it torch's own ``MemTracker``, which follows the
same step under fake tensors. Sequence 2048, batch 1, AdamW. Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.child_process import ChildFailedError, run_child
from benchmarks.llama import SHAPES
from benchmarks.machine import Machine, this_machine
from benchmarks.planning_case import TraceCost
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from lightning_memfit.units import GIB, format_bytes

SECONDS_TARGETS = {"7B": 7.0, "70B": 20.0}
"""Wall-clock seconds of one trace, best of the runs."""
RSS_TARGET_BYTES = GIB
"""Highest resident set size of the tracing process, imports included, for every size."""


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """One size, traced by both tools."""

    size: str
    """Key of ``llama.SHAPES``."""
    memfit: TraceCost
    """The fastest run."""
    mem_tracker: TraceCost | str
    """The fastest run of torch's tracker, or why there is none."""

    @property
    def missed(self) -> list[str]:
        """The targets that this size missed, in words."""
        missed = []
        limit = SECONDS_TARGETS.get(self.size)
        if limit is not None and self.memfit.seconds > limit:
            missed.append(f"missed: {self.size} took {self.memfit.seconds:.1f} s, target {limit:.0f} s")
        if self.memfit.peak_rss_bytes > RSS_TARGET_BYTES:
            held = format_bytes(self.memfit.peak_rss_bytes)
            missed.append(f"missed: {self.size} held {held}, target {format_bytes(RSS_TARGET_BYTES)}")
        return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--runs", type=int, default=3, help="processes per size and tool; the fastest counts")
    parser.add_argument("--timeout", type=float, default=180, help="seconds after which a process is given up")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    results = measure(chosen.sizes, chosen.precision, chosen.runs, chosen.timeout, console)
    console.print(_table(results, chosen.precision))
    console.print(machine.caption, style="dim")
    missed = [line for result in results for line in result.missed]
    console.print("\n".join(missed) if missed else _targets_met(results), style="red" if missed else "green")
    settings = {"precision": chosen.precision, "runs": chosen.runs, "timeout_seconds": chosen.timeout}
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(results, settings, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(results, settings, machine))
    return int(bool(missed))


def measure(
    sizes: Sequence[str], precision: str, runs: int, timeout_seconds: float, console: Console
) -> list[SizeResult]:
    """Trace every size with both tools, under a progress bar.

    Raises:
        ChildFailedError: if MemFit's own trace fails or does not end in time.
    """
    results = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=2 * runs * len(sizes))
        for size in sizes:
            found: dict[str, TraceCost | str] = {}
            for tool in ("memfit", "mem_tracker"):
                progress.update(task, description=f"{size:5}{tool:12}")
                found[tool] = _best(size, precision, tool, runs, timeout_seconds, lambda: progress.advance(task))
            memfit = found["memfit"]
            if isinstance(memfit, str):
                raise ChildFailedError(f"{size}: {memfit}")
            results.append(SizeResult(size=size, memfit=memfit, mem_tracker=found["mem_tracker"]))
    return results


def _best(size: str, precision: str, tool: str, runs: int, timeout_seconds: float, advance: Any) -> TraceCost | str:
    """The fastest of the runs; the reason if one is given up, since the others would be too."""
    costs = []
    failure = None
    for _ in range(runs):
        if failure is None:
            try:
                arguments = [size, "--precision", precision, "--tool", tool]
                costs.append(
                    TraceCost(**run_child("benchmarks.planning_case", arguments, timeout_seconds=timeout_seconds))
                )
            except subprocess.TimeoutExpired:
                failure = f"timed out after {timeout_seconds:.0f} s"
            except ChildFailedError as error:
                failure = f"failed: {str(error).splitlines()[-1][:80]}"
        advance()
    return min(costs, key=lambda cost: cost.seconds) if failure is None else failure


def as_json(results: Sequence[SizeResult], settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "planning_cost",
        "machine": machine.to_dict(),
        "settings": settings,
        "targets": {
            "seconds": SECONDS_TARGETS,
            "peak_rss_bytes": RSS_TARGET_BYTES,
            "missed": [line for result in results for line in result.missed],
        },
        "sizes": [asdict(result) for result in results],
    }


def as_markdown(results: Sequence[SizeResult], settings: dict[str, Any], machine: Machine) -> str:
    """The table for the README."""
    lines = [
        "| Llama-shaped | operators | predicted peak | one trace | target | CPU | host memory | torch MemTracker |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    about = (
        f"Batch 1, sequence 2048, {settings['precision']}, AdamW; each trace in a fresh process, best of "
        f"{settings['runs']}; imports left out of the seconds."
    )
    return "\n".join([*lines, "", f"{about} Host memory is the process's highest RSS. {machine.caption}.", ""])


def _cells(result: SizeResult) -> list[str]:
    memfit, other = result.memfit, result.mem_tracker
    limit = SECONDS_TARGETS.get(result.size)
    return [
        f"{result.size} ({memfit.num_parameters / 1e9:.3g}B parameters)",
        f"{memfit.num_operations:,}",
        format_bytes(memfit.predicted_peak_bytes),
        f"{memfit.seconds:.1f} s",
        "" if limit is None else f"<= {limit:.0f} s",
        f"{memfit.cpu_seconds:.1f} s",
        format_bytes(memfit.peak_rss_bytes),
        other if isinstance(other, str) else f"{other.seconds:.1f} s, {_agreement(memfit, other)}",
    ]


def _agreement(memfit: TraceCost, other: TraceCost) -> str:
    difference = other.predicted_peak_bytes - memfit.predicted_peak_bytes
    if difference == 0:
        return "the same peak"
    return f"peak {100 * difference / memfit.predicted_peak_bytes:+.2f} %"


def _table(results: Sequence[SizeResult], precision: str) -> Table:
    table = plain_table(f"One trace: {precision}, AdamW, batch 1, sequence 2048")
    table.add_column("Llama", no_wrap=True)
    for column in ("operators", "predicted\npeak", "one trace", "target", "CPU", "host\nmemory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("torch MemTracker", min_width=21)
    for result in results:
        table.add_row(result.size, *_cells(result)[1:])
    return table


def _targets_met(results: Sequence[SizeResult]) -> str:
    timed = [
        f"{result.size} {result.memfit.seconds:.1f} s <= {SECONDS_TARGETS[result.size]:.0f} s"
        for result in results
        if result.size in SECONDS_TARGETS
    ]
    held = max(result.memfit.peak_rss_bytes for result in results)
    return f"met: {', '.join([*timed, f'host memory {format_bytes(held)} <= {format_bytes(RSS_TARGET_BYTES)}'])}"


if __name__ == "__main__":
    sys.exit(main())
