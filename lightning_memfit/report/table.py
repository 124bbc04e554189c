"""The report for people: the plan, its memory and its reasons as rich renderables, and what a warm-up measured.

Every number says whether it is predicted or measured, and which statistic it is. Names and reasons are wrapped in
``Text``, so that a bracket in them is never taken for markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_memfit.plan import (
    BatchSplit,
    Forecast,
    Measurement,
    OptimizerStatesMeasurement,
    PassedOver,
    Plan,
)
from lightning_memfit.report.anatomy import bracket_words, memory_renderables
from lightning_memfit.report.device_words import device_words
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.report.pieces import (
    budget_bar,
    bullet,
    count,
    facts_table,
    heading,
    indented,
    numbers_table,
    percent,
    signed_bytes,
    title,
)
from lightning_memfit.units import format_bytes, format_seconds

__all__ = [
    "best_passed_over",
    "decisions_renderables",
    "measurement_renderable",
    "no_fit_message",
    "plan_renderable",
    "render_measurement",
    "render_plan",
    "report_text",
    "split_words",
]

REPORT_BEGINS = "MemFit plan"
"""The first words of a report."""
SHOWN_PASSED_OVER = 6
SHOWN_OPS = 5
_COLUMNS = 110
"""Width of a report in a file, in characters."""


def render_plan(
    plan: Plan, *, console: Console | None = None, most_passed_over: int | None = SHOWN_PASSED_OVER
) -> None:
    """Print the plan: verdict, device and budget, memory at the peak, decisions, and what was passed over.

    Args:
        plan: the plan.
        console: where to print; a new rich console on standard output if left out.
        most_passed_over: how many of the candidates that were passed over are shown; ``None`` for all.
    """
    (console or Console()).print(plan_renderable(plan, most_passed_over=most_passed_over))


def render_measurement(plan: Plan, measurement: Measurement, *, console: Console | None = None) -> None:
    """Print what the warm-up measured beside what the plan predicted.

    Args:
        plan: the plan that was run.
        measurement: what its profiled steps measured.
        console: where to print; a new rich console on standard output if left out.
    """
    (console or Console()).print(measurement_renderable(plan, measurement))


def report_text(plan: Plan, measurement: Measurement | None) -> str:
    """The whole report as plain text, without colours."""
    text = io.StringIO()
    console = Console(file=text, width=_COLUMNS, no_color=True, force_terminal=False)
    render_plan(plan, console=console)
    if measurement is not None:
        render_measurement(plan, measurement, console=console)
    # Tables fill their lines with spaces; a file is better without.
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def plan_renderable(plan: Plan, *, most_passed_over: int | None = SHOWN_PASSED_OVER) -> RenderableType:
    """Build what :func:`render_plan` prints."""
    parts: list[RenderableType] = [
        title(REPORT_BEGINS),
        _summary(plan),
        *memory_renderables(plan.forecast),
        *decisions_renderables(plan),
    ]
    notes = dict.fromkeys((*plan.notes, *plan.forecast.notes))  # each once, in order
    if notes:
        parts += [heading("Notes"), *(bullet(note) for note in notes)]
    if plan.passed_over:
        parts += _passed_over(plan, most_passed_over)
    return Group(*parts, Text())


def measurement_renderable(plan: Plan, measurement: Measurement) -> RenderableType:
    """Build what :func:`render_measurement` prints."""
    peak, budget = measurement.measured_peak_bytes, plan.budget.budget_bytes
    facts = facts_table()
    if measurement.timed_plans:
        words = f" (the fastest of {len(measurement.timed_plans)} that were timed)"
        facts.add_row("plan", Text(plan.candidate.label) + words)
    facts.add_row("measured", _use_of_budget(peak, budget))
    facts.add_row("", budget_bar(peak, budget))
    facts.add_row(
        "step time",
        f"{format_seconds(measurement.measured_step_seconds)} per optimizer step (fastest without the profiler, after "
        f"{count(measurement.profiled_steps, 'profiled step')})",
    )
    if measurement.evaluation_batch is not None:
        facts.add_row("evaluation", Text(f"measured with {measurement.evaluation_batch}"))
    if not measurement.profiled_steps:
        facts.add_row("proof", Text("NONE: training_step gave no loss for the first batch", style="bold red"))
    parts: list[RenderableType] = [
        title("MemFit warm-up"),
        facts,
        heading("Predicted against measured (difference: predicted - measured)"),
    ]
    parts.append(indented(_comparison(plan, measurement)))
    if measurement.optimizer_states is not None:
        parts += [heading("Optimizer states (measured)"), indented(Text(_states_words(measurement.optimizer_states)))]
    if measurement.timed_plans:
        parts += [heading("Timed, seconds per optimizer step"), indented(_timed_plans(measurement))]
    if measurement.costliest_ops:
        parts += [heading("Costliest operators"), indented(_costliest(measurement))]
    return Group(*parts, Text())


def _summary(plan: Plan) -> RenderableType:
    predicted, budget = plan.forecast.predicted_peak_bytes, plan.budget
    facts = facts_table()
    facts.add_row("plan", Text(plan.candidate.label, style="bold"))
    facts.add_row("batch", Text(split_words(plan.split)))
    facts.add_row("", Text(f"planned for {plan.planned_batch}"))
    facts.add_row("predicted", _use_of_budget(predicted, budget.budget_bytes, what=_deciding_statistic(plan.forecast)))
    facts.add_row("", budget_bar(predicted, budget.budget_bytes))
    bracket = bracket_words(plan.forecast.memory)
    if bracket is not None:
        facts.add_row("", Text(bracket))
    if plan.forecast.predicted_step_seconds is not None:
        seconds = format_seconds(plan.forecast.predicted_step_seconds)
        facts.add_row("", Text.assemble(("about ", "dim"), (seconds, "bold"), " per optimizer step"))
    facts.add_row("budget", Text(f"{format_bytes(budget.budget_bytes)}: {budget.reason}"))
    facts.add_row("device", Text(device_words(plan.device)))
    return facts


def split_words(split: BatchSplit) -> str:
    """How one optimizer step is divided, in a line."""
    effective = f"effective batch {split.effective_batch_size}"
    factors = []
    if split.ranks > 1:
        factors.append(f"{split.ranks} ranks")
    if split.accumulate_grad_batches > 1:
        factors.append(f"{split.accumulate_grad_batches} accumulated batches")
    if factors:
        effective += f" = {' x '.join(factors)} x {count(split.loader_batch_size, 'sample')}"
    if split.num_slices == 1:
        return f"{effective}, each batch undivided"
    if split.num_slices <= 6:
        return f"{effective}, each batch in slices of {' + '.join(map(str, split.slice_sizes))}"
    return f"{effective}, each batch in {split.num_slices} slices of at most {split.micro_batch_size}"


def decisions_renderables(plan: Plan) -> Iterable[RenderableType]:
    """Each lever with what was chosen, why, and what it costs."""
    if not plan.choices:
        return
    yield heading("Decisions, why, and what they cost")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=12, max_width=26, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for choice in plan.choices:
        table.add_row(Text(choice.lever), Text.assemble((choice.value, "bold"), ": ", choice.reason))
    yield indented(table)


def _passed_over(plan: Plan, most: int | None) -> Iterable[RenderableType]:
    yield heading("Passed over")
    budget = plan.budget.budget_bytes
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("candidate", ratio=4, min_width=20)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("per step", justify="right", no_wrap=True)
    table.add_column("why not", ratio=5, min_width=20)
    best = best_passed_over(plan.passed_over, budget)
    for passed in best[:most]:
        peak = passed.predicted_peak_bytes
        shown = "-" if peak is None else format_bytes(peak)
        over = peak is not None and peak > budget
        table.add_row(
            Text(passed.candidate.label),
            Text(shown, style="red" if over else ""),
            _seconds_or_dash(passed.predicted_step_seconds),
            Text(passed.reason),
        )
    yield indented(table)
    rest = 0 if most is None else len(best) - most
    if rest > 0:
        yield indented(Text(f"and {rest} more in plan.yaml"))


def best_passed_over(passed_over: Sequence[PassedOver], budget_bytes: int) -> list[PassedOver]:
    """Order rejected candidates, closest to being taken first.

    Those that fit keep the planner's order; then those over the budget, by how little; then those without a forecast.
    """

    def distance(passed: PassedOver) -> tuple[bool, int]:
        peak = passed.predicted_peak_bytes
        return peak is None, max(0, (peak or 0) - budget_bytes)

    return sorted(passed_over, key=distance)


def _comparison(plan: Plan, measurement: Measurement) -> Table:
    memory, correction = plan.forecast.memory, plan.forecast.correction_bytes
    table = numbers_table("statistic", "predicted", "measured", "difference", "")
    training = measurement.measured_peak_allocated_bytes
    raw = "allocated peak, training" + (", raw" if correction else "")
    table.add_row(raw, *_against(memory.peak_allocated_bytes, training))
    if correction:
        table.add_row(
            "allocated peak, training, corrected", *_against(memory.peak_allocated_bytes + correction, training)
        )
    evaluation = measurement.measured_evaluation_peak_bytes
    if evaluation is not None:
        predicted = plan.forecast.predicted_evaluation_peak_bytes
        table.add_row("allocated peak, evaluation", *_against(predicted, evaluation))
    if measurement.evaluation_kept_bytes and measurement.evaluation_batches:
        table.add_row(
            f"allocated peak, after {measurement.evaluation_batches} evaluation batches",
            format_bytes(measurement.predicted_evaluation_peak_bytes or 0), "-", "", "",
        )  # fmt: skip
    reserved, total = measurement.measured_peak_reserved_bytes, measurement.measured_device_total_bytes
    if reserved is not None:
        table.add_row("reserved peak, training", *_against(memory.peak_reserved_bytes, reserved))
    if total is not None:
        table.add_row("device total, all processes", *_against(None, total))
    rss = measurement.measured_peak_rss_bytes
    if rss is not None:
        table.add_row("process RSS peak", *_against(None, rss))
    table.add_row("optimizer step", *_times_against(plan.forecast.predicted_step_seconds, measurement))
    return table


def _times_against(predicted: float | None, measurement: Measurement) -> tuple[str, str, str, str]:
    measured = measurement.measured_step_seconds
    if predicted is None or not measured:
        return _seconds_or_dash(predicted), format_seconds(measured), "", ""
    difference = predicted - measured
    sign = "+" if difference > 0 else ""
    return (
        format_seconds(predicted),
        format_seconds(measured),
        f"{sign}{format_seconds(difference)}",
        f"{100 * difference / measured:+.0f} %",
    )


def _timed_plans(measurement: Measurement) -> Table:
    table = numbers_table("candidate", "predicted", "measured", "measured peak")
    for timed in measurement.timed_plans:
        peak = timed.measured_peak_allocated_bytes
        table.add_row(
            Text(timed.candidate.label),
            _seconds_or_dash(timed.predicted_step_seconds),
            _seconds_or_dash(timed.measured_step_seconds),
            "out of memory" if peak is None else format_bytes(peak),
        )
    return table


def _states_words(states: OptimizerStatesMeasurement) -> str:
    quantised, kept = states.quantised_parameters, states.kept_parameters
    words = f"{states.optimizer}: {format_bytes(states.quantised_bytes)} for {quantised:,} parameters"
    if quantised:
        words += f" in 8 bits ({states.quantised_bytes / quantised:.2f} bytes each)"
    if kept:
        words += f", {format_bytes(states.kept_bytes)} for {kept:,} in 32 bits ({states.kept_reason})"
    return f"{words}; {format_bytes(states.saved_bytes)} saved"


def _seconds_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _against(predicted: int | None, measured: int) -> tuple[str, str, str, str]:
    if predicted is None:
        return "-", format_bytes(measured), "", ""
    difference = predicted - measured
    percent = (
        f"{100 * difference / measured:+.2f} %".replace("-0.00", "0.00").replace("+0.00", "0.00") if measured else ""
    )
    return format_bytes(predicted), format_bytes(measured), signed_bytes(difference), percent


def _costliest(measurement: Measurement) -> Table:
    table = numbers_table("operator", "own time/step", "calls/step")
    steps = max(1, measurement.profiled_steps)
    for operator in measurement.costliest_ops[:SHOWN_OPS]:
        table.add_row(Text(operator.name), format_seconds(operator.self_seconds / steps), f"{operator.calls / steps:g}")
    return table


def _deciding_statistic(forecast: Forecast) -> str:
    """What is compared with the budget: under a caching allocator, what it must reserve at least."""
    is_reserved = forecast.memory.minimum_feasible_bytes is not None
    return "least reserved" if is_reserved and not forecast.evaluation_peak_bytes else "peak allocated"


def _use_of_budget(peak: int, budget: int, *, what: str = "peak allocated") -> Text:
    left = budget - peak
    verdict = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} over"
    return Text.assemble(
        f"{what} ",
        (format_bytes(peak), "bold"),
        f" of {format_bytes(budget)} ({percent(peak, budget)}): ",
        (f"fits, {verdict}" if left >= 0 else f"does not fit, {verdict}", "bold green" if left >= 0 else "bold red"),
    )
