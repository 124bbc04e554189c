"""Loggers get the plan as hyperparameters, beside the user's own, and no logger can end a run.

Run: ``pytest tests/zoo/test_loggers.py``. What is logged: ``tests/report/test_hyperparameters.py``; that every other
file of a logger stays as it was: ``tests/e2e/test_no_trace.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_memfit import MemFit
from lightning_memfit.report.hyperparameters import hyperparameters_of
from tests.zoo.data_programs import features
from tests.zoo.lifecycle import NAMESPACES, Stage, assert_same, classifier_of, held_out, memfit, rows, shuffled

pytestmark = [
    pytest.mark.usefixtures("no_probing"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
]
MakeTrainer = Callable[..., Any]


def hparams(folder: Path) -> dict[str, Any]:
    """The one ``hparams.yaml`` below a folder."""
    (path,) = folder.rglob("hparams.yaml")
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def planned(plugin: MemFit) -> Mapping[str, Any]:
    assert plugin.plan is not None and plugin.measured is not None
    return hyperparameters_of(plugin.plan, plugin.measured)


def fit(trainer: Any, module: Any, **settings: Any) -> None:
    lightning.seed_everything(1, verbose=False)
    trainer.fit(module, shuffled(), held_out(), **settings)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_csv_logger_has_the_plan_beside_the_users_own_and_the_same_metrics(namespace: str, tmp_path: Path) -> None:
    told = {}
    for plan in (None, "sliced and recomputed"):
        folder = tmp_path / str(plan)
        stage = Stage(namespace=namespace, folder=folder, plan=plan)
        trainer = stage.trainer(logger=stage.part("loggers.CSVLogger")(folder), max_epochs=1)
        module = stage.module()
        module.save_hyperparameters({"data": "made up", "augmentations": ["flip", "crop"]})
        stage.fit(trainer, module, shuffled())
        told[plan] = (hparams(folder), rows(folder))
        if plan is not None:
            ours = {name: value for name, value in told[plan][0].items() if name.startswith("memfit/")}
            assert ours == planned(trainer.precision_plugin)
            assert ours["memfit/num_slices"] == 3 and ours["memfit/micro_batch_size"] == 3
            assert ours["memfit/activation_checkpointing"] == "blocks.0, blocks.1, blocks.2"
            assert dict(module.hparams) == told[None][0], "the module's own are as they were"
    plain, with_plan = told[None], told["sliced and recomputed"]
    assert {name: value for name, value in with_plan[0].items() if not name.startswith("memfit/")} == plain[0]
    assert plain[0]["augmentations"] == ["flip", "crop"] and plain[0]["width"] == 64
    assert_same(with_plan[1], plain[1], within=1e-5)


def test_a_second_fit_logs_the_plan_that_it_runs_under(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer, module = make_trainer(memfit("no-op"), logger=CSVLogger(tmp_path)), classifier_of(NAMESPACES[0])()
    fit(trainer, module)
    first = hparams(tmp_path)
    trainer.fit_loop.max_epochs = 2
    lightning.seed_everything(1, verbose=False)
    module.save_hyperparameters({"phase": 2})
    trainer.fit(module, DataLoader(features(18), batch_size=6))
    second = hparams(tmp_path)
    assert (first["memfit/micro_batch_size"], second["memfit/micro_batch_size"]) == (8, 6)
    assert second == {**first, **planned(trainer.precision_plugin), "phase": 2}


class Offline(Logger):
    """A service that cannot be reached for hyperparameters; metrics are buffered."""

    name = version = "offline"

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[Any] = []

    def log_hyperparams(self, params: Any, *args: Any) -> None:
        if any(name.startswith("memfit/") for name in params):
            raise ConnectionError("no route to host")

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.append((step, metrics))


def test_a_logger_that_raises_is_named_and_the_run_and_the_other_loggers_go_on(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, offline = memfit("no-op"), Offline()
    plugin.verbose = True
    trainer = make_trainer(plugin, logger=[offline, CSVLogger(tmp_path)], log_every_n_steps=1)
    fit(trainer, classifier_of(NAMESPACES[0])())
    said = " ".join(capsys.readouterr().out.split())
    assert "Offline did not take the plan as hyperparameters: no route to host. The run goes on." in said
    assert hparams(tmp_path)["memfit/num_slices"] == 1
    assert trainer.global_step == 3 and offline.metrics


@pytest.mark.parametrize("mode", ["report", "off"])
def test_a_plan_that_is_not_proven_is_not_logged(mode: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(MemFit(mode=mode, verbose=False), logger=CSVLogger(tmp_path))
    fit(trainer, classifier_of(NAMESPACES[0])())
    assert not any(name.startswith("memfit/") for name in hparams(tmp_path))


@pytest.mark.parametrize("own", ["saved by the module", "logged as training starts", "none"])
def test_tensorboard_goes_on_to_show_the_users_own_and_its_file_has_the_plan(
    own: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams import plugin_data_pb2

    class LogsByHand(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if own == "logged as training starts":
                trainer.logger.log_hyperparams({"by_hand": 1}, {"hp_metric": 0.5})

    module = classifier_of(NAMESPACES[0])()
    module._log_hyperparams = own == "saved by the module"
    plugin, logger = memfit("no-op"), TensorBoardLogger(tmp_path)
    fit(make_trainer(plugin, logger=logger, callbacks=[LogsByHand()]), module)
    written = hparams(tmp_path)
    users = {
        "saved by the module": {"width": 64, "depth": 3},
        "logged as training starts": {"by_hand": 1},
        "none": {},
    }[own]
    in_file = users if own == "saved by the module" else {}  # Lightning writes the file before training starts
    assert written == {**in_file, **planned(plugin)}

    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    shown = events.PluginTagToContent("hparams") if users else {}
    if users:
        content = plugin_data_pb2.HParamsPluginData.FromString(shown["_hparams_/session_start_info"])
        assert set(content.session_start_info.hparams) == set(users)
    metric = [event.value for event in events.Scalars("hp_metric")] if users else []
    assert metric == {"saved by the module": [-1.0], "logged as training starts": [0.5], "none": []}[own]
