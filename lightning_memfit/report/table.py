"""The report for people: the plan, its memory and its reasons as rich renderables, and what a warm-up measured.

Every number says whether it is predicted or measured, and which statistic it is. Names and reasons are wrapped in
``Text``, so that a bracket in them is never taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lightning_memfit.plan import (
    BatchSplit,
    Measurement,
    MemoryBreakdown,
    OptimizerStatesMeasurement,
    PassedOver,
    Plan,
)
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.units import format_bytes, format_seconds

__all__ = [
    "best_passed_over",
    "measurement_renderable",
    "no_fit_message",
    "plan_renderable",
    "render_measurement",
    "render_plan",
]

SHOWN_PASSED_OVER = 6
SHOWN_OPS = 5

# The anatomy in the order in which a model comes to hold them.
_ANATOMY = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "temporaries",
    "inputs",
    "buffers",
    "callbacks",
)


def render_plan(plan: Plan, *, console: Console | None = None) -> None:
    """Print the plan: verdict, device and budget, memory at the peak, decisions, and what was passed over.

    Args:
        plan: the plan.
        console: where to print; a new rich console on standard output if left out.
    """
    (console or Console()).print(plan_renderable(plan))


def render_measurement(plan: Plan, measurement: Measurement, *, console: Console | None = None) -> None:
    """Print what the warm-up measured beside what the plan predicted.

    Args:
        plan: the plan that was run.
        measurement: what its profiled steps measured.
        console: where to print; a new rich console on standard output if left out.
    """
    (console or Console()).print(measurement_renderable(plan, measurement))


def plan_renderable(plan: Plan) -> RenderableType:
    """Build what :func:`render_plan` prints."""
    parts: list[RenderableType] = [_title("MemFit plan"), _summary(plan), *_memory(plan), *_decisions(plan)]
    notes = dict.fromkeys((*plan.notes, *plan.forecast.notes))  # each once, in order
    if notes:
        parts += [_heading("Notes"), *(_bullet(note) for note in notes)]
    if plan.passed_over:
        parts += _passed_over(plan)
    return Group(*parts, Text())


def measurement_renderable(plan: Plan, measurement: Measurement) -> RenderableType:
    """Build what :func:`render_measurement` prints."""
    peak, budget = measurement.measured_peak_bytes, plan.budget.budget_bytes
    facts = _facts()
    if measurement.timed_plans:
        words = f" (the fastest of {len(measurement.timed_plans)} that were timed)"
        facts.add_row("plan", Text(plan.candidate.label) + words)
    facts.add_row("measured", _use_of_budget(peak, budget))
    facts.add_row("", _budget_bar(peak, budget))
    facts.add_row(
        "step time",
        f"{format_seconds(measurement.measured_step_seconds)} per optimizer step (fastest without the profiler, after "
        f"{_count(measurement.profiled_steps, 'profiled step')})",
    )
    if measurement.evaluation_batch is not None:
        facts.add_row("evaluation", Text(f"measured with {measurement.evaluation_batch}"))
    if not measurement.profiled_steps:
        facts.add_row("proof", Text("NONE: training_step gave no loss for the first batch", style="bold red"))
    parts: list[RenderableType] = [
        _title("MemFit warm-up"),
        facts,
        _heading("Predicted against measured (difference: predicted - measured)"),
    ]
    parts.append(_indented(_comparison(plan, measurement)))
    if measurement.optimizer_states is not None:
        parts += [_heading("Optimizer states (measured)"), _indented(Text(_states_words(measurement.optimizer_states)))]
    if measurement.timed_plans:
        parts += [_heading("Timed, seconds per optimizer step"), _indented(_timed_plans(measurement))]
    if measurement.costliest_ops:
        parts += [_heading("Costliest operators"), _indented(_costliest(measurement))]
    return Group(*parts, Text())


def _summary(plan: Plan) -> RenderableType:
    predicted, budget = plan.forecast.predicted_peak_bytes, plan.budget
    facts = _facts()
    facts.add_row("plan", Text(plan.candidate.label, style="bold"))
    facts.add_row("batch", Text(_split_words(plan.split)))
    facts.add_row("", Text(f"planned for {plan.planned_batch}"))
    facts.add_row("predicted", _use_of_budget(predicted, budget.budget_bytes))
    facts.add_row("", _budget_bar(predicted, budget.budget_bytes))
    if plan.forecast.predicted_step_seconds is not None:
        seconds = format_seconds(plan.forecast.predicted_step_seconds)
        facts.add_row("", Text.assemble(("about ", "dim"), (seconds, "bold"), " per optimizer step"))
    facts.add_row("budget", Text(f"{format_bytes(budget.budget_bytes)}: {budget.reason}"))
    device = plan.device
    facts.add_row("device", Text(f"{device.name} ({device.kind}, {_count(device.cores, 'core')})"))
    return facts


def _split_words(split: BatchSplit) -> str:
    effective = f"effective batch {split.effective_batch_size}"
    factors = []
    if split.ranks > 1:
        factors.append(f"{split.ranks} ranks")
    if split.accumulate_grad_batches > 1:
        factors.append(f"{split.accumulate_grad_batches} accumulated batches")
    if factors:
        effective += f" = {' x '.join(factors)} x {_count(split.loader_batch_size, 'sample')}"
    if split.num_slices == 1:
        return f"{effective}, each batch undivided"
    if split.num_slices <= 6:
        return f"{effective}, each batch in slices of {' + '.join(map(str, split.slice_sizes))}"
    return f"{effective}, each batch in {split.num_slices} slices of at most {split.micro_batch_size}"


_HOW_FOUND = {
    "traced": "",
    "extrapolated": ", extrapolated from small measured steps",
    "floor": ", only what is certainly needed",
}


def _memory(plan: Plan) -> Iterable[RenderableType]:
    memory = plan.forecast.memory
    how = _HOW_FOUND[plan.forecast.method]
    yield _heading(f"Memory at the predicted peak (torch allocator, allocated bytes{how})")
    yield _indented(_anatomy(plan))
    if memory.peak_phase is None:
        yield _indented(Text("where in the step the peak occurs is not known"))
    else:
        yield _indented(Text.assemble("peak in the ", (_spaced(memory.peak_phase), "bold"), _place(memory)))
    if len(memory.by_phase) > 1:
        phases = (f"{_spaced(phase)} {format_bytes(size)}" for phase, size in memory.by_phase.items())
        yield _indented(Text(f"by phase: {', '.join(phases)}"))


def _anatomy(plan: Plan) -> Table:
    memory, correction = plan.forecast.memory, plan.forecast.correction_bytes
    table = _table("category", "bytes", "share", "bytes/parameter", "")
    names = [name for name in _ANATOMY if name in memory.by_category]
    names += [name for name in memory.by_category if name not in _ANATOMY]
    peak = memory.peak_allocated_bytes
    largest = max(memory.by_category.values(), default=0)
    for name in names:
        size = memory.by_category[name]
        style = "dim" if size == 0 else "bold" if size == largest else ""
        table.add_row(Text(_spaced(name)), *_sized(size, peak, memory), _share_bar(size, peak), style=style)
    table.add_section()
    table.add_row("sum" if not correction else "sum, raw", *_sized(peak, peak, memory), style="bold")
    if correction:
        table.add_row("correction by the warm-up", _signed_bytes(correction), "", "")
        table.add_row("predicted peak", format_bytes(plan.forecast.predicted_peak_bytes), "", "", style="bold")
    return table


def _sized(size: int, peak: int, memory: MemoryBreakdown) -> tuple[str, str, str]:
    per_parameter = f"{size / memory.num_parameters:,.2f}" if memory.num_parameters else "-"
    return format_bytes(size), f"{_percent(size, peak)}", per_parameter


def _place(memory: MemoryBreakdown) -> str:
    operator = f", at {memory.peak_op}" if memory.peak_op else ""
    if memory.peak_module is None:
        return operator
    return f"{operator}, in module {memory.peak_module or '(root)'}"


def _decisions(plan: Plan) -> Iterable[RenderableType]:
    if not plan.choices:
        return
    yield _heading("Decisions, why, and what they cost")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=12, max_width=26, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for choice in plan.choices:
        table.add_row(Text(choice.lever), Text.assemble((choice.value, "bold"), ": ", choice.reason))
    yield _indented(table)


def _passed_over(plan: Plan) -> Iterable[RenderableType]:
    yield _heading("Passed over")
    budget = plan.budget.budget_bytes
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("candidate", ratio=4, min_width=20)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("per step", justify="right", no_wrap=True)
    table.add_column("why not", ratio=5, min_width=20)
    best = best_passed_over(plan.passed_over, budget)
    for passed in best[:SHOWN_PASSED_OVER]:
        peak = passed.predicted_peak_bytes
        shown = "-" if peak is None else format_bytes(peak)
        over = peak is not None and peak > budget
        table.add_row(
            Text(passed.candidate.label),
            Text(shown, style="red" if over else ""),
            _seconds_or_dash(passed.predicted_step_seconds),
            Text(passed.reason),
        )
    yield _indented(table)
    rest = len(best) - SHOWN_PASSED_OVER
    if rest > 0:
        yield _indented(Text(f"and {rest} more in plan.yaml"))


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
    table = _table("statistic", "predicted", "measured", "difference", "")
    training = measurement.measured_peak_allocated_bytes
    raw = "allocated peak, training" + (", raw" if correction else "")
    table.add_row(raw, *_against(memory.peak_allocated_bytes, training))
    if correction:
        table.add_row(
            "allocated peak, training, corrected", *_against(plan.forecast.predicted_training_peak_bytes, training)
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
    table = _table("candidate", "predicted", "measured", "measured peak")
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
    return format_bytes(predicted), format_bytes(measured), _signed_bytes(difference), percent


def _costliest(measurement: Measurement) -> Table:
    table = _table("operator", "own time/step", "calls/step")
    steps = max(1, measurement.profiled_steps)
    for operator in measurement.costliest_ops[:SHOWN_OPS]:
        table.add_row(Text(operator.name), format_seconds(operator.self_seconds / steps), f"{operator.calls / steps:g}")
    return table


def _use_of_budget(peak: int, budget: int) -> Text:
    left = budget - peak
    verdict = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} over"
    return Text.assemble(
        "peak allocated ",
        (format_bytes(peak), "bold"),
        f" of {format_bytes(budget)} ({_percent(peak, budget)}): ",
        (f"fits, {verdict}" if left >= 0 else f"does not fit, {verdict}", "bold green" if left >= 0 else "bold red"),
    )


def _budget_bar(peak: int, budget: int) -> Table:
    colour = "green" if peak <= budget else "red"
    filled = min(peak, budget)
    row = Table.grid()
    bar = ProgressBar(total=budget, completed=filled, width=40, complete_style=colour, finished_style=colour)
    row.add_row("[", bar, Text("]"))  # the end stays visible where there is no colour
    return row


def _share_bar(size: int, peak: int) -> ProgressBar:
    return ProgressBar(total=max(peak, 1), completed=size, width=16, complete_style="cyan", finished_style="cyan")


def _title(words: str) -> RenderableType:
    return Rule(Text(words, style="bold"), align="left", style="cyan")


def _heading(words: str) -> RenderableType:
    return Padding(Text(words, style="bold cyan"), (1, 0, 0, 0))


def _indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2))


def _bullet(words: str) -> RenderableType:
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row("  -", Text(words))
    return row


def _facts() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1)
    return table


def _table(*headers: str) -> Table:
    """Make a table whose first column is text and whose others are numbers, never wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column(headers[0], overflow="fold")
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _signed_bytes(size: int) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)
