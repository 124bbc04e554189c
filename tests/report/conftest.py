"""A plan and a measurement with realistic numbers: a small GPT on a host."""

from __future__ import annotations

import pytest

from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import (
    BatchSplit,
    Budget,
    Candidate,
    Choice,
    Forecast,
    Measurement,
    MemoryBreakdown,
    OperatorCost,
    PassedOver,
    Plan,
    PlanRequest,
    balanced_slices,
)
from lightning_memfit.units import MIB

BLOCKS = tuple(f"transformer.blocks.{index}" for index in range(6))


def candidate(num_slices: int, *, checkpointing: bool = False, early: bool = False) -> Candidate:
    return Candidate(
        precision="32-true",
        activation_checkpointing="blocks" if checkpointing else "none",
        checkpointed_modules=BLOCKS if checkpointing else (),
        split=BatchSplit(
            effective_batch_size=64,
            loader_batch_size=32,
            accumulate_grad_batches=2,
            slice_sizes=balanced_slices(32, num_slices),
        ),
        zero_gradients_early=early,
    )


def passed(num_slices: int, peak_mib: int | None, reason: str, *, checkpointing: bool = False) -> PassedOver:
    return PassedOver(
        candidate=candidate(num_slices, checkpointing=checkpointing),
        predicted_peak_bytes=None if peak_mib is None else peak_mib * MIB,
        reason=reason,
    )


@pytest.fixture
def device() -> DeviceSpec:
    return DeviceSpec(
        name="AMD EPYC 7B13",
        kind="cpu",
        capacity_bytes=23 * 1024 * MIB,
        available_bytes=23 * 1024 * MIB - 500 * MIB,
        process_bytes=500 * MIB,
        cores=2,
    )


@pytest.fixture
def memory() -> MemoryBreakdown:
    # 10,485,760 parameters of 4 bytes are 40 MiB.
    return MemoryBreakdown(
        peak_allocated_bytes=560 * MIB,
        by_category={
            "parameters": 40 * MIB,
            "buffers": 0,
            "gradients": 20 * MIB,
            "optimizer_states": 80 * MIB,
            "activations": 350 * MIB,
            "temporaries": 68 * MIB,
            "inputs": 2 * MIB,
        },
        by_phase={"forward": 500 * MIB, "backward": 560 * MIB, "optimizer_step": 240 * MIB, "evaluation": 310 * MIB},
        peak_phase="backward",
        peak_op="aten._log_softmax_backward_data.default",
        peak_module="lm_head",
        num_parameters=10 * 1024**2,
    )


@pytest.fixture
def plan(device: DeviceSpec, memory: MemoryBreakdown) -> Plan:
    return Plan(
        request=PlanRequest(effective_batch_size=64, budget=700 * MIB),
        device=device,
        budget=Budget(
            budget_bytes=700 * MIB,
            capacity_bytes=device.capacity_bytes,
            headroom_bytes=0,
            non_torch_bytes=430 * MIB,
            reason="as given",
        ),
        forecast=Forecast(candidate=candidate(4, early=True), memory=memory, flops=10**12, recomputed_flops=0),
        choices=(
            Choice(lever="precision", value="32-true", reason='"auto" means 32-true in this release'),
            Choice(
                lever="micro_batch_size",
                value="8",
                reason="fewest slices that fit: 3 slices of <= 11 need 731.4 MiB; costs 3 more forward and backward "
                "calls per batch",
            ),
            Choice(
                lever="activation_checkpointing",
                value="none",
                reason="slicing alone fits, and recomputes nothing",
            ),
            Choice(
                lever="zero_gradients",
                value="before the forward",
                reason="gives back 40.00 MiB of old gradients during the forward; costs nothing",
            ),
        ),
        passed_over=(
            passed(1, None, "needs more than any forecast before it", checkpointing=False),
            passed(3, 732, "32.00 MiB over the budget"),
            passed(2, 1080, "380.0 MiB over the budget"),
            passed(1, 1960, "1.230 GiB over the budget"),
            passed(2, 640, "recomputes 0.31 TFLOP per step more than the plan", checkpointing=True),
            passed(1, 1010, "310.0 MiB over the budget", checkpointing=True),
            passed(5, 490, "more slices than the plan at the same FLOPs"),
            passed(8, 410, "more slices than the plan at the same FLOPs"),
        ),
        notes=("The last window of an epoch is short (2 of 4 batches) and is weighted exactly.",),
    )


@pytest.fixture
def measurement() -> Measurement:
    return Measurement(
        measured_peak_allocated_bytes=561 * MIB,
        measured_evaluation_peak_bytes=310 * MIB,
        measured_peak_rss_bytes=1044 * MIB,
        measured_step_seconds=0.8124,
        profiled_steps=2,
        costliest_ops=(
            OperatorCost(name="aten::addmm", self_seconds=0.61, calls=400),
            OperatorCost(name="aten::_scaled_dot_product_flash_attention_for_cpu_backward", self_seconds=0.2, calls=48),
            OperatorCost(name="aten::gelu", self_seconds=0.0051, calls=48),
        ),
    )
