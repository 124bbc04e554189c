"""Lengths of samples are found where they are stored, and batches are ranked by them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from lightning_memfit.apply.sample_lengths import SampleLengths, known_lengths


class Samples(Dataset[int]):
    """Four samples, which must not be loaded."""

    def __init__(self, **stored: Any) -> None:
        vars(self).update(stored)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> int:
        raise AssertionError("loaded a sample")


class Columns(Samples):
    """Like a data set of the library ``datasets``: columns, and a transform made for samples."""

    column_names = ("input_ids",)
    plain = False

    def with_format(self, kind: None) -> Columns:
        view = copy.copy(self)
        view.plain = True
        return view

    def __getitem__(self, index: Any) -> Any:
        assert self.plain, "the user's transform ran"
        assert index == "length"
        return iter([3, 1, 4, 1])


def table_of(loader: Any) -> Any:
    found = known_lengths(loader)
    return None if found is None else (found.source, found.table.tolist())


@pytest.mark.parametrize(
    "lengths", [[3, 1, 4, 1], (3, 1, 4, 1), np.array([3, 1, 4, 1]), torch.tensor([3, 1, 4, 1]), [3.0, 1.0, 4.0, 1.0]]
)
@pytest.mark.parametrize("name", ["lengths", "sizes"])
def test_stored_lengths_of_a_dataset_are_found(name: str, lengths: Any) -> None:
    assert table_of(DataLoader(Samples(**{name: lengths}))) == (f"Samples.{name}", [[3], [1], [4], [1]])


def test_a_source_and_a_target_have_a_column_each() -> None:
    pairs = [(3, 5), (1, 2), (4, 4), (1, 9)]
    assert table_of(DataLoader(Samples(sizes=pairs))) == ("Samples.sizes", [list(pair) for pair in pairs])


@pytest.mark.parametrize(
    "lengths",
    [None, 7, "four", [1, 2, 3], [1, 2, 3, -1], [1, 2, 3, float("nan")], ["a", "b", "c", "d"], [[1], [2], [3], [4, 5]],
     {0: 1, 1: 2, 2: 3, 3: 4}, [True, False, True, True], np.zeros((4, 2, 2)), np.zeros((4, 9)), lambda: [1, 2, 3, 4]],
)  # fmt: skip
def test_what_is_no_list_of_lengths_is_left_alone(lengths: Any) -> None:
    assert known_lengths(DataLoader(Samples(lengths=lengths))) is None


def test_a_property_is_not_computed() -> None:
    class Computing(Samples):
        @property
        def lengths(self) -> list[int]:
            raise AssertionError("computed for minutes")

    assert known_lengths(DataLoader(Computing())) is None


def test_a_column_of_lengths_is_read_without_the_transform_of_samples() -> None:
    dataset = Columns()
    assert known_lengths(DataLoader(dataset)) is None  # its names are no list, as those of a data set are
    dataset.column_names = ["input_ids", "length"]  # type: ignore[assignment]
    assert table_of(DataLoader(dataset)) == ("Columns['length']", [[3], [1], [4], [1]])
    dataset.column_names = ["input_ids", "lengths"]  # type: ignore[assignment]
    assert known_lengths(DataLoader(dataset)) is None  # whatever goes wrong when it is read


def test_samplers_may_know_the_lengths() -> None:
    sampler = RandomSampler(Samples())
    sampler.lengths = [3, 1, 4, 1]  # type: ignore[attr-defined]
    assert table_of(DataLoader(Samples(), sampler=sampler)) == ("RandomSampler.lengths", [[3], [1], [4], [1]])
    assert table_of(DataLoader(Samples(lengths=[2, 2, 2, 2]), sampler=sampler)) == ("Samples.lengths", [[2]] * 4)
    sampler.lengths = [1, 2]  # type: ignore[attr-defined]  # of batches, it seems
    assert known_lengths(DataLoader(Samples(), sampler=sampler)) is None


def test_a_subset_has_the_lengths_of_its_samples() -> None:
    dataset = Samples(lengths=[3, 1, 4, 1])
    assert table_of(DataLoader(Subset(dataset, [2, 0]))) == ("Samples.lengths", [[4], [3]])
    assert table_of(DataLoader(Subset(Subset(dataset, [2, 0, 1]), [2]))) == ("Samples.lengths", [[1]])
    assert known_lengths(DataLoader(Subset(dataset, ["a"]))) is None  # type: ignore[list-item]


def test_tensor_datasets_have_samples_of_one_shape() -> None:
    def constant(loader: Any) -> tuple[bool, bool]:
        found, first = known_lengths(loader), next(iter(loader.batch_sampler or loader.sampler))
        return found is not None and found.constant, found is not None and found.same_for_every_batch(loader, first)

    dataset = TensorDataset(torch.zeros(4, 2))
    assert constant(DataLoader(dataset, batch_size=3)) == (True, True)
    assert constant(DataLoader(dataset, batch_size=None)) == (True, True)
    assert constant(DataLoader(dataset, batch_size=None, sampler=[[0, 1], [0, 1, 2]])) == (True, False)
    assert constant(DataLoader(Subset(dataset, [1, 2]))) == (True, True)
    assert constant(DataLoader(dataset, batch_sampler=[[0], [1, 2]])) == (True, False)  # type: ignore[arg-type]
    assert constant(DataLoader(dataset, collate_fn=lambda samples: samples)) == (False, False)
    assert constant(DataLoader(Samples(lengths=[1, 1, 1, 1]))) == (False, False)


def ranked(lengths: list[Any], batches: list[Any]) -> Any:
    table = np.array(lengths).reshape(len(lengths), -1)
    ranking = SampleLengths(source="test", table=table).rank(batches[0])
    assert ranking is not None
    assert list(ranking.passing_by(enumerate(batches[1:], start=1))) == list(enumerate(batches[1:], start=1))
    return ranking


def test_the_extremes_are_the_largest_padded_packed_and_per_sample_and_the_smallest() -> None:
    lengths = [5, 5, 5, 5, 1, 1, 1, 9, 12, 1]
    batches = [[4, 5], [0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]
    # samples x longest: 2, 20, 36, 12, 1; together: 2, 20, 12, 12, 1; longest: 1, 5, 9, 12, 1
    assert ranked(lengths, batches).extremes() == {2: batches[2], 1: batches[1], 3: batches[3], 4: batches[4]}
    assert ranked(lengths, batches).ranked == 5


def test_columns_add_up() -> None:
    # samples x (longest source + longest target): 2 x (9 + 2) = 22 and 2 x (4 + 8) = 24
    """Reported in NVIDIA-NeMo/Speech#15578."""
    assert 1 in ranked([(9, 2), (1, 1), (4, 8), (4, 8)], [[0, 1], [2, 3]]).extremes()


def test_ranking_ends_where_indices_are_none() -> None:
    lengths = SampleLengths(source="test", table=np.array([[1], [2]]))
    assert lengths.rank(["a.wav"]) is None
    assert lengths.rank([7]) is None
    assert lengths.rank([]) is None
    ranking = lengths.rank([0])
    assert ranking is not None
    assert list(ranking.passing_by([(1, [1]), (2, [2]), (3, [0])])) == [(1, [1])]
    assert ranking.ranked == 2


def test_batches_that_measure_otherwise_contradict_the_lengths() -> None:
    ranking = ranked([1, 2, 3], [[0], [1], [2]])
    assert ranking.holds([([0], 10), ([1], 20), ([2], 30)])
    assert ranking.holds([([0], 10), ([1], 10), ([2], 10)])
    assert not ranking.holds([([0], 10), ([1], 20), ([2], 15)])
    # Packed batches go by all lengths together: 4 and 5, although 2 x 3 is more than 1 x 5 when padded.
    packed = ranked([1, 3, 5], [[0, 1], [2]])
    assert packed.holds([([0, 1], 40), ([2], 50)])
    assert packed.holds([([0, 1], 60), ([2], 50)])
