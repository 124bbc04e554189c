"""Predictions for absent GPUs against peaks that others measured on real ones and published.

    python -m benchmarks.accuracy_cuda_published [--rows PATTERN] [--json PATH] [--markdown PATH]

Nothing is trained and no GPU is needed: every network is rebuilt without memory and its step predicted. What a process
holds beside torch (the CUDA context, loaded libraries) is what the source measured of it, or a constant per source
taken from rows that are not judged by it. Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from benchmarks.published_case import PublishedPrediction, predict
from benchmarks.published_judgement import GROUPS, GroupSummary, JudgedRow, judge, missed_targets, summarise
from benchmarks.published_rows import LISTED, PublishedRow, Setting, published_rows, settings_of
from lightning_memfit.units import MIB

_UNEXPLAINED = 0.10  # errors above this need a cause in the data


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="*", help="pattern of ids such as 'mlp-*'")
    parser.add_argument("--device", help="predict all for this device instead, such as 'cpu', to see what differs")
    parser.add_argument("--processes", type=int, default=2, help="predictions made at the same time")
    parser.add_argument("--json", type=Path, help="write every row with its bytes here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    rows = [row for row in published_rows() if fnmatch.fnmatch(row.id, chosen.rows)]
    predictions = predict_all(rows, console, device=chosen.device, processes=chosen.processes)
    judged = judge(rows, predictions)
    summaries = summarise(judged)
    missed = missed_targets(summaries)
    console.print(_row_table(judged))
    console.print(_group_table(summaries))
    console.print(machine.caption, style="dim")
    console.print("\n".join(missed) if missed else "all targets met", style="red" if missed else "green")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(rows, judged, summaries, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(rows, judged, summaries, machine))
    return int(bool(missed))


def predict_all(
    rows: Sequence[PublishedRow], console: Console, *, device: str | None = None, processes: int = 1
) -> dict[Setting, PublishedPrediction]:
    """Predict every setting once, some at the same time, under a progress bar."""
    settings = settings_of(rows)
    with (
        progress_bar(console) as progress,
        # Forked children would inherit the threads of torch.
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task("predicting", total=len(settings))
        found = {}
        one = partial(predict, device=device)
        for setting, prediction in zip(settings, pool.map(one, settings), strict=True):
            found[setting] = prediction
            progress.advance(task)
        return found


def unexplained(judged: Sequence[JudgedRow]) -> list[str]:
    """Ids of the rows beyond a tenth for which no cause is known."""
    return [row.id for row in judged if abs(row.error or 0) > _UNEXPLAINED and not row.cause]


def as_json(
    rows: Sequence[PublishedRow],
    judged: Sequence[JudgedRow],
    summaries: Sequence[GroupSummary],
    machine: Machine,
) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "accuracy_cuda_published",
        "statistic": "each row's own: peak allocated or reserved bytes of torch's allocator, or bytes of the device",
        "machine": machine.to_dict(),
        "targets": {"missed": missed_targets(summaries), "without_a_known_cause": unexplained(judged)},
        "summary": [asdict(summary) for summary in summaries],
        "rows": [{**asdict(row), "error": row.error, "error_above_context": row.error_above_context} for row in judged],
        "not_rebuilt": [
            {"id": row.id, "title": row.title, "reason": row.not_rebuilt, "source": row.source}
            for row in rows
            if row.group == LISTED
        ],
    }


def as_markdown(
    rows: Sequence[PublishedRow],
    judged: Sequence[JudgedRow],
    summaries: Sequence[GroupSummary],
    machine: Machine,
) -> str:
    """The summary, every judged row, and what was left out."""
    lines = [
        "| rows | judged | median error | 95 % within | small rows within | measured in bracket "
        "| 20 B/parameter: median | the source's own: median |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(f"| {' | '.join(_group_cells(summary))} |" for summary in summaries),
        "",
        *(f"- {GROUPS[summary.group].title}: {GROUPS[summary.group].how_judged}" for summary in summaries),
        "",
        "| row | statistic | measured MiB | predicted MiB | error | bracket MiB | 20 B/parameter MiB | cause |",
        "|---|---|--:|--:|--:|--:|--:|---|",
        *(f"| {' | '.join(_row_cells(row))} |" for row in judged),
        "",
        f"Not rebuilt ({sum(row.group == LISTED for row in rows)} rows):",
        "",
        *(f"- {row.title} ({row.source}): {row.not_rebuilt}" for row in rows if row.group == LISTED),
        "",
        f"{machine.caption}.",
        "",
    ]
    return "\n".join(lines)


def _row_table(judged: Sequence[JudgedRow]) -> Table:
    table = plain_table("Predicted against measured, MiB; fitted: the row's group's constant comes from it")
    table.add_column("row")
    table.add_column("statistic")
    for column in ("measured", "predicted", "error", "bracket", "20 B/\nparameter"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("cause")
    for row in judged:
        table.add_row(*_row_cells(row))
    return table


def _group_table(summaries: Sequence[GroupSummary]) -> Table:
    table = plain_table("Sizes of errors by source")
    table.add_column("rows")
    for column in ("judged", "median", "95 %", "small rows", "in\nbracket", "20 B/p", "source's\nown"):
        table.add_column(column, justify="right")
    for summary in summaries:
        table.add_row(*_group_cells(summary))
    return table


def _row_cells(row: JudgedRow) -> list[str]:
    measured = "out of memory" if row.measured_bytes is None else _mebibytes(row.measured_bytes)
    error = row.verdict if row.error is None else f"{100 * row.error:+.2f} %"
    bracket = f"{_mebibytes(row.bracket_bytes[0])}-{_mebibytes(row.bracket_bytes[1])}"
    name = f"{row.id} {row.title}{'' if row.judged else ' (fitted)'}"
    return [
        name, row.statistic, measured, _mebibytes(row.predicted_bytes), error, bracket,
        _mebibytes(row.naive_bytes), row.cause,
    ]  # fmt: skip


def _group_cells(summary: GroupSummary) -> list[str]:
    return [
        f"{GROUPS[summary.group].title} ({summary.statistic})",
        str(summary.judged),
        _percent(summary.median),
        _percent(summary.percentile_95),
        "" if summary.largest_small_bytes is None else f"{summary.largest_small_bytes / MIB:.1f} MiB",
        "" if summary.in_bracket is None else f"{summary.in_bracket} of {summary.judged}",
        _percent(summary.naive_median),
        _percent(summary.peer_median),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _mebibytes(size: int) -> str:
    return f"{size / MIB:.0f}"


if __name__ == "__main__":
    sys.exit(main())
