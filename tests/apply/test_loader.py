"""Asking for the loader, looking at its first batch and rebuilding it, inside real Trainers, against plain runs."""

from __future__ import annotations

import copy
import multiprocessing
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from lightning_memfit.apply.loader import TrainLoader, forget_validation_loader, request_validation_batch
from lightning_memfit.errors import ConfigurationError, UnsupportedError

Make = Callable[[], Any]

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


class Numbers(Dataset[Tensor]):
    """Samples (i, noise): the noise from the global generator, as augmentation would draw it."""

    def __init__(self, size: int = 13, noise: bool = True) -> None:
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.randn(()) if self.noise else torch.zeros(())])


class Endless(IterableDataset[Tensor]):
    """A stateful stream: every sample is seen once, and the global generators are used along the way."""

    def __init__(self, limit: int = 30, noise: bool = True) -> None:
        self.position, self.limit, self.noise = 0, limit, noise

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.limit:
            self.position += 1
            noise = torch.randn(()) + random.random() + float(np.random.rand()) if self.noise else torch.zeros(())
            yield torch.stack([torch.tensor(float(self.position)), noise])


class Counting:
    """A plain iterable whose ``__iter__`` has a side effect, and whose order comes from it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        random.random()
        return iter([torch.full((2, 2), float(index)) for index in order])


class Recounting(BatchSampler):
    """A batch sampler with state of its own, changed in place while it yields."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[list[int]]:
        self.rounds.append(len(self.rounds))
        for _ in range(len(self)):
            yield [self.rng.randrange(13) for _ in range(2 + len(self.rounds) % 2)]

    def __len__(self) -> int:
        return 4


class OwnLoader(DataLoader[Any]):
    """A subclass with iteration of its own, stateful as Lightning understands it."""

    served = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self.served += 1
            yield batch * 2

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served = state["served"]


def stream_of_batches() -> Iterator[Tensor]:
    for index in range(9):
        yield torch.full((2, 2), float(index)) + torch.rand(2, 2)


def model_class(namespace: Any) -> type:
    class Model(namespace.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, make: Make | None = None, make_validation: Make | None = None) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))
            self.make, self.make_validation = make, make_validation
            self.calls = self.validation_calls = 0
            self.seen: list[Any] = []
            self.validated: list[Any] = []

        def train_dataloader(self) -> Any:
            self.calls += 1
            assert self.make is not None
            return self.make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(copy.deepcopy(batch))
            while not isinstance(batch, Tensor):
                batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            return self.layers(batch.reshape(-1, 2)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    return Model


def validating(cls: type) -> type:
    class Validating(cls):  # type: ignore[misc,valid-type]
        def val_dataloader(self) -> Any:
            self.validation_calls += 1
            return self.make_validation()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.validated.append(copy.deepcopy(batch))

    return Validating


Model = model_class(lightning.pytorch)


class Planned(lightning.pytorch.plugins.Precision):
    """Does what a plan does to the loader, where a plan does it."""

    def __init__(self, use: Callable[[TrainLoader], Any]) -> None:
        super().__init__()
        self.use = use
        self.loader: TrainLoader | None = None
        self.result: Any = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.loader = TrainLoader.request(module.trainer)
        self.result = self.use(self.loader)
        return module


def look_and_install(loader: TrainLoader) -> Any:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batch = loader.peek()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    loader.install()
    return batch


def seed() -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def fit(
    model: Any,
    plugin: Any = None,
    *,
    namespace: Any = lightning.pytorch,
    callbacks: Any = (),
    train: Any = None,
    validation: Any = None,
    datamodule: Any = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Any:
    trainer = namespace.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "plugins": [] if plugin is None else [plugin],
            "callbacks": list(callbacks),
            **settings,
        }
    )
    trainer.fit(model, train, validation, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    return [leaf for item in items for leaf in leaves(item)] if isinstance(tree, (dict, list, tuple)) else []


def same(left: Any, right: Any) -> bool:
    pairs = leaves(left), leaves(right)
    return len(pairs[0]) == len(pairs[1]) and all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def run(make: Make, use: Callable[[TrainLoader], Any] | None, **settings: Any) -> tuple[Any, Any, Any]:
    seed()
    model = Model(make)
    plugin = None if use is None else Planned(use)
    fit(model, plugin, **settings)
    ends = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return model, plugin, ends


def assert_as_in_a_plain_run(make: Make, **settings: Any) -> tuple[Any, Any]:
    plain, _, plain_ends = run(make, None, **settings)
    planned, plugin, ends = run(make, look_and_install, **settings)
    assert planned.calls == plain.calls
    assert len(planned.seen) > 2
    assert same(planned.seen, plain.seen)
    assert same(list(planned.parameters()), list(plain.parameters()))
    assert torch.equal(ends[0], plain_ends[0])
    assert ends[1:] == plain_ends[1:]
    assert same(plugin.result, planned.seen[0])
    return planned, plugin


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def split_by_the_hook() -> DataLoader[Any]:
    part, _ = torch.utils.data.random_split(Numbers(20), [11, 9])
    return DataLoader(part, batch_size=3, shuffle=True)


def shared_generator() -> DataLoader[Any]:
    shared = generator(8)
    return DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), generator=shared), generator=shared)


LOADERS: dict[str, Make] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled with a generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator(7)),
    "one generator for sampler and loader": shared_generator,
    "workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "batch sampler with state": lambda: DataLoader(Numbers(), batch_sampler=Recounting()),
    "dataset yields batches": lambda: DataLoader(TensorDataset(torch.randn(5, 3, 2)), batch_size=None),
    "random draws in the hook": split_by_the_hook,
    "stream": lambda: DataLoader(Endless(), batch_size=4),
    "stream, last batch dropped": lambda: DataLoader(Endless(31), batch_size=4, drop_last=True),
    "stream of batches": lambda: DataLoader(Endless(6), batch_size=None),
    "stream with a generator": lambda: DataLoader(Endless(), batch_size=4, generator=generator(3)),
    "stream in workers": lambda: DataLoader(Endless(12), batch_size=4, num_workers=2),
    "stream in persistent workers": lambda: DataLoader(
        Endless(12), batch_size=4, num_workers=1, persistent_workers=True
    ),
    "iterable with a side effect": Counting,
    "generator": stream_of_batches,
    "subclass with its own iteration": lambda: OwnLoader(Numbers(), batch_size=4, shuffle=True),
    "subclass over a stream": lambda: OwnLoader(Endless(), batch_size=4),
    "list of loaders": lambda: [
        DataLoader(Numbers(), batch_size=4, shuffle=True),
        DataLoader(Numbers(7), batch_size=2, shuffle=True),
    ],
    "dict with a stream and a generator": lambda: {
        "a": DataLoader(Endless(9), batch_size=3),
        "b": stream_of_batches(),
        "c": DataLoader(Numbers(6), batch_size=2, shuffle=True),
    },
    "combined loader": lambda: CombinedLoader(
        {"a": DataLoader(Numbers(), batch_size=4, shuffle=True), "b": Counting()}, "min_size"
    ),
    "list of tensors, each an iterable to Lightning": lambda: [torch.randn(4, 2), torch.randn(4, 2)],
}


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_after_a_look_is_the_plain_run_bit_for_bit(name: str) -> None:
    epochs = 1 if name.startswith(("generator", "stream", "subclass over", "dict")) else 2
    planned, _ = assert_as_in_a_plain_run(LOADERS[name], max_epochs=epochs)
    assert planned.calls == 1
    assert multiprocessing.active_children() == []


def test_a_stateful_stream_loses_no_sample_and_yields_none_twice() -> None:
    planned, _ = assert_as_in_a_plain_run(lambda: DataLoader(Endless(10), batch_size=4), max_epochs=1)
    assert torch.cat(planned.seen)[:, 0].tolist() == list(range(1, 11))


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


def test_seeded_workers_are_seeded_before_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert_as_in_a_plain_run(LOADERS["stream in workers"], max_epochs=1)
    assert_as_in_a_plain_run(LOADERS["workers"])


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


def test_workers_draw_their_seed_again_where_something_drew_in_between() -> None:
    class Drawing(Model):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            torch.rand(3)
            return super().configure_optimizers()  # type: ignore[no-any-return]

    runs = []
    for plugin in (None, Planned(look_and_install)):
        seed()
        model = Drawing(lambda: DataLoader(Endless(12, noise=False), batch_size=4, num_workers=1))
        fit(model, plugin, max_epochs=1)
        runs.append((model.seen, list(model.parameters()), [torch.get_rng_state()]))
    assert same(runs[0], runs[1])


def test_persistent_workers_of_a_look_stay_for_the_next_epoch() -> None:
    # Their copy of the stream is used up in the first epoch; workers that start anew would read it again.
    planned, _ = assert_as_in_a_plain_run(LOADERS["stream in persistent workers"], max_epochs=2)
    assert len(planned.seen) == 3  # 12 samples in batches of 4, once


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


def test_a_generator_goes_on_in_the_next_epoch_as_in_a_plain_run() -> None:
    runs = []
    for use in (None, look_and_install):
        seed()
        model = Model()
        batches = stream_of_batches()
        fit(model, None if use is None else Planned(use), train=batches, max_epochs=2, limit_train_batches=3)
        runs.append((model.seen, list(batches)))
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


# A loader by itself: a Trainer that is attached to data, without a run.


def request(loader: Any, **settings: Any) -> TrainLoader:
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **settings
    )
    model = Model(lambda: loader)
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model)
    return TrainLoader.request(trainer)


def test_a_look_leaves_samplers_generators_and_dicts_as_they_were() -> None:
    own = generator(7)
    sampler = RandomSampler(Numbers(), generator=own)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler, generator=own)
    train = request(loader)
    before, states = dict(vars(loader)), (own.get_state(), torch.get_rng_state())
    train.peek()
    assert (train.batch_size, train.num_batches) == (4, 4)
    assert vars(loader) == before
    assert torch.equal(own.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    custom = DataLoader(Numbers(), batch_sampler=Recounting())
    request(custom).peek()
    assert custom.batch_sampler.rounds == []
    assert custom.batch_sampler.rng.getstate() == random.Random(5).getstate()


def test_a_generator_of_the_dataset_gets_its_state_back() -> None:
    class Augmented(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.rng, self.old = np.random.default_rng(3), np.random.RandomState(4)

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([self.rng.random(), self.old.rand()])

    loader = DataLoader(Augmented(), batch_size=4)
    first = request(loader).peek()
    assert torch.equal(next(iter(loader)), first)


def test_a_dataset_is_read_in_a_worker_where_the_run_has_workers() -> None:
    class Lazy(Numbers):
        handle = None

        def __getitem__(self, index: int) -> Tensor:
            if torch.utils.data.get_worker_info() is None:
                raise RuntimeError("read outside of a worker")
            self.handle = object()
            return torch.tensor([float(index), 0.0])

    dataset = Lazy()
    batch = request(DataLoader(dataset, batch_size=2, num_workers=2)).peek()
    assert batch[:, 0].tolist() == [0.0, 1.0]
    assert dataset.handle is None
    assert multiprocessing.active_children() == []


def test_a_sampler_that_cannot_be_copied_hands_its_batch_on() -> None:
    class Live:
        def __init__(self) -> None:
            self.indices = (index for index in range(9))

        def __iter__(self) -> Iterator[int]:
            yield from self.indices

    loader = DataLoader(Numbers(noise=False), batch_size=2, sampler=Live())  # type: ignore[arg-type]
    train = request(loader)
    assert train.peek()[:, 0].tolist() == [0.0, 1.0]
    assert torch.cat(list(loader))[:, 0].tolist() == [float(index) for index in range(9)]
    assert type(loader) is DataLoader


def test_looking_twice_shows_the_same_batch_and_uses_nothing_up() -> None:
    dataset = Endless(6, noise=False)
    loader = DataLoader(dataset, batch_size=4)
    train = request(loader)
    assert same(train.peek(), train.peek())
    assert same(request(loader).peek(), train.peek())
    assert isinstance(dataset, Endless)
    assert torch.cat(list(loader))[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert type(dataset) is Endless
    assert list(loader) == []  # used up, as a plain run would have left it
    batches = request(generated := stream_of_batches())
    assert same(batches.peek(), batches.peek())
    assert len(list(generated)) == 8  # the object itself cannot be given its batch back; Lightning gets both


def test_a_batch_that_was_looked_at_may_be_changed() -> None:
    stored = torch.zeros(5, 3, 2)
    for loader in (DataLoader(TensorDataset(stored), batch_size=None), DataLoader(Endless(6), batch_size=None)):
        train = request(loader)
        batch = train.peek()
        for leaf in leaves(batch):
            leaf.fill_(99.0)
        assert all((leaf != 99.0).all() for leaf in leaves(next(iter(loader))))
    assert (stored == 0).all()


def test_a_copy_of_a_loader_that_waits_to_hand_on_is_a_plain_one() -> None:
    loader = OwnLoader(Numbers(noise=False), batch_size=4)
    request(loader).peek()
    assert type(loader) is not OwnLoader
    twin = copy.deepcopy(loader)
    assert type(twin) is OwnLoader
    assert len(list(twin)) == len(list(loader)) == 4
    assert type(loader) is OwnLoader


def test_a_loader_that_is_sent_to_another_position_does_not_hand_on() -> None:
    loader = OwnLoader(Numbers(noise=False), batch_size=4)
    train = request(loader)
    train.peek()
    loader.load_state_dict({"served": 0})
    assert type(loader) is OwnLoader
    assert loader.state_dict() == {"served": 0}
    assert len(list(loader)) == 4


def test_a_loader_that_is_sent_to_another_position_ends_the_workers_of_a_look() -> None:
    loader = OwnLoader(Endless(12), batch_size=4, num_workers=1)
    request(loader).peek()
    early = iter(loader)
    assert multiprocessing.active_children() != []
    loader.load_state_dict({"served": 0})
    assert multiprocessing.active_children() == []
    assert len(list(early)) == 3


@pytest.mark.parametrize("name", ["stream in workers", "stream in persistent workers"])
def test_workers_that_nobody_went_on_to_use_end_on_close(name: str) -> None:
    loader = LOADERS[name]()
    train = request(loader)
    train.peek()
    assert multiprocessing.active_children() != []
    train.close()
    assert multiprocessing.active_children() == []
    assert type(loader) is DataLoader
    assert loader._iterator is None


EMPTY: dict[str, Make] = {
    "map-style": lambda: DataLoader(Numbers(0), batch_size=4),
    "all dropped": lambda: DataLoader(Numbers(3), batch_size=4, drop_last=True),
    "all dropped, workers": lambda: DataLoader(Numbers(3), batch_size=4, drop_last=True, num_workers=1),
    "stream": lambda: DataLoader(Endless(0), batch_size=4),
    "iterator": lambda: iter(()),
    "list": lambda: [],
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_loader_without_a_batch_is_refused(name: str) -> None:
    loader = EMPTY[name]()
    with pytest.raises(ConfigurationError, match=r"The train loader yields 0 batches .* Check the dataset's length"):
        request(loader).peek()


def test_no_loader_and_no_batches_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"train_dataloader\(\) returned None"):
        request(None)
    with pytest.raises(ConfigurationError, match="limit_train_batches=0 trains on 0 batches"):
        request(LOADERS["in order"](), limit_train_batches=0)
    with pytest.raises(ConfigurationError, match="The loader is a int, which is no iterable over batches"):
        request(3).peek()


@pytest.mark.parametrize("make", [Numbers, Endless])
def test_an_exception_of_the_dataset_passes_through_and_changes_nothing(make: Any) -> None:
    class Broken(make):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Tensor:
            raise LookupError("no such file")

        def __iter__(self) -> Iterator[Tensor]:
            torch.rand(1)
            raise LookupError("no such file")
            yield

    dataset = Broken()
    train = request(DataLoader(dataset, batch_size=2))
    state = torch.get_rng_state()
    with pytest.raises(LookupError, match=r"^no such file$"):
        train.peek()
    assert type(dataset) is Broken
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_loader_declares() -> None:
    def declared(loader: Any, **settings: Any) -> tuple[Any, Any, Any]:
        train = request(loader, **settings)
        return train.batch_size, train.num_batches, train.rebuild_obstacle

    assert declared(DataLoader(Numbers(), batch_size=4)) == (4, 4, None)
    assert declared(DataLoader(Numbers(), batch_size=4, drop_last=True)) == (4, 3, None)
    assert declared(DataLoader(Numbers(), batch_size=4), limit_train_batches=3) == (4, 3, None)
    assert declared(DataLoader(Numbers(), batch_size=4), limit_train_batches=0.5) == (4, 2, None)
    assert declared(DataLoader(Endless(), batch_size=4)) == (4, None, None)
    assert declared(DataLoader(Endless(), batch_size=4), limit_train_batches=7) == (4, 7, None)
    explicit = BatchSampler(RandomSampler(Numbers()), 5, drop_last=False)
    assert declared(DataLoader(Numbers(), batch_sampler=explicit)) == (5, 3, None)
    assert declared(DataLoader(Numbers(), batch_sampler=Recounting())) == (
        None,
        4,
        "its batch sampler is a Recounting, whose batches are not known",
    )
    assert declared(DataLoader(Numbers(), batch_size=None)) == (
        None,
        13,
        "it has batch_size=None: its dataset yields whole batches",
    )
    assert declared(OwnLoader(Numbers(), batch_size=4)) == (
        4,
        4,
        "its class OwnLoader is a subclass of DataLoader, whose arguments are not known",
    )
    assert declared(Counting()) == (None, None, "it is a Counting, not a torch DataLoader")
    two = {"a": DataLoader(Numbers(), batch_size=4), "b": DataLoader(Numbers(6), batch_size=3)}
    assert declared(two) == (None, 4, "it is a dict, not a torch DataLoader")
    assert declared(CombinedLoader(two, "min_size"))[:2] == (None, 2)
    assert declared({**two, "c": Counting()})[:2] == (None, None)


def test_a_loader_describes_itself() -> None:
    assert request(DataLoader(Numbers(), batch_size=4, shuffle=True)).describe == (
        "DataLoader over 13 samples (Numbers), batches of 4, RandomSampler, 0 workers"
    )
    assert request({"a": Counting(), "b": DataLoader(Endless(), batch_size=4)}).describe == (
        "dict of 2 loaders: Counting, "
        "DataLoader over samples of unknown number (Endless), batches of 4, _InfiniteConstantSampler, 0 workers"
    )


def test_a_loader_does_not_live_longer_because_it_was_looked_at() -> None:
    for make in (lambda: Endless(6), Counting):
        iterable: Any = make()
        loader = DataLoader(iterable, batch_size=2) if isinstance(iterable, IterableDataset) else iterable
        train = request(loader)
        train.peek()
        assert len(list(loader)) > 1
        reference = weakref.ref(iterable)
        train._source.instance.make = None
        del iterable, loader, train
        assert reference() is None


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


# Rebuilding.


@pytest.mark.parametrize("name", ["in order", "shuffled", "shuffled with a generator", "workers", "persistent workers"])
def test_a_rebuilt_loader_yields_the_same_samples_in_the_same_order(name: str) -> None:
    plain, _, _ = run(LOADERS[name], None)
    planned, plugin, _ = run(LOADERS[name], lambda loader: (loader.peek(), loader.install(3)))
    assert planned.calls == 1
    assert [len(batch) for batch in planned.seen] == [3, 3, 3, 3, 1] * 2
    # noise depends on where dropout draws in between; the samples themselves do not in the first epoch
    order = torch.cat(planned.seen)[:13, 0].tolist()
    assert order == torch.cat(plain.seen)[:13, 0].tolist()
    assert plugin.loader.num_batches == 4
    assert plugin.loader.num_batches_at(3) == 5


def test_a_rebuilt_stream_starts_with_the_samples_that_were_looked_at() -> None:
    plain, _, _ = run(lambda: DataLoader(Endless(10, noise=False), batch_size=4), None, max_epochs=1)
    planned, _, _ = run(
        lambda: DataLoader(Endless(10, noise=False), batch_size=4),
        lambda loader: (loader.peek(), loader.install(3)),
        max_epochs=1,
    )
    assert [len(batch) for batch in planned.seen] == [3, 3, 3, 1]
    assert same(torch.cat(planned.seen), torch.cat(plain.seen))


def test_a_rebuilt_stream_in_workers_starts_them_anew() -> None:
    planned, _, _ = run(
        lambda: DataLoader(Endless(7, noise=False), batch_size=4, num_workers=1),
        lambda loader: (loader.peek(), loader.install(3)),
        max_epochs=1,
    )
    assert torch.cat(planned.seen)[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert [len(batch) for batch in planned.seen] == [3, 3, 1]
    assert multiprocessing.active_children() == []


def test_a_rebuilt_loader_keeps_every_public_setting() -> None:
    sampler = RandomSampler(Numbers(), generator=generator(1))
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        sampler=sampler,
        num_workers=2,
        collate_fn=torch.stack,  # type: ignore[arg-type]
        drop_last=True,
        timeout=30,
        worker_init_fn=print,
        multiprocessing_context="fork",
        generator=generator(2),
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
    )
    loader.note = "set by the user"  # type: ignore[attr-defined]
    train = request(loader)
    undo = train.install(3)
    rebuilt = train._source.dataloader()
    undo()
    assert type(rebuilt) is DataLoader
    kept = {name for name in vars(loader) if not name.startswith("_")} - {"batch_size", "batch_sampler"}
    assert {name for name in kept if getattr(rebuilt, name) is not getattr(loader, name)} == set()
    assert rebuilt.multiprocessing_context is loader.multiprocessing_context
    assert (rebuilt.batch_size, rebuilt.batch_sampler.batch_size, rebuilt.batch_sampler.drop_last) == (3, 3, True)
    explicit = BatchSampler(sampler, 5, drop_last=True)
    other = request(DataLoader(Numbers(), batch_sampler=explicit))
    other.install(2)
    again = other._source.dataloader()
    assert (again.batch_sampler.sampler, again.batch_sampler.batch_size) == (sampler, 2)
    assert again.batch_sampler.drop_last


def test_loaders_reloaded_later_are_rebuilt_too() -> None:
    planned, _, _ = run(
        LOADERS["shuffled"], lambda loader: loader.install(5), max_epochs=2, reload_dataloaders_every_n_epochs=1
    )
    assert planned.calls == 2
    assert [len(batch) for batch in planned.seen] == [5, 5, 3] * 2


def test_installing_the_loaders_own_batch_size_changes_nothing() -> None:
    loader = LOADERS["shuffled"]()
    train = request(loader)
    train.install(4)
    assert train._source.dataloader() is loader


def test_another_batch_size_is_refused_where_the_loader_cannot_be_rebuilt() -> None:
    with pytest.raises(ConfigurationError) as caught:
        request(DataLoader(Numbers(), batch_sampler=Recounting())).install(4)
    assert str(caught.value) == (
        "The train loader cannot be rebuilt with 4 samples per batch instead of None: its batch sampler is a "
        "Recounting, whose batches are not known. Give it this batch size where it is made."
    )


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


# Validation.


class LookAtValidation(lightning.pytorch.Callback):
    def __init__(self, times: int = 1) -> None:
        self.batches: list[Any] = []
        self.times = times

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.batches += [request_validation_batch(trainer) for _ in range(self.times)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_sanity_val_steps == 0:
            self.batches += [request_validation_batch(trainer) for _ in range(self.times)]


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
    if sanity or name not in ("map-style", "workers", "zipped"):
        assert same(look.batches[0], runs[0][0][0])


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
            self.batch = request_validation_batch(trainer)
            assert source.__dict__ != before
            forget_validation_loader(trainer)
            assert source.__dict__ == before
            forget_validation_loader(trainer)

    forgetting = Forgetting()
    model = validating(Model)(LOADERS["shuffled"], VALIDATION["map-style"])
    fit(model, callbacks=[forgetting], max_epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    assert forgetting.batch.shape == (5, 2)
    assert model.validation_calls == 2  # once here, once by Lightning, since the first answer was forgotten


# What is not public.


@pytest.mark.parametrize("namespace", [lightning.pytorch, pytorch_lightning])
def test_lightning_has_the_names_that_the_adapter_touches(namespace: Any) -> None:
    trainer = namespace.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (trainer.fit_loop, val_loop):
        source = loop._data_source
        assert set(vars(source)) == {"instance", "name"}
        assert callable(type(source).dataloader)
        module = sys.modules[type(source).__module__]
        assert module.__name__.startswith(namespace.__name__)
        for name in ("_request_dataloader", "CombinedLoader", "_auto_add_worker_init_fn"):
            assert hasattr(module, name)
    assert val_loop._combined_loader is None
    combined = module.CombinedLoader([[1], [2]], "sequential")
    assert combined._mode == "sequential"
    assert combined.flattened == [[[1], [2]]] or combined.flattened == [[1], [2]]


def test_torch_has_the_names_that_the_adapter_touches() -> None:
    assert DataLoader(Numbers())._iterator is None
    assert callable(DataLoader._get_iterator)


def test_a_lightning_that_renamed_them_is_named() -> None:
    class Source:
        instance = None

    class Loop:
        pass

    class Trainer:
        limit_train_batches = 1.0
        fit_loop: Any = Loop()

    with pytest.raises(UnsupportedError, match="Loop has no attribute '_data_source' in this version of Lightning"):
        TrainLoader.request(Trainer())
    Trainer.fit_loop._data_source = Source()
    with pytest.raises(UnsupportedError, match=r"has no '_request_dataloader' in this version of Lightning; .* 2\.6\."):
        TrainLoader.request(Trainer())
