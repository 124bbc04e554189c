"""What CUDA operators take inside, by formula. Run: ``pytest tests/predict/test_cuda_temporaries.py``."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.predict.cuda_temporaries import (
    CudaArchitecture,
    HiddenBytes,
    describe_formulas,
    hidden_bytes,
    library_workspaces,
)
from lightning_memfit.predict.cuda_temporaries.libraries import may_use_lt
from lightning_memfit.predict.cuda_temporaries.reductions import reduction_bytes
from lightning_memfit.trace.timeline import Signature, TensorShape

H100 = CudaArchitecture(compute_capability=(9, 0), multiprocessors=132)
A100 = CudaArchitecture(compute_capability=(8, 0), multiprocessors=108)
UNKNOWN_H100 = CudaArchitecture(compute_capability=(9, 0), multiprocessors=None)
DETERMINISTIC_H100 = CudaArchitecture(compute_capability=(9, 0), multiprocessors=132, deterministic_algorithms=True)


def tensor(*size: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorShape:
    steps = tuple(math.prod(size[index + 1 :]) for index in range(len(size)))
    return TensorShape(dtype, size, stride or steps, None)


def heads(batch: int, count: int, length: int, head_dim: int, dtype: str = "bfloat16") -> TensorShape:
    """(batch, heads, length, head dimension), lying in memory as (batch, length, heads, head dimension)."""
    stride = (length * count * head_dim, head_dim, count * head_dim, 1)
    return TensorShape(dtype, (batch, count, length, head_dim), stride, None)


def hidden(op: str, *args: Any, on: CudaArchitecture = H100, **kwargs: Any) -> HiddenBytes:
    found = hidden_bytes(Signature(f"aten.{op}", args, kwargs), on)
    assert found is not None
    return found


def ends(found: HiddenBytes) -> tuple[int, int]:
    return found.low_bytes, found.high_bytes


def flash_backward(query: TensorShape, key: TensorShape, grad: TensorShape, on: CudaArchitecture = H100) -> HiddenBytes:
    lse = tensor(2, 12, 1000)
    op = "_scaled_dot_product_flash_attention_backward.default"
    return hidden(op, grad, query, key, key, query, lse, None, None, 1000, 1000, 0.0, True, None, None, on=on)


def test_flash_backward_accumulates_dq_in_float32_of_rounded_lengths() -> None:
    # 1000 queries are rounded to 1024: 2 x 1024 x 12 heads = 24,576 rows of 64 + 1 float32: 6,291,456 + 98,304 bytes.
    query = heads(2, 12, 1000, 64)
    assert ends(flash_backward(query, query, query)) == (6_389_760, 6_389_760)


def test_flash_backward_rounds_a_head_dimension_to_32_and_above_128_to_64() -> None:
    # 80 becomes 96: 24,576 x 97 x 4; 136 becomes 192: 24,576 x 193 x 4.
    for head_dim, rounded in ((80, 96), (136, 192)):
        query = heads(2, 12, 1000, head_dim)
        assert ends(flash_backward(query, query, query)) == (24_576 * 4 * (rounded + 1),) * 2


def test_flash_backward_expands_grouped_heads_and_copies_what_is_not_contiguous() -> None:
    # dk and dv of 12 heads: 2 x 1000 x 12 x 64 x 2 bytes = 3,072,000 each; the gradient once more in another order.
    query, key = heads(2, 12, 1000, 64), heads(2, 4, 1000, 64)
    assert flash_backward(query, key, query).low_bytes == 6_389_760 + 2 * 3_072_000
    other_order = tensor(2, 12, 1000, 64, dtype="bfloat16")
    assert flash_backward(query, query, other_order).low_bytes == 6_389_760 + 3_072_000


def test_deterministic_flash_backward_keeps_a_dq_for_every_wave_of_multiprocessors() -> None:
    # ceil(132 / (2 x 12)) = 6 copies of 6,291,456 bytes, and one of 98,304.
    query = heads(2, 12, 1000, 64)
    assert flash_backward(query, query, query, DETERMINISTIC_H100).high_bytes == 6 * 6_291_456 + 98_304


def test_flash_backward_of_sequences_of_different_lengths_counts_128_rows_more_for_each() -> None:
    # 3 sequences, 700 queries together: 700 + 3 x 128 = 1084 rows of 4 heads x (64 + 1) float32: 17,344 + 1,110,016.
    query, lengths = tensor(700, 4, 64, dtype="bfloat16"), tensor(4, dtype="int32")
    op = "_flash_attention_backward.default"
    found = hidden(op, query, query, query, query, query, tensor(4, 700), lengths, lengths, 400, 400, 0.0, True)
    assert found.low_bytes == 17_408 + 1_110_016  # the row sums fill 34 blocks of 512 bytes


def test_flash_forward_splits_keys_only_over_idle_multiprocessors() -> None:
    # 1 x 8 heads x 16 blocks of queries = 128 of 264 slots; 4 blocks of 256 keys. Two splits fill 97 %, one 48 %.
    # 2 x 8 x 1024 rows of 64 + 1 float32 = 4,259,840 bytes. Four times the batch fills the GPU without splits.
    op = "_scaled_dot_product_flash_attention.default"
    few, many = heads(1, 8, 1024, 64), heads(4, 8, 1024, 64)
    assert ends(hidden(op, few, few, few, 0.0, True)) == (4_259_840, 4_259_840)
    assert ends(hidden(op, many, many, many, 0.0, True)) == (0, 0)
    assert ends(hidden(op, few, few, few, 0.1, True)) == (0, 0)
    # Without the number of multiprocessors, up to the 4 blocks of keys may be split.
    assert ends(hidden(op, few, few, few, 0.0, True, on=UNKNOWN_H100)) == (0, 8_519_680)


def efficient_backward(query: TensorShape, on: CudaArchitecture) -> HiddenBytes:
    op, mask = "_scaled_dot_product_efficient_attention_backward.default", (True, True, True, False)
    return hidden(op, query, query, query, query, None, query, tensor(2, 12, 512), None, None, 0.0, mask, on=on)


def test_efficient_backward_stages_dq_in_tiles() -> None:
    # 8 tiles of 16 + 4 x 64 x 64 = 16,400 bytes for each of 24 heads: 3,148,800; row sums 24 x 512 x 4 = 49,152.
    assert ends(efficient_backward(heads(2, 12, 512, 64), A100)) == (3_197_952, 3_197_952)


def test_efficient_backward_of_float32_multiplies_gradient_and_output_first() -> None:
    # The product of 24 x 512 x 64 float32 (3,145,728) and its sum (49,152) exceed the staging area of 3,148,800.
    assert ends(efficient_backward(heads(2, 12, 512, 64, "float32"), A100)) == (3_244_032, 3_244_032)


def test_efficient_backward_with_large_heads_is_an_interval_over_the_kernels() -> None:
    # 128 x 128 tiles: 4 of 65,552 bytes per head. 64 x 64 tiles: 8 x 2 of 16,400 bytes, and 8 splits of dk and dv of
    # 64 x 128 float32, 65,536 bytes for each pair. Row sums: 49,152.
    small, large = 49_152 + 24 * 4 * 65_552, 49_152 + 24 * (16 * 16_400 + 8 * 65_536)
    assert ends(efficient_backward(heads(2, 12, 512, 128), A100)) == (small, large)


def test_efficient_forward_needs_an_accumulator_only_for_large_heads_of_half_types() -> None:
    op = "_scaled_dot_product_efficient_attention.default"
    for head_dim, dtype, expected in ((128, "bfloat16", 0), (160, "float32", 0), (160, "bfloat16", 24 * 512 * 160 * 4)):
        query = heads(2, 12, 512, head_dim, dtype)
        assert ends(hidden(op, query, query, query, None, True)) == (expected, expected)


def test_cudnn_attention_is_an_interval_from_nothing() -> None:
    query = heads(2, 12, 512, 64)
    found = hidden("_scaled_dot_product_cudnn_attention_backward.default", query, query, query, query)
    # 2 x 12 x (512 + 2 x 512) rows of 64 + 1 float32.
    assert ends(found) == (0, 24 * 1536 * 65 * 4)


def test_a_sum_over_rows_stages_far_more_than_it_reads() -> None:
    # 768 outputs, 4 per thread: blocks of 32 x 4 threads, 6 of them along the outputs. Each thread would sum 8192 / 4
    # = 2048 values. 132 x 16 slots / 6 = 352 blocks per output, but 2048 / 16 = 128 suffice. Staged: 4 bytes x 768 x
    # 128 x 32 x 4 = 50,331,648, and 6 semaphores.
    found = hidden("sum.dim_IntList", tensor(8192, 768, dtype="bfloat16"), [0])
    assert ends(found) == (50_331_648 + 512,) * 2
    # The same sum of three dimensions without gaps.
    assert hidden("sum.dim_IntList", tensor(8, 1024, 768, dtype="bfloat16"), [0, 1], True).low_bytes == 50_332_160


def test_a_sum_of_everything_stages_one_value_per_block() -> None:
    # 2**20 values over 512 threads: 2048 each; 2048 / 16 = 128 blocks of the 528 that fit: 512 bytes, 1 semaphore.
    assert ends(hidden("sum.default", tensor(1024, 1024))) == (1024, 1024)
    assert ends(hidden("mean.default", tensor(100))) == (0, 0)


def test_a_sum_of_more_than_two_gibibytes_is_an_interval() -> None:
    # 2**21 rows of 768 bfloat16 are 3 GiB, reduced in parts; the 768 results are kept as float32: 3072 bytes.
    low, high = ends(hidden("sum.dim_IntList", tensor(2**21, 768, dtype="bfloat16"), [0]))
    # 352 blocks per output fill the GPU, but each thread should sum no more than 256 of 2**19 values: 2048 blocks.
    assert (low, high) == (0, 4 * 768 * 2048 * 128 + 512 + 3072)


def test_a_sum_along_short_rows_stages_nothing() -> None:
    # 768 values of a row over 128 / 4 ... 32 threads: fewer than 256 each.
    assert ends(hidden("mean.dim", tensor(8192, 768), [-1], True)) == (0, 0)


def test_partial_results_are_as_large_as_the_accumulator() -> None:
    half, full = tensor(8192, 768, dtype="float16"), tensor(8192, 768)
    # amax keeps 2 of the 4 bytes of a sum, a variance 16.
    assert hidden("amax.default", half, [0]).low_bytes == 50_331_648 // 2 + 512
    assert hidden("var.correction", full, [0], correction=1).low_bytes == 50_331_648 * 4 + 512
    assert hidden("linalg_vector_norm.default", full, 2, [0]).low_bytes == 50_331_648 + 512


@given(
    size=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    reduced=st.sets(st.integers(0, 2), min_size=1),
    multiprocessors=st.integers(1, 200),
)
def test_a_known_gpu_stages_no_more_than_an_unknown_one_may(
    size: list[int], reduced: set[int], multiprocessors: int
) -> None:
    dims = tuple(dim for dim in reduced if dim < len(size))
    known = CudaArchitecture(compute_capability=(9, 0), multiprocessors=multiprocessors)
    low, high = reduction_bytes(tensor(*size), dims, 4, known)
    least, most = reduction_bytes(tensor(*size), dims, 4, UNKNOWN_H100)
    assert least <= low <= high <= most


def test_a_norm_of_a_list_keeps_a_row_of_the_longest_tensor_for_each() -> None:
    # 65,537 elements are 2 chunks: 3 x 2 x 4 = 24 bytes, one block; after 2.13 up to 320 x 4 bytes (3 blocks) and one.
    listed = [tensor(65_537, dtype="bfloat16"), tensor(10, dtype="bfloat16"), tensor(100, dtype="bfloat16")]
    later = CudaArchitecture(compute_capability=(9, 0), multiprocessors=132, torch_minor=(2, 14))
    assert ends(hidden("_foreach_norm.Scalar", listed, 2)) == (512, 512)
    assert ends(hidden("_foreach_norm.Scalar", listed, 2, on=later)) == (512, 512 + 2048)
    # 1000 tensors and one of 65,536 x 1000 elements: 1001 x 1000 x 4 bytes.
    many = [tensor(65_536 * 1000), *[tensor(1)] * 1000]
    assert hidden("_foreach_norm.Scalar", many, 2).low_bytes == 4_004_352  # 4,004,000 in whole blocks


def layer_norm_backward(rows: int, on: CudaArchitecture = H100) -> HiddenBytes:
    x, weight = tensor(rows, 768, dtype="bfloat16"), tensor(768, dtype="bfloat16")
    mean, mask = tensor(rows, 1), (True, True, True)
    return hidden("native_layer_norm_backward.default", x, x, [768], mean, mean, weight, weight, mask, on=on)


def test_layer_norm_backward_stores_partial_sums_only_beyond_65536_rows() -> None:
    assert ends(layer_norm_backward(65_536)) == (0, 0)
    # min(131,072 / 32, 32,768 // 24) = 1365 rows of 768 bfloat16 for weight and bias: 2 x 2,096,640; a gradient that is
    # replaced: 1536; the sum over 1365 rows: ceil(342 / 16) = 22 blocks per output, 4 x 768 x 22 x 128 + 512.
    assert ends(layer_norm_backward(131_072)) == (4_193_280 + 1536 + 8_650_752 + 512,) * 2


def test_layer_norm_backward_of_earlier_versions_and_small_gpus_stores_none() -> None:
    earlier = CudaArchitecture(compute_capability=(9, 0), multiprocessors=132, torch_minor=(2, 7))
    small = CudaArchitecture(compute_capability=(8, 9), multiprocessors=46)  # 24 is not less than 46 / 2
    assert ends(layer_norm_backward(131_072, earlier)) == (0, 0)
    assert ends(layer_norm_backward(131_072, small)) == (0, 0)


def test_rms_norm_backward_has_no_bias() -> None:
    x, weight = tensor(131_072, 768, dtype="bfloat16"), tensor(768, dtype="bfloat16")
    found = hidden("_fused_rms_norm_backward.default", x, x, [768], tensor(131_072, 1), weight, (True, True))
    assert found.low_bytes == 2_096_640 + 1536 + 8_650_752 + 512


def test_group_norm_backward_keeps_sums_per_channel() -> None:
    # 4 x 64 float32 = 1024 bytes for ds, db and c1; 4 x 8 float32 = 128 bytes, one block each, for c2 and c3.
    x = tensor(4, 64, 16, 16, dtype="float16")
    found = hidden(
        "native_group_norm_backward.default", x, x, None, None, tensor(64), 4, 64, 256, 8, (True, True, True)
    )
    assert ends(found) == (3 * 1024 + 2 * 512,) * 2


def test_group_norm_keeps_scale_and_shift_of_every_channel() -> None:
    # Twice 4 x 64 float32; nothing without weight and bias, or with one value per channel.
    x, weight = tensor(4, 64, 16, 16, dtype="float16"), tensor(64)
    assert ends(hidden("native_group_norm.default", x, weight, weight, 4, 64, 256, 8, 1e-5)) == (2048, 2048)
    assert ends(hidden("native_group_norm.default", x, None, None, 4, 64, 256, 8, 1e-5)) == (0, 0)
    assert ends(hidden("native_group_norm.default", tensor(4, 64), weight, weight, 4, 64, 1, 8, 1e-5)) == (0, 0)


def embedding_backward(count: int) -> HiddenBytes:
    grad, indices = tensor(count, 768, dtype="bfloat16"), tensor(count, dtype="int64")
    return hidden("embedding_dense_backward.default", grad, indices, 50_257, -1, False)


def test_embedding_backward_sorts_more_than_3072_indices() -> None:
    assert ends(embedding_backward(3072)) == (0, 0)
    # 8192 // 10 + 8192 = 9011 partial sums of 768 float32: 27,681,792; their 9011 places: 72,088 (72,192 in blocks);
    # five arrays of 8192 int64: 327,680; two counters: 1024.
    assert ends(embedding_backward(8192)) == (27_681_792 + 72_192 + 327_680 + 1024,) * 2


def test_index_put_sorts_when_it_accumulates() -> None:
    index = tensor(100, dtype="int64")
    # Four arrays of 100 int64 (two blocks each). At most three more, CUB's 2000 bytes and 1 MiB, a copy of the values.
    found = hidden("index_put.default", tensor(50, 60), [index, index], tensor(100), True)
    assert ends(found) == (4096, 4096 + 3072 + 1_050_624 + 512)
    assert hidden("index_put.default", tensor(50, 60), [index, index], tensor(100), False).low_bytes == 0


def test_index_put_writes_whole_slices_of_dimensions_without_an_index() -> None:
    # 100 positions of 4 x 64 float32 each: 102,400 bytes of values at most, given as one slice that is expanded.
    index = tensor(100, dtype="int64")
    found = hidden("index_put.default", tensor(4, 50, 64), [None, index], tensor(4, 1, 64), True)
    assert ends(found) == (4096, 4096 + 3072 + 1_050_624 + 102_400)


def test_a_mask_may_select_nothing() -> None:
    found = hidden("index_put.default", tensor(50, 60), [tensor(50, 60, dtype="bool")], tensor(1), True)
    assert found.low_bytes == 0
    assert found.high_bytes >= 4 * 8 * 3000


def test_a_matrix_with_gaps_in_rows_and_columns_is_copied() -> None:
    gaps = tensor(64, 64, stride=(256, 2))
    assert ends(hidden("mm.default", gaps, tensor(64, 64))) == (64 * 64 * 4,) * 2
    transposed = tensor(64, 64, stride=(1, 64))
    assert ends(hidden("addmm.default", tensor(64), transposed, tensor(64, 64))) == (0, 0)


def test_a_bias_of_one_dimension_may_go_through_cublaslt() -> None:
    x, weight = tensor(32, 16), tensor(16, 8)
    assert may_use_lt(Signature("aten.addmm.default", (tensor(8), x, weight), {}))
    assert not may_use_lt(Signature("aten.addmm.default", (tensor(32, 8), x, weight), {}))
    assert not may_use_lt(Signature("aten.addmm.default", (tensor(8), x, weight), {"beta": 2}))
    assert not may_use_lt(Signature("aten.addmm.default", (tensor(8), tensor(1, 16), weight), {}))


def test_a_convolution_is_an_interval_that_says_so() -> None:
    # Input 2 x 3 x 8 x 8, weight 4 x 3 x 3 x 3 (432 bytes, one block), result 2 x 4 x 8 x 8, all float32.
    args = (tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = hidden("convolution.default", *args)
    assert ends(found) == (0, 1536 + 512 + 2048)
    assert "ours" in found.reason


@pytest.mark.parametrize("op", ["aten.add.Tensor", "aten.view.default", "aten.gelu.default"])
def test_of_elementwise_operators_and_views_nothing_is_known(op: str) -> None:
    assert hidden_bytes(Signature(op, (tensor(4),), {}), H100) is None


def test_fused_optimizers_take_nothing() -> None:
    for op in ("aten._fused_adamw_.default", "bitsandbytes.optimizer_update_8bit_blockwise.default"):
        assert hidden_bytes(Signature(op, (), {}), H100) == HiddenBytes(
            low_bytes=0, high_bytes=0, reason="its kernels take no memory besides outputs and arguments"
        )


def test_scattering_takes_nothing_unless_it_must_be_deterministic() -> None:
    call = Signature("aten.index_add_.default", (tensor(8, 4), 0, tensor(3, dtype="int64"), tensor(3, 4)), {})
    found = hidden_bytes(call, H100)
    assert found is not None
    assert found.exact and found.high_bytes == 0
    assert hidden_bytes(call, DETERMINISTIC_H100) is None


STEP = (("aten.addmm.default", "forward"), ("aten.mm.default", "backward"), ("aten.mm.default", "forward"))


@pytest.mark.parametrize(
    ("capability", "version", "low", "high"),
    [
        ((8, 0), (2, 13), 8_519_680, 8_519_680),  # (2 x 4096 + 8 x 16) KiB
        ((9, 0), (2, 13), 33_554_432, 33_554_432),
        ((10, 0), (2, 13), 33_554_432, 33_554_432),
        ((10, 0), (2, 12), 8_519_680, 33_554_432),
        ((12, 0), (2, 10), 8_519_680, 8_519_680),
        ((9, 0), (2, 14), 0, 33_554_432),
    ],
)
def test_each_thread_that_multiplies_keeps_a_cublas_workspace(
    capability: tuple[int, int], version: tuple[int, int], low: int, high: int
) -> None:
    architecture = CudaArchitecture(compute_capability=capability, multiprocessors=None, torch_minor=version)
    kept = [one for one in library_workspaces(STEP, architecture) if one.name.startswith("cuBLAS,")]
    assert [(one.name, one.low_bytes, one.high_bytes, one.first_phase) for one in kept] == [
        ("cuBLAS, forward thread", low, high, "forward"),
        ("cuBLAS, autograd thread", low, high, "backward"),
    ]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (":0:0", 0),
        (":16:8", 131_072),  # 16 x 8 KiB
        (":4096:2:16:8", 8_519_680),
        (":4096:8", 33_554_432),
        ("4096", 8_519_680),  # no pair: the default of the GPU
    ],
)
def test_the_environment_says_how_large_a_cublas_workspace_is(config: str, kept: int) -> None:
    architecture = replace(A100, cublas_workspace_config=config)
    assert [(one.low_bytes, one.high_bytes) for one in library_workspaces(STEP, architecture)] == [(kept, kept)] * 2


def test_cublaslt_may_keep_a_mebibyte_of_its_own_before_2_13() -> None:
    before = CudaArchitecture(compute_capability=(8, 0), multiprocessors=108, torch_minor=(2, 9))
    lt = [one for one in library_workspaces(STEP, before) if one.name.startswith("cuBLASLt")]
    assert [(one.name, one.low_bytes, one.high_bytes) for one in lt] == [("cuBLASLt, forward thread", 0, 1_048_576)]
    assert not [one for one in library_workspaces(STEP, A100) if one.name.startswith("cuBLASLt")]
    assert library_workspaces([("aten.add.Tensor", "forward")], A100) == ()


def test_every_formula_is_described_once_with_its_source() -> None:
    rows = describe_formulas()
    names = sorted(name for row in rows for name in row.operators)
    assert all(first != second for first, second in pairwise(names))
    assert all(row.formula and row.source and row.versions for row in rows)
    assert {row.kind for row in rows} == {"exact", "interval", "exact or interval"}
