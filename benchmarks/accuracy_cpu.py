"""Predicted against really measured peak: sixteen models at several settings each, on this machine's CPU.

    python -m benchmarks.accuracy_cpu [--cases PATTERN] [--json PATH] [--markdown PATH]

Every model runs in a process of its own, two at a time, under an allocator that counts every byte. "raw" is the
prediction before anything ran, operators probed; "after one warm-up" is what MemFit says after its own profiled steps.
Both are compared with the exact peak of three optimizer steps of a plain Trainer. Ends with code 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_case import CaseResult
from benchmarks.allocator.budget_allocator import build_allocator, why_unavailable
from benchmarks.child_process import stream_child
from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from benchmarks.zoo import ZooCase, select_cases
from benchmarks.zoo_models import MODELS
from lightning_memfit.units import format_bytes

MEDIAN_TARGET = 0.0005
"""Of the raw errors' sizes over all cases, as a share of the measured peak."""
CASE_TARGET = 0.005
"""Of every case's raw error."""


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """Sizes of errors over several cases, as shares of the measured peak."""

    median: float
    largest: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> ErrorSummary:
        """Summarise errors of either sign."""
        sizes = [abs(error) for error in errors]
        return cls(median=statistics.median(sizes), largest=max(sizes))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Several cases together: one model over its settings, all cases, or those with a lever on the optimizer."""

    name: str
    cases: int
    smallest_peak_bytes: int
    largest_peak_bytes: int
    raw: ErrorSummary
    after_warm_up: ErrorSummary
    unprobed: ErrorSummary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="*", help="pattern of labels such as 'gpt *' or '* bf16-mixed *'")
    parser.add_argument("--processes", type=int, default=2, help="models that run at the same time")
    parser.add_argument("--json", type=Path, help="write every case with its bytes here")
    parser.add_argument("--markdown", type=Path, help="write the table of models here")
    chosen = parser.parse_args(arguments)
    reason = why_unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    console, machine = open_console(), this_machine()
    results = run_cases(select_cases(chosen.cases), console, processes=chosen.processes)
    rows = summarise(results)
    console.print(_case_table(results))
    console.print(_summary_table(rows))
    console.print(machine.caption, style="dim")
    missed = missed_targets(results)
    console.print("\n".join(missed) if missed else _targets_met(results), style="red" if missed else "green")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(results, rows, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(rows, machine))
    return int(bool(missed))


def run_cases(cases: Sequence[ZooCase], console: Console, *, processes: int = 1) -> list[CaseResult]:
    """Run the cases of each model in a child process, some models at the same time, under a progress bar.

    What runs beside a case changes its times, which nobody looks at, and not its bytes.
    """
    library = build_allocator()
    models = list(dict.fromkeys(case.name for case in cases))
    # Operator probes are kept from case to case, and start from nothing in every run of the benchmark.
    with (
        tempfile.TemporaryDirectory() as cache_dir,
        progress_bar(console) as progress,
        ThreadPoolExecutor(processes) as pool,
    ):
        task = progress.add_task("", total=len(cases))
        files = ["--library", str(library), "--cache-dir", cache_dir]

        def run_model(model: str) -> list[CaseResult]:
            progress.update(task, description=f"{model:16}")
            found = []
            labels = [case.label for case in cases if case.name == model]
            for plain in stream_child("benchmarks.accuracy_case", [*labels, *files]):
                found.append(CaseResult(**{**plain, "notes": tuple(plain["notes"])}))
                progress.advance(task)
            return found

        return [result for results in pool.map(run_model, models) for result in results]


def summarise(results: Sequence[CaseResult]) -> list[Row]:
    """One row per model in the order of the results, one over all, and one for each lever on the optimizer."""
    models = list(dict.fromkeys(result.model for result in results))
    rows = [_row(MODELS[model].title, [r for r in results if r.model == model]) for model in models]
    quantised = [result for result in results if result.optimizer_states == "8bit"]
    chosen = [result for result in results if result.implementation != "as-configured"]
    of_these = [("of these: 8-bit states", quantised), ("of these: foreach, fused", chosen)]
    return [*rows, _row("all", results), *(_row(name, some) for name, some in of_these if some)]


def _row(name: str, results: Sequence[CaseResult]) -> Row:
    peaks = [result.measured_peak_bytes for result in results]
    return Row(
        name=name,
        cases=len(results),
        smallest_peak_bytes=min(peaks),
        largest_peak_bytes=max(peaks),
        raw=ErrorSummary.of(result.raw_error for result in results),
        after_warm_up=ErrorSummary.of(result.warm_up_error for result in results),
        unprobed=ErrorSummary.of(result.unprobed_error for result in results),
    )


def missed_targets(results: Sequence[CaseResult]) -> list[str]:
    """The targets that were missed, in words; none if all were met."""
    missed = []
    median = ErrorSummary.of(result.raw_error for result in results).median
    if median > MEDIAN_TARGET:
        missed.append(f"missed: raw median {percent(median)}, target {percent(MEDIAN_TARGET)}")
    for result in results:
        if abs(result.raw_error) > CASE_TARGET:
            missed.append(f"missed: {result.label}: {percent(result.raw_error)}, target {percent(CASE_TARGET)}")
    return missed


def cause_of(result: CaseResult) -> str:
    """Why a case is above the target, as far as its numbers tell; empty for a case that is not."""
    if abs(result.raw_error) <= CASE_TARGET:
        return ""
    if result.notes:
        return "; ".join(result.notes)
    if abs(result.warm_up_error) <= CASE_TARGET:
        missing = result.warm_up_peak_bytes - result.predicted_raw_bytes
        return f"inside the step at {result.peak_op}: the warm-up measured {format_bytes(missing)} more than predicted"
    outside = result.measured_peak_bytes - result.warm_up_peak_bytes
    return f"outside the step: the fit held {format_bytes(outside)} that the warm-up's steps did not"


def percent(share: float) -> str:
    """Render a share with the digits that matter.

    >>> percent(0.0005), percent(-0.0123), percent(0.00000004), percent(0.0)
    ('0.050 %', '-1.230 %', '< 0.001 %', '0 %')
    """
    if share == 0:
        return "0 %"
    return "< 0.001 %" if abs(share) < 0.000005 else f"{100 * share:.3f} %"


def as_json(results: Sequence[CaseResult], rows: Sequence[Row], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "accuracy_cpu",
        "statistic": "peak bytes of torch's CPU allocator during a fit, above those alive before the module was built",
        "machine": machine.to_dict(),
        "targets": {
            "raw_median": MEDIAN_TARGET,
            "raw_every_case": CASE_TARGET,
            "missed": missed_targets(results),
        },
        "summary": [asdict(row) for row in rows],
        "cases": [
            {
                **asdict(result),
                "raw_error": result.raw_error,
                "warm_up_error": result.warm_up_error,
                "unprobed_error": result.unprobed_error,
                "cause": cause_of(result),
            }
            for result in results
        ],
    }


def as_markdown(rows: Sequence[Row], machine: Machine) -> str:
    """The table of models for the README."""
    lines = [
        "| model | cases | measured peak | raw: median | raw: largest "
        "| after one warm-up: median | after: largest | without probes: largest |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = _cells(row)
        lines.append(f"| {' | '.join([*cells[:7], cells[8]])} |")
    target = f"Targets: raw median <= {percent(MEDIAN_TARGET)}, every case <= {percent(CASE_TARGET)}."
    return "\n".join([*lines, "", f"{target} {machine.caption}.", ""])


def _cells(row: Row) -> list[str]:
    peaks = f"{row.smallest_peak_bytes / 2**20:.0f}-{row.largest_peak_bytes / 2**20:.0f} MiB"
    summaries = (row.raw, row.after_warm_up, row.unprobed)
    shares = [percent(value) for summary in summaries for value in (summary.median, summary.largest)]
    return [row.name, str(row.cases), peaks, *shares]


def _case_table(results: Sequence[CaseResult]) -> Table:
    table = plain_table("Predicted against measured peak of each case")
    table.add_column("case")
    for column in ("measured\nMiB", "raw\nbytes", "raw\n%", "after one\nwarm-up, %", "without\nprobes, %"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("predicted\npeak in", no_wrap=True)
    if missed_targets(results):
        table.add_column("cause")
    for result in results:
        cells = [
            result.label,
            f"{result.measured_peak_bytes / 2**20:.2f}",
            f"{result.predicted_raw_bytes - result.measured_peak_bytes:+,}",
            *(percent(error)[:-2] for error in (result.raw_error, result.warm_up_error, result.unprobed_error)),
            result.peak_phase,
        ]
        table.add_row(*cells, *([cause_of(result)] if missed_targets(results) else []))
    return table


def _summary_table(rows: Sequence[Row]) -> Table:
    table = plain_table("Sizes of the errors in % of the measured peak: median, largest")
    table.add_column("model")
    for column in ("cases", "measured peak", "raw", "after one\nwarm-up", "without\nprobes"):
        table.add_column(column, justify="right")
    for row in rows:
        name, cases, peaks, *shares = _cells(row)
        pairs = [f"{median[:-2]}, {largest[:-2]}" for median, largest in zip(shares[::2], shares[1::2], strict=True)]
        table.add_row(name, cases, peaks, *pairs)
    return table


def _targets_met(results: Sequence[CaseResult]) -> str:
    raw = ErrorSummary.of(result.raw_error for result in results)
    return (
        f"met: raw median {percent(raw.median)} <= {percent(MEDIAN_TARGET)}, "
        f"largest {percent(raw.largest)} <= {percent(CASE_TARGET)}"
    )


if __name__ == "__main__":
    sys.exit(main())
