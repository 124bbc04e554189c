"""The vocabulary: checked when made, frozen, and the same after a round trip through a file."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import BatchArithmeticError, ConfigurationError, PlanFileError
from lightning_memfit.hardware.device import DeviceSpec, Neighbour
from lightning_memfit.plan import (
    CATEGORIES,
    PHASES,
    SCHEMA_VERSION,
    BatchSplit,
    Budget,
    Candidate,
    Choice,
    Forecast,
    Measurement,
    MemoryBreakdown,
    PassedOver,
    Plan,
    PlanRequest,
    balanced_slices,
)
from lightning_memfit.sharding import Sharding

SPLIT = BatchSplit(
    effective_batch_size=192, ranks=2, loader_batch_size=32, accumulate_grad_batches=3, slice_sizes=(11, 11, 10)
)
SHARDING = Sharding(
    engine="deepspeed",
    ranks=2,
    synchronisation="slice",
    zero_stage=3,
    reduce_bucket_elements=101,
    allgather_bucket_elements=102,
    prefetch_bucket_elements=103,
    persistence_threshold_elements=104,
    overlap_communication=True,
)
SHARDED_BY_FSDP2_OR_DDP = (
    "gradient_as_bucket_view",
    "shard_groups",
    "reshard_after_forward",
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
)
"""What a `Sharding` of DeepSpeed, that of the example, does not have."""
CANDIDATE = Candidate(
    precision="bf16-mixed",
    activation_checkpointing="blocks",
    checkpointed_modules=("blocks.0", "blocks.1"),
    split=SPLIT,
    zero_gradients_early=True,
    optimizer_states="8bit",
    optimizer_implementation="fused",
    offload="optimizer",
    sharding=SHARDING,
)
PLAIN = Candidate(precision="32-true", split=BatchSplit(effective_batch_size=8, loader_batch_size=8, slice_sizes=(8,)))
PLAN = Plan(
    request=PlanRequest(
        effective_batch_size=192,
        budget=10**9,
        headroom=10**7,
        precision="bf16-mixed",
        activation_checkpointing=("blocks.*", "head"),
        optimizer_states="8bit",
        offload="optimizer",
        micro_batch_size=11,
        optimizer_implementation="fused",
        loss_weight="tokens",
        max_length=512,
        allow_inexact_slicing=True,
        mode="report",
        on_no_fit="skip",
        num_profiled_steps=3,
        planning_seconds=2.5,
    ),
    device=DeviceSpec(
        name="Example: 9000 \u2122",
        kind="cpu",
        capacity_bytes=16 * 10**9,
        available_bytes=15 * 10**9,
        process_bytes=10**9,
        limit_bytes=20 * 10**9,
        limit_source="memory.max",
        cores=2,
        supported_precisions=("32-true",),
        key="example-40gb",
        is_present=False,
        uuid="GPU-1",
        compute_capability=(8, 0),
        multiprocessors=108,
        total_bytes=12,
        context_low_bytes=1,
        context_high_bytes=2,
        neighbours=(Neighbour(pid=7, held_bytes=3),),
        mig_profile="1g.5gb",
        memory_fraction=0.5,
        allocator_settings="expandable_segments:True",
        spills=True,
        unified_memory=True,
        bandwidth_bytes_per_second=13,
        link_bytes_per_second=15,
        peak_flops={"fp32": 14},
        attention_backends=("math",),
        unknowns=("rates",),
    ),
    budget=Budget(
        budget_bytes=10**9 - 10**7,
        capacity_bytes=16 * 10**9,
        headroom_bytes=10**7,
        non_torch_bytes=10**8,
        reason="as given: 'yes', #1",
    ),
    forecast=Forecast(
        candidate=CANDIDATE,
        memory=MemoryBreakdown(
            peak_allocated_bytes=sum(range(1, len(CATEGORIES) + 1)),
            peak_reserved_bytes=32,
            minimum_feasible_bytes=30,
            by_category={name: size for size, name in enumerate(CATEGORIES, start=1)},
            by_phase={name: 28 - size for size, name in enumerate(PHASES)},
            peak_phase="forward",
            peak_op="aten.mm.default",
            peak_module="",
            num_parameters=7,
        ),
        correction_bytes=-3,
        method="extrapolated",
        flops=10**15,
        recomputed_flops=10**14,
        predicted_step_seconds=0.25,
        exchanged_bytes=78,
        seconds_count_exchanges=True,
        host_bytes=79,
        predicted_evaluation_peak_bytes=77,
        evaluation_peak_bytes=21,
        confirmed=False,
        notes=("two small steps",),
    ),
    choices=(Choice(lever="precision", value="bf16-mixed", reason="as asked"),),
    passed_over=(
        PassedOver(candidate=PLAIN, predicted_peak_bytes=123, predicted_step_seconds=0.5, reason="over the budget"),
        PassedOver(candidate=CANDIDATE, predicted_peak_bytes=None, reason="ruled out"),
    ),
    notes=("the last window is short",),
    planned_batch="the largest of 100 batches: (32, 512) int64",
    fingerprint={"model": "Net of 3 modules [0123456789ab]", "torch": "2.13.0"},
)


def fields_left_at_their_default(value: Any) -> list[str]:
    left = []
    for spec in dataclasses.fields(value):
        inner = getattr(value, spec.name)
        if inner == spec.default or inner in ({}, ()):
            left.append(f"{type(value).__name__}.{spec.name}")
        if dataclasses.is_dataclass(inner):
            left += fields_left_at_their_default(inner)
    return left


def test_the_example_plan_gives_every_field_a_value_of_its_own() -> None:
    # Otherwise a field lost on the way would come back as its default, and the round trip would not notice.
    # Settings of other engines than the example's must be left out.
    assert fields_left_at_their_default(PLAN) == [
        *(f"Sharding.{name}" for name in SHARDED_BY_FSDP2_OR_DDP),
        "Plan.schema_version",
    ]


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "made" / "on the way" / "plan.yaml")
    assert Plan.load(path) == PLAN


def test_settings_of_every_engine_survive_a_file(tmp_path: Path) -> None:
    by_ddp = Sharding(engine="ddp", ranks=2, gradient_as_bucket_view=True)
    by_fsdp2 = Sharding(
        engine="fsdp2",
        ranks=2,
        shard_groups=("", "blocks.0"),
        reshard_after_forward=False,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        output_dtype="float32",
    )
    left = set(fields_left_at_their_default(by_ddp)) & set(fields_left_at_their_default(by_fsdp2))
    assert not left & {f"Sharding.{name}" for name in SHARDED_BY_FSDP2_OR_DDP}
    for sharding in (by_ddp, by_fsdp2):
        candidate = replace(CANDIDATE, sharding=sharding)
        plan = replace(PLAN, forecast=replace(PLAN.forecast, candidate=candidate))
        assert Plan.load(plan.save(tmp_path / f"{sharding.engine}.yaml")) == plan


def test_a_plan_of_defaults_survives_a_file(tmp_path: Path) -> None:
    plain = Plan(
        request=PlanRequest(),
        device=DeviceSpec(name="x", kind="cpu", capacity_bytes=2, available_bytes=1, process_bytes=1, cores=1),
        budget=PLAN.budget,
        forecast=Forecast(
            candidate=PLAIN,
            memory=MemoryBreakdown(peak_allocated_bytes=1, peak_phase="forward", num_parameters=0),
        ),
        choices=(),
    )
    assert Plan.load(plain.save(tmp_path / "plan.yaml")) == plain


def test_a_plan_as_a_dict_is_plain_data() -> None:
    def kinds(value: Any) -> set[type]:
        if isinstance(value, dict):
            return {dict}.union(*(kinds(item) for item in value.values()), *(kinds(key) for key in value))
        if isinstance(value, list):
            return {list}.union(*(kinds(item) for item in value))
        return {type(value)}

    assert kinds(PLAN.to_dict()) == {dict, list, str, int, float, bool, type(None)}


def test_a_plan_of_another_schema_is_refused() -> None:
    with pytest.raises(PlanFileError) as caught:
        Plan.from_dict({**PLAN.to_dict(), "schema_version": 2})
    assert str(caught.value) == (
        f"The plan that was given cannot be used as a plan: schema_version is 2, and this release reads "
        f"{SCHEMA_VERSION}. Plan again: leave plan= out."
    )
    with pytest.raises(PlanFileError, match=r"schema_version is null"):
        Plan.from_dict({})


def test_a_plan_without_a_field_is_refused_by_its_name() -> None:
    data = PLAN.to_dict()
    del data["budget"]
    with pytest.raises(PlanFileError) as caught:
        Plan.from_dict(data)
    assert str(caught.value) == (
        "The plan that was given cannot be used as a plan: the field budget is missing. Plan again: leave plan= out."
    )


def test_a_plan_with_an_unknown_field_is_refused_by_its_name() -> None:
    data = PLAN.to_dict()
    data["request"]["warmup"] = 3
    with pytest.raises(PlanFileError) as caught:
        Plan.from_dict(data)
    assert str(caught.value) == (
        "The plan that was given cannot be used as a plan: the field request.warmup is not known to this release "
        "(PlanRequest). Plan again: leave plan= out."
    )


def test_an_edited_plan_whose_parts_do_not_multiply_is_refused() -> None:
    data = PLAN.to_dict()
    data["forecast"]["candidate"]["split"]["effective_batch_size"] = 200
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_dict(data)
    assert str(caught.value) == (
        "The plan that was given cannot be used as a plan: forecast.candidate.split.effective_batch_size is 200, but "
        "must be 2 ranks x accumulate_grad_batches 3 x loader_batch_size 32 = 192. Plan again: leave plan= out."
    )


def test_a_file_without_a_mapping_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("- just\n- a list\n")
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path)
    assert str(caught.value) == (
        f"{path} cannot be used as a plan: it is a list of 2: ['just', 'a list'], but must be a mapping of the plan's "
        "fields. Plan again: leave plan= out."
    )


def test_sections_that_a_record_adds_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**PLAN.to_dict(), "measured": {"measured_step_seconds": 1.0}}))
    assert Plan.load(path) == PLAN


@pytest.mark.parametrize("value", [PLAN, PLAN.request, PLAN.device, PLAN.budget, PLAN.forecast, CANDIDATE, SPLIT])
def test_values_are_frozen(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


@pytest.mark.parametrize(
    "cls",
    [PlanRequest, BatchSplit, Candidate, MemoryBreakdown, Budget, Forecast, PassedOver, Choice, Plan, Measurement],
)
def test_values_are_made_by_keyword_only(cls: type) -> None:
    assert all(spec.kw_only for spec in dataclasses.fields(cls))


def test_the_plan_shows_its_candidate_and_split() -> None:
    assert PLAN.candidate is CANDIDATE
    assert PLAN.split is SPLIT
    assert PLAN.forecast.predicted_peak_bytes == 27  # the least capacity, 30, - 3, and more than the 21 of evaluation
    evaluating = dataclasses.replace(PLAN.forecast, evaluation_peak_bytes=34)
    assert (evaluating.predicted_peak_bytes, evaluating.predicted_training_peak_bytes) == (34, 27)
    assert PLAN.forecast.memory.bytes_per_parameter == 45 / 7


def test_a_model_without_parameters_has_no_bytes_per_parameter() -> None:
    memory = MemoryBreakdown(peak_allocated_bytes=1, peak_phase="forward", num_parameters=0)
    assert memory.bytes_per_parameter is None


# --- requests


def test_an_empty_request_is_valid() -> None:
    assert PlanRequest().effective_batch_size is None


@pytest.mark.parametrize("setting", ["effective_batch_size", "micro_batch_size", "max_length", "budget"])
@pytest.mark.parametrize("value", [0, -4, 2.0, "8", True])
def test_counts_are_whole_numbers_of_at_least_one(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(**{setting: value})
    assert str(caught.value) == f"{setting}={value!r} must be a whole number of at least 1, or be left out."


@pytest.mark.parametrize("value", [-1, 2.0, "1GiB", True])
def test_headroom_is_whole_bytes_and_may_be_none(value: Any) -> None:
    assert PlanRequest(headroom=0).headroom == 0
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(headroom=value)
    assert str(caught.value) == f"headroom={value!r} must be a whole number of at least 0, or be left out."


@pytest.mark.parametrize(
    ("setting", "choices"),
    [
        ("precision", "'auto', '32-true', 'bf16-mixed', '16-mixed', 'bf16-true'"),
        (
            "activation_checkpointing",
            "'auto', 'none', 'blocks', or a list of patterns of module names such as ['blocks.*']",
        ),
        ("optimizer_states", "'auto', 'as-configured', '8bit'"),
        ("offload", "'auto', 'never', 'optimizer', 'parameters'"),
        ("optimizer_implementation", "'auto', 'as-configured', 'single-tensor', 'foreach', 'fused'"),
        ("mode", "'apply', 'report', 'off'"),
        ("on_no_fit", "'raise', 'skip', 'value'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(setting: str, choices: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(**{setting: "bananas"})  # type: ignore[arg-type]
    assert str(caught.value) == f"{setting}='bananas' is not known. Choose one of: {choices}."


def test_one_profiled_step_is_too_few() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(num_profiled_steps=1)
    assert str(caught.value) == (
        "num_profiled_steps=1 is too few: optimizers create their states in the first step, so that only the second "
        "shows the whole peak. Use 2 or more."
    )


@pytest.mark.parametrize("value", [2.0, "2", True])
def test_profiled_steps_are_counted_in_whole_numbers(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(num_profiled_steps=value)
    assert str(caught.value) == f"num_profiled_steps={value!r} must be an int of at least 2."


@pytest.mark.parametrize("value", [0, -1.5, float("nan")])
def test_planning_takes_some_time(value: float) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(planning_seconds=value)
    assert str(caught.value) == f"planning_seconds={value!r} must be more than 0 seconds."


@pytest.mark.parametrize("value", ["30", True, (30,)])
def test_planning_seconds_are_a_number(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PlanRequest(planning_seconds=value)
    assert str(caught.value) == f"planning_seconds={value!r} must be a number of seconds, or be left out."


# --- splits


def test_a_split_that_does_not_multiply_back_is_refused() -> None:
    """Reported in deepspeedai/DeepSpeed#3982."""
    with pytest.raises(BatchArithmeticError) as caught:
        BatchSplit(effective_batch_size=100, ranks=3, loader_batch_size=32, slice_sizes=(32,))
    assert str(caught.value) == (
        "effective_batch_size=100 is not ranks 3 x accumulate_grad_batches 1 x loader batch 32 = 96."
    )


@pytest.mark.parametrize("slices", [(16, 15), (33, -1), (32, 0)])
def test_slices_that_do_not_add_up_are_refused(slices: tuple[int, ...]) -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        BatchSplit(effective_batch_size=32, loader_batch_size=32, slice_sizes=slices)
    assert str(caught.value) == f"slices {slices} do not add up to the loader's batch of 32 samples."


def test_the_micro_batch_is_the_largest_slice() -> None:
    assert SPLIT.micro_batch_size == 11
    assert SPLIT.num_slices == 3


@pytest.mark.parametrize(
    ("samples", "slices", "expected"),
    [(16, 3, (6, 5, 5)), (16, 1, (16,)), (16, 16, (1,) * 16), (7, 2, (4, 3)), (32, 7, (5, 5, 5, 5, 4, 4, 4))],
)
def test_balanced_slices_by_hand(samples: int, slices: int, expected: tuple[int, ...]) -> None:
    assert balanced_slices(samples, slices) == expected


@given(st.integers(1, 5000).flatmap(lambda samples: st.tuples(st.just(samples), st.integers(1, samples))))
def test_balanced_slices_add_up_differ_by_at_most_one_and_fall(case: tuple[int, int]) -> None:
    samples, num_slices = case
    slices = balanced_slices(samples, num_slices)
    assert len(slices) == num_slices
    assert sum(slices) == samples
    assert max(slices) - min(slices) <= 1
    assert list(slices) == sorted(slices, reverse=True)
    assert slices[0] == -(-samples // num_slices)  # no largest slice can be smaller


@pytest.mark.parametrize(("samples", "slices"), [(4, 5), (4, 0), (4, -1), (0, 1)])
def test_more_slices_than_samples_are_refused(samples: int, slices: int) -> None:
    with pytest.raises(BatchArithmeticError) as caught:
        balanced_slices(samples, slices)
    assert str(caught.value) == f"{samples} samples cannot be divided into {slices} slices of at least 1."


# --- candidates


@pytest.mark.parametrize(
    ("changes", "tier"),
    [
        ({}, 0),
        ({"precision": "bf16-mixed", "zero_gradients_early": True, "optimizer_implementation": "fused"}, 0),
        ({"activation_checkpointing": "blocks", "checkpointed_modules": ("a",)}, 0),
        ({"optimizer_states": "8bit"}, 1),
        ({"precision": "bf16-true"}, 2),
        ({"offload": "optimizer"}, 2),
        ({"offload": "parameters", "optimizer_states": "8bit"}, 3),
        ({"precision": "bf16-true", "optimizer_states": "8bit"}, 3),
    ],
)
def test_the_harm_tier_grows_with_every_harmful_lever(changes: dict[str, Any], tier: int) -> None:
    assert dataclasses.replace(PLAIN, **changes).harm_tier == tier


def test_labels_name_every_lever_that_is_on() -> None:
    assert PLAIN.label == "undivided batch"
    assert CANDIDATE.label == (
        "3 slices of <= 11, bf16-mixed, checkpointing 2 modules, gradients zeroed early, 8bit optimizer states, "
        "fused optimizer, offload optimizer, ZeRO-3 over 2"
    )


@pytest.mark.parametrize(("evaluation", "expected"), [(None, 100), (80, 100), (120, 120)])
def test_the_measured_peak_is_the_larger_of_training_and_evaluation(evaluation: int | None, expected: int) -> None:
    measurement = Measurement(
        measured_peak_allocated_bytes=100,
        measured_evaluation_peak_bytes=evaluation,
        measured_peak_rss_bytes=None,
        measured_step_seconds=1.0,
        profiled_steps=2,
    )
    assert measurement.measured_peak_bytes == expected
