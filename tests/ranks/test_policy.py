"""A Trainer on two real ranks whose module was sharded with a ``MixedPrecisionPolicy``: planned, proven, trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.ranks.conftest import Once
from tests.ranks.launch import results, run_on_ranks
from tests.ranks.policy_programs import DIVIDED, run_cases
from tests.ranks.trainer_programs import net_of, one_process

pytestmark = pytest.mark.slow

Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def ranks(once: Once) -> list[dict[str, Any]]:
    return once("policy", lambda: results(run_on_ranks(run_cases, seconds=300)))


def distance(first: Weights, second: Weights) -> float:
    return math.sqrt(sum(float((weight - second[name]).square().sum()) for name, weight in first.items()))


@pytest.mark.parametrize("name", DIVIDED)
def test_slices_train_as_the_undivided_batch_within_the_rounding_of_16_bits(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """The yardstick is what 16 bits change by themselves: the same policy without MemFit and slices, against float32.

    A run in slices rounds as often and as coarsely as that one, at other places: it may be as far from float32 again.
    """
    case = DIVIDED[name]
    exact, start = one_process(case), net_of(case).state_dict()
    for rank in ranks:
        undivided, sliced = rank["undivided"][name], rank[name]
        assert sliced["steps"] == undivided["steps"] == exact["steps"] >= 20
        rounding = distance(undivided["weights"], exact["weights"])
        moved = distance(exact["weights"], start)
        assert 0 < rounding < moved * 2**-6  # bfloat16 has 8 binary digits
        assert distance(sliced["weights"], exact["weights"]) <= 2 * rounding


@pytest.mark.parametrize("name", DIVIDED)
def test_one_plan_says_what_is_in_which_dtype(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    plan, policy = first["plan"], DIVIDED[name].policy
    assert plan == second["plan"] and policy is not None
    assert plan.candidate.precision == "32-true" and plan.split.slice_sizes == (3, 3, 2)
    assert plan.candidate.sharding.param_dtype == "bfloat16"
    assert plan.candidate.sharding.reduce_dtype == (None if policy.reduce_dtype is None else "float32")
    assert any("parameters are gathered and computed with in bfloat16" in note for note in plan.notes)
    (precision,) = (choice for choice in plan.choices if choice.lever == "precision")
    if DIVIDED[name].settings.get("precision") == "auto":
        assert precision.reason.startswith("fully_shard's MixedPrecisionPolicy chooses the dtypes")


def test_a_plan_that_changes_nothing_trains_as_the_policy_alone_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        weights = rank["nothing divided"]["weights"]
        assert weights and all(torch.equal(weights[name], weight) for name, weight in rank["plain"]["weights"].items())


def test_a_precision_beside_the_policy_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["refused"] == (
            "precision='bf16-mixed' cannot be had with fully_shard's MixedPrecisionPolicy(param_dtype=bfloat16, "
            "reduce_dtype=float32): both choose the dtypes of the computation, and 1 of them may. Leave precision out "
            "(it is '32-true' then, and the policy decides), or the policy."
        )
