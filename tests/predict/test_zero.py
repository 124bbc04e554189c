"""A rank's step under ZeRO, every number worked out by hand.

The model is two parameters in 16 bits, of 600 and 500 elements, in modules ``a`` and ``b``; two ranks. One batch of
100 bytes. Each module saves 1000 bytes of activations. The optimizer has two states and one temporary of the size of
what it steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.shares import pinned_beyond_bytes, shares_of
from lightning_memfit.predict.zero import heaviest_rank, zero_timeline
from lightning_memfit.predict.zero_layout import ZeroSettings, group_share
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import (
    FlatStep,
    Free,
    ModuleCall,
    Operation,
    Output,
    ParameterLayout,
    Resident,
    Timeline,
)

PARAMETERS = (
    ParameterLayout("a.weight", 0, "bfloat16", (600,), True),
    ParameterLayout("b.weight", 1, "bfloat16", (50, 10), True),
)
BATCH, STATES = 100, 2


def operation(
    module: str, phase: Any, *outputs: tuple[int, int], reads: tuple[int, ...] = (), step: int = 0
) -> Operation:
    made = tuple(Output(storage, place, size) for place, (storage, size) in enumerate(outputs))
    return Operation("aten.op", module, phase, None, made, reads=reads, micro_step=step)


def one_slice(step: int, first: int) -> list[Any]:
    """Forward and backward of a slice; the storages of its gradients are first + 2 and first + 4."""
    a, b, grad_b, grad_between, grad_a = range(first, first + 5)
    return [
        operation("a", "forward", (a, 1000), reads=(0, 4), step=step),
        operation("b", "forward", (b, 1000), reads=(1, a), step=step),
        *([Free(2, "zero_grad"), Free(3, "zero_grad")] if step == 0 else []),
        operation("b", "backward", (grad_between, 300), (grad_b, 1000), reads=(1, a, b), step=step),
        Free(b, "backward"),
        operation("a", "backward", (grad_a, 1200), reads=(0, a, grad_between), step=step),
        Free(a, "backward"),
        Free(grad_between, "backward"),
    ]


def timeline(*, parameters: tuple[ParameterLayout, ...] = PARAMETERS) -> Timeline:
    events = one_slice(0, 10)
    return Timeline(
        residents=(
            Resident(0, 1200, "parameters"),
            Resident(1, 1000, "parameters"),
            Resident(2, 1200, "gradients"),  # of the step before: DeepSpeed has none
            Resident(3, 1000, "gradients"),
            Resident(4, BATCH, "inputs"),
            Resident(5, 4400, "optimizer_states"),  # over whole parameters: a rank has its own
        ),
        events=tuple(events),
        categories={10: "activations", 11: "activations", 12: "gradients", 13: "temporaries", 14: "gradients"},
        signatures=(),
        num_parameters=1100,
        num_operations=4,
        flops=0,
        recomputed_flops=0,
        calls=(
            ModuleCall("a", 0, 0, 1, (10,), False),
            ModuleCall("b", 0, 1, 2, (11,), False),
            ModuleCall("", 0, 0, 2, (11,), False),
        ),
        parameters=parameters,
        gradient_of={2: 0, 3: 1, 12: 1, 14: 0},
    )


def flat_step(elements: int, parameters: tuple[int, ...] = (0, 1)) -> FlatStep:
    size = elements * 4
    step = Timeline(
        residents=(
            Resident(0, size, "parameters"),
            Resident(1, size, "gradients"),
            Resident(2, STATES * size, "optimizer_states"),
        ),
        events=(operation("", "optimizer_step", (3, size)), Free(3, "optimizer_step")),
        categories={3: "temporaries"},
        signatures=(),
        num_parameters=elements,
        num_operations=1,
        flops=0,
        recomputed_flops=0,
    )
    return FlatStep(parameters=parameters, elements=elements, step=step)


def sharding(stage: Any, **settings: Any) -> Sharding:
    return Sharding(
        **{"engine": "deepspeed", "ranks": 2, "zero_stage": stage, "reduce_bucket_elements": 5000} | settings
    )


def forecast(stage: Any, *, settings: dict[str, Any] | None = None, **more: Any) -> tuple[int, MemoryBreakdown]:
    """Bytes at rest, and the peak."""
    result = zero_timeline(timeline(), sharding(stage, **(settings or {})), [flat_step(550)], **more)
    return result.resident_bytes, predict_memory(result)


def test_of_what_is_divided_a_rank_holds_half() -> None:
    # parameters 1100 x 2, master weights 550 x 4, states 2 x 550 x 4, the batch
    for stage in (1, 2):
        assert forecast(stage)[0] == 2200 + 2200 + 4400 + BATCH
    # stage 3: half of the parameters 550 x 2, master and states as above, gradients 550 x 2, the bucket 5000 x 2, and
    # what is smaller than 100,000 elements whole beside its half
    assert forecast(3)[0] == 1100 + 2200 + 4400 + 1100 + 10000 + 2200 + BATCH
    # nothing is so small: the whole is gathered when it is needed
    assert forecast(3, settings={"persistence_threshold_elements": 0})[0] == 1100 + 2200 + 4400 + 1100 + 10000 + BATCH


def test_the_rank_with_the_most_gradients_is_the_one_that_is_told() -> None:
    # rank 0 has 550 of 600 elements, and keeps 600; rank 1 has 50 of 600 and all of 500, and keeps 1100
    assert heaviest_rank(timeline(), sharding(2), [flat_step(550)]) == 1


def test_the_step_takes_the_norm_of_doubles_and_a_flat_gradient_in_32_bits() -> None:
    at_rest, rank_0 = forecast(2, rank=0)
    # gradients 600 x 2, the norm of 550 as doubles; the flat gradient of one tensor is no copy
    assert rank_0.by_phase["optimizer_step"] == at_rest + 1200 + 550 * 8
    at_rest, rank_1 = forecast(2, rank=1)
    # gradients 1100 x 2 with the norm of 500 as doubles; flattened 550 x 2 and in 32 bits it is less
    assert rank_1.by_phase["optimizer_step"] == at_rest + 2200 + 500 * 8 > at_rest + 2200 + 1100 + 2200


def test_the_gradient_in_32_bits_lives_beside_the_optimizers_temporaries() -> None:
    alone = (ParameterLayout("a.weight", 0, "bfloat16", (4,), True), *PARAMETERS[1:])
    small = zero_timeline(timeline(parameters=alone), sharding(1), [flat_step(252)], rank=0)
    # 504 elements, 252 a rank: gradient 252 x 4 and the optimizer's temporary 252 x 4, after 504 x 2 are gone;
    # before it 504 x 2 with the norm of 248 as doubles
    assert predict_memory(small).by_phase["optimizer_step"] == small.resident_bytes + max(2016, 1008 + 248 * 8)


@pytest.mark.parametrize(("overlaps", "buckets"), [(False, 1), (True, 2), (None, 1)])
def test_buckets_come_with_the_first_gradient_and_go_with_the_backward(overlaps: bool | None, buckets: int) -> None:
    at_rest, peak = forecast(2, rank=0, settings={"overlap_communication": overlaps})
    assert peak.by_phase["forward"] == at_rest + 2000
    # the highest point: both gradients reduced at the end, flattened, since they go to two ranks: 1100 x 2; before that
    # the operator of a: its activations 1000, what came from b 300, its gradient 1200
    assert peak.by_phase["backward"] == at_rest + buckets * 10000 + max(2200, 1000 + 300 + 1200)
    assert peak.by_category["communication"] >= buckets * 10000


def test_deepspeeds_own_default_is_a_bucket_of_half_a_billion_elements() -> None:
    _, peak = forecast(2, settings={"reduce_bucket_elements": None})
    assert peak.by_category["communication"] == 1_000_000_000


def test_stage_1_keeps_whole_gradients_until_the_backward_is_over() -> None:
    at_rest, peak = forecast(1, rank=0)
    # b's gradient 1000 is alive when a's comes, 1200, with 300 and 1000 behind it
    assert peak.by_phase["backward"] == at_rest + 10000 + 1000 + 1000 + 300 + 1200
    # reduced while the backward goes on it is not, but there are two buckets
    _, overlapping = forecast(1, rank=0, settings={"overlap_communication": True})
    assert overlapping.by_phase["backward"] == at_rest + 20000 + 1000 + 300 + 1200


def test_a_gradient_larger_than_the_bucket_keeps_its_own_memory() -> None:
    at_rest, peak = forecast(2, rank=0, settings={"reduce_bucket_elements": 400})
    # b's (500 > 400) lives on beside a's until a's comes: 800 + 1000 + 1000 + 300 + 1200
    assert peak.by_phase["backward"] == at_rest + 800 + 1000 + 1000 + 300 + 1200


def test_an_offloaded_optimizer_leaves_the_device_and_fills_the_host() -> None:
    device_at_rest, device = forecast(2, rank=0, offload="optimizer")
    # parameters, the batch, and a buffer of the largest parameter for gradients on their way
    assert device_at_rest == 2200 + BATCH + 1200
    assert device.by_phase.get("optimizer_step", 0) <= device_at_rest
    host_at_rest, host = forecast(2, rank=0, offload="optimizer", memory="host")
    # master weights, states, the gradient in 32 bits, the new parameters in 16 bits, a buffer of the largest parameter
    assert host_at_rest == 2200 + 4400 + 2200 + 1100 + 1200
    assert host.peak_allocated_bytes == host_at_rest + 2200  # the optimizer's temporary
    assert forecast(2, rank=0, offload="optimizer", memory="both")[0] == device_at_rest + host_at_rest


def test_stage_3_with_an_offloaded_optimizer_keeps_gradients_on_the_host_too() -> None:
    device_at_rest, _ = forecast(3, offload="optimizer")
    assert device_at_rest == 1100 + 10000 + 2200 + BATCH
    host_at_rest, _ = forecast(3, offload="optimizer", memory="host")
    assert host_at_rest == 2200 + 4400 + 1100 + 2200


def test_offloaded_parameters_leave_the_device_but_for_small_ones_that_are_whole() -> None:
    here, _ = forecast(3, offload="optimizer")
    # Half of the parameters, 550 x 2, is on the host; both are smaller than 100,000 elements and whole here: 2200.
    at_rest, peak = forecast(3, offload="parameters")
    assert at_rest == here - 1100 == 10000 + 2200 + BATCH
    # When the optimizer has stepped they come back, their shares from the host on the device meanwhile.
    assert peak.by_phase["optimizer_step"] == at_rest + 1100
    none, _ = forecast(3, offload="parameters", settings={"persistence_threshold_elements": 0})
    assert none == 10000 + BATCH
    # master weights, states, gradients in 16 and in 32 bits, and 1100 bytes of parameters, pinned: a power of two
    host_at_rest, host = forecast(3, offload="parameters", memory="host")
    assert host_at_rest == 2200 + 4400 + 1100 + 2200 + 2048
    assert host.peak_allocated_bytes == host_at_rest + 2200  # the optimizer's temporary
    # On a CPU nothing is pinned: what leaves the device is what the host has more.
    together, _ = forecast(3, offload="parameters", memory="both")
    assert together == forecast(3, offload="optimizer", memory="both")[0] == at_rest + host_at_rest - 2048 + 1100


def test_offloaded_parameters_are_sent_from_copies_on_the_device() -> None:
    settings = {"persistence_threshold_elements": 0}
    at_rest, ahead = forecast(3, offload="parameters", settings=settings)
    # flat 2200, whole 2200 and a's activations 1000, as without; the copies of the shares are gone when all are flat
    assert ahead.by_phase["forward"] == at_rest + 2200 + 2200 + 1000
    result = zero_timeline(timeline(), sharding(3, **settings), [flat_step(550)], offload="parameters")
    assert [bytes_ for op, bytes_ in copies_of(result) if op == "zero.to_device"] == [1100]
    # Each by itself: a whole, 1200, beside the copy of its share, 600, until it has arrived; b likewise.
    alone = zero_timeline(
        timeline(), sharding(3, **settings, prefetch_bucket_elements=0), [flat_step(550)], offload="parameters"
    )
    assert copies_of(alone) == [
        ("zero.all_gather", 1200), ("zero.to_device", 600), ("zero.all_gather", 1000), ("zero.to_device", 500),
    ]  # fmt: skip
    # On a CPU the share is sent as it lies there.
    assert "zero.to_device" not in dict(copies_of(
        zero_timeline(timeline(), sharding(3, **settings), [flat_step(550)], offload="parameters", memory="both")
    ))  # fmt: skip


def copies_of(result: Timeline) -> list[tuple[str, int]]:
    return [
        (each.op, each.outputs[0].allocated_bytes)
        for each in result.events
        if isinstance(each, Operation) and each.op in ("zero.all_gather", "zero.to_device")
    ]


def test_one_rank_copies_a_parameter_from_the_host_when_its_module_is_reached() -> None:
    settings = {"ranks": 1, "persistence_threshold_elements": 0, "prefetch_bucket_elements": 0}
    result = zero_timeline(timeline(), sharding(3, **settings), [flat_step(1100)], offload="parameters")
    assert result.resident_bytes == 10000 + BATCH
    assert copies_of(result) == [("zero.to_device", 1200), ("zero.to_device", 1000)]
    memory = predict_memory(result)
    # both whole, since they are used again soon, and both activations
    assert memory.by_phase["forward"] == result.resident_bytes + 2200 + 2000
    # a is whole until its gradient is reduced: a copy of both, and the norm of 600 doubles on their way to the host
    assert memory.by_phase["backward"] == result.resident_bytes + 1200 + 2200 + 4800
    # Let go when its module is left, each is copied again in the backward.
    strict = dataclasses.replace(ZeroSettings.of(sharding(3, **settings)), reuse_elements=0)
    let_go = zero_timeline(
        timeline(), sharding(3, **settings), [flat_step(1100)], offload="parameters", settings=strict
    )
    assert [size for _, size in copies_of(let_go)] == [1200, 1000, 1000, 1200]
    assert predict_memory(let_go).by_phase["forward"] == let_go.resident_bytes + 1000 + 2000
    # Those that stay whole are copies too, and made anew behind the step.
    small = zero_timeline(timeline(), sharding(3, ranks=1), [flat_step(1100)], offload="parameters")
    assert small.resident_bytes == 10000 + BATCH + 2200
    assert copies_of(small) == [("zero.all_gather", 1200), ("zero.all_gather", 1000)]


def test_frozen_parameters_are_on_the_host_with_the_others() -> None:
    steps = [flat_step(250, (1,))]
    settings = {"persistence_threshold_elements": 0}
    device = zero_timeline(timeline(), sharding(3, **settings), steps, offload="parameters")
    assert device.resident_bytes == 10000 + BATCH
    # Of 600 frozen elements 600 bytes as they are; of 500 trained ones 500 bytes pinned, master weights, states, and
    # gradients in 16 and in 32 bits.
    host = zero_timeline(timeline(), sharding(3, **settings), steps, offload="parameters", memory="host")
    assert host.resident_bytes == 600 + 512 + 250 * (4 + STATES * 4 + 2 + 4)


def test_stage_3_gathers_ahead_in_one_flat_tensor_and_takes_it_apart() -> None:
    at_rest, peak = forecast(3, settings={"persistence_threshold_elements": 0})
    # both are fetched when the module around them is reached, and taken apart at a: flat 2200, whole 2200, activations
    # 1000; at b the flat tensor is gone, and there are 1000 more activations
    assert peak.by_phase["forward"] == at_rest + 2200 + 2200 + 1000
    gloo = zero_timeline(
        timeline(), sharding(3, persistence_threshold_elements=0), [flat_step(550)], collectives="gloo"
    )
    copies = [each for each in gloo.events if isinstance(each, Operation) and is_copy_of_gloos(gloo, each)]
    assert [each.outputs[0].allocated_bytes for each in copies] == [2200]


def is_copy_of_gloos(result: Timeline, each: Operation) -> bool:
    return each.op == "zero.all_gather" and result.categories[each.outputs[0].storage] == "communication"


def test_stage_3_without_looking_ahead_gathers_each_module_when_it_is_reached() -> None:
    settings = {"persistence_threshold_elements": 0, "prefetch_bucket_elements": 0}
    at_rest, peak = forecast(3, settings=settings)
    # a whole, 1200, and its activations; at b both whole and both activations
    assert peak.by_phase["forward"] == at_rest + 2200 + 2000


@pytest.mark.parametrize("persistence", [0, 100_000])
def test_stage_3_over_one_rank_gathers_nothing(persistence: int) -> None:
    alone = sharding(3, ranks=1, persistence_threshold_elements=persistence)
    result = zero_timeline(timeline(), alone, [flat_step(1100)])
    # parameters 2200, master weights 4400, states 8800, gradients 2200, the bucket; each parameter is a view of it
    assert result.resident_bytes == 2200 + 4400 + 8800 + 2200 + 10000 + BATCH
    memory = predict_memory(result)
    assert memory.by_phase["forward"] == result.resident_bytes + 2000  # activations
    # b's operator: activations, its gradient and what goes on to a
    assert memory.by_phase["backward"] == result.resident_bytes + 2000 + 1000 + 300


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_what_a_rank_is_said_to_keep_on_the_host_is_what_its_step_has_there(stage: Any, ranks: int) -> None:
    alone, elements = sharding(stage, ranks=ranks), 1100 // ranks
    kept = zero_timeline(timeline(), alone, [flat_step(elements)], offload="optimizer", memory="host").resident_bytes
    shares = shares_of(PARAMETERS, alone, offload="optimizer")
    assert shares.host_bytes + STATES * elements * 4 == kept


@pytest.mark.parametrize("ranks", [1, 2])
def test_pinned_parameters_are_part_of_what_a_rank_is_said_to_keep_on_the_host(ranks: int) -> None:
    alone, steps = sharding(3, ranks=ranks), [flat_step(600 // ranks, (0,)), flat_step(500 // ranks, (1,))]
    kept = zero_timeline(timeline(), alone, steps, offload="parameters", memory="host").resident_bytes
    beyond = pinned_beyond_bytes(PARAMETERS, [each.parameters for each in steps], alone)
    assert shares_of(PARAMETERS, alone, offload="parameters").host_bytes + beyond + STATES * 1100 // ranks * 4 == kept
    assert beyond == {1: (2048 - 1200) + (1024 - 1000), 2: (1024 - 600) + (512 - 500)}[ranks]


def test_two_groups_are_two_flat_tensors() -> None:
    # 600 elements are 300 a rank; 500 are 250 a rank: multiples of 4
    result = zero_timeline(timeline(), sharding(1), [flat_step(300, (0,)), flat_step(250, (1,))], rank=0)
    assert result.resident_bytes == 1200 + 1000 + (300 + 250) * 4 * (1 + STATES) + BATCH


def test_frozen_parameters_stay_as_they_are_in_stage_2_and_are_divided_in_stage_3() -> None:
    # of 500 elements 250 a rank are trained
    settings = {"persistence_threshold_elements": 0}
    second = zero_timeline(timeline(), sharding(2), [flat_step(250, (1,))])
    assert second.resident_bytes == 1200 + 1000 + 250 * 4 * (1 + STATES) + BATCH
    third = zero_timeline(timeline(), sharding(3, **settings), [flat_step(250, (1,))])
    assert third.resident_bytes == 600 + 500 + 250 * 4 * (1 + STATES) + 500 + 10000 + BATCH


def test_the_share_of_a_group_is_what_the_optimizer_is_traced_over() -> None:
    assert group_share([600, 500], ZeroSettings.of(sharding(2))) == 550
    assert group_share([601, 500], ZeroSettings.of(sharding(2))) == 552  # padded to 1104
    assert group_share([601, 501], ZeroSettings.of(sharding(3))) == 301 + 251  # each padded to an even number


def test_what_is_not_forecast_is_named() -> None:
    for stage in (1, 2):
        with pytest.raises(UnsupportedError, match=rf"offload='parameters' in stage {stage} of ZeRO: .* Choose"):
            forecast(stage, offload="parameters")
    with pytest.raises(UnsupportedError, match="DDP over 2 is none of DeepSpeed's stages"):
        zero_timeline(timeline(), Sharding(engine="ddp", ranks=2), [flat_step(550)])
    quantised = (PARAMETERS[0]._replace(dtype="int8"), PARAMETERS[1])
    with pytest.raises(UnsupportedError, match=r"parameter a\.weight is of int8\. ZeRO divides: float64, float32"):
        zero_timeline(timeline(parameters=quantised), sharding(2), [flat_step(550)])
