"""Draws predicted against measured peaks, from what ``benchmarks.accuracy_cpu`` wrote.

    python -m benchmarks.accuracy_picture [--json PATH] [--out PATH]

Writes a PNG and an SVG. Needs matplotlib: pip install 'lightning-memfit[plots]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.figures import BLUE, GREY, RED, open_figure, save_figure
from lightning_memfit.units import MIB

ROOT = Path(__file__).parents[1]
# Eight colours by two shapes: neighbours in the legend differ in colour, and the second eight in shape.
_COLOURS = ("#4E79A7", "#F28E2B", "#59A14F", "#E15759", "#76B7B2", "#B07AA1", "#9C755F", "#D4A800")
_SHAPES = ("o", "^", "s")
_TARGET = "raw_every_case"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/accuracy_cpu.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/accuracy_cpu", help="path without ending")
    settings = parser.parse_args(arguments)
    save_figure(draw(json.loads(settings.json.read_text(encoding="utf-8"))), settings.out)


def draw(results: dict[str, Any]) -> Any:
    """One mark for each case, on the diagonal where the prediction is right; hollow where probes are left out."""
    cases = results["cases"]
    by_model: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        by_model.setdefault(case["model"], []).append(case)
    # The summary has a row per model in the order of the cases, and rows over several models after them.
    names = [row["name"] for row in results["summary"]][: len(by_model)]
    groups = dict(zip(names, by_model.values(), strict=True))
    figure, (left, right) = open_figure((11, 1.8 + 0.27 * max(12, len(groups))), (1.0, 1.0))
    _draw_peaks(left, groups)
    left.set_title(f"{len(cases)} cases: filled with operator probes, hollow without", fontsize=10)
    _draw_errors(right, groups, 100 * results["targets"][_TARGET])
    return figure


def _draw_peaks(axes: Any, groups: dict[str, list[dict[str, Any]]]) -> None:
    largest = max(case["measured_peak_bytes"] for cases in groups.values() for case in cases) / MIB * 1.06
    axes.plot((0, largest), (0, largest), color="#808080", linewidth=1, zorder=1)
    for number, (name, cases) in enumerate(groups.items()):
        colour, shape = _COLOURS[number % len(_COLOURS)], _SHAPES[number // len(_COLOURS)]
        measured, raw, unprobed = (
            [case[field] / MIB for case in cases]
            for field in ("measured_peak_bytes", "predicted_raw_bytes", "predicted_unprobed_bytes")
        )
        axes.scatter(measured, unprobed, facecolors="none", edgecolors=colour, marker=shape, s=42, zorder=2)
        axes.scatter(measured, raw, color=colour, marker=shape, s=18, label=name, zorder=3)
    axes.set(xlim=(0, largest), ylim=(0, largest), xlabel="measured peak, MiB", ylabel="predicted peak, MiB")
    axes.legend(fontsize=7, frameon=False, loc="upper left", labelspacing=0.3, handletextpad=0.2)


def _draw_errors(axes: Any, groups: dict[str, list[dict[str, Any]]], target: float) -> None:
    rows = range(len(groups))
    for offset, field, colour, label in (
        (-0.2, "unprobed_error", GREY, "without probes"),
        (0.2, "raw_error", BLUE, "with probes, before anything ran"),
    ):
        values = [100 * max(abs(case[field]) for case in cases) for cases in groups.values()]
        bars = axes.barh([row + offset for row in rows], [max(value, 1e-3) for value in values], 0.38, color=colour)
        for text in axes.bar_label(bars, [_percent(value) for value in values], fontsize=7, padding=3):
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        bars.set_label(label)
    axes.axvline(target, color=RED, linewidth=1, linestyle="--", label=f"target: {target:g} %")
    axes.set_xscale("log")
    axes.set(xlim=(1e-3, 1e3), xlabel="largest error over a model's settings, % of the measured peak")
    axes.set_yticks(list(rows), list(groups), fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.42, -0.1), ncol=3)
    axes.set_title("Largest error", fontsize=10)


def _percent(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2f} %" if value >= 0.01 else f"{value:.0e} %"


if __name__ == "__main__":
    main()
