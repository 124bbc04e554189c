"""What is said about the worst batch, and the one that the user gives."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from lightning_memfit.apply.batch_scan import ScannedBatch, given_worst_batch, together
from lightning_memfit.errors import ConfigurationError

IDS = torch.zeros(16, 512, dtype=torch.int64)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"index": 17, "scanned": 64, "total": 64, "complete": True}, "batch_idx 17 of 64 batches (all looked at)"),
        ({"index": 5, "scanned": 7, "complete": True}, "batch_idx 5 of 7 batches (all looked at)"),
        (
            {"index": 31, "scanned": 32, "total": 4096},
            "batch_idx 31, the largest of 32 looked at of 4,096 batches",
        ),
        ({"index": 3, "scanned": 4}, "batch_idx 3, the largest of 4 looked at"),
        ({}, "batch_idx 0, the only one looked at"),
        ({"total": 9}, "batch_idx 0, the only one looked at of 9 batches"),
        ({"total": 1, "complete": True}, "batch_idx 0 of 1 batches (all looked at)"),
        (
            {"index": 8, "scanned": 64, "total": 64, "complete": True, "ranked_by": "Text.lengths"},
            "batch_idx 8 of 64 batches (all ranked by Text.lengths)",
        ),
        (
            {"index": 8, "scanned": 5000, "total": 6400, "ranked_by": "Text.lengths"},
            "batch_idx 8, the largest of 5,000 ranked by Text.lengths of 6,400 batches",
        ),
        (
            {"index": 1, "scanned": 2, "unreadable": "batch_idx 2 raised OSError: gone"},
            "batch_idx 1, the largest of 2 looked at (batch_idx 2 raised OSError: gone)",
        ),
        ({"origin": "the batch given as worst_batch="}, "the batch given as worst_batch="),
    ],
)
def test_a_scanned_batch_says_which_it_is_and_how_it_was_found(facts: dict[str, Any], words: str) -> None:
    assert ScannedBatch(batch=IDS, **facts).describe() == f"{words}: (16, 512) int64"


def test_batches_put_together_say_where_each_is_from() -> None:
    left = ScannedBatch(batch=IDS, index=2, scanned=3, total=3, complete=True, held_bytes=5)
    right = ScannedBatch(batch=IDS, index=1, scanned=2, larger_elsewhere=("batch: (2,) instead of (1,)",), held_bytes=7)
    joined = together({"a": IDS, "b": IDS}, [left, right], total=3)
    assert (joined.index, joined.scanned, joined.total, joined.complete, joined.held_bytes) == (2, 3, 3, False, 12)
    assert joined.describe() == (
        "the largest of each of 2 loaders (batch_idx 2 of 3, batch_idx 1 of an unknown number; not all looked at): "
        "(16, 512) int64, (16, 512) int64; another batch has more of batch: (2,) instead of (1,)"
    )


# The batch that the user gives.


def first_batch() -> dict[str, Any]:
    return {"ids": torch.ones(4, 8, dtype=torch.int64), "words": ["a", "b", "c", "d"]}


def longer(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "ids": batch["ids"].repeat(1, 3)}


def test_a_batch_is_taken_as_it_is() -> None:
    batch = longer(first_batch())
    given = given_worst_batch(batch, first_batch())
    assert given.batch is batch
    assert given.describe() == "the batch given as worst_batch=: (4, 24) int64"
    assert (given.complete, given.total) == (False, None)


@pytest.mark.parametrize(
    "function",
    [
        longer,
        lambda: longer(first_batch()),
        lambda length=24: {**first_batch(), "ids": torch.ones(4, length, dtype=torch.int64)},
        partial(longer),
        partial(longer, first_batch()),
        lambda batch, scale=1: longer(batch),
        lambda *batches: longer(first_batch()),
    ],
)
def test_a_function_makes_it_of_nothing_or_of_the_first_batch(function: Any) -> None:
    assert given_worst_batch(function, first_batch()).batch["ids"].shape == (4, 24)


def test_a_function_may_change_the_first_batch() -> None:
    def lengthen(batch: dict[str, Any]) -> dict[str, Any]:
        batch["ids"] = batch["ids"].repeat(1, 2)
        return batch

    assert given_worst_batch(lengthen, first_batch()).batch["ids"].shape == (4, 16)


def test_a_function_that_draws_leaves_the_generators_as_they_were() -> None:
    def draw(batch: dict[str, Any]) -> dict[str, Any]:
        random.random()
        return {**batch, "ids": torch.randint(9, (4, 24))}

    states = torch.get_rng_state(), random.getstate()
    given_worst_batch(draw, first_batch())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_function_of_more_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        given_worst_batch(lambda batch, index: batch, first_batch())
    assert str(caught.value) == (
        "worst_batch= is a function of (batch, index), which takes neither 0 arguments nor 1, the first batch. "
        "Make it a function of none or of one."
    )


@pytest.mark.parametrize(
    ("value", "structure"),
    [
        ({"ids": torch.ones(4, 24, dtype=torch.int64)}, "{'ids': int64 2-d}"),
        ({**first_batch(), "ids": torch.ones(4, 24)}, "{'ids': float32 2-d, 'words': [str, ...]}"),
        ({**first_batch(), "ids": torch.ones(4, 8, 3, dtype=torch.int64)}, "{'ids': int64 3-d, 'words': [str, ...]}"),
        (torch.ones(4, 24), "float32 2-d"),
        (lambda: None, "NoneType"),
    ],
)
def test_a_batch_that_is_built_in_another_way_is_refused_with_both_structures(value: Any, structure: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        given_worst_batch(value, first_batch())
    assert str(caught.value) == (
        "worst_batch= gives a batch that is built in another way than those of the run.\n"
        f"  worst_batch=: {structure}\n"
        "  first batch:  {'ids': int64 2-d, 'words': [str, ...]}\n"
        "Give one with the same keys, types, dtypes and numbers of dimensions, for instance one made of the first "
        "batch, by worst_batch= a function of it."
    )


def test_an_exception_of_the_function_is_named_and_is_the_cause() -> None:
    def broken(batch: Any) -> Any:
        raise LookupError("no such file")

    with pytest.raises(ConfigurationError, match=r"^worst_batch= failed: LookupError: no such file$") as caught:
        given_worst_batch(broken, first_batch())
    assert isinstance(caught.value.__cause__, LookupError)
