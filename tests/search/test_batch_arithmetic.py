"""The effective batch is formed exactly, or an error names the nearest values that can be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import BatchArithmeticError
from lightning_memfit.search.batch_arithmetic import (
    LoaderPlan,
    largest_divisor,
    last_window_is_short,
    optimizer_steps_per_epoch,
    resolve_loader,
)


def resolve(effective_batch_size: int | None, loader_batch_size: int, **changes: Any) -> LoaderPlan:
    settings: dict[str, Any] = {
        "ranks": 1,
        "accumulate_grad_batches": 1,
        "can_rebuild": True,
        "has_batch_norm": False,
        "allow_inexact_slicing": False,
    }
    return resolve_loader(
        effective_batch_size=effective_batch_size, loader_batch_size=loader_batch_size, **{**settings, **changes}
    )


def parts(plan: LoaderPlan) -> tuple[int, int, int, bool]:
    return plan.effective_batch_size, plan.loader_batch_size, plan.accumulate_grad_batches, plan.rebuilt


def test_nothing_asked_keeps_what_the_run_does() -> None:
    plan = resolve(None, 8, ranks=2, accumulate_grad_batches=3, can_rebuild=False, has_batch_norm=True)
    assert parts(plan) == (48, 8, 3, False)  # 2 x 3 x 8
    assert plan.reason == (
        "effective_batch_size was left out, so the run keeps its own: 2 ranks x 3 batches x 8 samples = 48"
    )


def test_a_multiple_of_the_loader_sets_the_accumulation_only() -> None:
    plan = resolve(256, 16, ranks=2, can_rebuild=False, has_batch_norm=True)
    assert parts(plan) == (256, 16, 8, False)  # 256 / (2 x 16)
    assert plan.reason == "the loader stays as it is: 2 ranks x 8 batches x 16 samples = 256"


def test_the_loaders_own_batch_changes_nothing() -> None:
    assert parts(resolve(16, 16)) == (16, 16, 1, False)


def test_a_loader_that_does_not_divide_is_rebuilt_with_the_largest_divisor_and_says_so() -> None:
    plan = resolve(100, 32)  # divisors of 100 up to 32: 1, 2, 4, 5, 10, 20, 25
    assert parts(plan) == (100, 25, 4, True)
    assert plan.reason == (
        "the loader is rebuilt with batches of 25 instead of 32, the largest size that divides 100 "
        "(same sampler, same order of samples): 1 rank x 4 batches x 25 samples = 100"
    )


def test_half_of_the_loaders_batch_is_still_rebuilt() -> None:
    assert parts(resolve(8, 16)) == (8, 8, 1, True)


def test_ranks_that_do_not_divide_name_the_neighbours() -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        resolve(100, 1, ranks=3)
    assert str(caught.value) == (
        "effective_batch_size=100 samples cannot be shared equally by 3 ranks. "
        "The nearest effective_batch_size values that work with 3 ranks are 99 and 102."
    )


def test_fewer_samples_than_ranks_name_the_smallest_value() -> None:
    with pytest.raises(BatchArithmeticError, match=r"The smallest effective_batch_size .* is 4\."):
        resolve(3, 1, ranks=4)


def test_less_than_half_of_the_loaders_batch_is_refused() -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        resolve(94, 40)  # 94 = 2 x 47
    assert str(caught.value) == (
        "effective_batch_size=94 samples make 94 per rank, which is not a multiple of the loader's batch of 40. "
        "Rebuilding the loader with 2 samples per batch would form it, but that is less than half of the loader's "
        "batch of 40. The nearest effective_batch_size values that work with this loader are 80 and 120. "
        "Or pass allow_inexact_slicing=True to rebuild the loader all the same."
    )


def test_less_than_half_is_rebuilt_where_the_user_allows_it_and_the_reason_says_so() -> None:
    plan = resolve(94, 40, allow_inexact_slicing=True)
    assert parts(plan) == (94, 2, 47, True)
    assert plan.reason.endswith(
        "; allow_inexact_slicing=True permits it although that is less than half of the loader's batch of 40"
    )


def test_batch_norm_refuses_another_loader_batch_unless_allowed() -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        resolve(100, 32, ranks=1, has_batch_norm=True)
    assert str(caught.value) == (
        "effective_batch_size=100 samples make 100 per rank, which is not a multiple of the loader's batch of 32. "
        "Rebuilding the loader with 25 samples per batch would form it, but the model normalises over the batch, so "
        "that its statistics would change. The nearest effective_batch_size values that work with this loader are 96 "
        "and 128. Or pass allow_inexact_slicing=True to rebuild the loader all the same."
    )
    assert parts(resolve(100, 32, has_batch_norm=True, allow_inexact_slicing=True)) == (100, 25, 4, True)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_loader_that_cannot_be_rebuilt_is_refused_whatever_is_allowed(allowed: bool) -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        resolve(
            200,
            32,
            ranks=2,
            can_rebuild=False,
            allow_inexact_slicing=allowed,
            rebuild_obstacle="its batch sampler is a BucketSampler",
        )
    # per rank 100; multiples of 2 x 32 = 64 around 200 are 192 and 256
    assert str(caught.value) == (
        "effective_batch_size=200 samples make 100 per rank, which is not a multiple of the loader's batch of 32, and "
        "the loader cannot be rebuilt with another batch size (its batch sampler is a BucketSampler). "
        "The nearest effective_batch_size values that work with this loader are 192 and 256. "
        "Or give the loader a batch size that divides 100, such as 25."
    )


def test_an_accumulation_that_makes_another_batch_is_refused() -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        resolve(256, 16, accumulate_grad_batches=4)
    assert str(caught.value) == (
        "effective_batch_size=256 samples, but Trainer(accumulate_grad_batches=4) x loader batch 16 x 1 rank makes 64 "
        "samples per optimizer step. Leave accumulate_grad_batches at 1, so that MemFit can set it, or ask for "
        "effective_batch_size=64."
    )


def test_an_accumulation_that_makes_the_batch_is_kept() -> None:
    plan = resolve(64, 16, accumulate_grad_batches=4, can_rebuild=False, has_batch_norm=True)
    assert parts(plan) == (64, 16, 4, False)
    assert plan.reason == (
        "the loader and accumulate_grad_batches stay as they are: 1 rank x 4 batches x 16 samples = 64"
    )


@given(
    effective=st.integers(1, 5000),
    ranks=st.integers(1, 16),
    loader=st.integers(1, 600),
    batch_norm=st.booleans(),
    can_rebuild=st.booleans(),
    allowed=st.booleans(),
)
def test_a_plan_multiplies_back_and_never_enlarges_the_loader(
    effective: int, ranks: int, loader: int, batch_norm: bool, can_rebuild: bool, allowed: bool
) -> None:
    try:
        plan = resolve(
            effective,
            loader,
            ranks=ranks,
            has_batch_norm=batch_norm,
            can_rebuild=can_rebuild,
            allow_inexact_slicing=allowed,
        )
    except BatchArithmeticError:
        assert effective % ranks or (effective // ranks) % loader
        assert not (can_rebuild and allowed) or effective % ranks
        return
    assert ranks * plan.accumulate_grad_batches * plan.loader_batch_size == effective == plan.effective_batch_size
    assert 1 <= plan.loader_batch_size <= loader
    assert plan.rebuilt == (plan.loader_batch_size != loader)
    if plan.rebuilt and not allowed:
        assert 2 * plan.loader_batch_size >= loader
        assert not batch_norm


@given(effective=st.integers(1, 5000), ranks=st.integers(1, 8), loader=st.integers(1, 600))
def test_the_values_an_error_names_work(effective: int, ranks: int, loader: int) -> None:
    try:
        resolve(effective, loader, ranks=ranks, can_rebuild=False)
    except BatchArithmeticError as error:
        message = str(error)
        named = re.search(r"works? with .*? (?:is|are) (\d+)(?: and (\d+))?\.", message)
        assert named is not None
        values = [int(value) for value in named.groups() if value is not None]
        for value in values:
            if effective % ranks:
                assert value % ranks == 0
            else:
                assert not resolve(value, loader, ranks=ranks, can_rebuild=False).rebuilt


@given(number=st.integers(1, 20_000), at_most=st.integers(1, 300))
def test_the_largest_divisor_is_the_largest(number: int, at_most: int) -> None:
    found = largest_divisor(number, at_most=at_most)
    assert number % found == 0
    assert found <= at_most
    assert all(number % other for other in range(found + 1, min(at_most, number) + 1))


def test_steps_per_epoch_count_the_short_window() -> None:
    assert [optimizer_steps_per_epoch(batches, 4) for batches in (0, 1, 4, 5, 8, 10)] == [0, 1, 1, 2, 2, 3]
    assert [last_window_is_short(batches, 4) for batches in (1, 4, 5, 8, 10)] == [True, False, True, False, True]


def test_a_loader_without_length_has_unknown_steps_and_only_accumulation_makes_the_window_unknown() -> None:
    assert optimizer_steps_per_epoch(None, 4) is None
    assert last_window_is_short(None, 4) is None
    assert last_window_is_short(None, 1) is False
