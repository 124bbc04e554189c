"""A Trainer's life, told without MemFit and with it, by users of either package: everything seen is the same.

Run: ``pytest tests/zoo/test_lifecycle.py``; one story: ``-k early``.

Told elsewhere: two fits of one Trainer, evaluation around a fit, a second Trainer with the same module, and resuming
between epochs, each also with random states (``tests/e2e/test_consecutive_runs.py``); every hook and file of a run
(``tests/e2e/test_no_trace.py``); limits of batches, intervals of validation, plugins beside (``lifecycle_programs.py``
in the matrix); checkpoints (``test_resuming.py``), loggers (``test_loggers.py``), ``LightningCLI``
(``test_lightning_cli.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.lifecycle import NAMESPACES, WITHIN, Stage, assert_same, files, held_out, memfit, outcome, rows, shuffled

pytestmark = [
    pytest.mark.usefixtures("no_probing"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
]


def fitted_twice(stage: Stage) -> Any:
    trainer, module = stage.trainer(max_epochs=1), stage.module()
    seen = []
    for epochs in (1, 3):
        trainer.fit_loop.max_epochs = epochs
        stage.fit(trainer, module, shuffled())
        seen.append(outcome(trainer, module))
    return seen


def fitted_and_evaluated(stage: Stage) -> Any:
    keep = stage.part("callbacks.ModelCheckpoint")(stage.folder, monitor="val_loss", mode="max")
    trainer, module = stage.trainer(callbacks=[keep], enable_checkpointing=True), stage.module()
    before = trainer.validate(module, held_out(), verbose=False)
    stage.fit(trainer, module, shuffled())
    seen = outcome(trainer, module)
    evaluated = [
        trainer.validate(module, held_out(), verbose=False),
        trainer.test(module, held_out(), verbose=False),
        trainer.test(module, held_out(), ckpt_path="best", verbose=False),
        trainer.predict(module, held_out()),
    ]
    return before, seen, evaluated, outcome(trainer, module)["weights"]


def stopped_early(stage: Stage) -> Any:
    stop = stage.part("callbacks.EarlyStopping")("val_loss", patience=2)
    name = "{epoch}-{step}-{val_loss:.2f}"
    best = stage.part("callbacks.ModelCheckpoint")(stage.folder, name, monitor="val_loss", save_top_k=2, save_last=True)
    steps = stage.part("callbacks.ModelCheckpoint")(stage.folder / "steps", every_n_train_steps=4, save_top_k=-1)
    logger = stage.part("loggers.CSVLogger")(stage.folder)
    callbacks = [stop, best, steps, stage.part("callbacks.LearningRateMonitor")("step")]
    trainer = stage.trainer(callbacks=callbacks, enable_checkpointing=True, logger=logger, max_epochs=20)
    module = stage.module()
    stage.fit(trainer, module, shuffled())
    assert 2 < stop.stopped_epoch < 19, "it stopped, and not at once"
    return {
        **outcome(trainer, module),
        "stopped": (stop.stopped_epoch, stop.wait_count, stop.best_score.item()),
        "best": (Path(best.best_model_path).name, best.best_model_score.item(), best.kth_best_model_path[-30:]),
        "scores": sorted((Path(path).name, score.item()) for path, score in best.best_k_models.items()),
        "rows": rows(stage.folder),
        "files": files(stage.folder),
    }


def other_model(stage: Stage) -> Any:
    trainer, first, second = stage.trainer(max_epochs=1), stage.module(), stage.module(width=80, depth=2)
    stage.fit(trainer, first, shuffled())
    between = outcome(trainer, first)
    trainer.fit_loop.max_epochs = 2
    stage.fit(trainer, second, shuffled())
    again = stage.trainer(max_epochs=1)  # the module that a Trainer has left, in another one
    stage.fit(again, first, shuffled())
    return between, outcome(trainer, second), outcome(again, first)


def module_with_its_own_data(stage: Stage) -> Any:
    class Data(stage.part("core.LightningDataModule")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def setup(self, stage: str) -> None:
            self.calls.append(f"setup {stage}")

        def teardown(self, stage: str) -> None:
            self.calls.append(f"teardown {stage}")

        def train_dataloader(self) -> Any:
            self.calls.append("train_dataloader")
            return shuffled()

        def val_dataloader(self) -> Any:
            self.calls.append("val_dataloader")
            return held_out()

        def test_dataloader(self) -> Any:
            self.calls.append("test_dataloader")
            return held_out()

    trainer, module, data = stage.trainer(), stage.module(), Data()
    stage.pl.seed_everything(1, verbose=False)
    trainer.fit(module, datamodule=data)
    tested = trainer.test(module, datamodule=data, verbose=False)
    return outcome(trainer, module), tested, sorted(data.calls)  # MemFit asks for training batches before validation's


def interrupted_by_the_user(stage: Stage) -> Any:
    class Stops(stage.part("callbacks.Callback")):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 4

    trainer, module = stage.trainer(callbacks=[Stops()], max_epochs=5), stage.module()
    stage.fit(trainer, module, shuffled())
    first = outcome(trainer, module)
    trainer.should_stop = False
    stage.fit(trainer, module, shuffled())
    return first, outcome(trainer, module)


def ended_by_an_error(stage: Stage) -> Any:
    class Fails(stage.part("callbacks.Callback")):  # type: ignore[misc]
        failed = False

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1 and not self.failed:
                self.failed = True
                raise ZeroDivisionError("the user's own")

    trainer = stage.trainer(callbacks=[Fails()], max_epochs=3, accumulate_grad_batches=3)
    module = stage.module()
    with pytest.raises(ZeroDivisionError):
        stage.fit(trainer, module, shuffled())
    first = outcome(trainer, module)
    stage.fit(trainer, module, shuffled())
    return first, outcome(trainer, module), trainer.accumulate_grad_batches


def barebones(stage: Stage) -> Any:
    fixed = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    trainer = stage.trainer(barebones=True, log_every_n_steps=None, **fixed)
    module = stage.module()
    with pytest.warns(UserWarning, match=r"You are using `self.log\(\)` with `Trainer\(barebones=True\)`|barebones"):
        stage.fit(trainer, module, shuffled())
    assert not trainer.loggers
    return outcome(trainer, module), files(stage.folder)


def fast_dev_run(stage: Stage) -> Any:
    trainer, module = stage.trainer(fast_dev_run=2, logger=True, enable_checkpointing=True), stage.module()
    stage.fit(trainer, module, shuffled())
    found = [path for path in stage.folder.rglob("*") if path.is_file()]
    assert not found, "a run for trying out writes no files, and no plan.yaml either"
    return outcome(trainer, module)


STORIES: Mapping[str, Callable[[Stage], Any]] = {
    "fitted twice": fitted_twice,
    "fitted and evaluated": fitted_and_evaluated,
    "stopped early": stopped_early,
    "another model": other_model,
    "a datamodule": module_with_its_own_data,
    "should_stop": interrupted_by_the_user,
    "an error, and on": ended_by_an_error,
    "barebones": barebones,
    "fast_dev_run": fast_dev_run,
}


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", STORIES)
def test_a_trainers_life_is_the_same_with_memfit(name: str, namespace: str, tmp_path: Path) -> None:
    told = {}
    for plan in (None, *WITHIN):
        folder = tmp_path / str(plan)
        folder.mkdir()
        told[plan] = STORIES[name](Stage(namespace=namespace, folder=folder, plan=plan))
    for plan, within in WITHIN.items():
        assert_same(told[plan], told[None], within=within, where=plan)


def test_one_plugin_serves_trainers_of_both_packages_one_after_the_other(tmp_path: Path) -> None:
    plugin = memfit("sliced and recomputed")
    for namespace in (*NAMESPACES, NAMESPACES[0]):
        told = []
        for plugins in ([], [plugin]):
            stage = Stage(namespace=namespace, folder=tmp_path, plan=None)
            trainer, module = stage.trainer(plugins=plugins), stage.module()
            stage.fit(trainer, module, shuffled())
            told.append(outcome(trainer, module))
        assert plugin.measured is not None
        assert_same(told[1], told[0], within=1e-5)


@pytest.mark.parametrize("left_alone", ["nothing to train", "MEMFIT=off"])
def test_a_run_that_is_left_alone_has_no_plan_of_the_run_before(
    left_alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(namespace=NAMESPACES[0], folder=tmp_path, plan="no-op")
    trainer = stage.trainer(max_epochs=1)
    stage.fit(trainer, stage.module(), shuffled())
    plugin = trainer.precision_plugin
    assert plugin.plan is not None

    if left_alone == "MEMFIT=off":
        monkeypatch.setenv("MEMFIT", "off")
    else:
        trainer.limit_train_batches = 0
    trainer.fit_loop.max_epochs = 2
    trainer.fit(stage.module(width=80), shuffled())
    assert plugin.plan is None and plugin.measured is None
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert "MemFit" not in torch.load(tmp_path / "other.ckpt", weights_only=True)
