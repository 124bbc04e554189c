"""A rank that fails, wherever it does, ends all of them within the time-out, and each says which one failed and why."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_memfit.plan import Plan
from tests.ranks.conftest import Once
from tests.ranks.failing_programs import (
    SECONDS,
    failing_behind_an_error_of_all_ranks,
    failing_in_a_slice,
    failing_to_compare_on_all_ranks,
    going_on,
    out_of_memory_comparing_on_one_rank,
    out_of_memory_evaluating,
    out_of_memory_under_zero,
    run_all,
    sending,
    unrecomputable_on_one_rank,
    validating_longer_on_one_rank,
)
from tests.ranks.launch import Ended, results, run_on_ranks

START_SECONDS = 60.0
"""Within which two processes import everything and look at the run, on a busy machine."""


@pytest.fixture(scope="module")
def said(once: Once) -> list[dict[str, str]]:
    return once("failures", lambda: results(run_on_ranks(run_all, seconds=START_SECONDS + 8 * SECONDS)))


@pytest.mark.parametrize(
    ("moment", "failed", "own", "others"),
    [
        (
            "looking at its data",
            1,
            "ConfigurationError: The train loader yields 0 batches",
            "RankFailedError: rank 1 failed while looking at batches and device: ConfigurationError: The train loader "
            "yields 0 batches",
        ),
        (
            "planning",
            0,
            "RuntimeError: no such lever",
            "RankFailedError: rank 0 failed while planning for all ranks: RuntimeError: no such lever",
        ),
        (
            "warm-up",
            1,
            "ValueError: no such sample",
            "RankFailedError: rank 1 failed while running the memory warm-up: ValueError: no such sample",
        ),
    ],
)
def test_the_rank_that_fails_says_what_happened_and_the_others_which_one_it_was(
    said: list[dict[str, str]], moment: str, failed: int, own: str, others: str
) -> None:
    """Reported in mosaicml/composer#2117."""
    assert said[failed][moment].startswith(own)
    assert said[1 - failed][moment].startswith(others)


def test_a_rank_that_runs_out_of_memory_in_the_warm_up_makes_no_other_wait(said: list[dict[str, str]]) -> None:
    """Reported in mosaicml/composer#2117, mosaicml/composer#3510."""
    for rank in said:
        assert rank["memory"].startswith("NoFeasiblePlanError") and "Warm-ups that ran out of memory" in rank["memory"]


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ("settings", "settings of MemFit: effective_batch_size=16 on rank 0 and 32 on rank 1"),
        ("model", "parameters: rank 0 has"),
        ("batches", "batches per epoch: rank 0 has 4, rank 1 has 5, so that one of them would wait for ever"),
    ],
)
def test_ranks_that_disagree_say_so_before_anything_is_exchanged_in_training(
    said: list[dict[str, str]], different: str, words: str
) -> None:
    """Reported in Lightning-AI/litData#129."""
    for rank in said:
        assert rank[different].startswith("RanksDisagreeError: The 2 ranks of this run are not about to train the same")
        assert words in rank[different]


def test_the_poorest_rank_decides_what_a_plan_may_use(said: list[dict[str, str]]) -> None:
    """Reported in vllm-project/vllm#14011."""
    assert said[0]["poorest"] == said[1]["poorest"]
    budget, reason = ast.literal_eval(said[0]["poorest"])
    assert budget < 6 * 2**30  # half of 12 GiB, less headroom and what the processes hold
    assert "that of rank 1, which has the least of 2 (the most is" in reason


def test_ranks_that_do_not_fit_are_told_which_other_strategy_would_and_what_it_needs(
    said: list[dict[str, str]],
) -> None:
    for rank in said:
        assert rank["too little"].startswith("NoFeasiblePlanError: No plan fits the budget of 20.00 MiB")
        assert 12 < _mebibytes_of_fsdp2(rank["too little"]) <= 20  # half of 16 bytes for each parameter at the least


def test_ranks_of_which_warm_ups_show_that_nothing_fits_are_told_so_too_by_what_was_measured(
    said: list[dict[str, str]],
) -> None:
    for rank in said:
        first = rank["more than predicted"].splitlines()[0]
        assert first.startswith("NoFeasiblePlanError: No plan fits the budget of 48.00 MiB")
        assert "(measured, allocated)" in first
        # What was measured beside the forecast of DDP, 30 MiB, counts for the other strategy as well.
        assert 30 + 15 < _mebibytes_of_fsdp2(rank["more than predicted"]) <= 48


def _mebibytes_of_fsdp2(message: str) -> float:
    (line,) = [line for line in message.splitlines() if "FSDP2" in line]
    found = re.fullmatch(r"  - FSDP2 \(ModelParallelStrategy\): ([0-9.]+) MiB on each device \(predicted: .*\)", line)
    assert found is not None
    return float(found[1])


def test_a_rank_that_fails_in_a_slice_ends_the_others_that_wait_for_its_gradients() -> None:
    """Reported in mosaicml/composer#2117."""
    waiting, failed = run_on_ranks(failing_in_a_slice, seconds=START_SECONDS + 2 * SECONDS)
    assert [waiting.code, failed.code] == [1, 1]
    assert last_error(failed).endswith("ValueError: no such sample")
    why = "rank 1 failed while running a training step: ValueError: no such sample"
    assert f"RankFailedError: {why}" in last_error(waiting)


@pytest.mark.parametrize("program", [out_of_memory_under_zero, out_of_memory_evaluating])
def test_a_rank_that_runs_out_of_memory_while_others_wait_in_the_step_ends_them_at_once(
    program: Callable[[int], None],
) -> None:
    """And not after the strategy's time-out, which either of them would name."""
    if program is out_of_memory_under_zero:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")
    waiting, failed = run_on_ranks(program, seconds=START_SECONDS + 2 * SECONDS, environment={"DS_ACCELERATOR": "cpu"})
    assert [waiting.code, failed.code] == [1, 1]
    assert "OutOfMemoryError: CUDA out of memory" in last_error(failed)
    assert "RankFailedError: rank 1 failed while" in last_error(waiting)
    assert "OutOfMemoryError: CUDA out of memory" in last_error(waiting)


def test_a_rank_that_runs_out_of_memory_alone_where_slices_are_compared_ends_the_others_that_wait_for_it() -> None:
    """It would go on without slices, and the others wait for its parameters until the strategy's time-out."""
    waiting, failed = run_on_ranks(out_of_memory_comparing_on_one_rank, seconds=START_SECONDS + 2 * SECONDS)
    assert [waiting.code, failed.code] == [1, 1]
    assert "OutOfMemoryError: CUDA out of memory" in last_error(failed)
    assert "Rank 1 of 2 failed so while comparing slices with the undivided batch, and not all others" in failed.output
    why = "rank 1 failed while comparing slices with the undivided batch: OutOfMemoryError: CUDA out of memory"
    assert f"RankFailedError: {why}" in last_error(waiting)


def test_ranks_that_all_fail_to_compare_slices_go_on_without_them() -> None:
    for compared, out_of_memory, raised in results(run_on_ranks(failing_to_compare_on_all_ranks)):
        assert "not sliced: the comparison" not in _why_not_sliced(compared[0])
        for (plan, weights), words in ((out_of_memory, "ran out of memory"), (raised, "raised KeyError: 'not yet'")):
            assert plan.split.num_slices == 1 and plan.candidate.checkpointed_modules
            assert _why_not_sliced(plan).startswith("not sliced: the comparison of") and words in _why_not_sliced(plan)
            for name, weight in compared[1].items():
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


def test_an_error_that_all_ranks_got_over_is_not_told_of_the_next() -> None:
    for rank, found in enumerate(results(run_on_ranks(going_on, seconds=START_SECONDS + 2 * SECONDS))):
        assert not found["is still told"]
        words, (note,) = found["ends 1"]
        assert words == "'elsewhere'" and found["ends 2"] == found["ends 1"]
        assert note.startswith(
            f"Rank {rank} of 2 failed so while recomputing, and not all others did at the same place."
        )
        told = (
            "ValueError: another" if rank == 1 else "RankFailedError: rank 1 failed while stepping: ValueError: another"
        )
        assert found["next"] == told


def test_tensors_of_an_accelerator_reach_other_ranks_on_the_host() -> None:
    """Unpickled as they are, those of rank 1 would be on rank 1's device in the process of rank 0."""

    def on_the_host(sender: int) -> list[Any]:
        values = [0.0 + sender, 1.0 + sender, 2.0 + sender]
        return [(torch.Tensor, "cpu", values), (torch.Tensor, "cpu", values), (torch.Tensor, "meta", None)]

    first, second = results(run_on_ranks(sending, seconds=START_SECONDS))
    assert first["from rank 1"] == [on_the_host(1)]
    assert first["of all"] == second["of all"] == [on_the_host(0), on_the_host(1)]


def test_a_rank_that_fails_behind_an_error_of_all_ranks_is_told_with_its_own_words() -> None:
    waiting, failed = run_on_ranks(failing_behind_an_error_of_all_ranks, seconds=START_SECONDS + 3 * SECONDS)
    assert [waiting.code, failed.code] == [1, 1]
    assert last_error(failed).endswith("ValueError: no such sample")
    why = "rank 1 failed while running a training step: ValueError: no such sample"
    assert f"RankFailedError: {why}" in last_error(waiting)


def test_a_rank_that_cannot_recompute_alone_ends_the_others_that_wait_for_it() -> None:
    waiting, failed = run_on_ranks(unrecomputable_on_one_rank, seconds=START_SECONDS + 3 * SECONDS)
    assert [waiting.code, failed.code] == [1, 1]
    assert "Rank 1 of 2 failed so while running the memory warm-up, and not all others" in failed.output
    assert "RankFailedError: rank 1 failed while running" in last_error(waiting)
    assert "CheckpointError: torch.utils.checkpoint: " in last_error(waiting)


def test_evaluations_of_other_lengths_that_gather_parameters_are_refused_before_a_rank_waits() -> None:
    for rank in run_on_ranks(validating_longer_on_one_rank, seconds=START_SECONDS + 2 * SECONDS):
        assert rank.code == 1
        assert "RanksDisagreeError: Validation loaders of 8 batches on rank 0 and of 10 on rank 1" in last_error(rank)


def _why_not_sliced(plan: Plan) -> str:
    (choice,) = (choice for choice in plan.choices if choice.lever == "micro_batch_size")
    return choice.reason


def last_error(rank: Ended) -> str:
    return [line for line in rank.output.splitlines() if "Error" in line][-1]
