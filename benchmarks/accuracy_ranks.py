"""Predicted against really measured peak of one rank: several processes that train together on this machine's CPU.

    python -m benchmarks.accuracy_ranks [--cases PATTERN] [--json PATH] [--markdown PATH]

The ranks of a case exchange over gloo and run under an allocator that counts every byte; what is compared is the
highest of their peaks in the steady state. "traced" follows the engine itself on fakes, "transformed" is derived from
the step of one device without running anything. Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_cpu import percent
from benchmarks.allocator.budget_allocator import build_allocator, why_unavailable
from benchmarks.child_process import run_child
from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from benchmarks.rank_cases import ALL_CASES, RankCase, select_cases
from benchmarks.rank_predictions import PREDICTING, Predicted
from lightning_memfit.trace.op_probe import OperatorProber

CASE_TARGET = 0.01
"""Of the size of every error, as a share of the measured peak."""
_SECONDS = 300
"""A case whose ranks wait for each other longer than this has failed."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What was predicted and measured for one case. All peaks are bytes of torch's allocator on one rank."""

    label: str
    """Of the case."""
    engine: str
    """Who spreads it."""
    measured_peak_bytes: int
    """Highest of the ranks' exact peaks, above what was alive before the module was built."""
    measured_by_rank_bytes: tuple[int, ...]
    """Of each rank."""
    predicted_traced_bytes: int | None
    """The engine followed on fakes; ``None`` where it cannot be."""
    predicted_transformed_bytes: int | None
    """Derived from the step of one device; ``None`` where it cannot be."""
    predicted_one_device_bytes: int
    """The same step on one device, not spread."""
    peak_phase: str
    """Of the predicted step."""
    by_category: Mapping[str, int]
    """What the predicted peak consists of."""

    @property
    def traced_error(self) -> float | None:
        """As a share of the measured peak; negative where too little was predicted."""
        return _error(self.predicted_traced_bytes, self.measured_peak_bytes)

    @property
    def transformed_error(self) -> float | None:
        """The same for what is derived."""
        return _error(self.predicted_transformed_bytes, self.measured_peak_bytes)


def _error(predicted: int | None, measured: int) -> float | None:
    return None if predicted is None else predicted / measured - 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="*", help="pattern of labels such as 'fsdp2 gpt *'")
    parser.add_argument("--json", type=Path, help="write every case with its bytes here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    chosen = parser.parse_args(arguments)
    reason = why_unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    console, machine = open_console(), this_machine()
    results = run_cases(select_cases(chosen.cases), console)
    console.print(_table(results))
    console.print(machine.caption, style="dim")
    missed = missed_targets(results)
    console.print("\n".join(missed) if missed else _targets_met(results), style="red" if missed else "green")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(results, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(results, machine))
    return int(bool(missed))


def run_cases(cases: Sequence[RankCase], console: Console) -> list[RankResult]:
    """Predict and measure each case, one after the other: the ranks of a case fill the machine."""
    library = build_allocator()
    found = []
    with OperatorProber() as prober, progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.label:60}")
            found.append(_result(case, PREDICTING[case.engine](case, prober), measure(case, library)))
            progress.advance(task)
    return found


def measure(case: RankCase, library: Path) -> tuple[int, ...]:
    """The peak of every rank; each is a process of its own."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(case.ranks) as pool:
        files = ["--store", str(Path(directory) / "store"), "--library", str(library)]

        def run_rank(rank: int) -> int:
            arguments = [case.label, "--rank", str(rank), *files]
            done = run_child("benchmarks.accuracy_ranks_case", arguments, timeout_seconds=_SECONDS)
            return int(done["measured_peak_bytes"])

        return tuple(pool.map(run_rank, range(case.ranks)))


def _result(case: RankCase, predicted: Predicted, measured: tuple[int, ...]) -> RankResult:
    told = predicted.traced or predicted.transformed
    assert told is not None, f"{case.label}: nothing was predicted"
    return RankResult(
        label=case.label,
        engine=case.engine,
        measured_peak_bytes=max(measured),
        measured_by_rank_bytes=measured,
        predicted_traced_bytes=None if predicted.traced is None else predicted.traced.peak_allocated_bytes,
        predicted_transformed_bytes=(
            None if predicted.transformed is None else predicted.transformed.peak_allocated_bytes
        ),
        predicted_one_device_bytes=predicted.one_device.peak_allocated_bytes,
        peak_phase=str(told.peak_phase),
        by_category=dict(told.by_category),
    )


def missed_targets(results: Sequence[RankResult]) -> list[str]:
    """One line for each case that is too far off."""
    return [
        f"{result.label}: {name} is off by {percent(error)}, more than {percent(CASE_TARGET)}"
        for result in results
        for name, error in (("traced", result.traced_error), ("transformed", result.transformed_error))
        if error is not None and abs(error) > CASE_TARGET
    ]


def _targets_met(results: Sequence[RankResult]) -> str:
    words = [
        f"{name}: median {percent(statistics.median(sizes))}, largest {percent(max(sizes))}"
        for name, sizes in (
            ("traced", _sizes(result.traced_error for result in results)),
            ("transformed", _sizes(result.transformed_error for result in results)),
        )
        if sizes
    ]
    return f"met, every case within {percent(CASE_TARGET)}; {'; '.join(words)}"


def _sizes(errors: Iterable[float | None]) -> list[float]:
    return [abs(error) for error in errors if error is not None]


def as_json(results: Sequence[RankResult], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "accuracy_ranks",
        "statistic": "peak bytes of torch's CPU allocator on one rank in the steps after the first, above those alive "
        "before the module was built; the highest of the ranks",
        "machine": machine.to_dict(),
        "targets": {"every_case": CASE_TARGET, "missed": missed_targets(results)},
        "cases": [
            {**asdict(result), "traced_error": result.traced_error, "transformed_error": result.transformed_error}
            for result in results
        ],
    }


def as_markdown(results: Sequence[RankResult], machine: Machine) -> str:
    """The table for a page."""
    lines = ["| case | one device | measured on a rank | traced | transformed |", "|---|--:|--:|--:|--:|"]
    lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    target = f"Target: every case within {percent(CASE_TARGET)}. {machine.caption}."
    return "\n".join([*lines, "", target, ""])


def _cells(result: RankResult) -> list[str]:
    return [
        result.label,
        f"{result.predicted_one_device_bytes / 2**20:.1f} MiB",
        f"{result.measured_peak_bytes / 2**20:.1f} MiB",
        *("-" if error is None else percent(error) for error in (result.traced_error, result.transformed_error)),
    ]


def _table(results: Sequence[RankResult]) -> Table:
    table = plain_table("Predicted against measured peak of one rank")
    table.add_column("case")
    for column in ("one device", "measured", "traced", "transformed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("predicted\npeak in", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result), result.peak_phase)
    return table


__all__ = ["ALL_CASES", "RankResult", "as_json", "as_markdown", "main", "measure", "missed_targets", "run_cases"]

if __name__ == "__main__":
    sys.exit(main())
