"""A scan finds the largest batch of an epoch, within its limits."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_memfit.apply.batch_scan import ScanLimits, ScannedBatch
from lightning_memfit.apply.epoch_scan import ScanBounds, scan_of, spread_over
from lightning_memfit.apply.first_batch import MapStyleLook, look_at
from lightning_memfit.apply.loader import TrainLoader
from lightning_memfit.errors import ConfigurationError
from tests.apply.loading import (
    LENGTHS,
    LIMITS,
    LONGEST,
    Counting,
    Numbers,
    Sequences,
    Stream,
    found,
    pad,
    padded,
    request,
    run,
    same,
    scan_and_install,
)

# Lightning 2.6 builds its trees with a name that torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")

# Finding the largest.


@pytest.mark.parametrize("workers", [0, 1])
def test_the_largest_batch_is_found_wherever_it_is(workers: int) -> None:
    result = found(padded(num_workers=workers))
    assert (result.index, result.scanned, result.total, result.complete) == (17, 32, 32, True)
    assert result.batch.shape == (2, 20, 2)
    assert result.batch[0, 0].tolist() == [34.0, 34.0]
    assert result.describe() == "batch_idx 17 of 32 batches (all looked at): (2, 20, 2) float32"
    assert (result.rival, result.larger_elsewhere, result.held_bytes) == (None, (), 0)


def test_of_equally_large_batches_the_first_is_taken() -> None:
    assert found(padded(Sequences([5] * 12))).index == 0


def test_limits_of_the_trainer_end_the_epoch_of_the_scan() -> None:
    assert found(padded(), limit_train_batches=17).batch.shape == (2, 7, 2)
    assert found(padded(), limit_train_batches=18).index == 17
    half = found(padded(), limit_train_batches=0.5)
    assert (half.batch.shape, half.scanned, half.total, half.complete) == ((2, 7, 2), 16, 16, True)
    quick = found(padded(), fast_dev_run=True)
    assert (quick.index, quick.scanned, quick.total, quick.complete) == (0, 1, 1, True)


def test_the_epoch_of_a_shuffling_sampler_is_that_of_the_run() -> None:
    planned, plugin, _ = run(lambda: padded(shuffle=True), scan_and_install, max_epochs=1)
    result = plugin.loader.result
    assert torch.equal(planned.seen[result.index], result.batch)
    assert result.index == max(range(32), key=lambda index: planned.seen[index].shape[1])
    assert result.index != 17


def test_batches_of_a_batch_sampler_are_those_that_it_makes() -> None:
    class Bucketed(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            order = sorted(range(64), key=lambda index: LENGTHS[index])
            for start in torch.randperm(16).tolist():
                yield order[4 * start : 4 * start + 4]

        def __len__(self) -> int:
            return 16

    def make() -> DataLoader[Any]:
        return DataLoader(Sequences(), batch_sampler=Bucketed(), collate_fn=pad)

    planned, plugin, _ = run(make, scan_and_install, max_epochs=1)
    result = plugin.loader.result
    assert torch.equal(planned.seen[result.index], result.batch)
    assert (result.batch.shape, result.complete) == ((4, 20, 2), True)


def test_a_loader_that_will_be_rebuilt_is_scanned_at_its_batch_size() -> None:
    def use(loader: TrainLoader) -> ScannedBatch:
        loader.peek()
        result = loader.scan(LIMITS, 4)
        loader.install(4)
        return result

    for make in (padded, lambda: padded(num_workers=1), lambda: padded(shuffle=True)):
        planned, plugin, _ = run(make, use, max_epochs=1)
        result = plugin.result
        assert (len(planned.seen), result.total, result.complete) == (16, 16, True)
        assert result.batch.shape == (4, 20, 2)
        assert torch.equal(planned.seen[result.index], result.batch)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_stream_that_will_be_rebuilt_hands_on_what_was_scanned(settings: dict[str, Any]) -> None:
    def use(loader: TrainLoader) -> ScannedBatch:
        loader.peek()
        result = loader.scan(LIMITS, 3)
        loader.install(3)
        return result

    planned, plugin, _ = run(lambda: padded(Stream(LENGTHS[:13]), **settings), use, max_epochs=2)
    numbers = [sample[0, 0].item() for batch in planned.seen for sample in batch]
    assert numbers == [float(number) for number in range(13)] * 2
    assert [len(batch) for batch in planned.seen] == [3, 3, 3, 3, 1] * 2
    assert plugin.result.batch.shape == (3, 7, 2)
    assert multiprocessing.active_children() == []


def test_a_batch_size_that_the_loader_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be rebuilt with 3 samples per batch instead of None"):
        request(Counting()).scan(LIMITS, 3)


def test_a_loader_without_a_batch_is_refused_as_when_it_is_looked_at() -> None:
    for loader in (padded(Sequences([])), padded(Stream([])), [], iter(())):
        with pytest.raises(ConfigurationError, match=r"The train loader yields 0 batches .*"):
            found(loader)


def test_whole_batches_of_a_dataset_are_the_callers_own() -> None:
    stored = [torch.zeros(2, 3), torch.zeros(9, 3), torch.zeros(4, 3)]
    result = found(DataLoader(stored, batch_size=None))  # type: ignore[arg-type]
    assert (result.index, result.batch.shape, result.complete) == (1, (9, 3), True)
    result.batch.fill_(7.0)
    assert (stored[1] == 0).all()
    rows = torch.zeros(5, 3, 2)
    row = found(rows)
    assert (row.index, row.scanned, row.total, row.complete) == (0, 5, 5, True)
    row.batch.fill_(7.0)
    assert (rows == 0).all()


# Limits.


def test_a_bounded_number_of_batches_is_spread_over_the_epoch() -> None:
    # Sorted data have the longest sample at the end, in a last batch of one sample; the one before it is full.
    dataset = Sequences([*sorted(LENGTHS), 20])
    result = found(padded(dataset), ScanLimits(max_batches=5, max_seconds=1000.0))
    assert dataset.read == [0, 1, 22, 23, 42, 43, 62, 63, 64]  # batches 0, 11, 21, 31 and 32
    assert (result.index, result.scanned, result.total, result.complete) == (31, 5, 33, False)
    assert result.describe() == ("batch_idx 31, the largest of 5 looked at of 33 batches: (2, 20, 2) float32")


def test_without_a_known_end_the_first_batches_are_looked_at() -> None:
    class Unsized(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(64))

    few = found(padded(sampler=Unsized()), ScanLimits(max_batches=4, max_seconds=1000.0))
    assert (few.index, few.scanned, few.total, few.complete) == (2, 4, None, False)
    assert few.describe() == "batch_idx 2, the largest of 4 looked at: (2, 7, 2) float32"
    every = found(padded(sampler=Unsized()))
    assert (every.index, every.scanned, every.complete) == (17, 32, True)


def ticking(seconds: float) -> Callable[[], float]:
    times = iter(range(10**6))
    return lambda: seconds * next(times)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_batch_is_begun_after_the_time_is_over(workers: int) -> None:
    dataset = Sequences()
    # The clock is asked before each further batch: at 0, 1 and 2 seconds there is time left, at 3 there is none.
    result = request(padded(dataset, num_workers=workers)).scan(ScanLimits(max_seconds=3.0), clock=ticking(1.0))
    assert (result.scanned, result.complete, result.total) == (4, False, 32)
    assert workers or dataset.read == list(range(8))


def test_without_any_time_the_first_batch_is_looked_at_all_the_same() -> None:
    for loader in (padded(), padded(Stream()), [torch.zeros(2), torch.zeros(3)]):
        result = request(loader).scan(ScanLimits(max_seconds=0.0))
        assert (result.index, result.scanned, result.complete) == (0, 1, False)
    assert (
        "batch_idx 0, the only one looked at: (2, 4, 2)"
        in request(padded(Stream())).scan(ScanLimits(max_seconds=0.0)).describe()
    )


def test_nothing_keeps_a_scanned_batch_alive() -> None:
    gc.collect()
    gc.disable()  # what only the garbage collector frees would lie beside the step
    try:
        for loader in (padded(), padded(num_workers=1), padded(Stream()), torch.zeros(3, 2)):
            train = request(loader)
            batch = weakref.ref(train.scan(LIMITS).batch)
            assert batch() is None
    finally:
        gc.enable()


def test_what_is_sent_to_workers_can_be_sent_to_spawned_ones() -> None:
    look = look_at(padded(), shared=(), prepare=lambda loader: None, starts=1)
    assert isinstance(look, MapStyleLook)
    scan_of(look, ScanBounds(limits=LIMITS, total=None, out_of_time=lambda: False))
    seen = pickle.loads(pickle.dumps(look.collate))([torch.zeros(3, 2), torch.zeros(1, 2)])
    assert seen.batch.shape == (2, 3, 2)
    assert pickle.loads(pickle.dumps(seen)).shapes == seen.shapes
    # A worker sends no batch that is not larger than all before.
    assert [look.collate([torch.zeros(length, 2)]).batch is None for length in (3, 2, 3, 4)] == [
        False,
        True,
        True,
        False,
    ]


def test_no_more_than_two_batches_are_held_at_once() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def collate(samples: list[Tensor]) -> Tensor:
        nonlocal most
        batch = pad(samples)
        alive.append(weakref.ref(batch))
        most = max(most, sum(each() is not None for each in alive))
        return batch

    result = found(DataLoader(Sequences(list(range(1, 31))), batch_size=2, collate_fn=collate))
    assert (result.index, len(alive), most) == (14, 15, 2)


# What cannot be read, and what no single number orders.


class Broken(Sequences):
    """Some samples cannot be read."""

    def __init__(self, *broken: int) -> None:
        super().__init__()
        self.broken = broken

    def __getitem__(self, index: int) -> Tensor:
        if index in self.broken:
            raise LookupError(f"no file {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_read_is_passed_over_and_named(workers: int) -> None:
    result = found(padded(Broken(20, 61), num_workers=workers))
    assert (result.index, result.batch.shape, result.scanned, result.complete) == (17, (2, 20, 2), 30, False)
    assert result.unreadable is not None
    assert result.unreadable.startswith("batch_idx 10 raised LookupError: ")
    # A broken dataset is not read to its end.
    ended = found(padded(Broken(4, 6, 8), num_workers=workers))
    assert (ended.scanned, ended.batch.shape) == (2, (2, 6, 2))


def test_a_batch_that_cannot_be_read_keeps_no_worker_alive() -> None:
    gc.collect()
    gc.disable()  # what only the garbage collector ends takes it five seconds
    try:
        found(padded(Broken(4, 6, 8), num_workers=1))
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_the_longest_batch_may_be_one_that_cannot_be_read() -> None:
    dataset = Broken(LONGEST)
    dataset.lengths = LENGTHS  # type: ignore[attr-defined]
    result = found(padded(dataset))
    assert (result.complete, result.ranked_by) == (False, "Broken.lengths")
    assert result.unreadable == "batch_idx 17 raised LookupError: no file 35"
    assert "the largest of 32 ranked by Broken.lengths of 32 batches (batch_idx 17 raised" in result.describe()


def test_an_exception_of_the_first_batch_passes_through() -> None:
    with pytest.raises(LookupError, match=r"^no file 0$"):
        found(padded(Broken(0)))


def test_a_batch_with_more_per_sample_is_named_beside_the_largest() -> None:
    # A budget of about 64 positions per batch: many short samples, or few long ones.
    lengths = [4] * 16 + [15] * 4 + [30] * 2
    batches = [list(range(16)), list(range(16, 20)), list(range(20, 22))]

    for settings in ({"num_workers": 1}, {}):
        loader = DataLoader(Sequences(lengths), batch_sampler=batches, collate_fn=pad, **settings)  # type: ignore[arg-type]
        result = found(loader)
        assert (result.index, result.batch.shape) == (0, (16, 4, 2))
        assert result.rival is not None
        assert (result.rival.index, result.rival.batch.shape) == (2, (2, 30, 2))
        assert result.rival.batch[:, 0, 0].tolist() == [20.0, 21.0]
        assert result.describe() == (
            "batch_idx 0 of 3 batches (all looked at): (16, 4, 2) float32; "
            "batch_idx 2 has more per sample: (2, 30, 2) float32"
        )
    streamed = found(iter(list(loader)))
    assert streamed.rival is not None
    assert (streamed.index, streamed.rival.index) == (0, 2)


def test_a_tensor_that_is_larger_in_another_batch_is_named() -> None:
    """Reported in ultralytics/ultralytics#17514."""
    pairs = [(9, 2), (3, 7), (4, 4)]

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        source, target = pairs[samples[0]]
        return {"source": torch.zeros(2, source), "target": torch.zeros(2, target)}

    result = found(DataLoader(range(3), collate_fn=collate))  # type: ignore[arg-type]
    assert (result.index, result.larger_elsewhere) == (0, ("batch['target']: (2, 7) instead of (2, 2)",))
    assert result.shape_ranges == (((2, 2), (3, 9)), ((2, 2), (2, 7)))
    assert result.describe() == (
        "batch_idx 0 of 3 batches (all looked at): (2, 9) float32, (2, 2) float32; "
        "another batch has more of batch['target']: (2, 7) instead of (2, 2)"
    )


def test_of_several_loaders_the_largest_of_each_are_put_together() -> None:
    def make() -> dict[str, Any]:
        return {"a": padded(), "b": DataLoader(Numbers(7, noise=False), batch_size=3)}

    result = found(make())
    assert (result.batch["a"].shape, result.batch["b"].shape) == ((2, 20, 2), (3, 2))
    assert (result.index, result.scanned, result.total, result.complete) == (17, 32, 32, True)
    assert result.describe() == (
        "the largest of each of 2 loaders (batch_idx 17 of 32, batch_idx 0 of 3; all looked at): "
        "(2, 20, 2) float32, (3, 2) float32"
    )
    # Where the shortest ends the epoch, no more of the others is trained on.
    shortest = found(CombinedLoader(make(), "min_size"))
    assert (shortest.batch["a"].shape, shortest.total) == ((2, 7, 2), 3)


# Lengths that are known.


def test_known_lengths_rank_the_whole_epoch_and_only_the_longest_batch_is_loaded() -> None:
    dataset = Sequences()
    dataset.lengths = LENGTHS  # type: ignore[attr-defined]
    result = found(padded(dataset), ScanLimits(max_batches=4, max_seconds=1000.0))
    # Loaded are the first batch, which is also the shortest, the longest, and the middle one of those set aside.
    assert dataset.read == [0, 1, 34, 35, 60, 61]
    assert (result.index, result.scanned, result.total, result.complete) == (17, 32, 32, True)
    assert result.describe() == ("batch_idx 17 of 32 batches (all ranked by Sequences.lengths): (2, 20, 2) float32")


def test_a_run_after_ranking_is_the_plain_run() -> None:
    def make() -> DataLoader[Any]:
        dataset = Sequences(noise=True)
        dataset.lengths = torch.tensor(LENGTHS)  # type: ignore[attr-defined]
        return padded(dataset, shuffle=True)

    plain, _, plain_ends = run(make, None)
    planned, plugin, ends = run(make, scan_and_install)
    assert same(planned.seen, plain.seen)
    assert torch.equal(ends[0], plain_ends[0])
    result = plugin.loader.result
    assert result.batch.shape == plain.seen[result.index].shape == (2, 20, 2)


def test_lengths_that_the_batches_contradict_are_not_believed() -> None:
    dataset = Sequences()
    dataset.lengths = [20 - length for length in LENGTHS]  # type: ignore[attr-defined]
    for workers in (0, 1):
        result = found(padded(dataset, num_workers=workers))
        assert (result.index, result.scanned, result.complete, result.ranked_by) == (17, 32, True, None)
        assert result.batch.shape == (2, 20, 2)


def test_lengths_that_say_nothing_of_a_target_are_not_all_that_is_looked_at() -> None:
    class Pairs(Dataset[int]):
        def __init__(self, targets: list[int]) -> None:
            self.lengths = [5, 9, 3, 4, 6, 7, 8, 2]
            self.targets = targets

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

        def collate(self, samples: list[int]) -> dict[str, Tensor]:
            source, target = self.lengths[samples[0]], self.targets[samples[0]]
            return {"source": torch.zeros(1, 4 * source), "target": torch.zeros(1, target)}

    def scanned(targets: list[int]) -> ScannedBatch:
        dataset = Pairs(targets)
        return found(DataLoader(dataset, collate_fn=dataset.collate))

    # Loaded are batch 0, the longest source (1), the shortest (7) and the middle one of those set aside (4). That
    # batch 0 has more of a target than batch 1 tells that sources are not all; batch 5, 28 + 40, is among the rest.
    result = scanned([6, 2, 1, 1, 3, 40, 1, 1])
    assert (result.index, result.scanned, result.complete, result.ranked_by) == (5, 8, True, None)
    # Where the rest contradicts nothing, the lengths stand.
    result = scanned([6, 2, 1, 1, 3, 3, 3, 1])
    assert (result.index, result.ranked_by) == (1, "Pairs.lengths")
    assert result.larger_elsewhere == ("batch['target']: (1, 6) instead of (1, 2)",)


def test_ranking_ends_with_the_epoch_that_the_trainer_runs() -> None:
    dataset = Sequences()
    dataset.lengths = LENGTHS  # type: ignore[attr-defined]
    result = found(padded(dataset), limit_train_batches=17)
    assert (result.batch.shape, result.scanned, result.total, result.complete) == ((2, 7, 2), 17, 17, True)


def test_batches_of_constant_samples_need_no_second_look() -> None:
    class Counted(TensorDataset):
        pass

    dataset = TensorDataset(torch.zeros(10, 3), torch.zeros(10))
    result = found(DataLoader(dataset, batch_size=4, shuffle=True))
    assert (result.index, result.scanned, result.total, result.complete) == (0, 1, 3, True)
    assert result.describe() == (
        "batch_idx 0, as large as any other (all samples of the TensorDataset have one shape): "
        "(4, 3) float32, (4,) float32"
    )
    # With batches of different numbers of samples the largest number counts.
    uneven = found(DataLoader(dataset, batch_sampler=[[0], [1, 2, 3], [4, 5]]))  # type: ignore[arg-type]
    assert (uneven.index, uneven.complete, uneven.ranked_by) == (1, True, "TensorDataset")
    # A collation of the user's own may do anything with equal samples, and so may a subclass.
    trimmed = found(DataLoader(TensorDataset(torch.ones(9, 3)), collate_fn=lambda samples: torch.zeros(len(samples))))
    assert trimmed.scanned == 9
    assert found(DataLoader(Counted(torch.ones(9, 3)))).scanned == 9


def test_positions_are_spread_with_both_ends() -> None:
    assert spread_over(3, 8) == {0, 1, 2}
    assert spread_over(10, 3) == {0, 1, 2}
    assert sorted(spread_over(4096, 6)) == [0, 1024, 2048, 3071, 4094, 4095]
    assert all(len(spread_over(total, 64)) <= 64 for total in range(1, 500))
