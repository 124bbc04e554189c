"""The ways to spread training over several devices side by side: what each needs, and why it was passed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from lightning_memfit.plan import BatchSplit, Candidate, PassedOver, Plan
from lightning_memfit.report.pieces import heading, indented, numbers_table
from lightning_memfit.search.reasons import strategy_words
from lightning_memfit.search.strategies import Spread
from lightning_memfit.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """One way to spread training."""

    candidate: Candidate
    """Its best candidate: the fastest that fits, else the smallest."""
    predicted_peak_bytes: int | None
    """What that needs on one device; ``None`` where it was ruled out without a forecast."""
    predicted_step_seconds: float | None
    """Seconds per optimizer step; ``None`` where they were not predicted."""
    why: str
    """Why it was taken, or passed over."""


def strategy_rows(plan: Plan) -> list[StrategyRow]:
    """The plan's own way first, then every other that was looked at, each once."""
    mine = StrategyRow(
        candidate=plan.candidate,
        predicted_peak_bytes=plan.forecast.predicted_peak_bytes,
        predicted_step_seconds=plan.forecast.predicted_step_seconds,
        why="the plan",
    )
    others: dict[Spread, list[PassedOver]] = {}
    for passed in plan.passed_over:
        if Spread.of(passed.candidate) != Spread.of(plan.candidate):
            others.setdefault(Spread.of(passed.candidate), []).append(passed)
    return [mine, *(_row(_best(group)) for group in others.values())]


def strategies_renderables(plan: Plan) -> Iterator[RenderableType]:
    """A table of them; nothing of a plan for one device."""
    if plan.candidate.sharding is None:
        return
    table = numbers_table("strategy", "micro-batch", "a device needs", "per step")
    table.add_column("why", overflow="fold")
    for row in strategy_rows(plan):
        table.add_row(*_cells(row))
    yield heading("Strategies (predicted; of each the fastest that fits, else the smallest)")
    yield indented(table)


def _best(group: Sequence[PassedOver]) -> PassedOver:
    fitting = [each for each in group if each.reason.startswith("fits")]
    if fitting:
        return min(fitting, key=lambda each: each.predicted_step_seconds or 0.0)
    forecast = [each for each in group if each.predicted_peak_bytes is not None]
    return min(forecast or group, key=lambda each: each.predicted_peak_bytes or 0)


def _row(passed: PassedOver) -> StrategyRow:
    return StrategyRow(
        candidate=passed.candidate,
        predicted_peak_bytes=passed.predicted_peak_bytes,
        predicted_step_seconds=passed.predicted_step_seconds,
        why=passed.reason,
    )


def _cells(row: StrategyRow) -> list[RenderableType]:
    needs, seconds = row.predicted_peak_bytes, row.predicted_step_seconds
    return [
        Text(strategy_words(row.candidate)),
        Text(_batch_words(row.candidate.split) if needs is not None else "-"),
        Text("-" if needs is None else format_bytes(needs)),
        Text("-" if seconds is None else format_seconds(seconds)),
        Text(row.why.replace(f"{strategy_words(row.candidate)} ", "")),
    ]


def _batch_words(split: BatchSplit) -> str:
    return f"{split.micro_batch_size} x {split.num_slices * split.accumulate_grad_batches}"
