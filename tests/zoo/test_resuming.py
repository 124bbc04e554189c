"""Checkpoints within an epoch: whoever saves and whoever goes on, the run ends as if nothing had interrupted it.

Run: ``pytest tests/zoo/test_resuming.py``. Resuming between epochs and with a loader that starts anew, the plan that
travels in a checkpoint, and bf16: ``tests/e2e/test_consecutive_runs.py`` and ``test_levers.py``; conversions of every
optimizer's states: ``tests/apply/test_optimizer_checkpoints.py``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.lifecycle import NAMESPACES, PLANS, Stage, assert_same, held_out, outcome, resumable
from tests.zoo.test_matrix import QUANTISED_WITHIN, difference

pytestmark = [
    pytest.mark.usefixtures("no_probing"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]

STEPS = 8
"""Of the whole run: two epochs of three batches, and two batches of the third."""
INTERRUPTED_AT = 5
"""After the second of the three batches of the second epoch."""

WRITERS = ("plain", *PLANS)
READERS = ("plain", *PLANS)


def stage_of(kind: str, namespace: str, folder: Path) -> Stage:
    return Stage(namespace=namespace, folder=folder, plan=None if kind == "plain" else kind)


@functools.cache
def uninterrupted(namespace: str, folder: Path) -> dict[str, Any]:
    """What a run of a plain Trainer ends with."""
    stage = stage_of("plain", namespace, folder)
    trainer, module = stage.trainer(max_steps=STEPS, max_epochs=-1), stage.module()
    stage.fit(trainer, module, resumable())
    return outcome(trainer, module)


@functools.cache
def written(kind: str, namespace: str, folder: Path) -> Path:
    """A checkpoint that was written within an epoch, once per process."""
    path = folder / f"{kind}-{namespace}.ckpt"
    stage = stage_of(kind, namespace, folder)
    keep = stage.part("callbacks.ModelCheckpoint")(path.parent, path.stem, every_n_train_steps=INTERRUPTED_AT)
    trainer = stage.trainer(max_steps=INTERRUPTED_AT, max_epochs=-1, callbacks=[keep], enable_checkpointing=True)
    stage.fit(trainer, stage.module(), resumable())
    assert keep.best_model_path == str(path), "it was written while the fit went on"
    return path


def resumed(kind: str, namespace: str, folder: Path, path: Path) -> dict[str, Any]:
    """A run that goes on from a checkpoint, with the defaults of ``Trainer.fit``, and what it ends with."""
    stage = stage_of(kind, namespace, folder)
    trainer, module = stage.trainer(max_steps=STEPS, max_epochs=-1), stage.module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # so that everything comes from the checkpoint
    stage.fit(trainer, module, resumable(), ckpt_path=path)
    return outcome(trainer, module)


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "resuming"
    folder.mkdir(exist_ok=True)
    return folder


def within(writer: str, reader: str) -> float:
    """Largest relative difference from the weights of a plain run."""
    if "8-bit states" in (writer, reader):
        return QUANTISED_WITHIN  # states are rounded in every step, or once as they are converted
    return 1e-5 if "sliced and recomputed" in (writer, reader) else 0.0


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_run_goes_on_within_an_epoch_from_any_checkpoint(
    writer: str, reader: str, namespace: str, shared: Path, tmp_path: Path
) -> None:
    if "8-bit states" in (writer, reader):
        pytest.importorskip("bitsandbytes")
    path = written(writer, namespace, shared)
    if (writer, reader) == ("8-bit states", "plain"):
        # A limit that the README states. torch's SGD would make a momentum that it does not find anew, in silence.
        with pytest.raises(KeyError, match="momentum"):
            resumed(reader, namespace, tmp_path, path)
        return
    ours, theirs = resumed(reader, namespace, tmp_path, path), uninterrupted(namespace, shared)
    found = difference(ours["weights"], theirs["weights"])
    assert found <= within(writer, reader)
    if "8-bit states" in (writer, reader):
        assert found > 0
    seen = ("steps", "progress", "rates")
    assert {name: ours[name] for name in seen} == {name: theirs[name] for name in seen}


def content(path: Path) -> dict[str, Any]:
    """A checkpoint, loaded as people are told to load those of strangers."""
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("writer", PLANS)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_checkpoint_of_memfit_is_one_of_a_plain_trainer_and_a_plan_beside(
    namespace: str, writer: str, shared: Path, tmp_path: Path
) -> None:
    if writer == "8-bit states":
        pytest.importorskip("bitsandbytes")
    plain, ours = content(written("plain", namespace, shared)), content(written(writer, namespace, shared))
    assert ours.keys() - plain.keys() == {"MemFit"} and plain.keys() <= ours.keys()
    assert list(ours["state_dict"]) == list(plain["state_dict"])
    for name in ("epoch", "global_step", "loops", "lr_schedulers", "hyper_parameters", "hparams_name"):
        assert ours[name] == plain[name], name
    if writer != "8-bit states":
        groups = [each["optimizer_states"][0]["param_groups"] for each in (ours, plain)]
        assert groups[0] == groups[1]

    path = written(writer, namespace, shared)
    stage = stage_of("plain", namespace, tmp_path)
    kind = type(stage.module())
    assert_same(dict(kind.load_from_checkpoint(path, strict=True).state_dict()), ours["state_dict"], within=0.0)
    module = stage.module()
    module.strict_loading = True
    stage.trainer().validate(module, held_out(), ckpt_path=path, verbose=False)
    assert_same(dict(module.state_dict()), ours["state_dict"], within=0.0)


def test_a_checkpoint_of_8_bits_that_is_saved_after_the_fit_is_not_taken_for_torchs_own_either(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    stage, path = stage_of("8-bit states", NAMESPACES[0], tmp_path), tmp_path / "after.ckpt"
    trainer = stage.trainer(max_steps=INTERRUPTED_AT, max_epochs=-1)
    stage.fit(trainer, stage.module(), resumable())
    trainer.save_checkpoint(path)
    with pytest.raises(KeyError, match="momentum"):
        resumed("plain", NAMESPACES[0], tmp_path, path)
    resumed("no-op", NAMESPACES[0], tmp_path, path)


def test_a_checkpoint_moves_between_the_packages(shared: Path, tmp_path: Path) -> None:
    for writer, reader in (NAMESPACES, NAMESPACES[::-1]):
        ours = resumed("no-op", reader, tmp_path, written("no-op", writer, shared))
        assert_same(ours["weights"], uninterrupted(reader, shared)["weights"], within=0.0)


@pytest.mark.parametrize("kind", ["plain", "sliced and recomputed"])
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(kind: str, shared: Path, tmp_path: Path) -> None:
    """An error within a step; the checkpoint is the last that was written before."""
    stage = stage_of(kind, NAMESPACES[0], tmp_path)

    class Ends(stage.part("callbacks.Callback")):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == INTERRUPTED_AT + 1:
                raise ZeroDivisionError("the machine ends here")

    keep = stage.part("callbacks.ModelCheckpoint")(tmp_path, save_last=True, every_n_train_steps=1)
    trainer = stage.trainer(max_steps=STEPS, max_epochs=-1, callbacks=[Ends(), keep], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError, match="the machine ends here"):
        stage.fit(trainer, stage.module(), resumable())
    again = stage_of(kind, NAMESPACES[0], tmp_path)
    ours = resumed(kind, NAMESPACES[0], again.folder, tmp_path / "last.ckpt")
    assert_same(ours["weights"], uninterrupted(NAMESPACES[0], shared)["weights"], within=within(kind, kind))
