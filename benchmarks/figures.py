"""How pictures of results are opened and written. Needs matplotlib: pip install 'lightning-memfit[plots]'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

GREY, BLUE, RED = "#BAB0AC", "#4E79A7", "#E15759"


def open_figure(size: tuple[float, float], widths: Sequence[float]) -> tuple[Any, Sequence[Any]]:
    """A figure in inches with axes side by side, ``widths`` in proportion; white, so that dark pages show it too."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "memfit"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(widths), figsize=size, width_ratios=widths, layout="constrained")
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG and an SVG; ``path`` is without an ending. The same results give the same files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(path.with_suffix(f".{ending}"), dpi=150, metadata=metadata)
