"""Trains a model inside a memory budget. Overrides as in Hydra: ``python scripts/train.py memfit.budget=56MiB``.

Exit code 0: trained. 2: MemFit refused, and the message says by how much and what would help. 1: any other error.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from lightning_memfit import config as memfit_config
from lightning_memfit.errors import MemFitError
from lightning_memfit.units import format_bytes

REFUSED = 2
"""Exit code if MemFit refuses."""


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


def quieten_lightning() -> None:
    """Leave out what does not concern this run, so that what does can be seen."""
    # Hardware that was not found, and products to try.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # The text is in memory already; worker processes would only copy it.
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    # Hydra made the folder a moment ago, and put its own files there.
    warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
    # Lightning 2.6 asks torch in a way that torch 2.13 will drop.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def require_every_value(config: DictConfig) -> None:
    """End with the name of a value that only the user can give, such as the path of his own data."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise SystemExit(
            f"{missing[0]} has no default. Add {missing[0]}=... to the command; conf/ says beside it what it means."
        )


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def train(config: DictConfig) -> None:
    """Make everything the config names, train, and say what happened."""
    quieten_lightning()
    require_every_value(config)
    seed_everything(config.seed, workers=True, verbose=False)
    curve = ValidationCurve()
    try:
        memfit = memfit_config.memfit_from_config(config.memfit)
        model = hydra.utils.instantiate(config.model)
        data = hydra.utils.instantiate(config.data)
        callbacks = [*hydra.utils.instantiate(config.trainer.callbacks), curve]
        trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks, plugins=[memfit])
        trainer.fit(model, datamodule=data)
    except MemFitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    print_summary(trainer, curve, Path(HydraConfig.get().runtime.output_dir))


def print_summary(trainer: Trainer, curve: ValidationCurve, output: Path) -> None:
    """Print what was trained, whether it learned, what it needed, and where the results are."""
    plan, measured = trainer.precision_plugin.plan, trainer.precision_plugin.measured
    lines = [("optimizer steps", str(trainer.global_step))]
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
    lines += [(name, str(output / name)) for name in ("plan.yaml", "metrics.csv") if (output / name).exists()]
    # Plain lines, not a table: a path that is cut or wrapped cannot be copied.
    print("\n".join(f"{label:<26}{value}" for label, value in lines))


def main() -> None:
    """Register the schema, then hand over to Hydra."""
    memfit_config.register_configs()
    train()


if __name__ == "__main__":
    main()
