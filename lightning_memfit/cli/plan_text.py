"""What ``memfit plan`` found, for people: one block for each device. Every number is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_memfit.application.outcomes import Outcome
from lightning_memfit.application.subject import Subject
from lightning_memfit.plan import Forecast
from lightning_memfit.report.anatomy import bracket_words, memory_renderables
from lightning_memfit.report.device_words import device_words
from lightning_memfit.report.pieces import bullet, facts_table, heading, title
from lightning_memfit.report.strategies import strategies_renderables
from lightning_memfit.report.table import decisions_renderables, split_words
from lightning_memfit.units import format_bytes, format_seconds

_STYLES = {"fits": "bold green", "does not fit": "bold red", "cannot tell": "bold yellow"}


def print_outcomes(subject: Subject, outcomes: Sequence[Outcome], notes: Sequence[str], *, console: Console) -> None:
    """Print a block for each device, and what holds for all of them.

    Args:
        subject: what was planned.
        outcomes: one for each device.
        notes: what the user should know.
        console: where to print.
    """
    for number, outcome in enumerate(outcomes):
        if number:
            console.print()
        for part in _block(subject, outcome):
            console.print(part)
    for part in _notes((*notes, *subject.notes)):
        console.print(part)


def _block(subject: Subject, outcome: Outcome) -> Iterator[RenderableType]:
    yield title(outcome.asked.name)
    yield Text.assemble((outcome.verdict, _STYLES[outcome.verdict]), f": {outcome.reason}")
    yield _facts(subject, outcome)
    if outcome.plan is not None:
        yield from memory_renderables(outcome.plan.forecast)
        yield from decisions_renderables(outcome.plan)
        yield from strategies_renderables(outcome.plan)
        yield from _notes((*outcome.plan.notes, *outcome.plan.forecast.notes))
    elif outcome.smallest is not None:
        yield from memory_renderables(outcome.smallest)
        yield from _notes(outcome.smallest.notes)
    if outcome.explanation is not None:
        yield heading("What was tried, and what would make it fit")
        yield Text(outcome.explanation)
        if outcome.catalogue_with_room:
            yield Text(f"  - of the catalogue, by this forecast: {', '.join(outcome.catalogue_with_room)}")


def _facts(subject: Subject, outcome: Outcome) -> Table:
    facts = facts_table()
    facts.add_row("planned", Text(subject.words))
    if outcome.asked.device is not None:
        facts.add_row("device", Text(device_words(outcome.asked.device)))
    plan, forecast = outcome.plan, outcome.forecast
    if plan is not None:
        facts.add_row("budget", Text(f"{format_bytes(plan.budget.budget_bytes)}: {plan.budget.reason}"))
    if forecast is None:
        return facts
    facts.add_row("plan" if plan is not None else "smallest", Text(forecast.candidate.label, style="bold"))
    facts.add_row("batch", Text(split_words(forecast.candidate.split)))
    for label, words in _predictions(outcome, forecast):
        facts.add_row(label, Text(words))
    return facts


def _predictions(outcome: Outcome, forecast: Forecast) -> Iterator[tuple[str, str]]:
    memory, total = forecast.memory, outcome.device_total_bytes
    bracket = bracket_words(memory)
    if bracket is not None:
        yield "bracket", bracket
    if memory.peak_reserved_bytes is not None:
        if total is None:
            yield "device total", "not known: the context of this GPU is not"
        else:
            low, high = map(format_bytes, total)
            words = low if low == high else f"{low} to {high}"
            yield "device total", f"{words} where there is room: reserved and the context (predicted)"
    if memory.bytes_per_parameter is not None:
        yield (
            "parameters",
            f"{memory.num_parameters:,}; {memory.bytes_per_parameter:.1f} bytes at the peak for each (predicted)",
        )
    if forecast.predicted_step_seconds is not None:
        yield "step", _step_words(outcome, forecast.predicted_step_seconds)


def _step_words(outcome: Outcome, seconds: float) -> str:
    words = f"about {format_seconds(seconds)} per optimizer step (predicted, "
    device = outcome.asked.device
    if device is not None and device.kind == "cpu":
        return f"{words}with rates measured on this host)"
    return f"{words}assumed rates: shares of the vendor's peaks)"


def _notes(notes: Iterable[str]) -> Iterator[RenderableType]:
    distinct = list(dict.fromkeys(notes))
    if distinct:
        yield heading("Notes")
        yield from (bullet(note) for note in distinct)
