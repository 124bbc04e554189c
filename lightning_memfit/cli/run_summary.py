"""What the training job prints at its end: what was trained, whether it learned, what it needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memfit.no_fit import NO_FIT_FILE
from lightning_memfit.plan_file import FILE_NAME
from lightning_memfit.report.record import REPORT_FILE
from lightning_memfit.units import format_bytes


class ValidationCurve(Callback):
    """Keeps what each validation logged; the first is that of the untrained model."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: dict[str, list[float]] = {"val_loss": [], "val_accuracy": []}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the means over this validation."""
        self.steps.append(trainer.global_step)
        for name, values in self.values.items():
            if name in trainer.callback_metrics:
                values.append(trainer.callback_metrics[name].item())

    def lines(self, loss_unit: str) -> list[tuple[str, str]]:
        """What to print of it, as pairs of a label and its value."""
        loss, accuracy = self.values["val_loss"], self.values["val_accuracy"]
        lines = []
        if loss:
            ends = f"{loss[0]:.3f} (step {self.steps[0]}) to {loss[-1]:.3f} (step {self.steps[-1]}) {loss_unit}"
            lines += [("validation loss", ends), ("  at every validation", " ".join(f"{value:.3f}" for value in loss))]
        if accuracy:
            lines.append(("validation accuracy", f"{accuracy[0]:.1%} to {accuracy[-1]:.1%}"))
        return lines


def print_summary(trainer: Any, curve: ValidationCurve, output: Path) -> None:
    """Print what was trained, whether it learned, what it needed, and where the results are."""
    plugin = trainer.precision_plugin
    plan, measured, no_fit = plugin.plan, plugin.measured, plugin.no_fit
    lines = [("optimizer steps", str(trainer.global_step))]
    if no_fit is not None:
        lines.append(("does not fit", f"{format_bytes(no_fit.missing_bytes)} missing, nothing was trained"))
    if plan is not None:
        label = "planned, not applied" if plan.request.mode == "report" else "effective batch"
        lines.append((label, f"{plan.split.effective_batch_size} samples: {plan.candidate.label}"))
    lines += curve.lines(getattr(trainer.lightning_module, "loss_unit", ""))
    if plan is not None:
        lines.append(("budget", format_bytes(plan.budget.budget_bytes)))
        lines.append(("predicted peak allocated", format_bytes(plan.forecast.predicted_peak_bytes)))
    if measured is not None:
        lines.append(("measured peak allocated", format_bytes(measured.measured_peak_allocated_bytes)))
        if measured.measured_evaluation_peak_bytes is not None:
            lines.append(("  while validating", format_bytes(measured.measured_evaluation_peak_bytes)))
    checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if checkpoint:
        lines.append(("checkpoint", checkpoint))
    names = (FILE_NAME, REPORT_FILE, NO_FIT_FILE, "metrics.csv")
    lines += [(name, str(output / name)) for name in names if (output / name).exists()]
    # Plain lines, not a table: a path that is cut or wrapped cannot be copied.
    print("\n".join(f"{label:<26}{value}" for label, value in lines))
