"""What came of a sweep, as a picture: memory against throughput.

Needs matplotlib, which is imported where it is needed: pip install 'lightning-memfit[sweeps]'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memfit.sweep.job import varying_overrides
from lightning_memfit.sweep.rows import NOT_FITTING, Row

NAME = "sweep"
"""Of the files, without their endings."""
_BLUE, _RED, _GREY, _INK = "#4E79A7", "#E15759", "#9A9A9A", "#303030"
_MOST_LISTED = 24  # jobs; more lines would be too small to read
_MOST_CHARACTERS = 60
_OFFSETS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 9), (0, -15), (14, -3), (-14, -3), (16, 12), (-16, 12))  # points
_LOG_FROM = 8.0  # largest over smallest value, from which an axis is logarithmic
_Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A job in the picture."""

    row: Row
    """The job."""
    percent: float
    """Predicted peak, % of its budget."""
    samples_per_second: float
    """Measured, or else predicted."""
    kind: str
    """One of :data:`KINDS`."""


KINDS: dict[str, dict[str, Any]] = {
    "trained, throughput measured": {"marker": "o", "color": _BLUE},
    "trained, throughput predicted": {"marker": "o", "edgecolors": _BLUE, "facecolors": "none"},
    "left out, throughput predicted": {"marker": "X", "color": _RED},
    "did not fit when it ran, throughput predicted": {"marker": "s", "edgecolors": _RED, "facecolors": "none"},
    "failed, throughput measured": {"marker": "D", "color": _GREY},
    "failed, throughput predicted": {"marker": "D", "edgecolors": _GREY, "facecolors": "none"},
}
"""What marks mean, and how they are drawn."""


def write_picture(sweep_dir: Path, rows: Sequence[Row]) -> str:
    """Write ``sweep.png`` and ``sweep.svg``.

    Returns:
        Why there is no picture; empty if there is one.
    """
    found = points(rows)
    if not found:
        return "no picture: of no job both memory and throughput are known"
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed. pip install 'lightning-memfit[sweeps]'"
    with matplotlib.rc_context({"svg.hashsalt": "memfit", "font.family": "DejaVu Sans"}):
        figure = _draw(found, rows)
        for ending in ("png", "svg"):
            metadata = {"Date": None} if ending == "svg" else {"Software": None}
            figure.savefig(sweep_dir / f"{NAME}.{ending}", dpi=150, metadata=metadata)
    return ""


def points(rows: Sequence[Row]) -> list[Point]:
    """The jobs of which both numbers are known."""
    return [point for row in rows for point in _point(row)]


def _point(row: Row) -> Iterator[Point]:
    forecast, peak, budget = row.forecast, row.predicted_peak_bytes, row.budget_bytes
    if peak is None or not budget:
        return
    measured = None if row.measured is None else row.measured.measured_samples_per_second
    predicted = None if forecast is None else forecast.predicted_samples_per_second
    is_measured = row.status in ("completed", "failed") and measured is not None
    speed = measured if is_measured else predicted
    if speed is None or row.status == "not run":
        return
    words = {"completed": "trained", "does not fit": "did not fit when it ran"}.get(row.status, row.status)
    kind = f"{words}, throughput {'measured' if is_measured else 'predicted'}"
    yield Point(row=row, percent=100 * peak / budget, samples_per_second=speed, kind=kind)


def _draw(found: Sequence[Point], rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    listed = len(rows) <= _MOST_LISTED
    # White, so that dark pages show it too. A figure of its own, so that the user's backend stays as it is.
    figure = Figure(figsize=(13 if listed else 8, 5.4), facecolor="white", layout="constrained")
    if listed:
        axes, beside = figure.subplots(1, 2, width_ratios=(1.7, 1.0))
        _list_jobs(beside, rows)
    else:
        axes = figure.subplots()
    _draw_points(axes, found, num_jobs=len(rows))
    _draw_budget(axes, found)
    figure.draw_without_rendering()
    _number(figure, axes, found)
    return figure


def _draw_points(axes: Any, found: Sequence[Point], *, num_jobs: int) -> None:
    for kind, style in KINDS.items():
        of_kind = [point for point in found if point.kind == kind]
        if of_kind:
            across = [point.percent for point in of_kind]
            up = [point.samples_per_second for point in of_kind]
            label = f"{kind} ({len(of_kind)})"
            axes.scatter(across, up, s=64, linewidths=1.6, label=label, zorder=3, **style)
    axes.spines[["top", "right"]].set_visible(False)
    across_words = "predicted peak of the plan (of the smallest one where none fits), % of the job's budget"
    not_drawn = num_jobs - len(found)
    without = f"\nnot drawn, since memory or throughput is not known: {not_drawn} of {num_jobs}" if not_drawn else ""
    axes.set_xlabel(across_words + without)
    axes.set_ylabel("samples per second")
    for axis, values in (
        ("x", [100.0, *(point.percent for point in found)]),
        ("y", [point.samples_per_second for point in found]),
    ):
        _scale(axes, axis, values)
    axes.grid(color="#E8E8E8", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    below = -0.19 if not_drawn else -0.13
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, below), ncol=2)


def _scale(axes: Any, axis: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_limits = axes.set_xlim if axis == "x" else axes.set_ylim
    least, most = min(values), max(values)
    if most / least < _LOG_FROM:
        room = 0.12 * max(most - least, 0.1 * most)
        set_limits(max(0.0, least - room), most + room)
        return
    (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    set_limits(least / 1.35, most * 1.35)
    of_axis = axes.xaxis if axis == "x" else axes.yaxis
    of_axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    of_axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    of_axis.set_minor_formatter(NullFormatter())


def _draw_budget(axes: Any, found: Sequence[Point]) -> None:
    low, high = axes.get_xlim()
    axes.axvspan(100, high, color=_RED, alpha=0.06, linewidth=0, zorder=0)
    axes.axvline(100, color=_RED, linewidth=1.2, linestyle="--", zorder=1)
    axes.set_xlim(low, high)
    for words, side, colour in (("fits", -1, _INK), ("does not fit", 1, _RED)):
        axes.annotate(
            words, (100, 1), xycoords=("data", "axes fraction"), xytext=(5 * side, 3), textcoords="offset points",
            ha="left" if side > 0 else "right", va="bottom", fontsize=8.5, color=colour,
        )  # fmt: skip


def _number(figure: Any, axes: Any, found: Sequence[Point]) -> None:
    """Write each job's number beside its mark, where there is room: not on another mark, number, or the budget."""
    per_point = figure.dpi / 72
    marks = [axes.transData.transform((point.percent, point.samples_per_second)) for point in found]
    taken = [_box(x, y - 5 * per_point, 10 * per_point, 10 * per_point) for x, y in marks]
    frame = axes.get_window_extent()
    budget = axes.transData.transform((100, found[0].samples_per_second))[0]
    taken.append(_box(budget, frame.y0, 2 * per_point, frame.height))
    for point, (x, y) in sorted(zip(found, marks, strict=True), key=lambda pair: (pair[1][1], pair[1][0])):
        text = str(point.row.job.number)
        size = 6.2 * len(text) * per_point, 9 * per_point
        places = {offset: _box(x + offset[0] * per_point, y + offset[1] * per_point, *size) for offset in _OFFSETS}
        inside = {
            offset: box
            for offset, box in places.items()
            if box[0] > frame.x0 and box[2] < frame.x1 and box[1] > frame.y0 and box[3] < frame.y1
        }
        offset, box = min((inside or places).items(), key=lambda place: _crossings(place[1], taken))
        taken.append(box)
        axes.annotate(
            text, (point.percent, point.samples_per_second), xytext=offset, textcoords="offset points", ha="center",
            va="bottom", fontsize=8.5, color=_INK, zorder=4,
        )  # fmt: skip


def _box(centre: float, bottom: float, width: float, height: float) -> _Box:
    return centre - width / 2, bottom, centre + width / 2, bottom + height


def _crossings(box: _Box, others: Sequence[_Box]) -> float:
    """The area that a box shares with others, in square pixels."""
    shared = 0.0
    for other in others:
        across = min(box[2], other[2]) - max(box[0], other[0])
        up = min(box[3], other[3]) - max(box[1], other[1])
        shared += max(0.0, across) * max(0.0, up)
    return shared


def _list_jobs(axes: Any, rows: Sequence[Row]) -> None:
    """What the numbers mean, a line for each job."""
    axes.axis("off")
    short = varying_overrides([row.job for row in rows])
    step = 1 / max(len(rows) + 1, 13)
    for line, row in enumerate(rows):
        words = short[row.job.number] or "no overrides"
        if len(words) > _MOST_CHARACTERS:
            words = f"{words[: _MOST_CHARACTERS - 3]}..."
        colour = _RED if row.status in NOT_FITTING else _GREY if row.status in ("failed", "not run") else _INK
        height = 1 - (line + 1) * step
        axes.text(0.06, height, str(row.job.number), ha="right", fontsize=8.5, color=colour, transform=axes.transAxes)
        axes.text(0.10, height, words, fontsize=8.5, color=colour, transform=axes.transAxes)
