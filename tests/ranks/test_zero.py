"""ZeRO on two real ranks under MemFit's slices: the training of one process with the same effective batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.conftest import Once
from tests.ranks.launch import results, run_on_ranks
from tests.ranks.trainer_programs import losses_of_steps
from tests.ranks.zero_programs import (
    CASES,
    LIVE,
    MORE_CASES,
    NOT_BUILT,
    ZeroCase,
    one_process,
    run_cases,
    run_more_cases,
    run_rehearsed,
)

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")


@pytest.fixture(scope="module")
def ranks(once: Once) -> list[dict[str, Any]]:
    return once("zero", lambda: results(run_on_ranks(run_cases, environment={"DS_ACCELERATOR": "cpu"}, seconds=400)))


@pytest.fixture(scope="module")
def more_ranks(once: Once) -> list[dict[str, Any]]:
    return once(
        "more zero", lambda: results(run_on_ranks(run_more_cases, environment={"DS_ACCELERATOR": "cpu"}, seconds=400))
    )


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_one_process_with_the_same_effective_batch(
    ranks: list[dict[str, Any]], name: str
) -> None:
    check_weights(ranks, name, CASES[name])


@pytest.mark.parametrize("name", LIVE)
def test_a_run_that_was_planned_and_proven_has_those_weights_too(ranks: list[dict[str, Any]], name: str) -> None:
    check_weights(ranks, name, LIVE[name])


@pytest.mark.parametrize("name", LIVE)
def test_what_was_predicted_for_a_rank_was_measured_with_buckets_that_fit(
    ranks: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first["plan"] == second["plan"] and first["measured"] == second["measured"]
    sharding = first["plan"].candidate.sharding
    assert sharding.reduce_bucket_elements < 200_000_000  # of which two alone take 1.5 GiB
    predicted = first["plan"].forecast.memory.peak_allocated_bytes
    for measured in first["measured"].measured_peak_bytes_by_rank:
        assert abs(predicted - measured) <= 0.03 * measured


def test_where_deepspeeds_adam_cannot_be_built_torchs_steps_on_the_host_and_the_plan_says_why(
    ranks: list[dict[str, Any]],
) -> None:
    """Reported in deepspeedai/DeepSpeed#483, deepspeedai/DeepSpeed#1846, deepspeedai/DeepSpeed#3488."""
    check_weights(ranks, "cannot be built", NOT_BUILT)
    losses = losses_of_steps(NOT_BUILT, [rank["cannot be built"]["losses"] for rank in ranks])
    assert losses == pytest.approx(one_process(NOT_BUILT)["losses"], rel=0, abs=1e-4)
    plan = ranks[0]["cannot be built"]["plan"]
    assert plan.candidate.offload == "optimizer" and plan.candidate.optimizer_implementation == "as-configured"
    reason = next(each.reason for each in plan.choices if each.lever == "optimizer_implementation")
    assert "the try ended with code 1" in reason and "offload with an optimizer of torch" in reason
    assert next(each.reason for each in plan.choices if each.lever == "offload").startswith("tier 2: as given; ")


def test_a_plan_that_was_made_where_it_could_be_built_is_refused_where_it_cannot(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        message = rank["cannot be built"]["given"]
        assert message.startswith("The plan given as plan= steps the optimizer on the host with DeepSpeed's Adam, but ")
        assert "the try ended with code 1" in message
        assert message.endswith("Leave plan= out to plan anew.")


def test_a_planned_run_goes_on_from_its_checkpoint_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        at_once, resumed = rank["resumed"]["at once"], rank["resumed"]["resumed"]
        assert all(torch.equal(weight, resumed[name]) for name, weight in at_once.items()) and at_once


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_the_weights_are_those_of_one_process_in_every_stage_with_every_lever(
    more_ranks: list[dict[str, Any]], name: str
) -> None:
    check_weights(more_ranks, name, MORE_CASES[name])


@pytest.mark.slow
def test_two_steps_that_are_taken_back_leave_no_trace() -> None:
    for rank in results(run_on_ranks(run_rehearsed, environment={"DS_ACCELERATOR": "cpu"}, seconds=300)):
        for name, (rehearsed, plain) in rank.items():
            for parameter, weight in plain["weights"].items():
                assert torch.equal(rehearsed["weights"][parameter], weight), (name, parameter)


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
