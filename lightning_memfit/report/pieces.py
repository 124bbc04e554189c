"""Pieces of reports: headings, tables, bars, and words for numbers.

Names and reasons are wrapped in ``Text``, so that a bracket in them is never taken for markup.
"""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lightning_memfit.units import format_bytes


def title(words: str) -> RenderableType:
    """A rule across the page with words on it."""
    return Rule(Text(words, style="bold"), align="left", style="cyan")


def heading(words: str) -> RenderableType:
    """Words above a part, a line apart from what is before."""
    return Padding(Text(words, style="bold cyan"), (1, 0, 0, 0))


def indented(renderable: RenderableType) -> Padding:
    """Two columns to the right."""
    return Padding(renderable, (0, 0, 0, 2))


def bullet(words: str) -> RenderableType:
    """One point of a list; long words wrap beside the dash."""
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row("  -", Text(words))
    return row


def facts_table() -> Table:
    """A table without lines: a label, and what there is to say."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1)
    return table


def numbers_table(*headers: str) -> Table:
    """Make a table whose first column is text and whose others are numbers, never wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column(headers[0], overflow="fold")
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def spaced(name: str) -> str:
    """A name in words, such as ``"optimizer states"``."""
    return name.replace("_", " ")


def count(number: int, noun: str) -> str:
    """``"1 core"``, ``"2 cores"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(part: int, whole: int) -> str:
    """A share such as ``"12.3 %"``; ``"-"`` of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def signed_bytes(size: int) -> str:
    """A difference in bytes, its sign always shown."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def budget_bar(peak: int, budget: int) -> Table:
    """How much of a budget is used, in bytes."""
    colour = "green" if peak <= budget else "red"
    filled = min(peak, budget)
    row = Table.grid()
    bar = ProgressBar(total=budget, completed=filled, width=40, complete_style=colour, finished_style=colour)
    row.add_row("[", bar, Text("]"))  # the end stays visible where there is no colour
    return row


def share_bar(size: int, peak: int) -> ProgressBar:
    """A share of the peak, in bytes."""
    return ProgressBar(total=max(peak, 1), completed=size, width=16, complete_style="cyan", finished_style="cyan")
