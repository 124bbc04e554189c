"""Which kind of work an operator counts as, and how much. Run: ``pytest tests/predict/test_operator_kinds.py``."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_memfit.hardware.rates import UNITS
from lightning_memfit.predict.operator_kinds import Work, work_of
from lightning_memfit.trace.timeline import Operation, Output


def op(name: str, **values: Any) -> Operation:
    outputs = tuple(Output(index, index, size) for index, size in enumerate(values.pop("written", ())))
    return Operation(f"aten.{name}", "", "forward", None, outputs, dtype="float32", **values)


def test_products_count_flops_and_everything_else_the_bytes_it_moves() -> None:
    assert work_of(op("addmm.default", flops=600, moved_bytes=90)) == Work("matmul", 600, 1)
    assert work_of(op("bmm.default", flops=600, moved_bytes=90)) == Work("batched_matmul", 600, 1)
    assert work_of(op("add.Tensor", moved_bytes=90)) == Work("elementwise", 90, 1)
    assert work_of(op("gelu_backward.default", moved_bytes=90)) == Work("transcendental", 90, 1)


def test_an_operator_in_place_or_on_a_list_is_of_the_kind_of_the_plain_one() -> None:
    assert work_of(op("sigmoid_.default", moved_bytes=8)).kind == "transcendental"
    assert work_of(op("_foreach_sqrt.default", moved_bytes=8, inner_calls=4)) == Work("transcendental", 8, 1)
    assert work_of(op("_foreach_addcmul_.Scalar", moved_bytes=8, inner_calls=4)) == Work("elementwise", 8, 1)
    assert work_of(op("_fused_adamw_.default", moved_bytes=8, inner_calls=4)) == Work("fused_optimizer", 8, 1)


def test_a_recurrent_layer_takes_one_step_after_the_other() -> None:
    # 64 time steps share 6400 FLOPs.
    assert work_of(op("mkldnn_rnn_layer.default", flops=6400, inner_calls=64)) == Work("recurrent", 100, 64)


def test_of_a_table_only_the_rows_that_are_looked_up_count() -> None:
    # Rows of 40 bytes are read and written, whatever the size of the table among the arguments.
    assert work_of(op("embedding.default", moved_bytes=4000, written=[40])) == Work("gather", 80, 1)
    # Backward: 40 bytes of gradients are read and added to rows; the table of 4000 is new and told by the outputs.
    assert work_of(op("embedding_dense_backward.default", moved_bytes=4040, written=[4000])) == Work("scatter", 80, 1)


def test_filling_in_place_writes_once() -> None:
    assert work_of(op("zero_.default", moved_bytes=80)) == Work("fill", 40, 1)
    assert work_of(op("zeros.default", moved_bytes=40)) == Work("fill", 40, 1)
    # The loss's gradient is zeros but for one number a row; its arguments are hardly read.
    assert work_of(op("nll_loss_backward.default", moved_bytes=200, written=[80])) == Work("fill", 80, 1)


@pytest.mark.parametrize(
    "name", ["empty.memory_format", "empty_like.default", "nll_loss_forward.default", "t_.default"]
)
def test_where_no_kernel_runs_there_is_no_work(name: str) -> None:
    assert work_of(op(name, moved_bytes=80)).kind is None


def test_a_product_without_a_formula_and_an_unknown_operator_move_memory() -> None:
    assert work_of(op("mv.default", moved_bytes=80)) == Work("elementwise", 80, 1)
    assert work_of(op("not_known_at_all.default", moved_bytes=80)) == Work("elementwise", 80, 1)


def test_the_steps_of_bitsandbytes_are_kinds_of_their_own() -> None:
    eight = op("x", moved_bytes=80)._replace(op="bitsandbytes.optimizer_update_8bit_blockwise.default")
    full = eight._replace(op="bitsandbytes.optimizer_update_32bit.default")
    assert work_of(eight) == Work("quantised_optimizer", 80, 1)
    assert work_of(full) == Work("unquantised_optimizer", 80, 1)


def test_kinds_that_count_flops_are_named_in_units() -> None:
    for name in ("mm", "convolution", "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer_backward"):
        kind = work_of(op(f"{name}.default", flops=10, moved_bytes=3)).kind
        assert kind is not None and UNITS[kind] == "flops"
