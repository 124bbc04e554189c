"""Seconds of synthetic steps, worked out by hand. Run: ``pytest tests/predict/test_step_time.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memfit.hardware.rates import AllocatorRates, CallSeconds, DeviceRates, RateCurve
from lightning_memfit.plan import BatchSplit
from lightning_memfit.predict.step_time import predict_step_seconds, step_seconds
from lightning_memfit.trace.timeline import Event, ModuleCall, Operation, Output, Timeline

FREE = CallSeconds(
    forward=0.0, backward=0.0, optimizer_step=0.0, foreach_tensor=0.0, fused_tensor=0.0, recomputed_block=0.0
)


def straight(per_second: float, fixed: float = 1e-9) -> RateCurve:
    """A constant rate; calls take ``fixed`` seconds at least."""
    return RateCurve(work=(fixed * per_second, 1e18), seconds=(fixed, 1e18 / per_second))


RATES = DeviceRates(
    device="a processor",
    threads=1,
    torch_version="any",
    curves={
        "matmul": {"float32": straight(100.0), "bfloat16": straight(400.0)},
        "thin_matmul": {"float32": straight(1e6), "bfloat16": straight(1e6)},
        "elementwise": {"float32": straight(10.0), "bfloat16": straight(20.0)},
        "cached_elementwise": {"float32": straight(40.0)},
        "fill": {"float32": straight(50.0)},
        "scatter": {"float32": straight(5.0)},
        "convolution": {"float32": straight(200.0)},
        "depthwise_convolution": {"float32": straight(20.0)},
        "fused_optimizer": {"float32": straight(8.0, fixed=0.5)},
        "recurrent": {"float32": straight(10.0)},
    },
    calls=FREE,
    allocator=AllocatorRates(seconds_per_new_byte=0.0, largest_kept_block_bytes=None),
    noise=0.0,
)


def op(name: str = "add.Tensor", phase: Any = "forward", **values: Any) -> Operation:
    outputs = tuple(Output(index, index, size) for index, size in enumerate(values.pop("written", ())))
    return Operation(f"aten.{name}", "", phase, None, outputs, **{"dtype": "float32", **values})


def timeline(*events: Event, **values: Any) -> Timeline:
    return Timeline(
        residents=(), events=events, categories={}, signatures=(), num_parameters=0, num_operations=len(events),
        flops=0, recomputed_flops=0, **values,
    )  # fmt: skip


def seconds(*events: Event, rates: DeviceRates = RATES, split: BatchSplit | None = None, **values: Any) -> float:
    return predict_step_seconds(timeline(*events, **values), rates, split=split)


def split_of(*slices: int, accumulate: int = 1) -> BatchSplit:
    return BatchSplit(
        effective_batch_size=accumulate * sum(slices), loader_batch_size=sum(slices),
        accumulate_grad_batches=accumulate, slice_sizes=slices,
    )  # fmt: skip


def test_every_operator_takes_its_work_over_its_rate() -> None:
    # 1000 FLOPs at 100/s and 50 bytes at 10/s.
    assert seconds(op("mm.default", flops=1000), op(moved_bytes=50)) == pytest.approx(10 + 5)


def test_the_dtype_decides_the_rate() -> None:
    mixed = [op("mm.default", flops=1000, dtype="bfloat16"), op(moved_bytes=50, dtype="bfloat16")]
    assert seconds(*mixed) == pytest.approx(2.5 + 2.5)


def test_where_low_precision_computes_slowly_it_is_predicted_to_be_slower() -> None:
    slow = replace(RATES, curves={**RATES.curves, "matmul": {"float32": straight(100.0), "bfloat16": straight(50.0)}})
    step = [op("mm.default", flops=1000), op("addmm.default", "backward", flops=2000)]
    mixed = [each._replace(dtype="bfloat16") for each in step]
    assert seconds(*mixed) < seconds(*step)
    assert seconds(*mixed, rates=slow) > seconds(*step, rates=slow)


def test_a_product_takes_at_least_what_moving_its_arguments_does() -> None:
    slow = replace(RATES, curves={**RATES.curves, "thin_matmul": {"float32": straight(4.0)}})
    assert seconds(op("mm.default", flops=1000, moved_bytes=20), rates=slow) == pytest.approx(10)
    assert seconds(op("mm.default", flops=1000, moved_bytes=80), rates=slow) == pytest.approx(20)


def test_a_convolution_brings_its_images_into_another_order_beside_computing() -> None:
    # 1000 FLOPs at 200/s are 5 s, 100 bytes at 20/s are 5 s: together (2 x 5^1.5)^(2/3) = 2^(2/3) x 5.
    assert seconds(op("convolution.default", flops=1000, moved_bytes=100)) == pytest.approx(5 * 2 ** (2 / 3))


def test_an_embeddings_gradient_is_zeros_and_rows_added_to_them() -> None:
    # 100 bytes of zeros at 50/s; 10 bytes of rows read and written at 5/s.
    event = op("embedding_dense_backward.default", "backward", moved_bytes=110, written=[100])
    assert seconds(event) == pytest.approx(2 + 4)


def test_a_recurrent_layer_pays_for_every_time_step() -> None:
    fixed = replace(RATES, curves={**RATES.curves, "recurrent": {"float32": straight(10.0, fixed=2.0)}})
    # 8 steps of 10 FLOPs: 1 s each by the rate, but a step takes 2 s at least.
    assert seconds(op("mkldnn_rnn_layer.default", flops=80, inner_calls=8)) == pytest.approx(8)
    assert seconds(op("mkldnn_rnn_layer.default", flops=80, inner_calls=8), rates=fixed) == pytest.approx(16)


# Slices


def window(**values: Any) -> list[Operation]:
    """Two slices that were followed, 10 s each, and an optimizer step of 5 s."""
    return [
        op("mm.default", flops=400),
        op("mm.default", "backward", flops=600),
        op("mm.default", micro_step=1, flops=400),
        op("mm.default", "backward", micro_step=1, flops=600),
        op("mm.default", "optimizer_step", micro_step=1, flops=500),
    ]


def test_the_second_slice_stands_for_all_further_ones_and_the_optimizer_steps_once() -> None:
    assert seconds(*window(), micro_steps=2, followed_micro_steps=2) == pytest.approx(10 + 10 + 5)
    assert seconds(*window(), micro_steps=7, followed_micro_steps=2) == pytest.approx(10 + 6 * 10 + 5)


def test_a_window_of_which_one_slice_was_followed_repeats_that_one() -> None:
    step = [op("mm.default", flops=1000), op("mm.default", "gradient_clipping", flops=100)]
    assert seconds(*step, micro_steps=4, followed_micro_steps=1) == pytest.approx(4 * 10 + 1)


def test_slices_that_were_not_followed_count_with_their_samples() -> None:
    # Slices of 4, 4 and 2: the second that was followed stands for 6 samples of its 4.
    split = split_of(4, 4, 2)
    found = seconds(*window(), micro_steps=3, followed_micro_steps=2, split=split)
    assert found == pytest.approx(10 + 1.5 * 10 + 5)


def test_with_accumulation_the_second_slice_followed_is_the_next_batchs_first() -> None:
    # Two batches of 5 + 3: 16 samples, of which the first slice has 5; the second followed has 5 too.
    split = split_of(5, 3, accumulate=2)
    found = seconds(*window(), micro_steps=4, followed_micro_steps=2, split=split)
    assert found == pytest.approx(10 + 11 / 5 * 10 + 5)


def test_a_split_of_one_slice_changes_nothing() -> None:
    assert seconds(op("mm.default", flops=1000), split=split_of(8)) == pytest.approx(10)


# What operators cost beside their kernels


CALLS = CallSeconds(
    forward=1.0, backward=10.0, optimizer_step=100.0, foreach_tensor=1000.0, fused_tensor=1e4, recomputed_block=1e5
)
COSTLY = replace(RATES, calls=CALLS)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (op("empty.memory_format"), 1.0),
        (op("empty.memory_format", views=3), 4.0),
        (op("empty.memory_format", "backward", views=1), 20.0),
        (op("empty.memory_format", "backward", recomputed=True), 1.0),
        (op("empty.memory_format", "optimizer_step"), 100.0),
        (op("empty.memory_format", "gradient_clipping"), 100.0),
    ],
)
def test_operators_and_views_cost_what_their_phase_costs(event: Operation, expected: float) -> None:
    found = step_seconds(timeline(event), COSTLY)
    assert (found.calls, found.kernels) == (expected, 0.0)


def test_lists_of_tensors_cost_by_tensor_and_their_kernel_without_its_own_fixed_cost() -> None:
    found = step_seconds(timeline(op("_foreach_mul_.Scalar", "optimizer_step", moved_bytes=100, inner_calls=3)), COSTLY)
    assert found.calls == 3000
    assert found.kernels == pytest.approx(10, abs=1e-6)
    # 16 bytes at 8/s, less half a second that a call takes at least.
    fused = step_seconds(timeline(op("_fused_adamw_.default", "optimizer_step", moved_bytes=16, inner_calls=2)), COSTLY)
    assert fused.calls == 20000
    assert fused.kernels == pytest.approx(1.5)


def test_operators_of_a_single_tensor_step_find_the_parameter_in_the_caches() -> None:
    assert seconds(op("mul_.Tensor", "optimizer_step", moved_bytes=80)) == pytest.approx(2)
    assert seconds(op("mul_.Tensor", "backward", moved_bytes=80)) == pytest.approx(8)


def test_recomputed_blocks_cost_once_each_however_many_modules_are_in_them() -> None:
    def call(name: str, first: int, end: int, micro_step: int = 0) -> ModuleCall:
        return ModuleCall(name, micro_step, first, end, (), recomputed=True)

    # Calls are in the order in which they ended: the parts of a block come before it.
    calls = (call("0.linear", 1, 2), call("0", 1, 3), call("1", 3, 5), call("0", 7, 9, micro_step=1))
    found = step_seconds(timeline(calls=calls, micro_steps=4, followed_micro_steps=2), COSTLY)
    # Two in the first slice, one in the second, which stands for three.
    assert found.calls == 5 * 1e5
    forward_only = tuple(each._replace(recomputed=False) for each in calls)
    assert step_seconds(timeline(calls=forward_only), COSTLY).calls == 0


def test_recomputation_and_the_optimizer_are_shown_as_parts_of_the_whole() -> None:
    step = [
        op("mm.default", flops=1000),
        op("mm.default", "backward", flops=300, recomputed=True),
        op(phase="optimizer_step", moved_bytes=80),
    ]
    found = step_seconds(timeline(*step), RATES)
    assert found.kernels == found.total == pytest.approx(10 + 3 + 2)
    assert found.recomputed == pytest.approx(3)
    assert found.optimizer == pytest.approx(2)


def test_memory_that_comes_from_the_system_every_time_costs_time() -> None:
    slow = replace(RATES, allocator=AllocatorRates(seconds_per_new_byte=0.25, largest_kept_block_bytes=10))
    found = step_seconds(timeline(op("empty.memory_format", written=[12, 8])), slow)
    assert found.new_memory == pytest.approx(3)
    assert found.total == pytest.approx(3)


# Properties


operations = st.builds(
    op,
    st.sampled_from(["mm.default", "add.Tensor", "_foreach_add_.Tensor", "embedding.default", "empty_like.default"]),
    st.sampled_from(["forward", "backward", "optimizer_step"]),
    flops=st.integers(0, 10**9),
    moved_bytes=st.integers(1, 10**8),
    written=st.lists(st.integers(1, 10**6), max_size=2),
    views=st.integers(0, 3),
    inner_calls=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "float64"]),
    recomputed=st.booleans(),
)


@settings(max_examples=50)
@given(st.lists(operations, max_size=8))
def test_a_step_takes_as_long_as_its_operators_one_by_one(events: list[Operation]) -> None:
    """Variants of a recorded step are predicted operator by operator."""
    assert seconds(*events, rates=COSTLY) == pytest.approx(sum(seconds(event, rates=COSTLY) for event in events))


@settings(max_examples=50)
@given(st.lists(operations, min_size=1, max_size=8), st.integers(1, 9))
def test_more_slices_of_the_same_size_never_take_less(events: list[Operation], count: int) -> None:
    second = [event._replace(micro_step=1) for event in events]
    fewer = seconds(*events, *second, rates=COSTLY, micro_steps=count + 1, followed_micro_steps=2)
    more = seconds(*events, *second, rates=COSTLY, micro_steps=count + 2, followed_micro_steps=2)
    assert more >= fewer
