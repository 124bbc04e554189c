"""Looking at the first batch of a loader leaves no trace, in whatever way its kind is looked at."""

from __future__ import annotations

import multiprocessing
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from lightning_memfit.errors import ConfigurationError
from tests.apply.loading import (
    LOADERS,
    Counting,
    Endless,
    Make,
    Numbers,
    Recounting,
    assert_as_in_a_plain_run,
    generator,
    leaves,
    request,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


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


def test_seeded_workers_are_seeded_before_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert_as_in_a_plain_run(LOADERS["stream in workers"], max_epochs=1)
    assert_as_in_a_plain_run(LOADERS["workers"])


def test_a_batch_that_was_looked_at_may_be_changed() -> None:
    stored = torch.zeros(5, 3, 2)
    for loader in (DataLoader(TensorDataset(stored), batch_size=None), DataLoader(Endless(6), batch_size=None)):
        train = request(loader)
        batch = train.peek()
        for leaf in leaves(batch):
            leaf.fill_(99.0)
        assert all((leaf != 99.0).all() for leaf in leaves(next(iter(loader))))
    assert (stored == 0).all()


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


def test_torch_has_the_names_that_the_adapter_touches() -> None:
    assert DataLoader(Numbers())._iterator is None
    assert callable(DataLoader._get_iterator)
