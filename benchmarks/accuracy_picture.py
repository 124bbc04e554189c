"""Draws predicted against measured peaks, from what ``benchmarks.accuracy_cpu`` wrote.

    python -m benchmarks.accuracy_picture [--json PATH] [--out PATH]

Writes a PNG and an SVG. Needs matplotlib: pip install 'lightning-memfit[plots]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_memfit.units import MIB

ROOT = Path(__file__).parents[1]
_COLOURS = ("#4E79A7", "#F28E2B", "#59A14F", "#E15759", "#76B7B2", "#B07AA1", "#EDC948")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/accuracy_cpu.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/accuracy_cpu", help="path without ending")
    settings = parser.parse_args(arguments)
    figure = draw(json.loads(settings.json.read_text(encoding="utf-8")))
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        # Without a date in the file, the same results give the same picture.
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(settings.out.with_suffix(f".{ending}"), dpi=150, metadata=metadata)


def draw(results: dict[str, Any]) -> Any:
    """One dot for each case, on the diagonal where the prediction is right; a ring where probes are left out."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "memfit"
    from matplotlib import pyplot

    cases = results["cases"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), width_ratios=(1.0, 1.15), layout="constrained")
    models = list(dict.fromkeys(case["model"] for case in cases))
    names = dict(zip(models, (row["name"] for row in results["summary"]), strict=False))
    largest = max(case["measured_peak_bytes"] for case in cases) / MIB * 1.06
    left.plot((0, largest), (0, largest), color="#808080", linewidth=1, zorder=1)
    for model, colour in zip(models, _COLOURS, strict=True):
        mine = [case for case in cases if case["model"] == model]
        measured = [case["measured_peak_bytes"] / MIB for case in mine]
        unprobed = [case["predicted_unprobed_bytes"] / MIB for case in mine]
        left.scatter(measured, unprobed, facecolors="none", edgecolors=colour, s=42, zorder=2)
        raw = [case["predicted_raw_bytes"] / MIB for case in mine]
        left.scatter(measured, raw, color=colour, s=18, label=names[model].split(",")[0], zorder=3)
    left.set(xlim=(0, largest), ylim=(0, largest), xlabel="measured peak, MiB", ylabel="predicted peak, MiB")
    left.set_title("56 cases: dots with operator probes, rings without", fontsize=10)
    left.legend(fontsize=8, frameon=False)

    worst = {model: [case for case in cases if case["model"] == model] for model in models}
    rows = range(len(models))
    for offset, field, colour, label in (
        (-0.2, "unprobed_error", "#BAB0AC", "without probes"),
        (0.2, "raw_error", "#4E79A7", "with probes, before anything ran"),
    ):
        values = [100 * max(abs(case[field]) for case in worst[model]) for model in models]
        bars = right.barh([row + offset for row in rows], [max(value, 1e-3) for value in values], 0.38, color=colour)
        labels = right.bar_label(bars, [_percent(value) for value in values], fontsize=8, padding=3)
        for label_text in labels:
            label_text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        bars.set_label(label)
    right.axvline(100 * results["targets"]["raw_every_case"], color="#E15759", linewidth=1, linestyle="--")
    right.text(0.55, 6.75, "target: 0.5 %", color="#E15759", fontsize=8)
    right.set_xscale("log")
    right.set(xlim=(1e-3, 1e3), xlabel="largest error of a model's 8 settings, % of the measured peak")
    right.set_yticks(list(rows), [names[model].split(",")[0] for model in models])
    right.invert_yaxis()
    right.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.13), ncol=2)
    right.set_title("Largest error", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _percent(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2f} %" if value >= 0.01 else f"{value:.0e} %"


if __name__ == "__main__":
    main()
