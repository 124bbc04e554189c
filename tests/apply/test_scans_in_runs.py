"""A run after a scan of its train and validation data is the plain run, in real Trainers."""

from __future__ import annotations

import multiprocessing
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Subset

from lightning_memfit.apply.batch_scan import ScanLimits, ScannedBatch
from lightning_memfit.apply.loader import TrainLoader, forget_validation_loader, scan_validation_batches
from tests.apply.loading import (
    LIMITS,
    LOADERS,
    LONGEST,
    Counting,
    Endless,
    Make,
    Model,
    Planned,
    Sequences,
    Stream,
    fit,
    model_class,
    padded,
    request,
    run,
    same,
    scan_and_install,
    seed,
    validating,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")

# No trace.


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_after_a_scan_is_the_plain_run_bit_for_bit(name: str) -> None:
    epochs = 1 if name.startswith(("generator", "stream", "subclass over", "dict")) else 2
    plain, _, plain_ends = run(LOADERS[name], None, max_epochs=epochs)
    planned, _, ends = run(LOADERS[name], scan_and_install, max_epochs=epochs)
    assert planned.calls == plain.calls == 1
    assert same(planned.seen, plain.seen)
    assert same(list(planned.parameters()), list(plain.parameters()))
    assert torch.equal(ends[0], plain_ends[0])
    assert ends[1:] == plain_ends[1:]
    assert multiprocessing.active_children() == []


PADDED: dict[str, Make] = {
    "in order": padded,
    "shuffled": lambda: padded(shuffle=True),
    "shuffled, noisy samples": lambda: padded(Sequences(noise=True), shuffle=True),
    "workers": lambda: padded(shuffle=True, num_workers=2),
    "persistent workers": lambda: padded(num_workers=1, persistent_workers=True),
    "stream": lambda: padded(Stream()),
    "stream in workers": lambda: padded(Stream(), num_workers=1),
    "stream in persistent workers": lambda: padded(Stream(), num_workers=1, persistent_workers=True),
    "subset": lambda: padded(Subset(Sequences(), list(range(10, 50)))),
}


@pytest.mark.parametrize("name", PADDED)
def test_padded_batches_are_trained_on_in_the_same_order_after_a_scan(name: str) -> None:
    plain, _, plain_ends = run(PADDED[name], None, max_epochs=2)
    planned, plugin, ends = run(PADDED[name], scan_and_install, max_epochs=2)
    assert same(planned.seen, plain.seen)
    assert same(list(planned.parameters()), list(plain.parameters()))
    assert torch.equal(ends[0], plain_ends[0])
    assert multiprocessing.active_children() == []
    result = plugin.loader.result
    assert len(plain.seen) in (2 * 20, 2 * 32)
    if not name.startswith("stream"):
        # of noise only the first batch's is drawn at the same moment as in training
        assert result.batch.shape == plain.seen[result.index].shape == (2, 20, 2)
        assert "noisy" in name or torch.equal(result.batch, plain.seen[result.index])


def test_scans_and_looks_may_follow_each_other() -> None:
    def use(loader: TrainLoader) -> Any:
        first = loader.peek()
        assert same(loader.scan(LIMITS).batch, loader.scan(LIMITS).batch)
        assert same(loader.peek(), first)
        loader.install()
        return first

    for name in ("shuffled", "stream", "stream in workers"):
        plain, _, _ = run(PADDED[name], None)
        planned, plugin, _ = run(PADDED[name], use)
        assert same(planned.seen, plain.seen)
        assert same(plugin.result, plain.seen[0])


def test_overfitting_is_scanned_in_the_order_that_it_trains_in() -> None:
    with pytest.warns(UserWarning, match="You requested to overfit"):
        planned, plugin, _ = run(lambda: padded(shuffle=True), scan_and_install, overfit_batches=18, max_epochs=1)
    assert plugin.loader.result.index == LONGEST // 2 == 17
    assert torch.equal(planned.seen[17], plugin.loader.result.batch)
    with pytest.warns(UserWarning, match="You requested to overfit"):
        _, plugin, _ = run(lambda: padded(shuffle=True), scan_and_install, overfit_batches=17, max_epochs=1)
    assert plugin.loader.result.batch.shape == (2, 7, 2)


@pytest.mark.parametrize("name", ["shuffled", "stream", "workers", "iterable with a side effect"])
def test_loaders_are_reloaded_every_epoch_after_a_scan_as_in_a_plain_run(name: str) -> None:
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    plain, _, _ = run(LOADERS[name], None, **settings)
    planned, _, _ = run(LOADERS[name], scan_and_install, **settings)
    assert planned.calls == plain.calls == 3
    assert same(planned.seen, plain.seen)


def test_pytorch_lightning_classes_are_scanned_the_same() -> None:
    class Scanning(pytorch_lightning.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            loader = TrainLoader.request(trainer)
            scan_and_install(loader)

        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            self.found = scan_validation_batches(trainer, LIMITS)

    runs = []
    for callbacks in ([], [Scanning()]):
        seed()
        model = validating(model_class(pytorch_lightning))(lambda: padded(Stream()), padded)
        fit(model, namespace=pytorch_lightning, callbacks=callbacks, max_epochs=1)
        assert (model.calls, model.validation_calls) == (1, 1)
        runs.append([model.seen, model.validated])
    assert same(runs[0], runs[1])
    assert callbacks[0].found.index == 17  # type: ignore[attr-defined]


def test_a_resumed_run_after_a_scan_is_the_plain_resumed_run(tmp_path: Any) -> None:
    seed()
    path = str(tmp_path / "half.ckpt")
    fit(Model(lambda: padded(shuffle=True)), max_steps=40, max_epochs=-1).save_checkpoint(path)
    runs = []
    for use in (None, scan_and_install):
        seed()
        model = Model(lambda: padded(shuffle=True))
        fit(model, None if use is None else Planned(use), max_epochs=3, ckpt_path=path)
        runs.append((model.seen, list(model.parameters()), [torch.get_rng_state()]))
    assert len(runs[0][0]) > 2
    assert same(runs[0], runs[1])


@pytest.mark.parametrize("batch_size", [None, 3])
def test_workers_of_a_scan_that_nobody_went_on_to_use_end_on_close(batch_size: int | None) -> None:
    loader = padded(Stream(), num_workers=1, persistent_workers=True)
    train = request(loader)
    train.scan(LIMITS, batch_size)
    assert multiprocessing.active_children() != []
    train.close()
    assert multiprocessing.active_children() == []
    assert (type(loader), loader._iterator) == (DataLoader, None)


# Validation.


class ScanValidation(lightning.pytorch.Callback):
    def __init__(self, limits: ScanLimits = LIMITS) -> None:
        self.limits = limits
        self.found: list[ScannedBatch | None] = []

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(scan_validation_batches(trainer, self.limits))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_sanity_val_steps == 0:
            self.found.append(scan_validation_batches(trainer, self.limits))


VALIDATION: dict[str, Make] = {
    "map-style": padded,
    "workers": lambda: padded(num_workers=1),
    "stream": lambda: padded(Stream()),
    "stream in workers": lambda: padded(Stream(), num_workers=1),
    "stream with a position": lambda: DataLoader(Endless(60, noise=False), batch_size=3),
    "stream that draws": lambda: DataLoader(Endless(60), batch_size=3),
    "iterable with a side effect": Counting,
    "generator": lambda: (torch.full((2, 2), float(index)) for index in range(30)),
    "several": lambda: [padded(Sequences([2] * 8)), padded(), padded(Stream([3] * 8))],
    "zipped": lambda: CombinedLoader([padded(Sequences([2] * 8)), padded(Stream([3] * 8))], "max_size"),
}


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("name", VALIDATION)
def test_a_scan_of_the_validation_data_changes_no_validation(name: str, sanity: int) -> None:
    if name == "stream that draws" and sanity == 0:
        pytest.skip("its samples hold numbers drawn before training drew: equally valid ones, but others")
    runs = []
    for scan in (None, ScanValidation()):
        seed()
        model = validating(Model)(LOADERS["shuffled"], VALIDATION[name])
        trainer = fit(model, callbacks=[] if scan is None else [scan], num_sanity_val_steps=sanity, max_epochs=2)
        assert model.validation_calls == 1
        assert "dataloader" not in trainer.fit_loop.epoch_loop.val_loop._data_source.__dict__
        runs.append((model.validated, model.seen, list(model.parameters()), [torch.get_rng_state()]))
    assert same(runs[0], runs[1])
    assert multiprocessing.active_children() == []
    assert scan is not None
    (result,) = scan.found
    assert result is not None
    if name in ("map-style", "workers", "several"):
        assert (result.index, result.batch.shape, result.complete) == (17, (2, 20, 2), True)
        assert result.dataloader_idx == (1 if name == "several" else None)


def test_limits_of_the_validation_end_the_scan_of_its_data() -> None:
    def scanned(**settings: Any) -> Any:
        scan = ScanValidation()
        fit(validating(Model)(LOADERS["shuffled"], padded), callbacks=[scan], max_epochs=1, **settings)
        return scan.found[0]

    assert scanned(limit_val_batches=17).batch.shape == (2, 7, 2)
    assert scanned(limit_val_batches=18).index == 17
    assert (scanned(limit_val_batches=0.5).scanned, scanned(limit_val_batches=0.5).total) == (16, 16)
    assert scanned(limit_val_batches=0, num_sanity_val_steps=0) is None


def test_the_scan_of_a_stream_leaves_the_sanity_check_what_it_takes() -> None:
    for steps in (1, 3):
        scan, dataset = ScanValidation(), Endless(60, noise=False)
        model = validating(Model)(LOADERS["shuffled"], lambda: DataLoader(dataset, batch_size=3))  # noqa: B023
        fit(model, callbacks=[scan], max_epochs=1, num_sanity_val_steps=steps)
        assert scan.found[0].scanned == steps  # type: ignore[union-attr]


def test_a_run_that_does_not_validate_has_nothing_to_scan() -> None:
    scan = ScanValidation()
    fit(Model(LOADERS["shuffled"]), callbacks=[scan], max_epochs=1, num_sanity_val_steps=0)
    assert scan.found == [None]


def test_a_scanned_validation_loader_that_nobody_asked_for_is_forgotten() -> None:
    class Forgetting(lightning.pytorch.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            source = trainer.fit_loop.epoch_loop.val_loop._data_source
            before = dict(source.__dict__)
            self.found = scan_validation_batches(trainer, LIMITS)
            assert source.__dict__ != before
            forget_validation_loader(trainer)
            assert source.__dict__ == before

    forgetting = Forgetting()
    model = validating(Model)(LOADERS["shuffled"], padded)
    fit(model, callbacks=[forgetting], max_epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    assert forgetting.found is not None
    assert forgetting.found.index == 17
