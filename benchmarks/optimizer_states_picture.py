"""Draws what ``benchmarks.optimizer_states`` measured. Needs matplotlib: pip install 'lightning-memfit[plots]'."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.figures import BLUE, GREY, open_figure

_SMOOTHED_OVER = 10  # steps


def draw(results: dict[str, Any]) -> Any:
    """Bytes per parameter and time of a step for each optimizer, and the training losses in 32 and in 8 bits."""
    figure, (left, middle, right) = open_figure((12, 4), (1.0, 0.8, 1.2))
    _draw_bytes(left, results["optimizers"])
    _draw_seconds(middle, results["optimizers"])
    _draw_losses(right, results)
    return figure


def _draw_bytes(axes: Any, optimizers: list[dict[str, Any]]) -> None:
    rows = range(len(optimizers))
    for offset, field, colour, label in (
        (-0.2, "bytes_per_kept_parameter", GREY, "in 32 bits"),
        (0.2, "bytes_per_quantised_parameter", BLUE, "in 8 bits"),
    ):
        values = [optimizer[field] for optimizer in optimizers]
        bars = axes.barh([row + offset for row in rows], values, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8, padding=3)
    axes.set_yticks(list(rows), [optimizer["optimizer"] for optimizer in optimizers])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="bytes of states per parameter, measured")
    axes.set_title("What the states take", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _draw_seconds(axes: Any, optimizers: list[dict[str, Any]]) -> None:
    rows = range(len(optimizers))
    for offset, field, colour in ((-0.2, "full_seconds", GREY), (0.2, "quantised_seconds", BLUE)):
        values = [1000 * statistics.median(optimizer[field]) for optimizer in optimizers]
        bars = axes.barh([row + offset for row in rows], values, 0.38, color=colour)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=8, padding=3)
    axes.set_yticks(list(rows), [""] * len(optimizers))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="milliseconds per optimizer step, median")
    axes.set_title("What a step costs on this CPU", fontsize=10)


def _draw_losses(axes: Any, results: dict[str, Any]) -> None:
    for optimizer_states, colour, style, label in (
        ("as-configured", GREY, "-", "in 32 bits"),
        ("8bit", BLUE, (0, (2, 2)), "in 8 bits"),
    ):
        curves = [
            _smoothed(run["train_losses"]) for run in results["runs"] if run["optimizer_states"] == optimizer_states
        ]
        for number, curve in enumerate(curves):
            name = label if number == 0 else None
            axes.plot(range(1, len(curve) + 1), curve, color=colour, linestyle=style, linewidth=1.4, label=name)
    losses = results["validation_loss"]
    axes.set(xlabel="optimizer step", ylabel="training loss, nats per byte")
    axes.set_title(f"AdamW, {len(losses['full'])} seeds, means of {_SMOOTHED_OVER} steps", fontsize=10)
    words = (
        f"validation loss at the end\n32 bits {statistics.fmean(losses['full']):.4f}\n"
        f"8 bits {statistics.fmean(losses['quantised']):.4f} ({losses['mean_difference']:+.4f})\n"
        f"seeds differ by {losses['spread_of_seeds']:.4f}"
    )
    axes.text(0.97, 0.72, words, transform=axes.transAxes, ha="right", va="top", fontsize=8, color="#404040")
    axes.legend(fontsize=8, frameon=False)


def _smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, end - _SMOOTHED_OVER) : end]) for end in range(1, len(losses) + 1)]
