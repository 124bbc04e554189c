"""What planning costs: Llama-shaped modules of 125M to 70B parameters, without their weights.

    python -m benchmarks.planning_cost [--sizes 125M 7B] [--parts trace plan] [--json PATH] [--markdown PATH]

*One trace*: sequence 2048, batch 1, AdamW, beside torch's own ``MemTracker``, which follows the same step under fake
tensors. *A whole plan*: ``make_plan`` for a batch of 8 over precision, recomputed blocks (none, some, all), slices,
early zeroing and the optimizer's implementation, for 60 % of what the step needs as it is, so that the search has work.
Each runs in a fresh process, the best of three counts. Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.child_process import ChildFailedError, run_child
from benchmarks.llama import SHAPES
from benchmarks.machine import Machine, this_machine
from benchmarks.planning_case import PLANNED_BATCH, PlanCost, TraceCost
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from lightning_memfit.units import GIB, format_bytes

SECONDS_TARGETS = {"7B": 7.0, "70B": 20.0}
"""Wall-clock seconds of one trace, best of the runs."""
PLAN_SECONDS_TARGETS = {"7B": 12.0, "70B": 40.0}
"""Wall-clock seconds of one whole plan, best of the runs."""
RSS_TARGET_BYTES = GIB
"""Highest resident set size of the process that traces or plans, imports included, for every size."""
BUDGET_PERCENT = 60
"""Budget of a plan in percent of the peak without any lever, in 32-true."""

Cost = TypeVar("Cost", TraceCost, PlanCost)


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
        return _missed(self.size, self.memfit, SECONDS_TARGETS, "one trace of ")


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """One size, planned."""

    size: str
    """Key of ``llama.SHAPES``."""
    unconstrained_bytes: int
    """Predicted peak without any lever."""
    plan: PlanCost
    """The fastest run."""

    @property
    def missed(self) -> list[str]:
        """The targets that this size missed, in words."""
        return _missed(self.size, self.plan, PLAN_SECONDS_TARGETS, "the whole plan of ")


def _missed(size: str, cost: TraceCost | PlanCost, targets: dict[str, float], what: str) -> list[str]:
    missed = []
    limit = targets.get(size)
    if limit is not None and cost.seconds > limit:
        missed.append(f"missed: {what}{size} took {cost.seconds:.1f} s, target {limit:.0f} s")
    if cost.peak_rss_bytes > RSS_TARGET_BYTES:
        held = format_bytes(cost.peak_rss_bytes)
        missed.append(f"missed: {what}{size} held {held}, target {format_bytes(RSS_TARGET_BYTES)}")
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=("trace", "plan"), default=["trace", "plan"])
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed"),
        default="bf16-mixed",
        help="of the traces; plans choose theirs",
    )
    parser.add_argument("--runs", type=int, default=3, help="processes per size and tool; the fastest counts")
    parser.add_argument("--timeout", type=float, default=180, help="seconds after which a process is given up")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    traces, plans = [], []
    if "trace" in chosen.parts:
        traces = measure(chosen.sizes, chosen.precision, chosen.runs, chosen.timeout, console)
        console.print(_trace_table(traces, chosen.precision))
    if "plan" in chosen.parts:
        plans = measure_plans(chosen.sizes, chosen.runs, chosen.timeout, console)
        console.print(_plan_table(plans))
    console.print(machine.caption, style="dim")
    missed = [line for result in (*traces, *plans) for line in result.missed]
    console.print("\n".join(missed) if missed else _targets_met(traces, plans), style="red" if missed else "green")
    settings = {"precision": chosen.precision, "runs": chosen.runs, "timeout_seconds": chosen.timeout}
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(traces, plans, settings, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(traces, plans, settings, machine))
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
                arguments = [size, "--precision", precision, "--tool", tool]
                found[tool] = _best(TraceCost, arguments, runs, timeout_seconds, lambda: progress.advance(task))
            memfit = found["memfit"]
            if isinstance(memfit, str):
                raise ChildFailedError(f"{size}: {memfit}")
            results.append(SizeResult(size=size, memfit=memfit, mem_tracker=found["mem_tracker"]))
    return results


def measure_plans(sizes: Sequence[str], runs: int, timeout_seconds: float, console: Console) -> list[PlanResult]:
    """Plan every size, under a progress bar.

    The device's rates are kept between the processes, as a user's cache keeps them between runs.

    Raises:
        ChildFailedError: if a plan fails or does not end in time.
    """
    results = []
    with progress_bar(console) as progress, tempfile.TemporaryDirectory() as cache:
        task = progress.add_task("", total=(runs + 1) * len(sizes))
        for size in sizes:
            progress.update(task, description=f"{size:5}plan")
            arguments = [size, "--precision", "32-true", "--tool", "unconstrained"]
            plain = _best(TraceCost, arguments, 1, timeout_seconds, lambda: progress.advance(task))
            if isinstance(plain, str):
                raise ChildFailedError(f"{size}: {plain}")
            budget = plain.predicted_peak_bytes * BUDGET_PERCENT // 100
            arguments = [size, "--tool", "plan", "--budget", str(budget), "--cache-dir", cache]
            plan = _best(PlanCost, arguments, runs, timeout_seconds, lambda: progress.advance(task))
            if isinstance(plan, str):
                raise ChildFailedError(f"{size}: {plan}")
            results.append(PlanResult(size=size, unconstrained_bytes=plain.predicted_peak_bytes, plan=plan))
    return results


def _best(
    kind: Callable[..., Cost], arguments: list[str], runs: int, timeout_seconds: float, advance: Callable[[], None]
) -> Cost | str:
    """The fastest of the runs; the reason if one is given up, since the others would be too."""
    costs: list[Cost] = []
    failure = None
    for _ in range(runs):
        if failure is None:
            try:
                found = run_child("benchmarks.planning_case", arguments, timeout_seconds=timeout_seconds)
                costs.append(kind(**found))
            except subprocess.TimeoutExpired:
                failure = f"timed out after {timeout_seconds:.0f} s"
            except ChildFailedError as error:
                failure = f"failed: {str(error).splitlines()[-1][:80]}"
        advance()
    return min(costs, key=lambda cost: cost.seconds) if failure is None else failure


def as_json(
    traces: Sequence[SizeResult], plans: Sequence[PlanResult], settings: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "planning_cost",
        "machine": machine.to_dict(),
        "settings": settings,
        "targets": {
            "seconds": SECONDS_TARGETS,
            "plan_seconds": PLAN_SECONDS_TARGETS,
            "peak_rss_bytes": RSS_TARGET_BYTES,
            "missed": [line for result in (*traces, *plans) for line in result.missed],
        },
        "sizes": [asdict(result) for result in traces],
        "plans": [asdict(result) for result in plans],
    }


def as_markdown(
    traces: Sequence[SizeResult], plans: Sequence[PlanResult], settings: dict[str, Any], machine: Machine
) -> str:
    """The tables for the README."""
    parts = []
    if traces:
        parts.append(
            _markdown_table(
                ("Llama-shaped", "operators", "predicted peak", "one trace", "target", "CPU", "host memory",
                 "torch MemTracker"),
                [_trace_cells(result) for result in traces],
                right=6,
            )
        )  # fmt: skip
    if plans:
        parts.append(
            _markdown_table(
                ("Llama-shaped", "without levers", "budget", "plan", "its peak", "derived", "traced", "whole plan",
                 "target", "CPU", "host memory"),
                [_plan_cells(result) for result in plans],
                right=10,
            )
        )  # fmt: skip
    about = (
        f"Sequence 2048, AdamW. One trace: batch 1, {settings['precision']}. A plan: batch of {PLANNED_BATCH}, budget "
        f"{BUDGET_PERCENT} % of the peak in 32-true without levers, rates of the device measured before. Each in a "
        f"fresh process, best of {settings['runs']}; imports left out of the seconds."
    )
    return "\n\n".join([*parts, f"{about} Host memory is the process's highest RSS. {machine.caption}.", ""])


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int) -> str:
    rules = ["---", *["--:"] * right, *["---"] * (len(head) - right - 1)]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rules)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _trace_cells(result: SizeResult) -> list[str]:
    memfit, other = result.memfit, result.mem_tracker
    return [
        _named(result.size, memfit),
        f"{memfit.num_operations:,}",
        format_bytes(memfit.predicted_peak_bytes),
        *_time_and_memory(result.size, memfit, SECONDS_TARGETS),
        other if isinstance(other, str) else f"{other.seconds:.1f} s, {_agreement(memfit, other)}",
    ]


def _plan_cells(result: PlanResult) -> list[str]:
    plan = result.plan
    return [
        _named(result.size, plan),
        format_bytes(result.unconstrained_bytes),
        format_bytes(plan.budget_bytes),
        plan.chosen,
        format_bytes(plan.predicted_peak_bytes),
        f"{plan.num_estimated:,}",
        f"{plan.num_traced:,}",
        *_time_and_memory(result.size, plan, PLAN_SECONDS_TARGETS),
    ]


def _named(size: str, cost: TraceCost | PlanCost) -> str:
    return f"{size} ({cost.num_parameters / 1e9:.3g}B parameters)"


def _time_and_memory(size: str, cost: TraceCost | PlanCost, targets: dict[str, float]) -> list[str]:
    limit = targets.get(size)
    return [
        f"{cost.seconds:.1f} s",
        "" if limit is None else f"<= {limit:.0f} s",
        f"{cost.cpu_seconds:.1f} s",
        format_bytes(cost.peak_rss_bytes),
    ]


def _agreement(memfit: TraceCost, other: TraceCost) -> str:
    difference = other.predicted_peak_bytes - memfit.predicted_peak_bytes
    if difference == 0:
        return "the same peak"
    return f"peak {100 * difference / memfit.predicted_peak_bytes:+.2f} %"


def _trace_table(results: Sequence[SizeResult], precision: str) -> Table:
    table = plain_table(f"One trace: {precision}, AdamW, batch 1, sequence 2048")
    table.add_column("Llama", no_wrap=True)
    for column in ("operators", "predicted\npeak", "one trace", "target", "CPU", "host\nmemory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("torch MemTracker", min_width=21)
    for result in results:
        table.add_row(result.size, *_trace_cells(result)[1:])
    return table


def _plan_table(results: Sequence[PlanResult]) -> Table:
    table = plain_table(f"A whole plan: AdamW, batch {PLANNED_BATCH}, sequence 2048, budget {BUDGET_PERCENT} %")
    table.add_column("Llama", no_wrap=True)
    for column in ("without\nlevers", "budget"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan", min_width=24)
    for column in ("its peak", "derived", "traced", "whole\nplan", "target", "CPU", "host\nmemory"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.size, *_plan_cells(result)[1:])
    return table


def _targets_met(traces: Sequence[SizeResult], plans: Sequence[PlanResult]) -> str:
    timed = [
        f"{what}{result.size} {cost.seconds:.1f} s <= {targets[result.size]:.0f} s"
        for results, what, targets in ((traces, "", SECONDS_TARGETS), (plans, "plan of ", PLAN_SECONDS_TARGETS))
        for result in results
        if result.size in targets
        for cost in (result.memfit if isinstance(result, SizeResult) else result.plan,)
    ]
    held = max(cost.peak_rss_bytes for cost in (*(r.memfit for r in traces), *(r.plan for r in plans)))
    return f"met: {', '.join([*timed, f'host memory {format_bytes(held)} <= {format_bytes(RSS_TARGET_BYTES)}'])}"


if __name__ == "__main__":
    sys.exit(main())
