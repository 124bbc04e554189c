"""The anatomy of a predicted peak: bytes by category, where in the step, what a caching allocator adds."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lightning_memfit.plan import Forecast, MemoryBreakdown
from lightning_memfit.report.pieces import heading, indented, numbers_table, percent, share_bar, signed_bytes, spaced
from lightning_memfit.units import format_bytes

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
    "communication",
)

_HOW_FOUND = {
    "traced": "",
    "extrapolated": ", extrapolated from small measured steps",
    "floor": ", only what is certainly needed",
}


def memory_renderables(forecast: Forecast) -> Iterable[RenderableType]:
    """What the peak of a forecast consists of, and where in the step it occurs."""
    memory = forecast.memory
    how = _HOW_FOUND[forecast.method]
    yield heading(f"Memory at the predicted peak (torch allocator, allocated bytes{how})")
    yield indented(_anatomy(forecast))
    if memory.peak_phase is None:
        yield indented(Text("where in the step the peak occurs is not known"))
    else:
        yield indented(Text.assemble("peak in the ", (spaced(memory.peak_phase), "bold"), _place(memory)))
    if len(memory.by_phase) > 1:
        phases = (f"{spaced(phase)} {format_bytes(size)}" for phase, size in memory.by_phase.items())
        yield indented(Text(f"by phase: {', '.join(phases)}"))


def bracket_words(memory: MemoryBreakdown) -> str | None:
    """What a caching allocator must reserve, and what it takes where nothing holds it back; ``None`` without one."""
    least, most = memory.minimum_feasible_bytes, memory.peak_reserved_bytes
    if least is None or most is None:
        return None
    return f"predicted to survive in {format_bytes(least)}, and to reserve {format_bytes(most)} where there is room"


def _anatomy(forecast: Forecast) -> Table:
    memory, correction = forecast.memory, forecast.correction_bytes
    table = numbers_table("category", "bytes", "share", "bytes/parameter", "")
    names = [name for name in _ANATOMY if name in memory.by_category]
    names += [name for name in memory.by_category if name not in _ANATOMY]
    peak = memory.peak_allocated_bytes
    largest = max(memory.by_category.values(), default=0)
    for name in names:
        size = memory.by_category[name]
        style = "dim" if size == 0 else "bold" if size == largest else ""
        table.add_row(Text(spaced(name)), *_sized(size, peak, memory), share_bar(size, peak), style=style)
    table.add_section()
    table.add_row("sum" if not correction else "sum, raw", *_sized(peak, peak, memory), style="bold")
    if correction:
        table.add_row("correction by the warm-up", signed_bytes(correction), "", "")
        what = "predicted peak" if memory.minimum_feasible_bytes is None else "least reserved, corrected"
        table.add_row(what, format_bytes(forecast.predicted_peak_bytes), "", "", style="bold")
    return table


def _sized(size: int, peak: int, memory: MemoryBreakdown) -> tuple[str, str, str]:
    per_parameter = f"{size / memory.num_parameters:,.2f}" if memory.num_parameters else "-"
    return format_bytes(size), f"{percent(size, peak)}", per_parameter


def _place(memory: MemoryBreakdown) -> str:
    operator = f", at {memory.peak_op}" if memory.peak_op else ""
    if memory.peak_module is None:
        return operator
    return f"{operator}, in module {memory.peak_module or '(root)'}"
