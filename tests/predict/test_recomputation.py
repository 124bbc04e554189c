"""When a block is repeated, how far, and until when its inputs are held.

Run: ``pytest tests/predict/test_recomputation.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_memfit.predict.recomputation import Moments, recomputations

Write = Callable[[], Any]


def one_block(write: Write, *, within_forward: bool = False, repeats: bool = False, asked_for: bool = True) -> Any:
    """A block that saves twice; events and marks in one order, counted from 0."""
    step = write()
    batch = step.resident(1, "inputs")
    step.start_slice()
    step.begin("block", batch)
    first = step.op(8)  # 0
    one = step.save(first)  # 1
    second = step.op(8)  # 2
    two = step.save(second)  # 3
    last = step.op(4)  # 4
    step.free(first, second)  # 5, 6
    step.end()
    if within_forward:
        step.unpack(two)
    step.end_forward()
    step.op(4)  # 7
    if asked_for:
        step.unpack(two)  # 8
    step.module = "block.inner"
    step.op(8, recomputed=repeats)  # 9
    step.release(two)  # 10, 11
    if asked_for:
        step.unpack(one)  # 12
    step.op(8)  # 13
    step.release(one)  # 14, 15
    step.free(last)  # 16
    return step.record(8)


def test_events_and_marks_have_one_order(write: Write) -> None:
    record = one_block(write)
    moments = Moments(record)
    assert moments.of_event[:-1].tolist() == [0, 2, 4, 5, 6, 7, 9, 13, 16]
    assert moments.of_mark.tolist() == [1, 3, 8, 10, 11, 12, 14, 15]
    assert moments.made == {1: 0.0, 2: 2.0, 3: 4.0, 4: 7.0, 5: 9.0, 6: 13.0}
    assert moments.freed == {1: 5.0, 2: 6.0, 3: 16.0}
    assert moments.released == (15.0, 11.0)
    assert moments.used == {0: 14.0, 1: 10.0}


def test_a_saved_tensor_that_lives_on_as_a_gradient_is_released_when_that_dies(write: Write) -> None:
    step = write()
    step.start_slice()
    saved = step.save(step.op(8))  # 0, 1
    step.end_forward()
    step.unpack(saved)  # 2
    step.mark("released", saved)  # 3
    step.op(1)  # 4
    step.mark("used", saved)  # 5
    assert Moments(step.record(8)).released == (5.0,)


def test_a_block_is_repeated_in_front_of_the_first_node_that_asks_up_to_the_last_tensor_saved(write: Write) -> None:
    record = one_block(write)
    (plan,) = recomputations(record, Moments(record))
    assert plan.saved == (0, 1)
    assert (plan.begins, plan.stops, plan.ends) == (8.0, 3.0, 15.0)  # the operator at 4 saves nothing: not repeated
    assert plan.obstacle is None


def test_a_block_of_which_nothing_is_asked_for_is_not_repeated(write: Write) -> None:
    record = one_block(write, asked_for=False)
    (plan,) = recomputations(record, Moments(record))
    assert plan.begins == math.inf and plan.ends < math.inf


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"within_forward": True}, "its gradients are asked for within the forward"),
        ({"repeats": True}, "it recomputes activations itself"),
    ],
)
def test_what_cannot_be_derived_says_why(write: Write, options: dict[str, bool], obstacle: str) -> None:
    record = one_block(write, **options)
    (plan,) = recomputations(record, Moments(record))
    assert plan.obstacle == obstacle


def test_a_block_that_is_given_a_cache_is_another_one_where_it_is_recomputed(write: Write) -> None:
    step = write()
    step.start_slice()
    step.begin("block", has_cache=True)
    step.end()
    step.end_forward()
    record = step.record(8)
    (plan,) = recomputations(record, Moments(record))
    assert plan.obstacle == "it is given a key/value cache, and would not be where it is recomputed"
    assert (plan.saved, plan.begins) == ((), math.inf)
