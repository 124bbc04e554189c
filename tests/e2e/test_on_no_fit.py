"""A run that does not fit as a result: nothing is trained, nothing is raised, and what was missing is recorded.

Run: ``pytest tests/e2e/test_on_no_fit.py``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import ConfigurationError, MemFit, NoFeasiblePlanError, objective
from lightning_memfit.no_fit import load_no_fit, no_fits_heard
from lightning_memfit.plan_schema import load_seconds_spent
from lightning_memfit.upstream import NAMESPACES
from lightning_memfit.validate import warmup

MakeTrainer = Callable[..., Any]

pytestmark = [pytest.mark.usefixtures("no_probing")]

TOO_SMALL = "1KiB"
# 16 x 16 weights, 16 biases and as many gradients in float32 alone take 2 x 272 x 4 = 2,176 bytes.
AS_IT_IS: Any = {"precision": "32-true", "optimizer_states": "as-configured", "verbose": False}


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append("step")
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def teardown(self, stage: str) -> None:
        self.seen.append("teardown")


class Heard(lightning.Callback):
    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(8, 16)), 4)


@pytest.mark.parametrize(("on_no_fit", "value"), [("skip", None), ("value", 1e9)])
def test_a_run_that_does_not_fit_returns_untrained_and_says_what_is_missing(
    make_trainer: MakeTrainer, tmp_path: Path, on_no_fit: str, value: float | None
) -> None:
    module, heard = Line(), Heard()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    plugin = MemFit(budget=TOO_SMALL, on_no_fit=on_no_fit, no_fit_value=value, **AS_IT_IS)
    trainer = make_trainer(plugin, callbacks=[heard])
    trainer.fit(module, loader(), loader())
    assert trainer.state.finished and trainer.global_step == 0
    assert heard.exceptions == []
    assert module.seen[-1] == "teardown" and "forward" not in vars(module.layer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert plugin.plan is None and plugin.measured is None
    assert plugin.no_fit is not None
    assert plugin.no_fit.budget_bytes == 1024
    assert plugin.no_fit.missing_bytes == plugin.no_fit.best_peak_bytes - 1024 > 0
    assert load_no_fit(tmp_path / "no_fit.yaml") == plugin.no_fit
    assert not (tmp_path / "plan.yaml").exists()
    found = objective(trainer, "val_loss")
    assert math.isnan(found) if value is None else found == value


def test_an_error_is_what_a_run_that_does_not_fit_gives_by_default(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = MemFit(budget=TOO_SMALL, **AS_IT_IS)
    with pytest.raises(NoFeasiblePlanError) as caught:
        make_trainer(plugin).fit(Line(), loader())
    assert plugin.no_fit is None
    skipping = MemFit(budget=TOO_SMALL, on_no_fit="skip", **AS_IT_IS)
    make_trainer(skipping).fit(Line(), loader())
    assert skipping.no_fit is not None
    words = str(caught.value).splitlines()  # the last ones tell what the host holds now
    assert skipping.no_fit.reason.splitlines()[:3] == words[:3]


def test_a_plan_that_no_warm_up_proves_is_a_run_that_does_not_fit_too(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lightning_memfit import real_steps

    measured = warmup.run_warmup

    def out_of_memory(**settings: Any) -> Any:
        measured(**settings)
        raise torch.OutOfMemoryError("as if the device had less")

    monkeypatch.setattr(real_steps, "run_warmup", out_of_memory)
    plugin = MemFit(budget="1MiB", on_no_fit="skip", **AS_IT_IS)
    module = Line()
    trainer = make_trainer(plugin)
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == 0 and plugin.no_fit is not None
    assert "ran out of memory" in plugin.no_fit.reason
    assert plugin.plan is None
    assert trainer.callbacks == [callback for callback in trainer.callbacks if "MemFit" not in type(callback).__name__]
    assert (tmp_path / "no_fit.yaml").exists()


def test_the_next_fit_of_the_same_plugin_starts_anew(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = MemFit(budget="1MiB", on_no_fit="skip", **AS_IT_IS)
    trainer = make_trainer(plugin)
    (tmp_path / "no_fit.yaml").write_text("schema_version: 1\n")  # of an earlier run in the same folder
    trainer.fit(Line(), loader(), loader())
    assert plugin.no_fit is None and plugin.plan is not None
    spent = load_seconds_spent(tmp_path / "plan.yaml")
    assert spent is not None and spent.planning > 0 and spent.proving > 0
    assert not (tmp_path / "no_fit.yaml").exists()
    assert (tmp_path / "memfit_report.txt").read_text().startswith("MemFit plan")
    assert objective(trainer, "val_loss") == float(trainer.callback_metrics["val_loss"])


def test_of_several_runs_in_one_place_the_last_one_counts(make_trainer: MakeTrainer) -> None:
    with no_fits_heard() as heard:
        make_trainer(MemFit(budget=TOO_SMALL, on_no_fit="skip", **AS_IT_IS)).fit(Line(), loader())
        assert len(heard) == 1
        make_trainer(MemFit(budget="1MiB", on_no_fit="skip", **AS_IT_IS)).fit(Line(), loader())
        assert heard == []


def test_an_objective_that_was_not_logged_is_named_with_those_that_were(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit(Line(), loader(), loader())
    with pytest.raises(ConfigurationError) as caught:
        objective(trainer, "val_los")
    assert str(caught.value) == (
        "The objective 'val_los' was not logged. Choose one of: val_loss, or log it with self.log."
    )


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lightning_still_has_the_exception_that_ends_a_fit_quietly(namespace: str) -> None:
    trainer = importlib.import_module(namespace).Trainer
    source = Path(importlib.import_module(f"{trainer.__module__.rsplit('.', 1)[0]}.call").__file__ or "").read_text()
    assert "except _TunerExitException:" in source
    assert issubclass(importlib.import_module(f"{namespace}.utilities.exceptions")._TunerExitException, Exception)
