"""Of data that cannot be rewound few batches are scanned, and all of them are handed on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memfit.apply.batch_scan import ScanLimits
from lightning_memfit.apply.loader import TrainLoader
from tests.apply.loading import (
    LENGTHS,
    LIMITS,
    Endless,
    Model,
    Numbers,
    OwnLoader,
    Planned,
    Stream,
    fit,
    found,
    padded,
    request,
    same,
    scan_and_install,
    seed,
    stream_of_batches,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")


def test_all_batches_of_a_stream_that_were_looked_at_are_handed_on_in_order() -> None:
    dataset = Stream()
    loader = padded(dataset)
    result = found(loader)
    assert (result.index, result.scanned, result.total, result.complete) == (2, 4, None, False)
    # Batches of lengths (3, 4), (5, 6), (7, 3), (4, 5), each of 2 samples and positions of 2 numbers of 4 bytes
    assert result.held_bytes == 2 * 2 * 4 * (4 + 6 + 7 + 5)
    numbers = [sample[0, 0].item() for batch in loader for sample in batch]
    assert numbers == list(range(64))
    assert dataset.epochs == 1
    assert [len(batch) for batch in loader] == [2] * 32
    assert (dataset.epochs, type(dataset)) == (2, Stream)


def test_a_stream_that_ends_while_it_is_looked_at_is_known_whole() -> None:
    result = found(padded(Stream(LENGTHS[:5])))
    assert (result.index, result.scanned, result.total, result.complete) == (1, 3, None, True)
    assert result.describe() == (
        "batch_idx 1 of 3 batches (all looked at): (2, 6, 2) float32; "
        "batch_idx 2 has more per sample: (1, 7, 2) float32"
    )


def test_a_stream_holds_no_more_than_its_limits_allow() -> None:
    assert found(padded(Stream()), ScanLimits(max_handed_on=2, max_seconds=1000.0)).scanned == 2
    # The first batch has 2 x 4 x 2 x 4 = 64 bytes, the second 96.
    assert found(padded(Stream()), ScanLimits(max_held_bytes=64, max_seconds=1000.0)).scanned == 1
    assert found(padded(Stream()), ScanLimits(max_held_bytes=65, max_seconds=1000.0)).scanned == 2


def test_a_stream_is_not_read_further_than_training_goes() -> None:
    def position_after(use: Callable[[TrainLoader], Any] | None, **settings: Any) -> int:
        seed()
        dataset = Endless(30, noise=False)
        plugin = None if use is None else Planned(use)
        fit(Model(lambda: DataLoader(dataset, batch_size=4)), plugin, max_epochs=1, **settings)
        return dataset.position

    for settings in ({"max_steps": 2}, {"limit_train_batches": 2}):
        assert position_after(scan_and_install, **settings) == position_after(None, **settings)
    assert found(padded(Stream()), max_steps=3).scanned == 3


def test_a_stream_that_draws_what_training_draws_is_only_looked_at_once() -> None:
    assert found(DataLoader(Endless(30), batch_size=4)).scanned == 1
    assert found(DataLoader(Endless(30, noise=False), batch_size=4)).scanned == 4
    assert found(stream_of_batches()).scanned == 1


def test_an_object_whose_position_is_saved_is_only_looked_at_once() -> None:
    loader = OwnLoader(Numbers(noise=False), batch_size=4)
    assert found(loader).scanned == 1
    assert loader.state_dict() == {"served": 1}

    class Positioned(Stream):
        def state_dict(self) -> dict[str, int]:
            return {}

    assert found(padded(Positioned())).scanned == 1


class Breaking(Stream):
    """Ends with an exception after two whole batches and half of one."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from list(super().__iter__())[:5]
        raise LookupError("no such file")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_the_middle_of_a_stream_comes_up_where_it_would_in_training(workers: int) -> None:
    train = request(padded(Breaking(), num_workers=workers))
    result = train.scan(LIMITS)
    train.close()
    assert (result.index, result.scanned, result.complete) == (1, 2, False)
    assert result.unreadable is not None
    assert result.unreadable.startswith("batch_idx 2 raised LookupError: ")

    def trained(use: Callable[[TrainLoader], Any] | None) -> list[Any]:
        seed()
        model = Model(lambda: padded(Breaking(), num_workers=workers))
        try:
            fit(model, None if use is None else Planned(use), max_epochs=1)
        except LookupError as error:
            assert "no such file" in str(error)
            assert workers or traceback.extract_tb(error.__traceback__)[-1].name == "__iter__"  # where it was raised
            error.__traceback__ = None  # it holds the workers
        else:
            pytest.fail("the exception did not come up")
        return model.seen

    plain = trained(None)
    assert len(plain) == 1  # Lightning fetches one batch ahead of a stream
    assert same(trained(scan_and_install), plain)


def test_an_exception_of_the_first_batch_passes_through_and_changes_nothing() -> None:
    dataset = Breaking(LENGTHS[:0])
    train = request(padded(dataset))
    state = torch.get_rng_state()
    with pytest.raises(LookupError, match=r"^no such file$"):
        train.scan(LIMITS)
    assert type(dataset) is Breaking
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_stream_draws_at_its_end_is_drawn_where_its_reader_meets_it() -> None:
    class Closing(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            yield from super().__iter__()
            torch.rand(3)

    def read(loader: Any) -> list[Any]:
        torch.manual_seed(4)
        batches = list(loader)
        return [*batches, torch.get_rng_state()]

    looked_at = padded(Closing(LENGTHS[:6]))
    train = request(looked_at)
    torch.manual_seed(4)
    assert train.scan(LIMITS).complete
    plain = padded(Closing(LENGTHS[:6]))
    assert same(read(looked_at), read(plain))
    assert same(read(looked_at), read(plain))
