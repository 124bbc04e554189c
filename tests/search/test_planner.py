"""The search on made-up peaks, compared with trying everything. Run: ``pytest tests/search/test_planner.py``."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import (
    BatchSplit,
    Budget,
    Candidate,
    Choice,
    Forecast,
    MemoryBreakdown,
    Plan,
    PlanRequest,
)
from lightning_memfit.search.levers import search_space
from lightning_memfit.search.planner import search_plan

DEVICE = DeviceSpec(name="a host", kind="cpu", capacity_bytes=2**40, available_bytes=2**40, process_bytes=0, cores=1)
BLOCKS = ("blocks.0", "blocks.1")
PeakOf = Callable[[Candidate], int]


class Evaluator:
    """Answers with made-up peaks, and remembers what it was asked."""

    def __init__(self, peak_of: PeakOf) -> None:
        self.peak_of = peak_of
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Forecast:
        self.asked.append(candidate)
        peak = self.peak_of(candidate)
        recomputed = 250 if candidate.checkpointed_modules else 0
        return Forecast(
            candidate=candidate,
            memory=MemoryBreakdown(
                peak_allocated_bytes=peak, by_category={"activations": peak}, peak_phase="backward", num_parameters=1
            ),
            flops=1000 + recomputed,
            recomputed_flops=recomputed,
        )


def linear(fixed: int = 1000, sample: int = 100, checkpointed: int = 40, gradients: int = 0) -> PeakOf:
    """fixed + per sample, less with checkpointing; the old gradients on top unless they are zeroed early."""

    def peak(candidate: Candidate) -> int:
        slope = checkpointed if candidate.checkpointed_modules else sample
        late = 0 if candidate.zero_gradients_early else gradients
        return fixed + slope * candidate.split.micro_batch_size + late

    return peak


def plan_for(
    budget: int, peak_of: PeakOf, *, samples: int = 16, request: PlanRequest | None = None, reason: str | None = None
) -> tuple[Plan, Evaluator]:
    request = request or PlanRequest()
    whole = BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,))
    evaluate = Evaluator(peak_of)
    formed = Budget(budget_bytes=budget, capacity_bytes=2**40, headroom_bytes=0, non_torch_bytes=0, reason="as given")
    space = search_space(request, whole, blocks=BLOCKS, matched=("head",), slicing_reason=reason)
    return search_plan(request, DEVICE, formed, space, evaluate), evaluate


def choice(plan: Plan, lever: str) -> Choice:
    (found,) = (item for item in plan.choices if item.lever == lever)
    return found


def test_what_fits_as_it_is_is_left_as_it_is_after_one_forecast() -> None:
    plan, evaluate = plan_for(2600, linear())
    assert plan.split.slice_sizes == (16,)
    assert plan.candidate.activation_checkpointing == "none" and not plan.candidate.zero_gradients_early
    assert len(evaluate.asked) == 1
    (unneeded,) = plan.passed_over
    assert unneeded.predicted_peak_bytes is None
    assert unneeded.reason == "not forecast: a plan that recomputes less fits already"


def test_slicing_is_taken_before_recomputing_and_no_finer_than_needed() -> None:
    # 1000 + 100 x 5 = 1500 does not fit 1450; 1000 + 100 x 4 = 1400 does: 4 slices of 4.
    plan, _ = plan_for(1450, linear())
    assert plan.split.slice_sizes == (4, 4, 4, 4)
    assert plan.candidate.activation_checkpointing == "none"
    reason = choice(plan, "micro_batch_size").reason
    # 1000 + 100 x 6 = 1600 B
    assert reason == "the fewest slices that fit: 3 would need 1.562 KiB; costs 4 smaller passes per batch"


def test_recomputing_is_taken_where_no_slice_is_small_enough() -> None:
    # One sample needs 1100; recomputing 1000 + 40 per sample: two of them in 1085.
    plan, _ = plan_for(1085, linear())
    assert plan.candidate.activation_checkpointing == "blocks"
    assert plan.split.micro_batch_size == 2
    assert (
        "does not fit without, at any slice size; costs 25% more FLOPs"
        in choice(plan, "activation_checkpointing").reason
    )


def test_gradients_are_zeroed_early_only_where_only_that_fits() -> None:
    fits_late, _ = plan_for(3100, linear(gradients=500))
    assert not fits_late.candidate.zero_gradients_early
    plan, _ = plan_for(2600, linear(gradients=500))
    assert plan.candidate.zero_gradients_early and plan.split.num_slices == 1
    (late,) = (item for item in plan.passed_over if item.predicted_peak_bytes is not None)
    assert late.reason == "does not fit: 500 B over the budget"
    assert choice(plan, "zero_gradients_early").value == "before the forward"


def test_a_pinned_micro_batch_is_not_searched() -> None:
    plan, evaluate = plan_for(2600, linear(), request=PlanRequest(micro_batch_size=4))
    assert plan.split.slice_sizes == (4, 4, 4, 4)
    assert len(evaluate.asked) == 1
    assert choice(plan, "micro_batch_size").reason == "micro_batch_size is given"


def test_a_batch_that_may_not_be_sliced_is_recomputed_instead() -> None:
    plan, _ = plan_for(1700, linear(), reason="BatchNorm is in train mode")
    assert (plan.split.num_slices, plan.candidate.activation_checkpointing) == (1, "blocks")
    assert choice(plan, "micro_batch_size").reason == "BatchNorm is in train mode"


def test_nothing_fits_says_by_how_much() -> None:
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_for(1000, linear(gradients=70))
    # The smallest: one sample, recomputed, gradients zeroed early: 1000 + 40.
    assert caught.value.budget_bytes == 1000
    assert caught.value.best_peak_bytes == 1040
    assert caught.value.missing_bytes == 40
    message = str(caught.value)
    assert message.startswith("No plan fits the budget of 1000 B: the smallest one found needs 1.016 KiB (predicted")
    assert "40 B too much" in message and "What would help:" in message


def test_a_correction_counts() -> None:
    evaluate = Evaluator(linear())

    def corrected(candidate: Candidate) -> Forecast:
        import dataclasses

        return dataclasses.replace(evaluate(candidate), correction_bytes=1)

    whole = BatchSplit(effective_batch_size=2, loader_batch_size=2, slice_sizes=(2,))
    budget = Budget(budget_bytes=1200, capacity_bytes=2**40, headroom_bytes=0, non_torch_bytes=0, reason="as given")
    space = search_space(PlanRequest(), whole, blocks=())
    plan = search_plan(PlanRequest(), DEVICE, budget, space, corrected, notes=("a note",))
    assert plan.split.num_slices == 2
    assert plan.notes == ("a note",)


# Properties.

peaks = st.lists(st.integers(0, 50), min_size=64, max_size=64)


def monotone(rises: list[int], gradients: list[int], saved: int) -> PeakOf:
    """Any peak that does not fall with the micro-batch, that recomputing and zeroing early do not raise."""

    def peak(candidate: Candidate) -> int:
        size = candidate.split.micro_batch_size
        late = 0 if candidate.zero_gradients_early else max(gradients[:size])
        base = sum(rises[:size]) + (0 if candidate.checkpointed_modules else saved)
        return 100 + base + late

    return peak


@settings(max_examples=150, deadline=None)
@given(peaks, peaks, st.integers(0, 300), st.integers(1, 64), st.integers(50, 3000))
def test_the_choice_is_the_one_that_trying_everything_would_find(
    rises: list[int], gradients: list[int], saved: int, samples: int, budget: int
) -> None:
    peak_of = monotone(rises, gradients, saved)
    whole = BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,))
    space = search_space(PlanRequest(), whole, blocks=BLOCKS)
    everything = [
        space.candidate(option, count, zero_gradients_early=early)
        for option in space.checkpointing
        for count in space.num_slices
        for early in (False, True)
    ]
    fitting = [candidate for candidate in everything if peak_of(candidate) <= budget]
    if not fitting:
        with pytest.raises(NoFeasiblePlanError) as caught:
            plan_for(budget, peak_of, samples=samples)
        assert caught.value.best_peak_bytes == min(map(peak_of, everything))
        return
    plan, evaluate = plan_for(budget, peak_of, samples=samples)
    assert plan.candidate == fitting[0]
    # Everything that was forecast is accounted for, once, with a reason.
    passed = [item.candidate for item in plan.passed_over if item.predicted_peak_bytes is not None]
    assert sorted(map(repr, [*passed, plan.candidate])) == sorted(map(repr, evaluate.asked))
    assert all(item.reason for item in plan.passed_over)
    for item in plan.passed_over:
        over = item.predicted_peak_bytes is not None and item.predicted_peak_bytes > budget
        assert item.reason.startswith("does not fit") == over


@settings(max_examples=80, deadline=None)
@given(peaks, peaks, st.integers(0, 300), st.integers(1, 64), st.integers(50, 3000), st.integers(0, 500))
def test_more_budget_never_gives_more_slices_or_more_recomputation(
    rises: list[int], gradients: list[int], saved: int, samples: int, budget: int, more: int
) -> None:
    peak_of = monotone(rises, gradients, saved)
    try:
        tight, _ = plan_for(budget, peak_of, samples=samples)
    except NoFeasiblePlanError:
        return
    ample, _ = plan_for(budget + more, peak_of, samples=samples)

    def rank(plan: Plan) -> tuple[bool, int, bool]:
        candidate = plan.candidate
        return bool(candidate.checkpointed_modules), candidate.split.num_slices, candidate.zero_gradients_early

    assert rank(ample) <= rank(tight)


@pytest.mark.parametrize("samples", [16, 64, 256, 1024, 4096])
@pytest.mark.parametrize("shape", ["straight", "convex", "concave", "step", "late gradients"])
def test_the_number_of_forecasts_is_bounded(samples: int, shape: str) -> None:
    def peak(candidate: Candidate) -> int:
        size = candidate.split.micro_batch_size
        late = 10**6 if shape == "late gradients" and not candidate.zero_gradients_early else 0
        growth = {
            "straight": 1000 * size,
            "convex": size**2,
            "concave": int(10**6 * math.log2(1 + size)),
            "step": 10**9 * (size > samples // 7),
            "late gradients": 1000 * size,
        }[shape]
        return 10**6 + growth + late + (0 if candidate.checkpointed_modules else 1)

    request = PlanRequest(activation_checkpointing="none")
    most = 0
    sizes = sorted({max(1, samples // part) for part in (2, 3, 5, 6, 7, 9, 20, 100)})
    for size in sizes:
        whole = BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,))
        space = search_space(request, whole, blocks=())
        count = next(c for c in space.num_slices if -(-samples // c) <= size)
        budget = peak(space.candidate(space.checkpointing[0], count, zero_gradients_early=True))
        _, evaluate = plan_for(budget, peak, samples=samples, request=request)
        most = max(most, len(evaluate.asked))
    assert most <= max(2 * math.log2(samples) + 4, math.log2(samples) + 10)


def test_a_straight_line_is_found_in_a_handful_of_slice_counts() -> None:
    _, evaluate = plan_for(1000 + 100 * 37, linear(), samples=512, request=PlanRequest(activation_checkpointing="none"))
    assert len({candidate.split.num_slices for candidate in evaluate.asked}) <= 4
