"""A batch is extended to the longest that may occur: sequences and what goes with them, and nothing else."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from transformers import BatchEncoding

from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.apply.length_cap import at_max_length, pad_to_length
from lightning_memfit.errors import ConfigurationError


def language_batch(samples: int = 2, length: int = 3) -> dict[str, Any]:
    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[0, -1] = 0
    labels = torch.arange(samples * length).reshape(samples, length)
    labels[0, -1] = -100
    return {
        "input_ids": torch.arange(samples * length).reshape(samples, length),
        "attention_mask": mask,
        "labels": labels,
        "bias": torch.zeros(samples, 1, length, length),
        "embedded": torch.arange(samples * length * 5.0).reshape(samples, length, 5),
        "scale": torch.ones(samples, 7),
        "weight": torch.tensor(0.5),
        "text": ["a"] * samples,
    }


def shapes(batch: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}


def test_every_sequence_is_extended_and_nothing_else() -> None:
    batch = language_batch()
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
    longer = pad_to_length(batch, 6)
    assert shapes(longer) == {
        "input_ids": (2, 6),
        "attention_mask": (2, 6),
        "labels": (2, 6),
        "bias": (2, 1, 6, 6),
        "embedded": (2, 6, 5),
        "scale": (2, 7),
        "weight": (),
    }
    assert longer["text"] == ["a", "a"]
    assert longer["scale"] is batch["scale"]
    assert all(torch.equal(batch[name], before[name]) for name in shapes(batch))


def test_the_last_position_is_repeated() -> None:
    longer = pad_to_length(language_batch(), 5)
    assert longer["input_ids"].tolist() == [[0, 1, 2, 2, 2], [3, 4, 5, 5, 5]]
    assert longer["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert longer["labels"].tolist() == [[0, 1, -100, -100, -100], [3, 4, 5, 5, 5]]
    assert longer["embedded"][0, 2:].tolist() == [[10.0, 11.0, 12.0, 13.0, 14.0]] * 3


def test_a_batch_of_the_longest_length_stays_as_it_is() -> None:
    batch = language_batch()
    same = pad_to_length(batch, 3)
    assert all(same[name] is batch[name] for name in shapes(batch))


def test_source_and_target_are_both_extended() -> None:
    """Reported in NVIDIA-NeMo/Speech#15578."""
    batch = [torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 7, 4)]
    assert [tuple(tensor.shape) for tensor in pad_to_length(batch, 9)] == [(2, 9), (2, 9), (2, 9, 9)]


@pytest.mark.parametrize("mapping", [dict, UserDict, BatchEncoding])
def test_mappings_held_by_a_batch_class_are_extended(mapping: Any) -> None:
    class Batch:
        def __init__(self) -> None:
            self.inputs = mapping({"ids": torch.zeros(2, 4, dtype=torch.int64)})

    batch = Batch()
    longest = at_max_length(ScannedBatch(batch=batch, index=0), 16)
    assert longest.batch.inputs["ids"].shape == (2, 16) and type(longest.batch.inputs) is mapping
    assert longest.describe().startswith("a stand-in for the longest batch: batch_idx 0, its sequences extended from 4")
    assert batch.inputs["ids"].shape == (2, 4)


def test_lengths_of_sequences_grow_with_the_longest() -> None:
    batch = (torch.zeros(3, 6, dtype=torch.int64), torch.tensor([6, 2, 6]), torch.tensor([1, 0, 1]))
    ids, lengths, target = pad_to_length(batch, 10)
    assert lengths.tolist() == [10, 2, 10]
    assert target is batch[2]
    # so that a step that packs by them runs over all positions
    packed = pack_padded_sequence(ids.float().unsqueeze(-1), lengths, batch_first=True, enforce_sorted=False)
    output, _ = nn.LSTM(1, 2, batch_first=True)(packed)
    assert len(output.batch_sizes) == 10


def test_what_never_varies_over_the_run_is_no_sequence() -> None:
    batch = {
        "ids": torch.zeros(2, 4, dtype=torch.int64),
        "choices": torch.zeros(2, 3, dtype=torch.int64),
        "embedded": torch.zeros(2, 4, 4),
    }
    ranges = (((2, 2), (3, 6)), ((2, 2), (3, 3)), ((2, 2), (3, 6), (4, 4)))
    assert shapes(pad_to_length(batch, 8, shape_ranges=ranges)) == {
        "ids": (2, 8),
        "choices": (2, 3),
        "embedded": (2, 8, 4),
    }
    # Without other batches nothing tells them apart.
    assert shapes(pad_to_length(batch, 8)) == {"ids": (2, 8), "choices": (2, 8), "embedded": (2, 8, 8)}
    # Nor if all of them were of one length, or of another structure.
    constant = (((2, 2), (4, 4)), ((2, 2), (3, 3)), ((2, 2), (4, 4), (4, 4)))
    for unknown in (constant, ranges[:2], (((2, 2),),) * 3):
        assert shapes(pad_to_length(batch, 8, shape_ranges=unknown))["choices"] == (2, 8)


def test_a_cap_below_what_occurs_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError) as caught:
        pad_to_length(language_batch(length=12), 10)
    assert str(caught.value) == (
        "max_length=10 is less than the 12 positions that batch['input_ids'] has in a batch of this run. "
        "Set max_length=12 or more, or truncate where batches are made."
    )
    # also where it is another batch of the run that is longer
    with pytest.raises(ConfigurationError, match=r"max_length=10 is less than the 14 positions that batch has in"):
        pad_to_length(torch.zeros(2, 5, dtype=torch.int64), 10, shape_ranges=[((2, 2), (3, 14))])


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        (torch.zeros(2, 80, 3), "(2, 80, 3) float32"),
        ([torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)], "(2, 3, 8, 8) float32, (2,) int64"),
        (torch.zeros(2, 1, dtype=torch.int64), "(2, 1) int64"),
        (["a", "b"], "a list without tensors"),
    ],
)
def test_a_batch_without_a_known_sequence_is_refused_with_its_shapes(batch: Any, shown: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        pad_to_length(batch, 100)
    assert str(caught.value) == (
        "max_length=100: which dimension of the batch is a sequence cannot be told, since it has no tensor of integers "
        f"or booleans of shape (batch, length) with a length of at least 2: {shown}. "
        "Pass worst_batch= the largest batch that may occur, or a function of the first batch that makes it."
    )


def test_packed_sequences_are_refused() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(1)])
    with pytest.raises(ConfigurationError, match=r"max_length=9 cannot extend a batch with a PackedSequence \("):
        pad_to_length([torch.zeros(2, 3, dtype=torch.int64), packed], 9)


def test_what_was_scanned_is_extended_and_says_so() -> None:
    scanned = ScannedBatch(
        batch=torch.zeros(2, 40, dtype=torch.int64),
        index=3,
        scanned=4,
        larger_elsewhere=("batch['x']: (2, 3) instead of (2, 2)",),
        rival=ScannedBatch(batch=None),
        shape_ranges=(((2, 2), (10, 40)),),
    )
    longest = at_max_length(scanned, 512)
    assert longest.batch.shape == (2, 512)
    assert (longest.index, longest.scanned) == (3, 4)
    assert longest.describe() == (
        "a stand-in for the longest batch: batch_idx 3, its sequences extended from 40 to max_length=512: "
        "(2, 512) int64"
    )
