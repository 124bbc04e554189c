"""Forecasts and plans for several devices without a Trainer. Run: ``pytest tests/test_several_devices.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit import Sharding, choose_strategy, forecast, make_plan
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.forecasting import make_plans
from lightning_memfit.plan import BatchSplit, Candidate, Plan
from lightning_memfit.predict.zero_layout import pinned_bytes
from lightning_memfit.search.strategies import bucket_elements
from lightning_memfit.several_devices import host_bytes_of, on_ranks
from lightning_memfit.strategy_choice import namespace_of, strategy_arguments
from lightning_memfit.units import GIB, MIB, format_bytes

WIDTH, BLOCKS = 2048, 4
BLOCK_BYTES = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)  # two linear layers with biases


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


def network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def squared(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).square().mean()


def batch(samples: int = 8) -> torch.Tensor:
    return torch.zeros(samples, 256, WIDTH, device="meta")


def needs(sharding: Sharding | None = None, **settings: Any) -> Any:
    given = {"device": "a100-40gb", **settings}
    return forecast(network(), batch(), loss=squared, optimizer=torch.optim.AdamW, sharding=sharding, **given)


@cache
def plan_of(budget: int | str = "auto", **settings: Any) -> Plan:
    return make_plan(
        network(), batch(), effective_batch_size=64, loss=squared, optimizer=torch.optim.AdamW, device="a100-40gb",
        num_devices=4, budget=budget, **settings,
    )  # fmt: skip


def test_a_policy_is_forecast_in_its_dtypes_and_beside_no_other_precision() -> None:
    groups = ("", *map(str, range(BLOCKS)))
    plain = Sharding(engine="fsdp2", ranks=4, synchronisation="slice", shard_groups=groups)
    policy = Sharding(
        engine="fsdp2", ranks=4, synchronisation="slice", shard_groups=groups,
        param_dtype="bfloat16", reduce_dtype="float32",
    )  # fmt: skip
    in_32, mixed = needs(plain), needs(policy)
    assert mixed.by_category["parameters"] == in_32.by_category["parameters"] == BLOCKS * BLOCK_BYTES // 4
    assert mixed.by_category["optimizer_states"] == in_32.by_category["optimizer_states"]
    # The root has no parameters: in the forward a block is gathered in 2 bytes beside the buffer of the one before it.
    assert in_32.by_phase["forward"] - mixed.by_phase["forward"] >= BLOCK_BYTES
    with pytest.raises(ConfigurationError, match="precision='bf16-mixed' cannot be had with fully_shard's Mixed"):
        needs(policy, precision="bf16-mixed")


def zero(stage: Any, ranks: int = 4) -> Sharding:
    return Sharding(
        engine="deepspeed", ranks=ranks, zero_stage=stage, reduce_bucket_elements=1000, overlap_communication=True
    )


# One forecast


def test_ddp_needs_its_buckets_beside_what_one_device_needs() -> None:
    alone, ranked = needs(), needs(Sharding(engine="ddp", ranks=4))
    assert ranked.by_category["communication"] == BLOCKS * BLOCK_BYTES
    assert ranked.peak_allocated_bytes == alone.peak_allocated_bytes + BLOCKS * BLOCK_BYTES


def test_each_stage_divides_more_than_the_one_before() -> None:
    first, second, third = (needs(zero(stage), precision="bf16-mixed") for stage in (1, 2, 3))
    assert first.peak_allocated_bytes > second.peak_allocated_bytes
    assert first.by_category["parameters"] == BLOCKS * BLOCK_BYTES // 2  # all of them, in 16 bits
    assert third.by_category["optimizer_states"] < 3 * BLOCKS * BLOCK_BYTES // 3  # a quarter of twelve bytes each


def test_fsdp2_holds_a_quarter_of_everything_that_lasts() -> None:
    sharding = Sharding(engine="fsdp2", ranks=4, shard_groups=("", *map(str, range(BLOCKS))))
    memory = needs(sharding)
    assert memory.by_category["optimizer_states"] == 2 * BLOCKS * BLOCK_BYTES // 4
    assert memory.peak_allocated_bytes < 0.6 * needs().peak_allocated_bytes  # activations are not divided


def test_the_optimizer_on_the_host_leaves_the_device() -> None:
    here, away = needs(zero(2)), needs(zero(2), offload="optimizer")
    assert here.by_category["optimizer_states"] > 0 and "optimizer_states" not in away.by_category


def test_a_forecast_for_the_host_is_of_a_rank_too() -> None:
    alone, ranked = needs(device="cpu", probe_operators=False), needs(
        Sharding(engine="ddp", ranks=2), device="cpu", probe_operators=False
    )  # fmt: skip
    assert ranked.peak_allocated_bytes == alone.peak_allocated_bytes + BLOCKS * BLOCK_BYTES


def test_only_deepspeed_offloads() -> None:
    with pytest.raises(ConfigurationError, match=r"offload='optimizer' is forecast for DeepSpeed alone\. Give shardi"):
        needs(Sharding(engine="ddp", ranks=2), offload="optimizer")
    with pytest.raises(ConfigurationError, match=r"offload='parameters' with zero_stage=2: .* Give zero_stage=3, or"):
        needs(zero(2), offload="parameters")


def test_parameters_on_the_host_leave_the_device_and_come_as_they_are_used() -> None:
    one = needs(zero(3, ranks=1), offload="parameters", precision="bf16-mixed")
    alone = needs(zero(3, ranks=1), offload="optimizer", precision="bf16-mixed")
    # DeepSpeed keeps 10^9 elements for their next use, more than there are here: all are whole until the backward is
    # over, and gone when the optimizer steps. Biases come back behind it.
    assert one.peak_allocated_bytes == alone.peak_allocated_bytes > BLOCKS * BLOCK_BYTES // 2
    assert one.by_phase["optimizer_step"] < BLOCKS * BLOCK_BYTES // 10


def test_a_plan_with_parameters_on_the_host_says_what_lies_there_and_what_crosses() -> None:
    plan = plan_of(offload="parameters", precision="bf16-mixed", probe_operators=False)
    assert plan.candidate.offload == "parameters" and plan.candidate.sharding is not None
    assert plan.candidate.sharding.zero_stage == 3
    # 4 ranks: master weights, gradients and two states of 4 bytes, gradients of 2, and parameters of 2 that are pinned:
    # a power of two of bytes.
    share = BLOCKS * BLOCK_BYTES // 4 // 4
    assert plan.forecast.host_bytes == 18 * share + pinned_bytes(2 * share)
    assert any("gradients, and parameters in every forward and backward, cross PCI Express" in n for n in plan.notes)
    reason = next(each.reason for each in plan.choices if each.lever == "offload")
    assert reason.startswith("tier 2: as given; 4 ranks keep")


# Plans


def test_the_effective_batch_is_that_of_all_ranks() -> None:
    split = plan_of().split
    assert (split.effective_batch_size, split.ranks, split.accumulate_grad_batches, split.loader_batch_size) == (
        64, 4, 2, 8,
    )  # fmt: skip


def test_ddp_departs_least_and_is_taken_where_it_fits() -> None:
    plan = plan_of()
    assert plan.candidate.sharding == Sharding(engine="ddp", ranks=4)
    (choice,) = [choice for choice in plan.choices if choice.lever == "strategy"]
    assert choice.value == "DDP over 4" and "departs least from a run on one device, and fits" in choice.reason
    # An all-reduce sends 2 x 3/4 of them.
    assert plan.forecast.exchanged_bytes == 2 * BLOCKS * BLOCK_BYTES * 3 // 4
    assert any("300 GB/s" in note for note in plan.notes)
    reasons = {each.reason for each in plan.passed_over if each.candidate.sharding != plan.candidate.sharding}
    assert reasons == {"not forecast: DDP over 4 fits with nothing divided or recomputed"}


def test_less_memory_takes_a_strategy_that_divides_and_says_what_ddp_needs() -> None:
    plan = plan_of(1700 * MIB)
    sharding = plan.candidate.sharding
    assert sharding is not None and sharding.engine != "ddp" and plan.candidate.offload == "never"
    assert plan.forecast.predicted_peak_bytes <= 1700 * MIB
    (choice,) = [choice for choice in plan.choices if choice.lever == "strategy"]
    assert "DDP over 4" in choice.reason


def test_what_lies_there_all_the_time_rules_a_strategy_out_without_a_forecast() -> None:
    ruled_out = {
        each.candidate.sharding: each for each in plan_of(1700 * MIB).passed_over if each.predicted_peak_bytes is None
    }
    # 512.2 MiB of parameters, and as much of gradients, buckets and each of two states: 5 x 512.2.
    assert ruled_out[Sharding(engine="ddp", ranks=4)].reason == (
        "does not fit: DDP over 4 holds 2.501 GiB at the least all the time, 860.8 MiB over the budget"
    )


def test_the_host_is_used_only_where_nothing_else_fits() -> None:
    plan = plan_of(700 * MIB)
    assert plan.candidate.offload == "optimizer" and plan.candidate.harm_tier == 2
    (choice,) = [choice for choice in plan.choices if choice.lever == "offload"]
    assert "how much the host has is not known" in choice.reason
    assert plan.forecast.host_bytes is not None and plan.forecast.host_bytes > 2 * BLOCKS * BLOCK_BYTES // 4


def test_a_host_without_room_is_no_way_out() -> None:
    """Reported in deepspeedai/DeepSpeed#1891."""
    with pytest.raises(NoFeasiblePlanError, match="No plan fits the budget"):
        plan_of(700 * MIB, host_memory=MIB)
    with pytest.raises(NoFeasiblePlanError):
        plan_of(700 * MIB, offload="never")


def test_a_named_strategy_is_the_only_one() -> None:
    plan = plan_of(strategy="fsdp2")
    assert plan.candidate.sharding is not None and plan.candidate.sharding.engine == "fsdp2"
    engines = {each.candidate.sharding.engine for each in plan.passed_over if each.candidate.sharding}
    assert engines <= {"fsdp2"}
    assert next(choice.reason for choice in plan.choices if choice.lever == "strategy").startswith("as given")


# One GPU


def plan_of_one(budget: int, **settings: Any) -> Plan:
    given = {"device": "a100-40gb", "probe_operators": False, **settings}
    return make_plan(
        network(), batch(), effective_batch_size=16, loss=squared, optimizer=torch.optim.AdamW, budget=budget, **given
    )


def test_one_gpu_moves_the_optimizer_to_the_host_where_that_was_asked_for() -> None:
    plan = plan_of_one(1000 * MIB, offload="auto")
    assert plan.candidate.offload == "optimizer" and plan.candidate.harm_tier == 2 and plan.split.ranks == 1
    assert plan.forecast.confirmed and plan.forecast.predicted_peak_bytes <= 1000 * MIB
    # 16 bytes for each of a quarter as many parameters as bytes, and what passes through in 16 bits: new parameters, a
    # buffer of the largest, and what the two batches of a step add up.
    elements, largest = BLOCKS * BLOCK_BYTES // 4, 4 * WIDTH * WIDTH
    assert plan.forecast.host_bytes == 16 * elements + 2 * (elements + largest + elements)
    assert not any("each rank sends" in choice.reason for choice in plan.choices)
    assert any("a Trainer by itself offloads nothing" in note for note in plan.notes)
    assert not any("sends" in note for note in plan.notes)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_one_gpu_alone_says_that_the_host_would_help_and_by_which_prediction() -> None:
    with pytest.raises(NoFeasiblePlanError) as error:
        plan_of_one(1000 * MIB)
    offloaded = plan_of_one(1000 * MIB, offload="auto").forecast
    assert offloaded.host_bytes is not None
    assert (
        'strategy="deepspeed_stage_2_offload", the optimizer on the host: '
        f"{format_bytes(offloaded.predicted_peak_bytes)} here, and {format_bytes(offloaded.host_bytes)} of the host's "
        f"memory (predicted: {offloaded.candidate.label})"
    ) in str(error.value)


def test_a_strategy_that_offloads_is_planned_for_one_gpu() -> None:
    plan = plan_of_one(4 * GIB, strategy="deepspeed_stage_2_offload")
    assert plan.candidate.offload == "optimizer" and plan.candidate.sharding is not None
    assert (plan.candidate.sharding.zero_stage, plan.candidate.sharding.ranks) == (2, 1)
    assert plan.request.offload == "auto" and "as given" in next(
        choice.reason for choice in plan.choices if choice.lever == "offload"
    )


def test_a_host_cannot_offload_to_itself_and_the_plan_says_so() -> None:
    plan = plan_of_one(4 * GIB, offload="auto", device="cpu", precision="32-true")
    assert plan.candidate.offload == "never"
    assert any(note.startswith("not considered: offload to the host: the device is the host") for note in plan.notes)


def test_stage_3_over_one_rank_holds_one_bucket_and_no_buffer_of_the_largest_gradient() -> None:
    second, third = (needs(zero(stage, ranks=1), offload="optimizer", precision="bf16-mixed") for stage in (2, 3))
    assert third.by_category["parameters"] == second.by_category["parameters"] == BLOCKS * BLOCK_BYTES // 2
    assert third.by_category["communication"] < second.by_category["communication"]


def test_where_no_link_is_known_fewest_exchanged_bytes_win() -> None:
    plans = make_plans(
        network(), batch(), devices=("a10g",), effective_batch_size=32, loss=squared, optimizer=torch.optim.AdamW,
        num_devices=4,
    )  # fmt: skip
    plan = plans["a10g"]
    assert isinstance(plan, Plan) and not plan.forecast.seconds_count_exchanges
    assert any("is not known: strategies are ranked by the bytes" in note for note in plan.notes)
    sent = plan.forecast.exchanged_bytes
    assert sent is not None and sent <= 2 * BLOCKS * BLOCK_BYTES * 3 // 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"effective_batch_size": 40},
            r"40 is not a multiple of 32 samples: 4 devices x a batch of 8\. Nearest: 32 and",
        ),
        ({"num_devices": -1}, r"num_devices=-1 must be a whole number of at least 1"),
        ({"strategy": "horovod"}, r"strategy='horovod' is not known\. Choose one of: 'auto', 'ddp'"),
        ({"num_devices": 1, "strategy": "ddp"}, r"strategy='ddp' is planned for several devices, and num_devices=1"),
        ({"strategy": "deepspeed_stage_3_offload", "offload": "never"}, r"offloads, and offload='never' forbids it"),
        ({"strategy": "deepspeed_stage_2", "device": "cpu"}, r"cannot be had on a CPU: Lightning's DeepSpeedStrategy"),
        (
            {"offload": "parameters", "strategy": "ddp"},
            r"strategy='ddp' keeps everything on the devices, and offload='p",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, Any], message: str) -> None:
    given = {"effective_batch_size": 32, "num_devices": 4, "device": "a100-40gb", **settings}
    with pytest.raises(ConfigurationError, match=message):
        make_plan(network(), batch(), loss=squared, optimizer=torch.optim.AdamW, probe_operators=False, **given)


def test_a_host_has_no_deepspeed_and_the_plan_says_so() -> None:
    plan = make_plan(
        network(), batch(), effective_batch_size=16, loss=squared, optimizer=torch.optim.AdamW, device="cpu",
        num_devices=2, probe_operators=False, budget=4 * GIB, precision="32-true",
    )  # fmt: skip
    assert any(note.startswith("not considered: DeepSpeed: Lightning's") for note in plan.notes)
    assert plan.candidate.sharding is not None and plan.candidate.sharding.engine == "ddp"


def test_buckets_of_a_small_model_are_small_and_say_why() -> None:
    chosen, reason = bucket_elements([512 * 2048])
    assert chosen == 25 * MIB // 2 and "takes its whole size whatever is in it" in reason
    assert bucket_elements([10**9]) == (
        200_000_000, "Lightning's own 200,000,000 elements: the largest parameter has 1,000,000,000",
    )  # fmt: skip


def test_text_is_a_size_of_the_host() -> None:
    assert host_bytes_of("2GiB") == 2 * GIB and host_bytes_of(None) is None
    with pytest.raises(ConfigurationError, match=r"host_memory=-1 must be bytes"):
        host_bytes_of(-1)


# Lightning's objects


def spread(sharding: Sharding | None, offload: Any = "never") -> Candidate:
    split = BatchSplit(effective_batch_size=8, loader_batch_size=8, slice_sizes=(8,))
    return on_ranks(Candidate(precision="32-true", split=split), sharding, offload)


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (lambda _: spread(None), ("SingleDeviceStrategy", {})),
        (lambda _: spread(Sharding(engine="ddp", ranks=4, gradient_as_bucket_view=True)),
         ("DDPStrategy", {"gradient_as_bucket_view": True})),
        (lambda _: spread(zero(2), "optimizer"),
         ("DeepSpeedStrategy", {"stage": 2, "reduce_bucket_size": 1000, "offload_optimizer": True})),
        (lambda _: spread(zero(3), "parameters"),
         ("DeepSpeedStrategy", {
             "stage": 3, "reduce_bucket_size": 1000, "offload_optimizer": True, "offload_parameters": True,
         })),
        (lambda _: spread(Sharding(engine="fsdp2", ranks=4)),
         ("ModelParallelStrategy", {"data_parallel_size": 4, "tensor_parallel_size": 1})),
    ],
    ids=["one", "ddp", "deepspeed", "deepspeed_with_parameters", "fsdp2"],
)  # fmt: skip
def test_a_candidate_is_a_strategy_of_lightning(candidate: Any, expected: Any) -> None:
    assert strategy_arguments(candidate(None)) == expected


def test_the_strategy_is_made_with_its_plan_and_reason() -> None:
    from lightning.pytorch.strategies import DDPStrategy

    chosen = choose_strategy(
        network(), batch(), 4, effective_batch_size=32, loss=squared, optimizer=torch.optim.AdamW, device="a100-40gb"
    )
    assert isinstance(chosen.strategy, DDPStrategy) and chosen.name == "DDPStrategy"
    assert chosen.plan.split.ranks == 4 and "departs least" in chosen.reason


def test_the_strategy_of_one_gpu_is_deepspeeds_where_only_that_fits() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")
    from lightning.pytorch.strategies import DeepSpeedStrategy

    chosen = choose_strategy(
        network(), batch(), 1, effective_batch_size=16, loss=squared, optimizer=torch.optim.AdamW, offload="auto",
        device="a100-40gb", budget=1000 * MIB, probe_operators=False,
    )  # fmt: skip
    assert isinstance(chosen.strategy, DeepSpeedStrategy)
    assert chosen.arguments["stage"] == 2 and chosen.arguments["offload_optimizer"] is True
    assert chosen.plan.candidate.offload == "optimizer" and "without offload" in chosen.reason


def test_the_strategy_comes_from_the_package_of_the_module() -> None:
    import lightning.pytorch

    assert namespace_of(lightning.pytorch.LightningModule()) == "lightning.pytorch"
    assert namespace_of(nn.Linear(1, 1)) == "lightning.pytorch"
