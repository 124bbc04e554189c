"""ZeRO on two real ranks under MemFit's slices: the training of one process with the same effective batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.launch import results, run_on_ranks
from tests.ranks.zero_programs import CASES, MORE_CASES, ZeroCase, one_process, run_cases, run_more_cases

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return results(run_on_ranks(run_cases, environment={"DS_ACCELERATOR": "cpu"}, seconds=300))


@pytest.fixture(scope="module")
def more_ranks() -> list[dict[str, Any]]:
    return results(run_on_ranks(run_more_cases, environment={"DS_ACCELERATOR": "cpu"}, seconds=300))


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_one_process_with_the_same_effective_batch(
    ranks: list[dict[str, Any]], name: str
) -> None:
    check_weights(ranks, name, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_the_weights_are_those_of_one_process_in_every_stage_with_every_lever(
    more_ranks: list[dict[str, Any]], name: str
) -> None:
    check_weights(more_ranks, name, MORE_CASES[name])


def check_weights(ranks: list[dict[str, Any]], name: str, case: ZeroCase) -> None:
    expected = one_process(case)
    for rank in ranks:
        assert rank[name]["steps"] == expected["steps"] >= 20
        for parameter, weight in rank[name]["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][parameter], rtol=0, atol=1e-5)


def test_every_window_is_one_step_of_the_mean_gradient_where_lightning_alone_divides_twice(
    ranks: list[dict[str, Any]],
) -> None:
    # 10 batches with a gradient of 1, 4 to a step: three steps of 1. DeepSpeed under Lightning alone divides each loss
    # by 4 and by 4 once more, and steps twice: 2 x 4 / 16 = 0.5.
    for rank in ranks:
        assert rank["constant"] == pytest.approx(-3.0, abs=1e-6)
        assert rank["constant, Lightning alone"] == pytest.approx(-0.5, abs=1e-6)
