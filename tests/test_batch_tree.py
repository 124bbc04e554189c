"""Batches divide without copies and step outputs join again, or the error names the place."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_memfit.batch_tree import (
    batch_size_of,
    detach_tensors,
    join_outputs,
    map_tensors,
    split_by_sizes,
    tensors_of,
    weighted_mean,
)
from lightning_memfit.errors import BatchStructureError

Pair = namedtuple("Pair", ["image", "label"])


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    names: list[str]
    scale: float = 2.0


def rows(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + 2 * count).reshape(count, 2).float()


def test_the_first_tensor_with_dimensions_gives_the_batch_size() -> None:
    assert batch_size_of({"t": torch.tensor(1.0), "x": rows(5), "y": [rows(5), rows(5)]}) == 5
    assert batch_size_of(rows(3)) == 3
    assert batch_size_of((rows(2), "text", None)) == 2


def test_tensors_that_disagree_are_named_with_their_shapes() -> None:
    with pytest.raises(BatchStructureError) as caught:
        batch_size_of({"x": rows(4), "y": {"z": torch.zeros(5, 1)}})
    assert str(caught.value) == (
        "batch['y']['z'] has shape (5, 1), but batch['x'] of shape (4, 2) means 4 samples: every tensor must have the "
        "batch as its first dimension. Pass MemFit(split_batch=...), a function (batch, micro_batch_size) -> pairs of "
        "(slice, samples)."
    )


@pytest.mark.parametrize("batch", [{"names": ["a", "b"]}, torch.tensor(1.0), [], torch.zeros(0, 3)])
def test_a_batch_without_samples_is_an_error_that_names_the_way_out(batch: Any) -> None:
    with pytest.raises(BatchStructureError, match=r"split_batch="):
        batch_size_of(batch)


def test_slices_are_views_in_order() -> None:
    batch = rows(5)
    parts = split_by_sizes(batch, (3, 2))
    assert [part.shape[0] for part in parts] == [3, 2]
    assert all(part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for part in parts)
    assert torch.equal(torch.cat(parts), batch)


def test_containers_keep_their_types() -> None:
    batch = {
        "ordered": OrderedDict(a=rows(3)),
        "named": Pair(rows(3), torch.arange(3)),
        "data": Sample(rows(3), ["a", "b", "c"]),
        "encoding": BatchEncoding({"input_ids": torch.arange(6).reshape(3, 2)}),
        "tuple": (rows(3), [torch.arange(3)]),
        "model": SequenceClassifierOutput(logits=rows(3)),
    }
    first, second = split_by_sizes(batch, (2, 1))
    for name, value in batch.items():
        assert type(first[name]) is type(value)
    assert first["data"].names == ["a", "b"] and second["data"].names == ["c"]
    assert first["data"].scale == 2.0
    assert second["named"].label.tolist() == [2]
    assert second["encoding"]["input_ids"].tolist() == [[4, 5]]
    assert second["model"].logits.shape == (1, 2) and second["model"]["logits"].shape == (1, 2)
    assert batch["encoding"]["input_ids"].shape == (3, 2), "the batch itself is not changed"
    assert batch["data"].names == ["a", "b", "c"]


def test_what_has_no_batch_dimension_goes_into_every_slice() -> None:
    batch = {"x": rows(4), "t": torch.tensor(3.0), "n": 7, "s": "text", "none": None, "flag": True, "size": (8, 8, 8)}
    for part in split_by_sizes(batch, (2, 2)):
        assert {key: part[key] for key in batch if key != "x"} == {key: batch[key] for key in batch if key != "x"}


def test_lists_with_one_entry_per_sample_are_divided() -> None:
    ragged = [torch.zeros(1), torch.zeros(4), torch.zeros(2)]
    batch = [rows(3), ragged, ["a", "b", "c"], ({"k": 1}, {"k": 2}, {"k": 3})]
    assert batch_size_of(batch) == 3
    first, second = split_by_sizes(batch, (2, 1))
    assert [len(boxes) for boxes in first[1]] == [1, 4] and [len(boxes) for boxes in second[1]] == [2]
    assert first[2] == ["a", "b"] and second[3] == ({"k": 3},)


def test_a_list_of_batch_sized_tensors_is_a_structure_even_with_as_many_entries_as_samples() -> None:
    first, second = split_by_sizes([rows(2), torch.arange(2)], (1, 1))
    assert first[0].shape == (1, 2) and second[1].tolist() == [1]


def test_lists_of_samples_stay_lists_in_a_batch_where_they_look_like_a_structure() -> None:
    def batch(*counts: int) -> list[Any]:
        return [rows(len(counts)), [{"boxes": torch.zeros(count, 4)} for count in counts]]

    known: set[str] = set()
    split_by_sizes(batch(1, 3, 2), (2, 1), lists_of_samples=known)
    assert known == {"[1]"}
    first, second = split_by_sizes(batch(2, 2), (1, 1), lists_of_samples=known)  # two images of two boxes each
    assert [[len(target["boxes"]) for target in part[1]] for part in (first, second)] == [[2], [2]]
    first, _ = split_by_sizes(batch(2, 2), (1, 1))
    assert [len(target["boxes"]) for target in first[1]] == [1, 1]  # nothing tells it apart from a structure


def test_unknown_objects_are_named_with_type_and_path() -> None:
    with pytest.raises(BatchStructureError) as caught:
        split_by_sizes({"x": rows(4), "graph": [object()]}, (2, 2))
    assert "batch['graph'][0] is of type builtins.object" in str(caught.value)
    assert "4 samples" in str(caught.value) and "split_batch=" in str(caught.value)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
        torch.eye(4).to_sparse(),
    ],
)
def test_tensors_without_a_batch_dimension_to_narrow_are_refused(leaf: Any) -> None:
    with pytest.raises(BatchStructureError, match=r"split_batch="):
        split_by_sizes({"x": rows(4), "leaf": leaf}, (2, 2))


def test_outputs_join_as_the_undivided_batch_would_return_them() -> None:
    needs_graph = torch.ones(3, 1, requires_grad=True) * 2
    joined = join_outputs(
        [
            {"p": needs_graph, "m": torch.tensor(1.0), "f": 1.0, "i": ["a", "b", "c"], "k": "same", "n": (rows(3), 4)},
            {"p": torch.zeros(1, 1), "m": torch.tensor(5.0), "f": 5.0, "i": ["d"], "k": "same", "n": (rows(1), 4)},
        ],
        (3, 1),
        (3.0, 1.0),
    )
    assert joined["p"].tolist() == [[2.0], [2.0], [2.0], [0.0]] and not joined["p"].requires_grad
    assert joined["m"].item() == 2.0  # (3 x 1 + 1 x 5) / 4
    assert joined["f"] == 2.0
    assert joined["i"] == ["a", "b", "c", "d"]
    assert joined["k"] == "same" and joined["n"][0].shape == (4, 2) and joined["n"][1] == 4


def test_lists_of_ragged_tensors_are_concatenated_and_pairs_of_batch_sized_ones_are_not() -> None:
    ragged = join_outputs([[torch.zeros(4), torch.zeros(1)], [torch.zeros(3), torch.zeros(9)]], (2, 2), (2, 2))
    assert [len(entry) for entry in ragged] == [4, 1, 3, 9]
    pair = join_outputs([[rows(2), rows(2)], [rows(2), rows(2)]], (2, 2), (2, 2))
    assert [tuple(entry.shape) for entry in pair] == [(4, 2), (4, 2)]


def test_values_that_are_the_same_everywhere_are_kept() -> None:
    weights, token = torch.tensor([1.0, 2.0, 3.0]), object()
    joined = join_outputs([{"w": weights, "o": token, "c": 3}] * 2, (2, 2), (2, 2))
    assert torch.equal(joined["w"], weights) and joined["o"] is token and joined["c"] == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (None, 1.0),
        ("a", "b"),
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])),
        ({"a": 1}, {"b": 1}),
        (object(), object()),
    ],
)
def test_values_that_cannot_be_joined_are_named(first: Any, second: Any) -> None:
    with pytest.raises(BatchStructureError) as caught:
        join_outputs([{"stats": {"odd": first}}, {"stats": {"odd": second}}], (2, 2), (2, 2))
    assert "training_step returned ['stats']['odd'] that cannot be joined over slices of [2, 2] samples" in str(
        caught.value
    )
    assert "use self.log" in str(caught.value)


def test_the_weighted_mean_keeps_equal_values_and_leaves_out_empty_slices() -> None:
    value = torch.tensor(0.1)
    assert torch.equal(weighted_mean([value] * 3, [6, 5, 5]), value)
    assert weighted_mean([torch.tensor(2.0), torch.tensor(float("nan"))], [1, 0]).item() == 2.0
    assert weighted_mean([torch.tensor(1), torch.tensor(2)], [1, 1]).item() == 1.5
    assert weighted_mean([torch.tensor(1.0), torch.tensor(3.0)], [0, 0]).item() == 2.0


def test_detaching_drops_every_graph_in_the_tree() -> None:
    tree = {"a": [torch.ones(1, requires_grad=True) * 2], "b": Pair(torch.ones(1, requires_grad=True), "x")}
    detached = detach_tensors(tree)
    assert not detached["a"][0].requires_grad and not detached["b"].image.requires_grad
    assert isinstance(detached["b"], Pair) and tree["a"][0].requires_grad


@pytest.mark.parametrize("mapping", [dict, UserDict, BatchEncoding])
def test_mappings_that_a_batch_class_of_the_users_own_holds_are_looked_into(mapping: Any) -> None:
    class Batch:
        def __init__(self) -> None:
            self.inputs = mapping({"input_ids": rows(3)})
            self.name = "text"

    batch = Batch()
    assert tensors_of(batch) == [batch.inputs["input_ids"]]
    doubled = map_tensors(batch, lambda tensor: 2 * tensor)
    assert type(doubled) is Batch and type(doubled.inputs) is mapping and doubled.name == "text"
    assert torch.equal(doubled.inputs["input_ids"], 2 * rows(3))
    assert torch.equal(batch.inputs["input_ids"], rows(3)), "the batch itself is not changed"
