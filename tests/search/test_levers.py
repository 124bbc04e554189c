"""The space that is searched. Run: ``pytest tests/search/test_levers.py``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import BatchSplit, PlanRequest
from lightning_memfit.search.levers import TIERS, CheckpointingOption, SearchSpace, search_space

BLOCKS = ("blocks.0", "blocks.1")
NONE = CheckpointingOption(kind="none")
FIRST_BLOCK = CheckpointingOption(kind="blocks", modules=BLOCKS[:1])
EVERY_BLOCK = CheckpointingOption(kind="blocks", modules=BLOCKS)


def whole(samples: int, accumulate: int = 1) -> BatchSplit:
    return BatchSplit(
        effective_batch_size=samples * accumulate,
        loader_batch_size=samples,
        accumulate_grad_batches=accumulate,
        slice_sizes=(samples,),
    )


def test_every_number_of_slices_that_gives_another_largest_slice_is_there() -> None:
    # 16 samples: largest slices 16, 8, 6, 4 (4 slices), 3 (6 slices; 5 slices give 4 again), 2 (8), 1 (16).
    assert search_space(PlanRequest(), whole(16), blocks=()).num_slices == (1, 2, 3, 4, 6, 8, 16)


@given(st.integers(1, 600))
def test_the_numbers_of_slices_cover_every_reachable_micro_batch_once(samples: int) -> None:
    counts = search_space(PlanRequest(), whole(samples), blocks=()).num_slices
    sizes = [-(-samples // count) for count in counts]
    assert sizes == sorted({-(-samples // count) for count in range(1, samples + 1)}, reverse=True)
    assert counts[0] == 1 and counts[-1] == samples


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ("auto", (NONE, FIRST_BLOCK, EVERY_BLOCK)),
        ("none", (NONE,)),
        ("blocks", (EVERY_BLOCK,)),
        (("head",), (CheckpointingOption(kind="patterns", modules=("head",)),)),
    ],
)
def test_checkpointing_options_are_those_asked_for(asked: object, options: tuple[CheckpointingOption, ...]) -> None:
    request = PlanRequest(activation_checkpointing=asked)  # type: ignore[arg-type]
    assert search_space(request, whole(4), blocks=BLOCKS, matched=("head",)).checkpointing == options


def test_without_blocks_auto_is_none_and_blocks_is_an_error() -> None:
    assert search_space(PlanRequest(), whole(4), blocks=()).checkpointing == (NONE,)
    with pytest.raises(ConfigurationError, match=r"'blocks' found no repeated blocks.*encoder\.layers\.\*"):
        search_space(PlanRequest(activation_checkpointing="blocks"), whole(4), blocks=())


@pytest.mark.parametrize("asked", ["auto", "none", "blocks", ("blocks.*",)])
def test_where_the_model_recomputes_all_of_it_nothing_is_added(asked: Any) -> None:
    space = search_space(
        PlanRequest(activation_checkpointing=asked), whole(4), blocks=(), recomputed_anyway=("blocks.0", "blocks.1")
    )
    assert space.checkpointing == (CheckpointingOption(kind="none"),)


def test_a_pinned_micro_batch_is_the_only_one() -> None:
    """Reported in ludwig-ai/ludwig#2579."""
    space = search_space(PlanRequest(micro_batch_size=6), whole(16), blocks=())
    assert space.num_slices == (3,)
    assert space.slicing_reason == "micro_batch_size is given"
    (setting,) = space.settings(0)
    assert space.candidate(setting, 3, zero_gradients_early=False).split.slice_sizes == (6, 5, 5)


def test_a_micro_batch_above_the_loaders_batch_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"micro_batch_size=17 is more than the 16 samples.*at most 16"):
        search_space(PlanRequest(micro_batch_size=17), whole(16), blocks=())


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("the batch has no structure", "Use micro_batch_size=16."),
        ("a BatchNorm. allow_inexact_slicing=True slices it all the same.", "16, or allow_inexact_slicing=True."),
    ],
)
def test_inexact_slices_are_a_way_out_only_where_batches_can_be_divided(reason: str, way_out: str) -> None:
    request = PlanRequest(micro_batch_size=4)
    with pytest.raises(ConfigurationError) as caught:
        search_space(request, whole(16), blocks=(), slicing_reason=f"not sliced: {reason}")
    assert str(caught.value).endswith(way_out)


def test_a_batch_that_may_not_be_sliced_is_left_whole() -> None:
    space = search_space(PlanRequest(), whole(16), blocks=(), slicing_reason="BatchNorm is in train mode")
    assert (space.num_slices, space.slicing_reason) == ((1,), "BatchNorm is in train mode")
    with pytest.raises(ConfigurationError, match=r"16 samples, but BatchNorm .* Use micro_batch_size=16"):
        search_space(PlanRequest(micro_batch_size=8), whole(16), blocks=(), slicing_reason="BatchNorm is in train mode")
    pinned_whole = PlanRequest(micro_batch_size=16)
    assert search_space(pinned_whole, whole(16), blocks=(), slicing_reason="BatchNorm").num_slices == (1,)


def test_a_candidate_keeps_the_effective_batch() -> None:
    space = search_space(PlanRequest(precision="bf16-mixed"), whole(10, accumulate=4), blocks=BLOCKS)
    setting = next(setting for setting in space.settings(0) if setting.checkpointing == EVERY_BLOCK)
    candidate = space.candidate(setting, 3, zero_gradients_early=True)
    assert candidate.split.effective_batch_size == 40
    assert candidate.split.slice_sizes == (4, 3, 3)
    assert candidate.split.accumulate_grad_batches == 4
    assert candidate.checkpointed_modules == BLOCKS
    assert (candidate.precision, candidate.zero_gradients_early) == ("bf16-mixed", True)


def test_quarters_of_many_blocks_are_recomputed_from_the_first_on() -> None:
    names = tuple(f"layers.{index}" for index in range(10))
    options = search_space(PlanRequest(), whole(4), blocks=names).checkpointing
    assert [len(option.modules) for option in options] == [0, 2, 5, 7, 10]
    assert all(option.modules == names[: len(option.modules)] for option in options)


def space_of(request: PlanRequest, states_reason: str | None = None) -> SearchSpace:
    return search_space(
        request,
        whole(4),
        blocks=(),
        precisions=("32-true", "bf16-mixed"),
        implementations=("foreach", "fused"),
        states_reason=states_reason,
    )


def test_tier_0_has_every_precision_with_every_implementation_and_tier_1_quantised_states_with_their_own() -> None:
    space = space_of(PlanRequest())
    of_tier_0 = [(setting.precision, setting.optimizer_implementation) for setting in space.settings(0)]
    steps = ("as-configured", "foreach", "fused")
    assert of_tier_0 == [(precision, step) for precision in ("32-true", "bf16-mixed") for step in steps]
    of_tier_1 = [(setting.precision, setting.optimizer_implementation) for setting in space.settings(1)]
    assert of_tier_1 == [("32-true", "as-configured"), ("bf16-mixed", "as-configured")]
    assert {setting.optimizer_states for setting in space.settings(1)} == {"8bit"}
    assert list(space.settings(2)) == []


def test_bf16_true_is_of_tier_2_and_only_there_when_asked_for() -> None:
    space = space_of(PlanRequest(precision="bf16-true", optimizer_states="as-configured"))
    assert list(space.settings(0)) == list(space.settings(1)) == []
    assert {setting.precision for setting in space.settings(2)} == {"bf16-true"}


def test_bf16_true_that_is_asked_for_does_not_make_quantised_states_an_equal_choice() -> None:
    space = space_of(PlanRequest(precision="bf16-true"))
    assert {setting.optimizer_states for setting in space.settings(2)} == {"as-configured"}
    assert {setting.optimizer_states for setting in space.settings(3)} == {"8bit"}


def test_departures_count_the_levers_that_are_not_at_their_least() -> None:
    space = space_of(PlanRequest())
    least, *_, furthest = space.settings(0)
    assert space.departures(space.candidate(least, 1, zero_gradients_early=False)) == 0
    # precision, implementation, slices, early zeroing
    assert space.departures(space.candidate(furthest, 2, zero_gradients_early=True)) == 4


def test_quantised_states_with_a_pinned_implementation_are_an_error() -> None:
    request = PlanRequest(optimizer_states="8bit", optimizer_implementation="fused")
    with pytest.raises(ConfigurationError, match="'fused' cannot be had with optimizer_states='8bit'"):
        space_of(request)


def test_parameters_of_16_bits_keep_the_implementation_that_they_have() -> None:
    space = search_space(
        PlanRequest(),
        whole(4),
        precisions=("bf16-true",),
        blocks=(),
        implementations=("foreach", "fused"),
        states_reason="no",
    )
    settings = [setting for tier in TIERS for setting in space.settings(tier)]
    assert {setting.optimizer_implementation for setting in settings} == {"as-configured"}
