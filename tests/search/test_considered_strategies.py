"""Which ways to spread training are considered, on one device and on several; and what the search makes of offload."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, MemoryBreakdown, Plan, PlanRequest
from lightning_memfit.search.levers import search_space
from lightning_memfit.search.planner import Evaluate, Found, search_plan
from lightning_memfit.search.strategies import ONE_DEVICE, Considered, considered_strategies

SIZES = (1000, 16)
OBSTACLE = "two optimizers step in turn"
DEVICE = DeviceSpec(name="a GPU", kind="cuda", capacity_bytes=2**40, available_bytes=2**40, process_bytes=0)


def considered(offload: Any = "auto", *, devices: int = 1, kind: str = "cuda", **more: Any) -> Considered:
    states = more.pop("states", "auto")
    request = PlanRequest(offload=offload, optimizer_states=states)
    return considered_strategies(request, num_devices=devices, device_kind=kind, parameter_elements=SIZES, **more)


def names(found: Considered) -> list[str | None]:
    return [spread.name for spread in found.spreads]


STAGE_3 = "DeepSpeedStrategy(stage=3, offload_optimizer=True)"  # Lightning has no name for it
OPTIMIZER = ["deepspeed_stage_2_offload", STAGE_3]
PARAMETERS = "deepspeed_stage_3_offload"
OFFLOADED = [*OPTIMIZER, PARAMETERS]


def test_on_one_gpu_the_host_comes_behind_the_plain_run() -> None:
    found = considered("auto")
    assert names(found) == [None, *OFFLOADED] and not found.given and not found.withheld
    sharding = found.spreads[1].sharding
    assert sharding is not None and sharding.ranks == 1 and sharding.overlap_communication
    assert sharding.reduce_bucket_elements == 13_107_200 and "13,107,200 elements" in found.bucket_reasons[13_107_200]


def test_on_one_gpu_the_host_is_withheld_from_who_did_not_ask() -> None:
    found = considered("never")
    assert found.spreads == ONE_DEVICE.spreads and [spread.name for spread in found.withheld] == OFFLOADED
    for nothing_to_withhold in (
        considered("never", kind="cpu"),
        considered("never", zero_obstacle=OBSTACLE),
        considered("never", states="8bit"),
    ):
        assert nothing_to_withhold is ONE_DEVICE


def test_who_asks_for_the_host_gets_nothing_else() -> None:
    for devices in (1, 2):
        assert names(considered("optimizer", devices=devices)) == OPTIMIZER
        assert names(considered("parameters", devices=devices)) == [PARAMETERS]
        assert names(considered("auto", devices=devices, strategy="deepspeed_stage_2_offload")) == OPTIMIZER[:1]
        assert names(considered("optimizer", devices=devices, strategy="deepspeed_stage_2_offload")) == OPTIMIZER[:1]
        assert names(considered("optimizer", devices=devices, strategy="deepspeed_stage_3")) == [STAGE_3]
        assert names(considered("parameters", devices=devices, strategy="deepspeed_stage_3")) == [PARAMETERS]


@pytest.mark.parametrize("offload", ["auto", "parameters"])
@pytest.mark.parametrize("devices", [1, 2])
def test_lightnings_name_of_stage_3_keeps_optimizer_and_parameters_on_the_host(offload: str, devices: int) -> None:
    (spread,) = considered(offload, devices=devices, strategy=PARAMETERS).spreads
    assert spread.offload == "parameters" and spread.name == PARAMETERS
    registered = pytest.importorskip("lightning.pytorch.strategies", reason="Lightning is not installed")
    kept = registered.StrategyRegistry[PARAMETERS]["init_params"]
    assert (kept["stage"], kept["offload_optimizer"], kept["offload_parameters"]) == (3, True, True)
    other = registered.StrategyRegistry[OPTIMIZER[0]]["init_params"]
    assert other["offload_optimizer"] and "offload_parameters" not in other


def test_parameters_come_behind_the_optimizer() -> None:
    offloads = [spread.offload for spread in considered("auto", devices=2).spreads]
    assert [each for each in offloads if each != "never"] == ["optimizer", "optimizer", "parameters"]
    assert names(considered("never", devices=2))[-1] == "fsdp2" and set(OFFLOADED).isdisjoint(
        names(considered("never", devices=2))
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "cpu"}, "offload to the host: the device is the host, and Lightning's DeepSpeedStrategy runs on"),
        ({"zero_obstacle": OBSTACLE}, f"offload to the host: {OBSTACLE}"),
        ({"states": "8bit"}, "offload to the host: DeepSpeed makes the optimizer's parameters anew"),
    ],
)
def test_where_it_cannot_be_had_it_is_left_out_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    found = considered("auto", **settings)
    assert found.spreads == ONE_DEVICE.spreads
    (left_out,) = found.left_out
    assert left_out.startswith(reason)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"offload": "optimizer", "kind": "cpu"},
            r"^offload='optimizer' cannot be had on a CPU: Lightning's DeepSpeedStrategy runs on CUDA GPUs alone, and "
            r"the host is the device\. Leave it out, or plan for a GPU\.$",
        ),
        (
            {"offload": "auto", "kind": "cpu", "strategy": "deepspeed_stage_2_offload"},
            r"^strategy='deepspeed_stage_2_offload' cannot be had on a CPU: .* and the host is the device\. Leave it",
        ),
        (
            {"offload": "optimizer", "kind": "cpu", "devices": 2},
            r"^offload='optimizer' cannot be had on a CPU: .* Leave it out, or plan for a GPU\.$",
        ),
        ({"offload": "optimizer", "zero_obstacle": OBSTACLE}, rf"^offload='optimizer' cannot be had: {OBSTACLE}$"),
        (
            {"offload": "optimizer", "states": "8bit"},
            r"^optimizer_states='8bit' cannot be had with offload='optimizer': .* Choose offload='never', or",
        ),
        (
            {"offload": "auto", "strategy": "deepspeed_stage_2"},
            r"^strategy='deepspeed_stage_2' is planned for several devices, and num_devices=1\. Give num_devices=2 or "
            r"more, or leave it out; for one there are 'deepspeed_stage_2_offload' and 'deepspeed_stage_3_offload'\.$",
        ),
        (
            {"offload": "optimizer", "strategy": "ddp", "devices": 2},
            r"^strategy='ddp' keeps everything on the devices, and offload='optimizer' asks for the host\. Leave one",
        ),
        (
            {"offload": "parameters", "strategy": "deepspeed_stage_2_offload", "devices": 2},
            r"^strategy='deepspeed_stage_2_offload' with offload='parameters': DeepSpeed divides parameters, .* in "
            r"stage 3 alone\. Choose 'deepspeed_stage_3_offload', or offload='optimizer'\.$",
        ),
        (
            {"offload": "optimizer", "strategy": PARAMETERS},
            r"^strategy='deepspeed_stage_3_offload' keeps the parameters on the host too, as Lightning's does, and "
            r"offload='optimizer' the optimizer alone\. Leave one out, or give strategy='deepspeed_stage_3' with it",
        ),
        (
            {"offload": "parameters", "strategy": "fsdp2", "devices": 2},
            r"^strategy='fsdp2' keeps everything on the devices, and offload='parameters' asks for the host\.",
        ),
        ({"offload": "parameters", "kind": "cpu"}, r"^offload='parameters' cannot be had on a CPU: .* host is the"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        considered(**settings)


def evaluate(candidate: Candidate) -> Forecast:
    """1000 bytes and 100 for each sample; ZeRO-2 holds 200 with 10 for each, ZeRO-3 150, and they look faster.

    With the parameters on the host ZeRO-3 holds 50 and looks fastest, and the host has 1000 more.
    """
    samples, offloads = candidate.split.micro_batch_size, candidate.offload != "never"
    stage = candidate.sharding.zero_stage if candidate.sharding is not None else None
    fixed, each = {None: (1000, 100), 2: (200, 10), 3: (150, 10)}[stage]
    seconds = {None: 2.0, 2: 1.0, 3: 0.9}[stage] * (1 + 0.01 * candidate.split.num_slices)
    if candidate.offload == "parameters":
        fixed, seconds = 50, seconds / 2
    peak = fixed + each * samples
    return Forecast(
        candidate=candidate,
        memory=MemoryBreakdown(
            peak_allocated_bytes=peak, by_category={"activations": peak}, peak_phase="backward", num_parameters=1
        ),
        flops=1000,
        recomputed_flops=0,
        predicted_step_seconds=seconds,
        exchanged_bytes=0 if offloads else None,
        host_bytes=(4000 if candidate.offload == "parameters" else 3000) if offloads else None,
    )


def planned(budget: int, offload: Any, *, host: int | None = None, precision: Any = "32-true") -> Plan:
    return search(budget, offload, evaluate, host=host, precision=precision).plan


def search(
    budget: int,
    offload: Any,
    evaluate: Evaluate,
    *,
    host: int | None = None,
    precision: Any = "32-true",
    contenders: int = 1,
) -> Found:
    request = PlanRequest(offload=offload, precision=precision)
    whole = BatchSplit(effective_batch_size=16, loader_batch_size=16, slice_sizes=(16,))
    space = search_space(
        request,
        whole,
        blocks=(),
        strategies=considered_strategies(request, num_devices=1, device_kind="cuda", parameter_elements=SIZES),
        host_budget_bytes=host,
    )
    formed = Budget(budget_bytes=budget, capacity_bytes=2**40, headroom_bytes=0, non_torch_bytes=0, reason="as given")
    return search_plan(request, DEVICE, formed, space, evaluate, contenders=contenders)


def reason(plan: Plan, lever: str) -> str:
    return next(choice.reason for choice in plan.choices if choice.lever == lever)


def test_the_host_is_used_where_nothing_fits_without_and_the_plan_says_what_that_needs() -> None:
    plan = planned(1000, "auto")  # a sample needs 1100
    assert plan.candidate.offload == "optimizer" and plan.candidate.harm_tier == 2 and plan.split.num_slices == 1
    assert plan.candidate.sharding is not None and plan.candidate.sharding.zero_stage == 2  # 10 % are not enough
    assert reason(plan, "strategy") == "one device without offload needs 1.074 KiB at the least"
    assert reason(plan, "offload") == (
        "tier 2: nothing fits on the GPU alone; the optimizer keeps 2.930 KiB in the host's memory, how much the host "
        "has is not known"
    )
    assert reason(plan, "optimizer_implementation") == "the host steps, with an optimizer of DeepSpeed's"


def test_stage_3_is_taken_where_stage_2_does_not_fit() -> None:
    plan = planned(200, "auto")
    assert plan.candidate.sharding is not None and plan.candidate.sharding.zero_stage == 3


NOT_LOOKED_AT = "not forecast: a plan that keeps less on the host fits already"


def told_of_parameters(plan: Plan) -> list[str]:
    return [each.reason for each in plan.passed_over if each.candidate.offload == "parameters"]


@pytest.mark.parametrize(("budget", "looked_at"), [(1000, False), (200, False), (159, True), (50, True)])
def test_parameters_on_the_host_are_forecast_only_where_nothing_else_fits(budget: int, looked_at: bool) -> None:
    asked: list[Candidate] = []

    def heard(candidate: Candidate) -> Forecast:
        asked.append(candidate)
        return evaluate(candidate)

    try:
        found = search(budget, "auto", heard, contenders=3)
    except NoFeasiblePlanError as error:
        assert budget == 50 and "optimizer and parameters on the host (60 B)" in str(error)
    else:
        assert all((each.candidate.offload == "parameters") == looked_at for each in found.contenders)
    assert any(candidate.offload == "parameters" for candidate in asked) == looked_at


def test_parameters_leave_only_where_nothing_fits_with_the_optimizer_alone_on_the_host() -> None:
    with_optimizer = planned(200, "auto")  # ZeRO-3 with slices; the parameters' would fit, undivided and faster
    assert with_optimizer.candidate.offload == "optimizer"
    assert told_of_parameters(with_optimizer) == [NOT_LOOKED_AT]
    plan = planned(159, "auto")  # one sample needs 160 in ZeRO-3
    assert plan.candidate.offload == "parameters" and plan.candidate.harm_tier == 2
    assert reason(plan, "offload") == (
        "tier 2: nothing fits on the GPU alone, or with the optimizer alone on the host; optimizer and parameters keep "
        "3.906 KiB in the host's memory, how much the host has is not known"
    )
    assert reason(planned(200, "parameters"), "offload").startswith("tier 2: as given; optimizer and parameters keep")


def test_what_fits_without_the_host_is_the_plan_that_it_was() -> None:
    asked, plain = planned(1400, "auto"), planned(1400, "never")
    assert asked.candidate == plain.candidate and asked.choices == plain.choices
    assert asked.passed_over == plain.passed_over


def test_within_one_tier_the_host_is_the_last_resort_however_fast_it_looks() -> None:
    plan = planned(1400, "auto", precision="bf16-true")  # of tier 2 by itself; 4 slices of 4 samples
    assert plan.candidate.offload == "never" and plan.split.num_slices == 4
    reasons = {each.reason for each in plan.passed_over if each.candidate.offload == "optimizer"}
    assert reasons == {"fits, but moves the optimizer to the host, which the plan does without"}
    assert told_of_parameters(plan) == [NOT_LOOKED_AT]


def test_an_error_says_that_offload_would_help_only_where_it_is_predicted_to_fit() -> None:
    with pytest.raises(NoFeasiblePlanError) as error:
        planned(1000, "never")
    assert (
        '  - strategy="deepspeed_stage_2_offload", the optimizer on the host: 360 B here, and 2.930 KiB of the host\'s '
        "memory (predicted: undivided batch, offload optimizer, ZeRO-2 over 1)"
    ) in str(error.value)
    with pytest.raises(NoFeasiblePlanError) as error:
        planned(155, "never")
    assert (
        '  - strategy="deepspeed_stage_3_offload", optimizer and parameters on the host: 130 B here, and 3.906 KiB of '
        "the host's memory (predicted: 2 slices of <= 8, offload parameters, ZeRO-3 over 1)"
    ) in str(error.value)
    with pytest.raises(NoFeasiblePlanError) as error:
        planned(170, "never")
    assert (
        "  - strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True), the optimizer on the host: 170 B here, and "
        "2.930 KiB of"
    ) in str(error.value)
    for budget, host in ((50, None), (1000, 2000)):
        with pytest.raises(NoFeasiblePlanError) as error:
            planned(budget, "never", host=host)
        assert "offload" not in str(error.value)


def test_a_host_without_room_is_told_from_a_device_without() -> None:
    with pytest.raises(NoFeasiblePlanError) as error:
        planned(1000, "auto", host=2000)
    assert str(error.value).startswith(
        "No plan fits the host: of the smallest one, optimizer and parameters keep 3.906 KiB in its memory, 1.953 KiB "
        "more than the 1.953 KiB that are given (host_memory)."
    )
    # One sample: 1000 + 100, 200 + 10, 150 + 10 and 50 + 10.
    assert (
        "strategy: one device (1.074 KiB), ZeRO-2 over 1, optimizer on the host (210 B), ZeRO-3 over 1, optimizer on "
        "the host (160 B), ZeRO-3 over 1, optimizer and parameters on the host (60 B)"
    ) in str(error.value)


def test_one_device_keeps_every_implementation_that_it_would_have_without_offload() -> None:
    whole = BatchSplit(effective_batch_size=16, loader_batch_size=16, slice_sizes=(16,))
    offered: Any = ("single-tensor", "fused")
    spaces = [
        search_space(
            PlanRequest(), whole, blocks=(), implementations=offered, strategies=considered(offload)
        ).optimizer_implementations
        for offload in ("never", "auto")
    ]
    assert spaces[0] == spaces[1] == ("as-configured", "single-tensor", "fused")
