"""What a loader declares, and the same loader with another batch size, inside real Trainers."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_memfit.errors import ConfigurationError
from tests.apply.loading import (
    LOADERS,
    Counting,
    Endless,
    Numbers,
    OwnLoader,
    Recounting,
    generator,
    request,
    run,
    same,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


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
