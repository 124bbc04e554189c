"""What all benchmarks show and write in the same way: the console, the progress bar, tables, files."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_LOG_WIDTH = 100  # columns where the output is no terminal


def open_console() -> Console:
    """A console as wide as the terminal; in a log wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


def progress_bar(console: Console) -> Progress:
    """Name, bar, count, and time so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def plain_table(title: str) -> Table:
    """A table without frames, its columns close to each other."""
    return Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))


def write_text(path: Path, text: str) -> None:
    """Write a file, its folder made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
