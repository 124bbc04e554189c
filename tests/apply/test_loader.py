"""Asking for the loaders and looking at them inside real Trainers, against plain runs."""

from __future__ import annotations

import multiprocessing
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit.apply.batch_scan import ScanLimits
from lightning_memfit.apply.batch_shapes import measure
from lightning_memfit.apply.loader import TrainLoader, forget_validation_loader, scan_validation_batches
from lightning_memfit.errors import ConfigurationError
from tests.apply.loading import (
    LOADERS,
    Counting,
    Endless,
    Make,
    Model,
    Numbers,
    OwnLoader,
    Planned,
    assert_as_in_a_plain_run,
    fit,
    look_and_install,
    model_class,
    request,
    same,
    seed,
    validating,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_after_a_look_is_the_plain_run_bit_for_bit(name: str) -> None:
    epochs = 1 if name.startswith(("generator", "stream", "subclass over", "dict")) else 2
    planned, _ = assert_as_in_a_plain_run(LOADERS[name], max_epochs=epochs)
    assert planned.calls == 1
    assert multiprocessing.active_children() == []


def test_a_limited_number_of_batches_is_the_same() -> None:
    assert_as_in_a_plain_run(LOADERS["stream"], max_epochs=2, limit_train_batches=3)
    assert_as_in_a_plain_run(LOADERS["shuffled"], max_epochs=2, limit_train_batches=2)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_replaces_the_sampler_as_in_a_plain_run() -> None:
    seed()
    plain = Model(LOADERS["shuffled"])
    fit(plain, overfit_batches=2)
    seed()
    planned = Model(LOADERS["shuffled"])
    plugin = Planned(look_and_install)
    fit(planned, plugin, overfit_batches=2)
    assert same(planned.seen, plain.seen)
    assert plugin.loader is not None
    assert plugin.loader.num_batches == 2


@pytest.mark.parametrize("name", ["shuffled", "stream", "workers", "iterable with a side effect"])
def test_loaders_are_reloaded_every_epoch_as_in_a_plain_run(name: str) -> None:
    planned, _ = assert_as_in_a_plain_run(LOADERS[name], max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert planned.calls == 3


def test_steps_estimated_in_configure_optimizers_do_not_use_the_look_up() -> None:
    class Estimating(Model):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()  # type: ignore[no-any-return]

    runs = []
    for plugin in (None, Planned(look_and_install)):
        seed()
        model = Estimating(LOADERS["shuffled"])
        fit(model, plugin)
        runs.append((model.steps, model.calls, model.seen))
    assert runs[0][:2] == runs[1][:2] == (8, 1)  # 13 samples in batches of 4 are 4 batches, for 2 epochs
    assert same(runs[0][2], runs[1][2])


@pytest.mark.parametrize("name", ["shuffled", "stream", "generator", "iterable with a side effect"])
def test_a_loader_passed_to_fit_is_handed_to_lightning_as_the_same_object(name: str) -> None:
    runs = []
    for use in (None, look_and_install):
        seed()
        model, loader = Model(), LOADERS[name]()
        cls = type(loader)
        trainer = fit(model, None if use is None else Planned(use), train=loader, max_epochs=1)
        assert model.calls == 0
        assert type(loader) is cls
        if name != "generator":
            assert trainer.train_dataloader is loader
        runs.append((model.seen, list(model.parameters())))
    assert same(runs[0], runs[1])


def test_a_datamodule_is_asked_once() -> None:
    class Data(lightning.pytorch.LightningDataModule):
        calls = 0

        def train_dataloader(self) -> Any:
            self.calls += 1
            return LOADERS["shuffled"]()

    runs = []
    for use in (None, look_and_install):
        seed()
        model, data = Model(), Data()
        fit(model, None if use is None else Planned(use), datamodule=data)
        assert data.calls == 1
        runs.append(model.seen)
    assert same(runs[0], runs[1])


def test_pytorch_lightning_classes_work_the_same() -> None:
    class Hook(pytorch_lightning.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            loader = TrainLoader.request(trainer)
            self.batch = look_and_install(loader)

    runs = []
    for callbacks in ([], [Hook()]):
        seed()
        model = model_class(pytorch_lightning)(LOADERS["stream"])
        fit(model, namespace=pytorch_lightning, callbacks=callbacks, max_epochs=1)
        assert model.calls == 1
        runs.append(model.seen)
    assert same(runs[0], runs[1])


def test_no_loader_and_no_batches_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"train_dataloader\(\) returned None"):
        request(None)
    with pytest.raises(ConfigurationError, match="limit_train_batches=0 trains on 0 batches"):
        request(LOADERS["in order"](), limit_train_batches=0)
    with pytest.raises(ConfigurationError, match="The loader is a int, which is no iterable over batches"):
        request(3).peek()


def test_a_resumed_run_is_the_plain_resumed_run(tmp_path: Any) -> None:
    for make in (LOADERS["shuffled"], lambda: OwnLoader(Numbers(), batch_size=4, shuffle=True)):
        seed()
        first = Model(make)
        path = str(tmp_path / "half.ckpt")
        fit(first, max_steps=6, max_epochs=-1).save_checkpoint(path)  # in the middle of the second epoch
        runs = []
        for use in (None, look_and_install):
            seed()
            model = Model(make)
            fit(model, None if use is None else Planned(use), max_epochs=3, ckpt_path=path)
            assert model.calls == 1
            runs.append((model.seen, list(model.parameters()), [torch.get_rng_state()]))
        assert len(runs[0][0]) > 2
        assert same(runs[0], runs[1])


def test_undo_restores_the_data_source_exactly_and_may_be_called_twice() -> None:
    train = request(LOADERS["shuffled"]())
    source = train._source
    before = dict(source.__dict__)
    undo = train.install(3)
    assert source.__dict__ != before
    undo()
    undo()
    assert source.__dict__ == before
    assert all(source.__dict__[name] is value for name, value in before.items())


def test_a_loader_is_installed_again_after_an_undo_without_asking_the_hook() -> None:
    loader = LOADERS["shuffled"]()
    train = request(loader)
    train.install(3)()
    train.install()
    assert train._source.dataloader() is loader
    assert train._source.instance.calls == 1
    train._source.dataloader()
    assert train._source.instance.calls == 2


def first_validation_batch(trainer: Any) -> Any:
    found = scan_validation_batches(trainer, ScanLimits(max_batches=1))
    return None if found is None else found.batch


class LookAtValidation(lightning.pytorch.Callback):
    def __init__(self, times: int = 1) -> None:
        self.batches: list[Any] = []
        self.times = times

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.batches += [first_validation_batch(trainer) for _ in range(self.times)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_sanity_val_steps == 0:
            self.batches += [first_validation_batch(trainer) for _ in range(self.times)]


VALIDATION: dict[str, Make] = {
    "map-style": lambda: DataLoader(Numbers(), batch_size=5),
    "workers": lambda: DataLoader(Numbers(), batch_size=5, num_workers=1),
    "stream": lambda: DataLoader(Endless(noise=False), batch_size=5),
    "stream that draws": lambda: DataLoader(Endless(), batch_size=5),
    "iterable with a side effect": Counting,
    "generator": lambda: (torch.full((2, 2), float(index)) for index in range(30)),
    "two loaders": lambda: [Counting(), DataLoader(Numbers(), batch_size=5)],
    "zipped": lambda: CombinedLoader([Counting(), DataLoader(Numbers(), batch_size=5)], "max_size"),
    "random draws in the hook": lambda: DataLoader(TensorDataset(torch.randn(7, 2)), batch_size=5),
}


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("name", VALIDATION)
def test_a_look_at_the_validation_data_changes_no_validation(name: str, sanity: int) -> None:
    if name == "stream that draws" and sanity == 0:
        pytest.skip("its samples hold numbers drawn before training drew: equally valid ones, but others")
    runs = []
    for look in (None, LookAtValidation(times=2)):
        seed()
        model = validating(Model)(LOADERS["shuffled"], VALIDATION[name])
        trainer = fit(model, callbacks=[] if look is None else [look], num_sanity_val_steps=sanity, max_epochs=2)
        assert model.validation_calls == 1
        assert "dataloader" not in trainer.fit_loop.epoch_loop.val_loop._data_source.__dict__
        runs.append((model.validated, model.seen, list(model.parameters()), [torch.get_rng_state()]))
    assert look is not None
    assert same(runs[0], runs[1])
    assert same(look.batches[0], look.batches[1])
    # without a sanity check, the noise of a map-style dataset is drawn after training drew
    if sanity or name not in ("map-style", "workers", "zipped", "two loaders"):
        assert same(look.batches[0], max(runs[0][0], key=lambda batch: measure(batch).num_bytes))


def test_a_run_that_does_not_validate_is_not_asked() -> None:
    def looked_at(model: Any, **settings: Any) -> Any:
        look = LookAtValidation()
        fit(model, callbacks=[look], max_epochs=1, **settings)
        assert model.validation_calls == 0
        return look.batches

    model = validating(Model)(LOADERS["shuffled"], VALIDATION["map-style"])
    assert looked_at(Model(LOADERS["shuffled"]), num_sanity_val_steps=0) == [None]
    assert looked_at(model, limit_val_batches=0, num_sanity_val_steps=0) == [None]
    assert looked_at(model, check_val_every_n_epoch=3, num_sanity_val_steps=0) == [None]


@pytest.mark.filterwarnings("ignore:Total length of")
def test_an_empty_validation_loader_is_passed_over() -> None:
    look = LookAtValidation()
    model = validating(Model)(LOADERS["shuffled"], lambda: [DataLoader(Numbers(0)), DataLoader(Numbers())])
    fit(model, callbacks=[look], max_epochs=1)
    assert same(look.batches[0][:, 0], torch.zeros(1))
    look = LookAtValidation()
    model = validating(Model)(LOADERS["shuffled"], lambda: DataLoader(Numbers(0)))
    fit(model, callbacks=[look], max_epochs=1)
    assert look.batches == [None]


def test_a_validation_loader_that_nobody_asked_for_is_forgotten() -> None:
    class Forgetting(lightning.pytorch.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            source = trainer.fit_loop.epoch_loop.val_loop._data_source
            before = dict(source.__dict__)
            self.batch = first_validation_batch(trainer)
            assert source.__dict__ != before
            forget_validation_loader(trainer)
            assert source.__dict__ == before
            forget_validation_loader(trainer)

    forgetting = Forgetting()
    model = validating(Model)(LOADERS["shuffled"], VALIDATION["map-style"])
    fit(model, callbacks=[forgetting], max_epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    assert forgetting.batch.shape == (5, 2)
    assert model.validation_calls == 2  # once here, once by Lightning, since the first answer was forgotten
