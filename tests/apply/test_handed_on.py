"""What was looked at in data that cannot be rewound is handed on, once and in order."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from tests.apply.loading import (
    LOADERS,
    Endless,
    Model,
    Numbers,
    OwnLoader,
    Planned,
    assert_as_in_a_plain_run,
    fit,
    look_and_install,
    request,
    same,
    seed,
    stream_of_batches,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


def test_a_stateful_stream_loses_no_sample_and_yields_none_twice() -> None:
    planned, _ = assert_as_in_a_plain_run(lambda: DataLoader(Endless(10), batch_size=4), max_epochs=1)
    assert torch.cat(planned.seen)[:, 0].tolist() == list(range(1, 11))


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


def test_a_generator_goes_on_in_the_next_epoch_as_in_a_plain_run() -> None:
    runs = []
    for use in (None, look_and_install):
        seed()
        model = Model()
        batches = stream_of_batches()
        fit(model, None if use is None else Planned(use), train=batches, max_epochs=2, limit_train_batches=3)
        runs.append((model.seen, list(batches)))
    assert same(runs[0], runs[1])


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
