"""What came of a sweep, as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memfit.sweep.job import varying_overrides
from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.messages import counted_jobs
from lightning_memfit.sweep.rows import Row
from lightning_memfit.units import format_bytes, format_seconds

COLUMNS_OF_A_FILE = 160
"""Width of what goes into a file or a pipe, in characters."""
_STYLES = {"completed": "green", "left out": "yellow", "does not fit": "yellow", "failed": "bold red"}
_UNKNOWN = "-"
_COLUMNS = {
    "plan": 130,
    "predicted\npeak": 0,
    "budget": 0,
    "measured\npeak": 0,
    "samples/s\nmeasured": 95,
    "forecast\ntook": 115,
    "job\ntook": 115,
    "of it plan\nand proof": 140,
    "objective": 0,
}
"""What is told of each job, and the width in characters from which there is room for it."""


def print_table(rows: Sequence[Row], *, console: Console) -> None:
    """Print a line for each job, and how many there are of each status below.

    Columns of which nothing is known are left out, and in a narrow terminal those that matter least.
    """
    table = Table(title="Sweep", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("overrides", overflow="fold", ratio=4)
    cells = [_cells(row) for row in rows]
    shown = [
        name
        for name, least_width in _COLUMNS.items()
        if console.width >= least_width and any(each[name] != _UNKNOWN for each in cells)
    ]
    for name in shown:
        if name == "plan":
            table.add_column(name, overflow="fold", ratio=4)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what came of it", overflow="fold", ratio=5)
    short = varying_overrides([row.job for row in rows])
    for row, known in zip(rows, cells, strict=True):
        texts = (str(row.job.number), short[row.job.number] or _UNKNOWN, *(known[name] for name in shown))
        table.add_row(*map(Text, texts), _end(row))
    if console.is_terminal:
        console.print(table)
    else:  # a table fills its lines with spaces; a file is better without
        with console.capture() as drawn:
            console.print(table)
        for line in drawn.get().splitlines():
            console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
    for words in (count_words(rows), seconds_words(rows)):
        if words is not None:
            console.print(words, markup=False, highlight=False, soft_wrap=True)


def count_words(rows: Sequence[Row]) -> str:
    """How many jobs there are of each status, in one line."""
    counts = Counter(row.status for row in rows)
    before = sum(row.from_before for row in rows)
    parts = [f"{count} {status}" for status, count in counts.items()]
    if before:
        parts.append(f"{before} of them by an earlier run")
    return f"{counted_jobs(len(rows))}: {', '.join(parts)}"


def seconds_words(rows: Sequence[Row]) -> str | None:
    """Seconds of planning against those of the rest, in one line; ``None`` where no job tells them."""
    planned = [row.measured.planning_seconds for row in rows if row.measured is not None]
    within, others = [each for each in planned if each is not None], [row.other_seconds for row in rows]
    if not within:
        return None
    forecasts = sum(row.forecast.seconds for row in rows if row.forecast is not None)
    return (
        f"forecasts took {format_seconds(forecasts)}, plans and proofs within jobs {format_seconds(sum(within))}, the "
        f"rest of these jobs, training among it, {format_seconds(sum(each for each in others if each is not None))}"
    )


def _cells(row: Row) -> dict[str, str]:
    """What is known of a job, by the names of :data:`_COLUMNS`."""
    measured, forecast, end = row.measured, row.forecast, row.end
    speed = None if measured is None else measured.measured_samples_per_second
    texts = (
        row.plan_label or _UNKNOWN,
        _bytes(row.predicted_peak_bytes),
        _bytes(row.budget_bytes),
        _bytes(None if measured is None else measured.measured_peak_bytes),
        _UNKNOWN if speed is None else f"{speed:.4g}",
        _forecast_took(forecast),
        _seconds(None if end is None else end.seconds),
        _seconds(None if measured is None else measured.planning_seconds),
        _UNKNOWN if row.objective is None else f"{row.objective:.5g}",
    )
    return dict(zip(_COLUMNS, texts, strict=True))


def _forecast_took(forecast: JobForecast | None) -> str:
    if forecast is not None and forecast.same_as is not None:
        return f"as job {forecast.same_as}"
    return _seconds(None if forecast is None else forecast.seconds)


def _end(row: Row) -> Text:
    status = f"{row.status}, by an earlier run" if row.from_before else row.status
    text = Text(status, style=_STYLES.get(row.status, ""))
    if row.status == "completed" and row.reason:
        # What a job did tells more than why that was not known before; files have the whole reason.
        text.append(": could not be told before", style="default")
    elif row.reason:
        text.append(f": {row.reason}", style="default")
    if row.error_file:
        text.append(f" [{row.error_file}]", style="default")
    return text


def _bytes(size: int | None) -> str:
    return _UNKNOWN if size is None else format_bytes(size)


def _seconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else format_seconds(seconds)
