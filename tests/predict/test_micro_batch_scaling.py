"""Straight lines through two sizes, and which operators lie on one.

Run: ``pytest tests/predict/test_micro_batch_scaling.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.predict.micro_batch_scaling import NotDerivableError, at_samples, pair_operations

Write = Callable[[], Any]


def at(large: int, small: int, sizes: tuple[int, int], samples: int) -> int:
    return int(at_samples(np.array([large]), np.array([small]), sizes, np.array([samples]))[0])


def test_a_number_lies_on_the_line_through_two_sizes() -> None:
    # 20 + 10 per sample: 100 at 8 samples, 40 at 2.
    assert [at(100, 40, (8, 2), samples) for samples in (8, 2, 4, 1, 16)] == [100, 40, 60, 30, 180]
    assert at(40, 100, (2, 8), 4) == 60  # whichever of the two is larger
    assert at(7, 7, (8, 2), 5) == 7


def test_what_is_no_whole_number_on_the_line_is_rounded_up_and_never_negative() -> None:
    # 3 at 4 samples, 1 at 1: 2/3 per sample, so 1.67 at 2 samples.
    assert at(3, 1, (4, 1), 2) == 2
    assert at(3, 1, (4, 1), 3) == 3
    # 16 at 8 samples, 0 at 4 (nothing below some size): -12 at 1.
    assert at(16, 0, (8, 4), 1) == 0


def test_two_slices_of_one_size_give_no_line() -> None:
    assert at(30, 50, (4, 4), 4) == 30


@given(st.integers(0, 10**12), st.integers(0, 10**10), st.integers(1, 64), st.integers(1, 64), st.integers(1, 500))
def test_what_is_affine_is_exact_at_every_size(fixed: int, slope: int, one: int, two: int, samples: int) -> None:
    line = [fixed + slope * size for size in (one, two, samples)]
    assert at(line[0], line[1], (one, two), samples if one != two else one) == (line[2] if one != two else line[0])


def two_slices(write: Write, *, second: str = "matmul", swapped: bool = False) -> Any:
    """Two slices of 8 and 2 samples: the first makes a gradient, the second adds to it."""
    step = write()
    weight = step.resident(10)
    for number, samples in enumerate((8, 2)):
        step.start_slice()
        hidden = step.op(4 * samples, name="matmul" if number == 0 else second, reads=(weight,))
        other = step.op(2 * samples, name="gelu", reads=(hidden,))
        step.end_forward()
        if number == 0:
            made = step.op(10, name="mm", reads=(hidden, other))
            gradient = step.op(10, name="clone", reads=(made,), gradient=True)
            step.free(made)
        else:
            made = step.op(10, name="mm", reads=(other, hidden) if swapped else (hidden, other))
            step.op(name="add_", reads=(gradient, made))
            step.free(made)
        step.free(hidden, other)
    return step.record(8, 2)


def test_operators_of_both_slices_are_paired_and_those_on_gradients_stand_alone(write: Write) -> None:
    record = two_slices(write)
    names = [getattr(event, "op", "free") for event in record.events]
    pairs = pair_operations(record)
    assert {(names[one], names[two]) for one, two in pairs.items()} == {("matmul",) * 2, ("gelu",) * 2, ("mm",) * 2}
    assert all(pairs[two] == one for one, two in pairs.items())
    assert names.index("clone") not in pairs and names.index("add_") not in pairs


def test_slices_that_run_different_operators_are_named(write: Write) -> None:
    with pytest.raises(NotDerivableError) as error:
        pair_operations(two_slices(write, second="conv"))
    assert str(error.value) == (
        "slices of 8 and 2 samples run different operators (matmul in 'the module itself' where the other runs conv in "
        "'the module itself')"
    )


def test_the_same_operators_on_other_storages_are_no_pair(write: Write) -> None:
    with pytest.raises(NotDerivableError, match="run different operators"):
        pair_operations(two_slices(write, swapped=True))


def test_a_slice_that_runs_more_is_no_pair(write: Write) -> None:
    step = write()
    for samples in (8, 2):
        step.start_slice()
        step.op(samples, name="matmul")
        if samples == 2:
            step.op(samples, name="extra")
        step.end_forward()
    with pytest.raises(NotDerivableError, match=r"nothing more where the other runs extra"):
        pair_operations(step.record(8, 2))


def test_operators_with_other_results_are_no_pair(write: Write) -> None:
    step = write()
    for sizes in ((8, 8), (2,)):
        step.start_slice()
        step.op(*sizes, name="split")
        step.end_forward()
    with pytest.raises(NotDerivableError, match="run different operators"):
        pair_operations(step.record(8, 2))


def test_one_slice_or_two_of_one_size_have_no_pairs(write: Write) -> None:
    step = write()
    step.start_slice()
    step.op(1)
    step.end_forward()
    assert pair_operations(step.record(8)) == {}
    step.start_slice()
    step.op(1, name="other")
    step.end_forward()
    assert pair_operations(step.record(8, 8)) == {}


def test_what_stands_for_slices_that_are_not_followed_is_no_operator_of_the_second(write: Write) -> None:
    step = write()
    step.start_slice()
    step.op(8, name="matmul")
    step.end_forward()
    step.start_slice()
    stands_for_others = step.op(3, name="empty")
    step.op(2, name="matmul")
    step.end_forward()
    assert pair_operations(step.record(8, 2, left_out=stands_for_others)) == {0: 2, 2: 0}
