"""``fully_shard`` on two real ranks: the training of one process, and what a rank was said to need."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.conftest import Once
from tests.ranks.fsdp2_programs import TRAININGS, Rank, run, train_in_one_process
from tests.ranks.launch import results, run_on_ranks


@pytest.fixture(scope="module")
def ranks(once: Once) -> list[Rank]:
    return once("fsdp2", lambda: results(run_on_ranks(run)))


@pytest.mark.parametrize("name", TRAININGS)
def test_the_weights_are_those_of_one_process_with_the_same_effective_batch(ranks: list[Rank], name: str) -> None:
    expected = train_in_one_process(TRAININGS[name])
    for rank in ranks:
        for weight, wanted in zip(rank.trained[name], expected, strict=True):
            torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-5)


def test_how_a_module_was_sharded_is_read_from_the_module(ranks: list[Rank]) -> None:
    for resharding, kept in (rank.told for rank in ranks):
        assert resharding.sharding.ranks == 2
        assert resharding.sharding.shard_groups == ("", "blocks.0", "blocks.1")
        assert resharding.sharding.reshard_after_forward and not kept.sharding.reshard_after_forward
        # 307 x 129 of the tied embeddings; a block: 129 x 129 + 129 of the layer, and 2 x 129 of the norm.
        assert resharding.deferred_bytes == 4 * (307 * 129 + 2 * (129 * 129 + 3 * 129))


def test_what_a_live_rank_needs_is_predicted_within_a_thousandth(ranks: list[Rank]) -> None:
    for of_first, of_second in zip(*(rank.told for rank in ranks), strict=True):
        measured = max(of_first.measured_bytes, of_second.measured_bytes)
        assert abs(of_first.predicted_bytes / measured - 1) < 0.001
        # A module that is sharded already, over a real group, is told as one that is not.
        assert of_first.predicted_bytes == of_second.predicted_bytes == of_first.forecast_bytes


def test_a_policy_of_mixed_precision_is_followed_and_derived_too(ranks: list[Rank]) -> None:
    traced, derived, _ = ranks[0].mixed
    measured = max(rank.mixed[-1] for rank in ranks)
    assert abs(traced / measured - 1) < 0.001 and abs(derived / measured - 1) < 0.001
