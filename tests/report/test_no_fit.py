"""The message when nothing fits: whole, and each way out only where it helps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, MemoryBreakdown, PassedOver, PlanRequest
from lightning_memfit.report.no_fit import no_fit_message
from lightning_memfit.units import GIB, MIB

SPLIT = BatchSplit(effective_batch_size=4, loader_batch_size=4, slice_sizes=(1, 1, 1, 1))
SMALLEST = Candidate(
    precision="32-true",
    activation_checkpointing="blocks",
    checkpointed_modules=("a.0", "a.1"),
    split=SPLIT,
    zero_gradients_early=True,
)
UNDIVIDED = Candidate(precision="32-true", split=dataclasses.replace(SPLIT, slice_sizes=(4,)))
HALVES = Candidate(precision="32-true", split=dataclasses.replace(SPLIT, slice_sizes=(2, 2)))
BUDGET = Budget(
    budget_bytes=100 * MIB, capacity_bytes=2 * GIB, headroom_bytes=0, non_torch_bytes=48 * MIB, reason="as given"
)
BEST = Forecast(
    candidate=SMALLEST,
    memory=MemoryBreakdown(
        peak_allocated_bytes=130 * MIB,
        by_category={
            "parameters": 20 * MIB,
            "gradients": 10 * MIB,
            "optimizer_states": 40 * MIB,
            "activations": 50 * MIB,
            "temporaries": 8 * MIB,
            "inputs": 2 * MIB,
            "buffers": 0,
        },
        peak_phase="backward",
        peak_op="aten.mm.default",
        peak_module="head",
        num_parameters=5 * 1024**2,
    ),
)
PASSED_OVER = (
    PassedOver(candidate=UNDIVIDED, predicted_peak_bytes=400 * MIB, reason="over"),
    PassedOver(candidate=HALVES, predicted_peak_bytes=250 * MIB, reason="over"),
    PassedOver(
        candidate=dataclasses.replace(UNDIVIDED, zero_gradients_early=True),
        predicted_peak_bytes=None,
        reason="needs more than one that does not fit",
    ),
)


def message(**changes: Any) -> str:
    arguments: dict[str, Any] = {
        "budget": BUDGET,
        "best": BEST,
        "measured_peak_bytes": None,
        "passed_over": PASSED_OVER,
        "request": PlanRequest(budget=100 * MIB),
    }
    return no_fit_message(**{**arguments, **changes})


def with_memory(**changes: Any) -> Forecast:
    return dataclasses.replace(BEST, memory=dataclasses.replace(BEST.memory, **changes))


def test_the_whole_message() -> None:
    # missing: 130 - 100; floor 20 + 10 + 40 = 70 is below the budget; of the samples 50 + 8 + 2 = 60
    """Reported in jax-ml/jax#13428."""
    request = PlanRequest(budget=100 * MIB, precision="32-true")
    assert message(request=request).splitlines() == [
        "No plan fits the budget of 100.0 MiB: the smallest one found needs 130.0 MiB (predicted, allocated), "
        "30.00 MiB too much.",
        "Budget: as given.",
        "Smallest plan: 4 slices of <= 1, checkpointing 2 modules, gradients zeroed early. Its predicted peak is in "
        "the backward at aten.mm.default in module head: activations 50.00 MiB, optimizer states 40.00 MiB, parameters "
        "20.00 MiB, gradients 10.00 MiB, temporaries 8.000 MiB, inputs 2.000 MiB.",
        "Tried (smallest peak of each):",
        "  - micro_batch_size: 4 (400.0 MiB), 2 (250.0 MiB), 1 (130.0 MiB)",
        "  - activation_checkpointing: none (250.0 MiB), 2 modules (130.0 MiB)",
        "  - zeroing gradients before or after the forward: after (250.0 MiB), before (130.0 MiB)",
        "  - precision: 32-true (130.0 MiB); pinned by you",
        "Ruled out without a forecast:",
        "  - needs more than one that does not fit",
        "What would help:",
        '  - budget="130MiB" or more (this device could hold 1.953 GiB now)',  # 2048 - 48 = 2000 MiB
        '  - precision="bf16-mixed": may halve part of the 50.00 MiB of activations',
        "  - shorter sequences or smaller inputs: activations, temporaries and inputs hold 60.00 MiB of the peak with "
        "a micro-batch of 1",
        "  - an optimizer with smaller states: these hold 40.00 MiB of the peak",
    ]


def test_a_precision_that_the_search_was_free_to_take_is_not_offered() -> None:
    assert "bf16-mixed" not in message(request=PlanRequest(budget=100 * MIB))


def test_a_measured_peak_replaces_the_predicted_one() -> None:
    text = message(measured_peak_bytes=133 * MIB)
    assert "needs 133.0 MiB (measured, allocated), 33.00 MiB too much." in text
    assert 'budget="133MiB" or more' in text


def test_a_floor_above_the_budget_is_named_and_levers_that_cannot_help_are_not() -> None:
    floor = with_memory(
        peak_allocated_bytes=150 * MIB,
        by_category={
            "parameters": 30 * MIB,
            "gradients": 30 * MIB,
            "optimizer_states": 60 * MIB,
            "activations": 30 * MIB,
        },
    )
    text = message(best=floor, request=PlanRequest(budget=100 * MIB, activation_checkpointing="none"))
    assert (
        "parameters 30.00 MiB + gradients 30.00 MiB + optimizer states 60.00 MiB = 120.0 MiB alone are 20.00 MiB above "
        "the budget: no slice is small enough."
    ) in text
    # 120 MiB / 5 Mi parameters = 24 bytes each; 100 MiB / 24 = 4,369,066.7
    assert "a smaller model: 24 bytes per parameter allow fewer than 4,369,066 parameters" in text
    assert "(this one has 5,242,880)" in text
    assert "activation_checkpointing=" not in text
    assert "bf16-mixed" not in text
    assert "shorter sequences" not in text


def test_levers_that_the_user_ruled_out_are_offered() -> None:
    best = dataclasses.replace(BEST, candidate=HALVES)
    text = message(
        best=best, request=PlanRequest(budget=100 * MIB, activation_checkpointing="none", micro_batch_size=2)
    )
    assert 'activation_checkpointing="auto" (you set "none"): activations hold 50.00 MiB of the peak' in text
    assert 'micro_batch_size="auto" (you set 2): smaller slices need less' in text
    assert "  - micro_batch_size: 4 (400.0 MiB), 2 (130.0 MiB); pinned by you" in text


def test_slices_that_stopped_early_point_to_inexact_slicing() -> None:
    best = dataclasses.replace(BEST, candidate=HALVES)
    assert "allow_inexact_slicing=True: slices stop at 2 samples" in message(best=best)
    allowed = PlanRequest(budget=100 * MIB, allow_inexact_slicing=True)
    assert "allow_inexact_slicing" not in message(best=best, request=allowed)


def test_bf16_is_not_offered_to_those_who_have_it() -> None:
    candidate = dataclasses.replace(SMALLEST, precision="bf16-mixed")
    assert 'precision="bf16-mixed"' not in message(best=dataclasses.replace(BEST, candidate=candidate))


def test_a_peak_in_the_optimizer_step_is_not_blamed_on_the_samples() -> None:
    best = with_memory(peak_phase="optimizer_step", by_category={"parameters": 65 * MIB, "temporaries": 65 * MIB})
    text = message(best=best)
    assert "an optimizer step with smaller temporaries (such as fused=True): these hold 65.00 MiB of the peak" in text
    assert "shorter sequences" not in text


def test_a_headroom_asked_for_is_added_to_the_budget_that_helps() -> None:
    budget = dataclasses.replace(BUDGET, headroom_bytes=10 * MIB)
    text = message(budget=budget, request=PlanRequest(budget=110 * MIB, headroom=10 * MIB))
    assert 'budget="140MiB" or more' in text


def test_without_a_given_budget_less_headroom_is_offered_where_it_suffices() -> None:
    # could hold 400 - 48 = 352; with 130 in use 222 are left for headroom
    budget = dataclasses.replace(BUDGET, capacity_bytes=400 * MIB, headroom_bytes=256 * MIB, budget_bytes=96 * MIB)
    text = message(budget=budget, request=PlanRequest())
    assert 'headroom="222MiB" or less: 256.0 MiB are kept free now' in text


@pytest.mark.parametrize("request_", [PlanRequest(), PlanRequest(budget=100 * MIB)])
def test_what_the_device_cannot_hold_is_not_offered(request_: PlanRequest) -> None:
    budget = dataclasses.replace(BUDGET, capacity_bytes=168 * MIB)  # could hold 120
    text = message(budget=budget, request=request_)
    assert "a device or a memory limit that leaves 130.0 MiB to torch: this device could hold 120.0 MiB now" in text
    assert 'budget="' not in text
    assert 'headroom="' not in text


def test_a_long_ladder_of_sizes_is_shown_by_its_ends() -> None:
    def passed(largest: int) -> PassedOver:
        split = BatchSplit(effective_batch_size=64, loader_batch_size=64, slice_sizes=(largest, 64 - largest))
        candidate = Candidate(precision="32-true", split=split)
        return PassedOver(candidate=candidate, predicted_peak_bytes=(100 + largest) * MIB, reason="over")

    text = message(passed_over=[passed(size) for size in range(40, 60)])
    assert (
        "micro_batch_size: 59 (159.0 MiB), 58 (158.0 MiB), ..., 41 (141.0 MiB), 40 (140.0 MiB), 1 (130.0 MiB)" in text
    )


def test_many_reasons_are_counted() -> None:
    passed = [PassedOver(candidate=HALVES, predicted_peak_bytes=None, reason=f"reason {index}") for index in range(5)]
    text = message(passed_over=passed)
    assert "reason 2" in text
    assert "reason 3" not in text
    assert "  - and 2 more reasons" in text


def test_why_nothing_may_be_recomputed_is_said() -> None:
    text = message(checkpointing_reason="not recomputed: a module that was recomputed gave something else")
    assert "\nNot recomputed: a module that was recomputed gave something else.\nWhat would help:" in text
