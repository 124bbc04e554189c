"""Batches are measured, and their tensors and structure named, whatever they are made of."""

from __future__ import annotations

import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_memfit.apply.batch_shapes import measure, named_tensors, shapes_in_words, structure_of

Pair = namedtuple("Pair", ["source", "target"])


@dataclass
class Sentence:
    ids: Tensor
    text: str


class Graph:
    def __init__(self) -> None:
        self.x, self.edges, self.name = torch.zeros(5, 2), torch.zeros(2, 9, dtype=torch.int64), "a"
        self.store = UserDict(weight=torch.zeros(9))


NESTED: dict[str, tuple[Any, list[str], str]] = {
    "tensor": (torch.zeros(4, 2), [""], "float32 2-d"),
    "mapping": ({"b": torch.zeros(4), "a": [3]}, ["['b']"], "{'a': [int, ...], 'b': float32 1-d}"),
    "mapping of another class": (UserDict(x=torch.zeros(1)), ["['x']"], "UserDict{'x': float32 1-d}"),
    "list": ([torch.zeros(4), (torch.zeros(4, 1), None)], ["[0]", "[1][0]"], "[float32 1-d, [float32 2-d, NoneType]]"),
    "named tuple": (Pair(torch.zeros(1), 2.0), [".source"], "Pair(source=float32 1-d, target=float)"),
    "dataclass": (Sentence(torch.zeros(2, 3), "a"), [".ids"], "Sentence(ids=float32 2-d, text=str)"),
    "object": (
        Graph(),
        [".x", ".edges", ".store['weight']"],
        "Graph(x=float32 2-d, edges=int64 2-d, store=UserDict{'weight': float32 1-d})",
    ),
    "words": ({"words": ["a", "b"], "n": 3}, [], "{'n': int, 'words': [str, ...]}"),
    "nothing": (None, [], "NoneType"),
}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_are_found_and_the_structure_named(name: str) -> None:
    batch, names, structure = NESTED[name]
    assert [found for found, _ in named_tensors(batch)] == names
    assert structure_of(batch) == structure


def test_packed_sequences_show_what_they_hold() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    assert measure({"x": packed}).names == ("['x'].data", "['x'].batch_sizes")
    assert measure(packed).num_bytes == 4 * 2 * 4 + 3 * 8
    assert structure_of(packed).startswith("PackedSequence(data=float32 2-d, ")


def test_structures_are_equal_for_other_sizes_and_different_for_other_tensors() -> None:
    assert structure_of([torch.zeros(4, 2), ["a", "b"]]) == structure_of((torch.zeros(9, 7), ["c"]))
    assert structure_of([torch.zeros(4)]) != structure_of([torch.zeros(4), torch.zeros(4)])
    assert structure_of({"x": torch.zeros(4)}) != structure_of({"y": torch.zeros(4)})
    assert structure_of(torch.zeros(4)) != structure_of(torch.zeros(4, dtype=torch.int64))
    assert structure_of(torch.zeros(4)) != structure_of(torch.zeros(4, 1))


def test_a_batch_is_measured_in_bytes_in_all_and_per_sample() -> None:
    batch = {
        "ids": torch.zeros(4, 8, dtype=torch.int64),
        "mask": torch.ones(4, 1, 8, 8, dtype=torch.bool),
        "scale": torch.tensor(1.0),
        "offsets": torch.zeros(5, dtype=torch.int32),
    }
    shapes = measure(batch)
    assert shapes.shapes == ((4, 8), (4, 1, 8, 8), (), (5,))
    assert shapes.elements == (32, 256, 1, 5)
    assert shapes.num_bytes == 256 + 256 + 4 + 20
    assert shapes.bytes_per_sample == (256 + 256) / 4  # what does not grow with the samples is left out
    assert pickle.loads(pickle.dumps(shapes)) == shapes
    assert (measure("words").num_bytes, measure("words").bytes_per_sample) == (0, 0.0)
    assert measure(torch.zeros(0, 3)).bytes_per_sample == 0.0


def test_nested_and_sparse_tensors_are_measured_by_what_they_hold() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(5, 2)], layout=torch.jagged)
    assert (measure(jagged).shapes, measure(jagged).num_bytes) == (((2,),), 8 * 2 * 4)
    sparse = torch.eye(100).narrow(0, 0, 2).to_sparse()
    assert (measure(sparse).shapes, measure(sparse).elements) == (((2, 100),), (2,))


def test_shapes_in_words_name_the_first_and_count_the_others() -> None:
    assert shapes_in_words([torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool)]) == "(2, 3) float32, (2,) bool"
    assert shapes_in_words([torch.zeros(n) for n in range(5)]) == "(0,) float32, (1,) float32, (2,) float32 and 2 more"
    assert shapes_in_words(["a"]) == "a list without tensors"
