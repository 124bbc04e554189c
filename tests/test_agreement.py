"""What ranks must have in common, and which of them decides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_memfit.agreement import RankFacts, check_agreement, check_evaluations, most_demanding, poorest
from lightning_memfit.errors import RanksDisagreeError
from lightning_memfit.hardware.device import DeviceSpec, shared_by
from lightning_memfit.plan import Budget, PlanRequest
from lightning_memfit.units import GIB, MIB

HOST = DeviceSpec(name="x", kind="cpu", capacity_bytes=5 * GIB, available_bytes=4 * GIB, process_bytes=GIB)


def facts(**changes: Any) -> RankFacts:
    plain = RankFacts(
        request=PlanRequest(),
        fingerprint={"model": "Net", "batch shapes": "(8, 4)", "cores": "2"},
        num_batches=4,
        device=HOST,
        budget=Budget(budget_bytes=GIB, capacity_bytes=GIB, headroom_bytes=0, non_torch_bytes=0, reason="as given"),
        batch_bytes=100,
        batch_shapes="(8, 4)",
    )
    return replace(plain, **changes)


def test_ranks_that_are_alike_agree_whatever_their_share_of_the_data_is() -> None:
    other = facts(fingerprint={"model": "Net", "batch shapes": "(8, 9)", "cores": "4"}, batch_shapes="(8, 9)")
    check_agreement([facts(), other, facts(num_batches=None)])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"request": PlanRequest(effective_batch_size=8, precision="bf16-mixed")},
            "settings of MemFit: effective_batch_size=None on rank 0 and 8 on rank 1, precision=None on rank 0 and "
            "'bf16-mixed' on rank 1",
        ),
        ({"fingerprint": {"model": "Other"}}, "model: rank 0 has Net, rank 1 has Other"),
        ({"fingerprint": {"model": "Net", "strategy": "DDP"}}, "strategy: rank 0 has None, rank 1 has DDP"),
        (
            {"num_batches": 5},
            "batches per epoch: rank 0 has 4, rank 1 has 5, so that one of them would wait for ever at the end of the "
            "epoch. Use Lightning's DistributedSampler (use_distributed_sampler=True), or limit_train_batches=",
        ),
    ],
)
def test_what_differs_is_told_with_what_both_have(changes: dict[str, Any], line: str) -> None:
    message = (
        f"The 2 ranks of this run are not about to train the same:\n  - {line}\nOne plan is made for all of them. "
        "Build model, optimizer, loader and MemFit alike on every rank, whatever its rank is."
    )
    with pytest.raises(RanksDisagreeError, match=f"^{re.escape(message)}$"):
        check_agreement([facts(), facts(**changes)])


def test_the_poorest_rank_is_named_with_what_the_richest_has() -> None:
    poor = replace(facts().budget, budget_bytes=700 * MIB)
    rank, budget = poorest([facts(), facts(budget=poor), facts()])
    assert (rank, budget.budget_bytes) == (1, 700 * MIB)
    assert budget.reason == "as given; that of rank 1, which has the least of 3 (the most is 1.000 GiB)"
    assert poorest([facts(), facts()]) == (0, facts().budget)


def test_the_largest_batch_of_all_ranks_is_planned_where_they_differ() -> None:
    assert most_demanding([facts(), facts(batch_bytes=100)]) is None
    assert most_demanding([facts(), facts(batch_shapes="(8, 9)", batch_bytes=900)]) == 1


def test_processes_on_one_host_share_what_is_free() -> None:
    # 4 GiB free for two processes: 2 GiB for each, beside the 1 GiB that it holds already.
    assert shared_by(HOST, 2) == replace(HOST, available_bytes=2 * GIB, capacity_bytes=3 * GIB)
    assert shared_by(HOST, 1) == HOST


@pytest.mark.parametrize("batches", [(3, 3), (0, 0), (None, 3), (None, None, 0)])
def test_evaluations_that_are_as_long_or_of_unknown_length_may_gather(batches: tuple[int | None, ...]) -> None:
    check_evaluations(batches)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ((3, 2), "of 3 batches on rank 0 and of 2 on rank 1"),
        ((None, 0, 0, 1), "of 0 batches on rank 1 and of 1 on rank 3"),
    ],
)
def test_evaluations_of_other_lengths_would_leave_a_rank_waiting(batches: tuple[int | None, ...], words: str) -> None:
    with pytest.raises(RanksDisagreeError, match=f"^Validation loaders {words}, before ranks share them"):
        check_evaluations(batches)
