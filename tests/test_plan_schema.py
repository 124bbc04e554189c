"""The strict reader: every valid plan comes back equal; whatever is no plan is refused by path, field and reason."""

from __future__ import annotations

import dataclasses
import random
import re
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memfit import plan as vocabulary
from lightning_memfit.errors import ConfigurationError, PlanFileError
from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.device import DeviceSpec, Neighbour
from lightning_memfit.measurement import Measurement, OperatorCost, OptimizerStatesMeasurement, TimedPlan
from lightning_memfit.plan import (
    CATEGORIES,
    PHASES,
    BatchSplit,
    Budget,
    Candidate,
    Choice,
    Forecast,
    MemoryBreakdown,
    PassedOver,
    Plan,
    PlanRequest,
    balanced_slices,
)
from lightning_memfit.plan_file import parse_plain, to_yaml
from lightning_memfit.plan_schema import load_measurement, read_plan
from lightning_memfit.report.record import write_record
from lightning_memfit.sharding import Engine, PolicyDtype, Sharding, Synchronisation, ZeroStage

# --- every plan

TEXT = st.text(max_size=12)
BYTES = st.integers(0, 2**63 - 1)
COUNT = st.integers(1, 40)
SECONDS = st.floats(0, 1e9)
NAMES = st.lists(TEXT, max_size=3).map(tuple)


def choice_of(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(literal))


@st.composite
def splits(draw: st.DrawFn) -> BatchSplit:
    ranks, accumulate, loader = draw(COUNT), draw(COUNT), draw(COUNT)
    return BatchSplit(
        effective_batch_size=ranks * accumulate * loader,
        ranks=ranks,
        loader_batch_size=loader,
        accumulate_grad_batches=accumulate,
        slice_sizes=balanced_slices(loader, draw(st.integers(1, loader))),
    )


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    engine = draw(choice_of(Engine))
    facts: dict[str, Any] = {}
    if engine == "deepspeed":
        facts = {"zero_stage": draw(choice_of(ZeroStage)), "reduce_bucket_elements": draw(st.none() | COUNT)}
    elif engine == "fsdp2":
        dtypes = st.none() | choice_of(PolicyDtype)
        facts = {"shard_groups": draw(NAMES), "reshard_after_forward": draw(st.booleans())}
        facts |= {name: draw(dtypes) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    else:
        facts = {"gradient_as_bucket_view": draw(st.booleans())}
    return Sharding(engine=engine, ranks=draw(COUNT), synchronisation=draw(choice_of(Synchronisation)), **facts)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    kind = draw(choice_of(vocabulary.Checkpointing))
    modules = () if kind == "none" else tuple(draw(st.lists(TEXT, min_size=1, max_size=3, unique=True)))
    return Candidate(
        precision=draw(choice_of(vocabulary.Precision)),
        activation_checkpointing=kind,
        checkpointed_modules=modules,
        split=draw(splits()),
        zero_gradients_early=draw(st.booleans()),
        optimizer_states=draw(choice_of(vocabulary.OptimizerStates)),
        optimizer_implementation=draw(choice_of(vocabulary.OptimizerImplementation)),
        offload=draw(choice_of(vocabulary.Offload)),
        sharding=draw(st.none() | shardings()),
    )


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    parts = draw(st.dictionaries(st.sampled_from((*CATEGORIES, "unattributed")), st.integers(0, 2**60)))
    peak = sum(parts.values()) if parts else draw(BYTES)
    flops = draw(st.none() | st.integers(0, 2**70))
    memory = MemoryBreakdown(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=draw(st.none() | BYTES),
        minimum_feasible_bytes=draw(st.none() | BYTES),
        by_category=parts,
        by_phase=draw(st.dictionaries(st.sampled_from(PHASES), BYTES)),
        peak_phase=draw(st.none() | st.sampled_from(PHASES)),
        peak_op=draw(st.none() | TEXT),
        peak_module=draw(st.none() | TEXT),
        num_parameters=draw(BYTES),
    )
    return Forecast(
        candidate=draw(candidates()),
        memory=memory,
        correction_bytes=draw(st.integers(-peak, 2**40)),
        method=draw(choice_of(vocabulary.Method)),
        flops=flops,
        recomputed_flops=None if flops is None else draw(st.none() | st.integers(0, flops)),
        predicted_step_seconds=draw(st.none() | SECONDS),
        predicted_evaluation_peak_bytes=draw(st.none() | BYTES),
        evaluation_peak_bytes=draw(st.none() | BYTES),
        confirmed=draw(st.booleans()),
        notes=draw(NAMES),
    )


@st.composite
def requests(draw: st.DrawFn, candidate: Candidate) -> PlanRequest:
    split = candidate.split
    words = st.sampled_from(("auto", "none", "blocks"))
    return PlanRequest(
        effective_batch_size=draw(st.sampled_from((None, split.effective_batch_size))),
        budget=draw(st.none() | st.integers(1, 2**50)),
        headroom=draw(st.none() | BYTES),
        precision=draw(st.sampled_from((None, candidate.precision))),
        activation_checkpointing=draw(words | NAMES),
        optimizer_states=draw(st.sampled_from(("auto", "as-configured", "8bit"))),
        offload=draw(st.sampled_from(("auto", "never", "optimizer", "parameters"))),
        micro_batch_size=draw(st.none() | st.integers(split.micro_batch_size, 100)),
        optimizer_implementation=draw(st.sampled_from(("auto", "as-configured", "single-tensor", "foreach", "fused"))),
        loss_weight=draw(TEXT),
        max_length=draw(st.none() | COUNT),
        allow_inexact_slicing=draw(st.booleans()),
        mode=draw(choice_of(vocabulary.Mode)),
        on_no_fit=draw(choice_of(vocabulary.OnNoFit)),
        num_profiled_steps=draw(st.integers(2, 5)),
        planning_seconds=draw(st.none() | st.floats(0.001, 1e6) | st.integers(1, 100)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    forecast = draw(forecasts())
    passed_over = st.builds(
        PassedOver,
        candidate=candidates(),
        predicted_peak_bytes=st.none() | BYTES,
        predicted_step_seconds=st.none() | SECONDS,
        reason=TEXT,
    )
    return Plan(
        request=draw(requests(forecast.candidate)),
        device=DeviceSpec(
            name=draw(TEXT),
            kind=draw(st.sampled_from(("cpu", "cuda"))),
            capacity_bytes=draw(BYTES),
            available_bytes=draw(BYTES),
            process_bytes=draw(BYTES),
            limit_bytes=draw(st.none() | BYTES),
            limit_source=draw(st.none() | TEXT),
            cores=draw(COUNT),
            supported_precisions=draw(NAMES),
        ),
        budget=Budget(
            budget_bytes=draw(BYTES),
            capacity_bytes=draw(BYTES),
            headroom_bytes=draw(BYTES),
            non_torch_bytes=draw(BYTES),
            reason=draw(TEXT),
        ),
        forecast=forecast,
        choices=tuple(draw(st.lists(st.builds(Choice, lever=TEXT, value=TEXT, reason=TEXT), max_size=2))),
        passed_over=tuple(draw(st.lists(passed_over, max_size=2))),
        notes=draw(NAMES),
        planned_batch=draw(TEXT),
        fingerprint=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


@given(plan=plans())
@settings(max_examples=60, deadline=None)
def test_every_plan_is_equal_after_a_round_trip_through_text(plan: Plan) -> None:
    text = to_yaml(plan.to_dict())
    for loader in {yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)}:
        assert read_plan(parse_plain(text, source="x", loader_class=loader)) == plan


@given(plan=plans())
@settings(max_examples=15, deadline=None)
def test_every_plan_is_equal_after_a_round_trip_through_a_file(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert Plan.load(plan.save(Path(folder) / "plan.yaml")) == plan


def test_numbers_of_other_libraries_are_saved_as_numbers(tmp_path: Path) -> None:
    budget = dataclasses.replace(PLAN.budget, budget_bytes=np.int64(7))
    plan = dataclasses.replace(PLAN, budget=budget)
    loaded = Plan.load(plan.save(tmp_path / "plan.yaml"))
    assert loaded == plan
    assert type(loaded.budget.budget_bytes) is int


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "plan.yaml")
    before = path.read_text()
    broken = dataclasses.replace(PLAN, forecast=dataclasses.replace(PLAN.forecast, predicted_step_seconds=float("nan")))
    with pytest.raises(PlanFileError) as caught:
        broken.save(path)
    assert str(caught.value) == (
        f"The plan to be saved as {path} cannot be used as a plan: forecast.predicted_step_seconds is nan, but must be "
        "a number from 0 to 2^63 - 1. Plan again: leave plan= out."
    )
    assert path.read_text() == before


# --- one wrong field at a time

PLAN = Plan(
    request=PlanRequest(effective_batch_size=32, micro_batch_size=6, precision="bf16-mixed"),
    device=DeviceSpec(name="Example 9000", kind="cpu", capacity_bytes=9, available_bytes=8, process_bytes=1, cores=2),
    budget=Budget(budget_bytes=900, capacity_bytes=1000, headroom_bytes=50, non_torch_bytes=50, reason="as given"),
    forecast=Forecast(
        candidate=Candidate(
            precision="bf16-mixed",
            activation_checkpointing="blocks",
            checkpointed_modules=("blocks.0", "blocks.1"),
            split=BatchSplit(
                effective_batch_size=32, loader_batch_size=16, accumulate_grad_batches=2, slice_sizes=(6, 5, 5)
            ),
        ),
        memory=MemoryBreakdown(
            peak_allocated_bytes=100,
            by_category={"parameters": 60, "activations": 40},
            by_phase={"forward": 90, "backward": 100},
            peak_phase="backward",
            peak_op="aten.mm.default",
            num_parameters=15,
        ),
        correction_bytes=-3,
        flops=1000,
        recomputed_flops=100,
        predicted_step_seconds=0.25,
    ),
    choices=(Choice(lever="precision", value="bf16-mixed", reason="as given"),),
    passed_over=(
        PassedOver(
            candidate=Candidate(
                precision="bf16-mixed",
                split=BatchSplit(
                    effective_batch_size=32, loader_batch_size=16, accumulate_grad_batches=2, slice_sizes=(16,)
                ),
            ),
            predicted_peak_bytes=1200,
            predicted_step_seconds=0.2,
            reason="does not fit: 300 B over the budget",
        ),
    ),
    notes=("the last window is short",),
    fingerprint={"model": "Net of 3 modules [0123456789ab]", "loader batch size": "16"},
)
Keys = tuple[str | int, ...]


def changed(path: Keys, value: Any) -> dict[str, Any]:
    """The plan's data with another value at one place."""
    data: Any = PLAN.to_dict()
    *parents, last = path
    inner = data
    for key in parents:
        inner = inner[key]
    inner[last] = deepcopy(value)
    return data  # type: ignore[no-any-return]


def dotted(path: Keys) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if key.isidentifier() else f".{key!r}"
    return text.lstrip(".")


def keys(text: str) -> Keys:
    return tuple(int(key) if key.isdigit() else key for key in text.split("/"))


COUNTS = "a whole number from 1 to 2^63 - 1"
BYTES_WORDS = "a whole number from 0 to 2^63 - 1"
SECONDS_WORDS = "a number from 0 to 2^63 - 1"
SPLIT = "forecast/candidate/split"


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("budget/budget_bytes", True, f"is true, but must be {BYTES_WORDS}"),
        ("budget/budget_bytes", -1, f"is -1, but must be {BYTES_WORDS}"),
        ("budget/budget_bytes", 1.0, f"is 1.0, but must be {BYTES_WORDS}"),
        ("budget/budget_bytes", "900", f"is '900', but must be {BYTES_WORDS}"),
        ("budget/budget_bytes", None, f"is null, but must be {BYTES_WORDS}"),
        ("budget/budget_bytes", 2**63, f"is 9223372036854775808, but must be {BYTES_WORDS}"),
        ("budget/reason", 7, "is 7, but must be text"),
        ("budget", [], "is a list of 0: [], but must be a mapping"),
        ("device/cores", 0, f"is 0, but must be {COUNTS}"),
        ("device/kind", "tpu", "is 'tpu', but must be one of 'cpu', 'cuda'"),
        ("device/limit_bytes", -2, f"is -2, but must be {BYTES_WORDS}"),
        ("device/limit_bytes", "x", f"is 'x', but must be {BYTES_WORDS} or null"),
        ("request/precision", "fp8", "is 'fp8', but must be one of '32-true', 'bf16-mixed', '16-mixed', 'bf16-true'"),
        ("request/num_profiled_steps", 1, "is 1, but must be a whole number from 2 to 2^63 - 1"),
        ("request/planning_seconds", float("inf"), f"is inf, but must be {SECONDS_WORDS}"),
        ("request/activation_checkpointing", "some", "is 'some', but must be one of 'auto', 'none', 'blocks'"),
        ("request/activation_checkpointing", 3, "is 3, but must be one of 'auto', 'none', 'blocks' or a list of which "
         "each entry is text"),
        ("forecast/confirmed", 1, "is 1, but must be true or false"),
        ("forecast/method", "guessed", "is 'guessed', but must be one of 'traced', 'extrapolated', 'floor'"),
        ("forecast/flops", 2**101, "is 2535301200456458802993406410752, but must be a whole number from 0 to 2^100"),
        ("forecast/recomputed_flops", 1001, "is 1001, but must be null or a part of flops, which is 1000"),
        ("forecast/correction_bytes", -101, "is -101, but must be at least -100, so that the corrected peak is not "
         "below 0"),
        ("forecast/predicted_step_seconds", float("nan"), f"is nan, but must be {SECONDS_WORDS}"),
        ("forecast/notes", "just one", "is 'just one', but must be a list of which each entry is text"),
        ("forecast/candidate/precision", "32-true", "is '32-true', but must be the 'bf16-mixed' of request.precision"),
        ("forecast/candidate/checkpointed_modules", [], "is a list of 0: [], but must be names of modules, since "
         "activation_checkpointing is 'blocks'"),
        ("forecast/candidate/checkpointed_modules", ["a", "a"], "is a list of 2: ['a', 'a'], but must be names that "
         "occur once each"),
        (f"{SPLIT}/ranks", 0, f"is 0, but must be {COUNTS}"),
        (f"{SPLIT}/slice_sizes", [], "is a list of 0: [], but must be sizes that add up to loader_batch_size 16; they "
         "add up to 0"),
        (f"{SPLIT}/slice_sizes", [6, 5, 4], "is a list of 3: [6, 5, 4], but must be sizes that add up to "
         "loader_batch_size 16; they add up to 15"),
        (f"{SPLIT}/slice_sizes", [5, 5, 6], "is a list of 3: [5, 5, 6], but must be sizes with the largest first"),
        (f"{SPLIT}/slice_sizes", [8, 8], "is a list of 2: [8, 8], but must be at most the 6 of "
         "request.micro_batch_size each"),
        (f"{SPLIT}/effective_batch_size", 48, "is 48, but must be 1 ranks x accumulate_grad_batches 2 x "
         "loader_batch_size 16 = 32"),
        ("forecast/memory/by_category", {"parameters": 60}, "is a mapping of 1 entries, but must be empty, or bytes "
         "that add up to peak_allocated_bytes 100; they add up to 60"),
        ("forecast/memory/peak_phase", "warm-up", "is 'warm-up', but must be one of 'forward', 'zero_grad', "
         "'backward', 'gradient_clipping', 'optimizer_step', 'evaluation'"),
        ("choices", {}, "is a mapping of 0 entries, but must be a list of which each entry is a mapping"),
        ("fingerprint", [["model", "x"]], "is a list of 1: [a list of 2], but must be a mapping"),
        ("planned_batch", None, "is null, but must be text"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_path_value_and_what_it_must_be(path: str, value: Any, found: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        read_plan(changed(keys(path), value), source="plan.yaml")
    field = dotted(keys(path))
    assert str(caught.value) == f"plan.yaml cannot be used as a plan: {field} {found}. Plan again: leave plan= out."


def test_a_split_that_is_not_what_was_asked_for_is_refused_as_the_split() -> None:
    with pytest.raises(PlanFileError) as caught:
        read_plan(changed(keys("request/effective_batch_size"), 48), source="plan.yaml")
    assert str(caught.value) == (
        "plan.yaml cannot be used as a plan: forecast.candidate.split.effective_batch_size is 32, but must be the 48 "
        "of request.effective_batch_size. Plan again: leave plan= out."
    )


@pytest.mark.parametrize("path", ["budget/budget_bytes", "notes/0", "request"])
def test_a_number_too_long_to_print_is_refused(path: str) -> None:
    with pytest.raises(PlanFileError, match=r" is a number of 19932 bits, but must be "):
        read_plan(changed(keys(path), 10**6000))  # 6000 x log2(10) = 19931.6


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{SPLIT}/slice_sizes/1", 0, f"forecast.candidate.split.slice_sizes[1] is 0, but must be {COUNTS}"),
        ("passed_over/0/predicted_peak_bytes", -5, "passed_over[0].predicted_peak_bytes is -5, but must be "
         f"{BYTES_WORDS}"),
        ("notes/0", 5, "notes[0] is 5, but must be text"),
        ("forecast/memory/by_category/parameters", -60, "forecast.memory.by_category.parameters is -60, but must be "
         f"{BYTES_WORDS}"),
        ("forecast/memory/by_category/weights", 0, "a name in forecast.memory.by_category is 'weights', but must be "
         "one of 'parameters', 'buffers', 'gradients', 'optimizer_states', 'activations', 'temporaries', 'inputs', "
         "'callbacks', 'communication', 'unattributed'"),
        ("fingerprint/loader batch size", 16, "fingerprint.'loader batch size' is 16, but must be text"),
        ("choices/0", "fast", "choices[0] is 'fast', but must be a mapping"),
        ("request/planning_seconds", 0, "request is refused: planning_seconds=0.0 must be more than 0 seconds."),
        ("warmth", 1, "the field warmth is not known to this release (Plan)"),
        (f"{SPLIT}/{'y' * 80}", 1, f"the field forecast.candidate.split.'{'y' * 27}...{'y' * 28}' is not known to this "
         "release (BatchSplit)"),
    ],
)  # fmt: skip
def test_what_is_wrong_inside_a_list_or_mapping_is_told_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        read_plan(changed(keys(path), value), source="plan.yaml")
    stop = "" if message.endswith(".") else "."
    assert str(caught.value) == f"plan.yaml cannot be used as a plan: {message}{stop} Plan again: leave plan= out."


def places(value: Any, at: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every place in plain data, with what stands there."""
    if at:
        yield at, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*at, key))


OF_GPUS = {
    "key", "is_present", "uuid", "compute_capability", "multiprocessors", "total_bytes", "context_low_bytes",
    "context_high_bytes",
    "neighbours", "mig_profile", "memory_fraction", "allocator_settings", "spills", "unified_memory",
    "bandwidth_bytes_per_second", "link_bytes_per_second", "peak_flops", "attention_backends", "unknowns",
}  # fmt: skip
OF_SEVERAL_DEVICES = {"exchanged_bytes", "seconds_count_exchanges", "host_bytes"}


def fields_of_records() -> list[Keys]:
    free = ("by_category", "by_phase", "fingerprint")
    return [
        path for path, _ in places(PLAN.to_dict())
        if isinstance(path[-1], str) and not (len(path) > 1 and path[-2] in free)
        and not (path[0] == "device" and path[-1] in OF_GPUS) and "sharding" not in path
        and path[-1] not in OF_SEVERAL_DEVICES
    ]  # fmt: skip


def test_a_plan_from_before_gpus_were_described_is_read_as_it_was() -> None:
    data = PLAN.to_dict()
    for name in OF_GPUS:
        del data["device"][name]
    assert read_plan(data) == PLAN


def test_a_plan_from_before_several_devices_is_read_as_one_for_a_single_device() -> None:
    data = dataclasses.replace(PLAN, passed_over=()).to_dict()
    del data["forecast"]["candidate"]["sharding"]
    for name in OF_SEVERAL_DEVICES:
        del data["forecast"][name]
    assert read_plan(data).candidate == dataclasses.replace(PLAN.candidate, sharding=None)


def test_settings_of_another_engine_are_refused_with_the_engine() -> None:
    data = PLAN.to_dict()
    data["forecast"]["candidate"]["sharding"] = {"engine": "ddp", "ranks": 2, "shard_groups": ["blocks.0"]}
    with pytest.raises(PlanFileError, match=r"shard_groups=.* are a setting of FSDP2, not of ddp"):
        read_plan(data)


def test_a_plan_for_a_gpu_comes_back_as_it_was_saved() -> None:
    gpu = dataclasses.replace(
        catalog_device("a100-40gb"),
        neighbours=(Neighbour(pid=7, held_bytes=None), Neighbour(pid=8, held_bytes=5)),
        memory_fraction=0.5,
        mig_profile="1g.5gb",
        unknowns=("rates",),
    )
    plan = dataclasses.replace(PLAN, device=gpu)
    assert read_plan(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("compute_capability", [8], "is a list of 1: [8], but must be two numbers, major and minor"),
        ("context_high_bytes", 4, "is 4, but must be at least the 5 of context_low_bytes"),
        ("attention_backends", ["fast"], "[0] is 'fast', but must be one of 'flash', 'efficient', 'cudnn', 'math'"),
        ("peak_flops", {"fp4": 1}, "a name in device.peak_flops is 'fp4', but must be one of"),
    ],
)
def test_contradictions_about_a_gpu_are_refused(field: str, value: Any, found: str) -> None:
    data = dataclasses.replace(PLAN, device=dataclasses.replace(PLAN.device, context_low_bytes=5)).to_dict()
    data["device"]["context_high_bytes"] = 6
    data["device"][field] = value
    with pytest.raises(PlanFileError, match=re.escape(found)):
        read_plan(data)


@pytest.mark.parametrize("path", fields_of_records(), ids=dotted)
def test_no_field_may_be_missing(path: Keys) -> None:
    data = PLAN.to_dict()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    words = "schema_version is null" if path == ("schema_version",) else f"the field {dotted(path)} is missing"
    with pytest.raises(PlanFileError, match=re.escape(words)):
        read_plan(data)


WRONG = (None, True, -1, 0.5, 2**80, -(2**80), float("nan"), float("-inf"), "text", [], [None], {}, {"a": {}}, b"x")


@pytest.mark.parametrize("path", [path for path, _ in places(PLAN.to_dict())], ids=dotted)
def test_another_type_at_any_place_is_refused_there_or_is_valid(path: Keys) -> None:
    top = dotted(path[:1])
    refused = 0
    for value in WRONG:
        data = changed(path, value)
        try:
            plan = read_plan(data, source="plan.yaml")
        except ConfigurationError as error:
            assert str(error).startswith("plan.yaml cannot be used as a plan: ")
            assert top in str(error) or "forecast.candidate" in str(error)  # what contradicts the request is told there
            refused += 1
        else:
            assert read_plan(plan.to_dict()) == plan
            assert plan.to_dict() == data
    assert refused >= len(WRONG) - 5


# --- hostile, corrupt and outdated files

EVIL = (
    "!!python/object/apply:os.system ['touch {marker}']",
    "!!python/object/apply:subprocess.check_output [[touch, '{marker}']]",
    "!!python/object/new:os.system ['touch {marker}']",
    "!!python/object/apply:builtins.exec [\"open('{marker}', 'w').close()\"]",
    "!!python/object/apply:builtins.eval [\"open('{marker}', 'w').close()\"]",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!!python/object:lightning_memfit.plan.Plan {{}}",
    "!!python/tuple [1]",
    "!!binary aGVsbG8=",
    "!!set {{a}}",
    "!!timestamp 2001-01-01",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {marker}']",
    "&bomb [*bomb, *bomb]",
    "*bomb",
    "2001-01-01",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{",
    "9" * 5000,
    ".nan",
    "-.inf",
    "0b_",
    '"\\U00110000"',
    "{{<<: {{a: 1}}}}",
    "'\n---\n'",
)
SLOTS = ("budget_bytes: 900", "effective_batch_size: 32", "name: Example 9000", "method: traced", "confirmed: true")


def hostile(text: str, marker: Path) -> Iterator[tuple[str, bytes]]:
    """Files in which a value was replaced by something that is no plain value of a plan."""
    for slot in SLOTS:
        assert slot in text
        name = slot.partition(":")[0]
        for evil in EVIL:
            yield f"{name}: {evil[:40]}", text.replace(slot, f"{name}: {evil.format(marker=marker)}", 1).encode()


def corrupt(text: str, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Files that a disk or a hand damaged: bits flipped, ends cut off, lines lost, doubled, indented or exchanged."""
    content, lines = text.encode(), text.splitlines(keepends=True)
    for number in range(150):
        flipped = bytearray(content)
        for _ in range(1 + number % 3):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        yield f"bits {number}", bytes(flipped)
    for number in range(40):
        yield f"cut {number}", content[: rng.randrange(len(content) - 60)]
    for number in range(60):
        damaged, at = list(lines), rng.randrange(len(lines))
        match number % 4:
            case 0:
                del damaged[at]
            case 1:
                damaged.insert(at, damaged[at])
            case 2:
                damaged[at] = f"  {damaged[at]}"
            case _:
                other = rng.randrange(len(lines))
                damaged[at], damaged[other] = damaged[other], damaged[at]
        yield f"lines {number}", "".join(damaged).encode()
    for number in range(20):
        yield f"noise {number}", rng.randbytes(200)


def outdated(data: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Files of other releases."""
    for version in (0, 2, 99, -1, 1.0, True, "1", None, [1], 10**30):
        yield f"schema_version {version!r}", to_yaml({**data, "schema_version": version}).encode()
    for path in fields_of_records()[::4]:
        inner = data = deepcopy(PLAN.to_dict())
        for key in path[:-1]:
            inner = inner[key]  # type: ignore[index]
        inner[f"{path[-1]}_of_a_later_release"] = inner[path[-1]]  # type: ignore[index]
        yield f"later {dotted(path)}", to_yaml(data).encode()


def broken_files(marker: Path) -> list[tuple[str, bytes]]:
    data = PLAN.to_dict()
    text = to_yaml(data)
    return [*hostile(text, marker), *corrupt(text, random.Random(0)), *outdated(data)]


def test_of_400_hostile_corrupt_and_outdated_files_none_is_executed_and_each_is_refused_or_valid(
    tmp_path: Path,
) -> None:
    marker, path = tmp_path / "executed", tmp_path / "plan.yaml"
    refused, still_valid = {}, []
    variants = broken_files(marker)
    for name, content in variants:
        path.write_bytes(content)
        try:
            plan = Plan.load(path)  # whatever else is raised fails the test
        except PlanFileError as error:
            message = str(error)
            assert message.startswith(str(path)), name
            assert re.search(r" is | has | are |cannot be read", message.removeprefix(str(path))), name
            assert len(message) < 1000, name
            refused[name] = message
        else:
            assert read_plan(plan.to_dict()) == plan, name
            still_valid.append(name)
    assert not marker.exists()
    assert len({content for _, content in variants}) > 400
    # A flipped bit in a name or a note makes another name or note, and two fields may stand in another order.
    assert len(refused) > 400
    assert {name.split()[0] for name in still_valid} <= {"bits", "lines"}


def test_without_the_faster_parser_they_are_refused_too(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    refused = 0
    for _, content in broken_files(marker)[::4]:
        text = content.decode("utf-8", "replace")
        try:
            plan = read_plan(parse_plain(text, source="plan.yaml", loader_class=yaml.SafeLoader), source="plan.yaml")
        except PlanFileError:
            refused += 1
        else:
            assert read_plan(plan.to_dict()) == plan
    assert refused > 100
    assert not marker.exists()


@pytest.mark.parametrize("evil", [EVIL[0], EVIL[3]])
def test_the_marker_of_the_hostile_files_is_made_by_a_reader_that_executes(tmp_path: Path, evil: str) -> None:
    # Otherwise its absence would prove nothing.
    marker = tmp_path / "executed"
    yaml.unsafe_load(f"a: {evil.format(marker=marker)}")
    assert marker.exists()


# --- what a run's record holds beside the plan

MEASUREMENT = Measurement(
    measured_peak_allocated_bytes=97,
    measured_evaluation_peak_bytes=120,
    measured_peak_rss_bytes=None,
    measured_step_seconds=0.5,
    profiled_steps=2,
    costliest_ops=(OperatorCost(name="aten::mm", self_seconds=0.25, calls=8),),
    timed_plans=(
        TimedPlan(
            candidate=PLAN.candidate,
            predicted_step_seconds=0.25,
            measured_step_seconds=None,
            measured_peak_allocated_bytes=None,
        ),
    ),
    optimizer_states=OptimizerStatesMeasurement(
        optimizer="bitsandbytes.optim.adamw.AdamW8bit",
        quantised_parameters=8192,
        quantised_bytes=16640,
        kept_parameters=10,
        kept_bytes=80,
        saved_bytes=48896,
        kept_reason="smaller than 4096 elements",
    ),
)


def test_a_record_is_read_as_the_plan_and_what_was_measured(tmp_path: Path) -> None:
    path = Path(write_record(PLAN, MEASUREMENT, tmp_path))
    assert Plan.load(path) == PLAN
    assert load_measurement(path) == MEASUREMENT


def test_without_a_warm_up_nothing_was_measured(tmp_path: Path) -> None:
    assert load_measurement(Path(write_record(PLAN, None, tmp_path))) is None
    assert load_measurement(PLAN.save(tmp_path / "saved.yaml")) is None


def test_a_record_from_before_gpus_were_measured_is_read(tmp_path: Path) -> None:
    path = Path(write_record(PLAN, MEASUREMENT, tmp_path))
    lines = path.read_text().splitlines(keepends=True)
    older = [line for line in lines if "measured_peak_reserved" not in line and "measured_device_total" not in line]
    assert len(older) == len(lines) - 2
    path.write_text("".join(older))
    assert load_measurement(path) == MEASUREMENT


def test_a_wrong_measurement_is_refused_by_its_field(tmp_path: Path) -> None:
    path = Path(write_record(PLAN, MEASUREMENT, tmp_path))
    path.write_text(path.read_text().replace("calls: 8", "calls: -8"))
    with pytest.raises(PlanFileError) as caught:
        load_measurement(path)
    assert str(caught.value) == (
        f"{path} cannot be used as a plan: measured.costliest_ops[0].calls is -8, but must be {BYTES_WORDS}. "
        "Plan again: leave plan= out."
    )
