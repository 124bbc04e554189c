"""Hidden bytes of operators on CUDA that sort indices first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_memfit.predict.cuda_temporaries.rule import (
    CudaArchitecture,
    HiddenBytes,
    Rule,
    accumulator_bytes,
    argument,
    between,
    blocks,
    element_bytes,
    exactly,
    is_contiguous,
    numel,
    tensor_argument,
    tensor_bytes,
)
from lightning_memfit.trace.timeline import Signature, TensorShape

_MOST_UNSORTED_INDICES = 3072
_ROWS_PER_PARTIAL_SUM = 10
_SINGLE_TILE_ITEMS = 16384
_SORT_SLACK_BYTES = 2**20


def sort_storage(items: int, pair_bytes: int) -> tuple[int, int]:
    """Least and most bytes that CUB takes to sort pairs.

    CUB sorts through a second copy of keys and values, except for what one block sorts at once; histograms and the
    state of each tile come on top. The ends are ours: nothing below 16,384 pairs, else one copy; at most a copy and a
    quarter of it and 1 MiB.

    Source: CUB ``DeviceRadixSort::SortPairs``, called without permission to overwrite its input
    (``ATen/cuda/cub-RadixSortPairs.cuh`` of 2.13).
    """
    low = blocks(items * pair_bytes) if items > _SINGLE_TILE_ITEMS else 0
    return low, blocks(items * pair_bytes * 1.25 + _SORT_SLACK_BYTES)


def embedding_backward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Sorted indices and partial sums of the gradient of an embedding.

    1. Up to 3,072 indices, not scaled by frequency: nothing but contiguous copies.
    2. Otherwise sorted indices and the order that sorts them, each of the size of the indices; while sorting moreover a
       range of that size and CUB's storage; with scaling the counts.
    3. ``segments = min(indices, rows of the table)``; three arrays of that many indices.
    4. ``p = indices // 10 + segments`` partial sums: an array of p indices, and p x columns accumulators (float32 for
       half types), which is the large one.

    Source: ``aten/src/ATen/native/cuda/Embedding.cu``, ``embedding_dense_backward_cuda``;
    ``EmbeddingBackwardKernel.cu``, ``embedding_backward_cuda_kernel``.

    Ignores: CUB's storage for scans and the selection of unique indices (kilobytes).
    """
    grad, indices = tensor_argument(signature, 0, "grad_output"), tensor_argument(signature, 1, "indices")
    table_rows = argument(signature, 2, "num_weights")
    if grad is None or indices is None or table_rows is None:
        return None
    scaled = bool(argument(signature, 4, "scale_grad_by_freq", False))
    copies = sum(blocks(tensor_bytes(one)) for one in (grad, indices) if not is_contiguous(one))
    count, index_bytes = numel(indices), element_bytes(indices.dtype)
    if count <= _MOST_UNSORTED_INDICES and not scaled:
        return exactly(copies, "few indices are added without sorting")
    segments = min(count, table_rows)
    partial = count // _ROWS_PER_PARTIAL_SUM + segments
    kept = copies + 2 * blocks(count * index_bytes)
    summing = 3 * blocks(segments * index_bytes) + blocks(partial * index_bytes, 8, 8)
    summing += blocks(partial * grad.size[-1] * accumulator_bytes(grad.dtype))
    if scaled:
        summing += blocks(count * index_bytes)
    sorting = [blocks(count * index_bytes) + storage for storage in sort_storage(count, 2 * index_bytes)]
    low, high = (kept + max(one, summing) for one in sorting)
    return between(low, high, "sorted indices and float32 partial sums of the gradient's rows")


def index_put(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Sorted linear indices of an accumulating write.

    1. Without accumulation, and without deterministic algorithms, nothing is sorted.
    2. ``n`` is the number of indexed positions: that of the broadcast index tensors. A mask has at most as many as it
       has elements, and at least none.
    3. int64 arrays of n: linear indices, sorted ones, a range, the order; and CUB's storage. At most three more that
       the computation of the linear indices leaves, one by one.
    4. At most a contiguous copy of the values, expanded to every indexed position, and one of the target.

    Source: ``aten/src/ATen/native/cuda/Indexing.cu``, ``index_put_with_sort_kernel``.
    """
    target, values = tensor_argument(signature, 0, "self"), tensor_argument(signature, 2, "values")
    listed = argument(signature, 1, "indices", ())
    accumulate = bool(argument(signature, 3, "accumulate", False))
    indices = [one for one in listed if isinstance(one, TensorShape)] if not isinstance(listed, TensorShape) else []
    if target is None or values is None or not indices:
        return None
    masked = any(one.dtype in ("bool", "uint8") for one in indices)
    count = max(numel(one) for one in indices) if masked else _broadcast_elements(indices)
    conversion = blocks(8 * count) * 3
    if not (accumulate or architecture.deterministic_algorithms):
        return between(0, conversion, "indices brought into one shape")
    low_sort, high_sort = sort_storage(count, 16)
    untouched = _elements_per_position(target, listed)
    copies = blocks(max(tensor_bytes(values), count * untouched * element_bytes(values.dtype)))
    if not is_contiguous(target):
        copies += 2 * blocks(tensor_bytes(target))
    arrays = 4 * blocks(8 * count)
    return between(0 if masked else arrays + low_sort, arrays + conversion + high_sort + copies, "sorted indices")


def _elements_per_position(target: TensorShape, indices: Iterable[TensorShape | None]) -> int:
    """Elements of the dimensions that no index picks from: those of ``None``, and those behind the last index."""
    dimension, elements = 0, 1
    for index in indices:
        if index is None:
            elements *= target.size[dimension]
        dimension += len(index.size) if index is not None and index.dtype in ("bool", "uint8") else 1
    return elements * math.prod(target.size[dimension:])


def _broadcast_elements(indices: list[TensorShape]) -> int:
    rank = max(len(one.size) for one in indices)
    padded = [(1,) * (rank - len(one.size)) + tuple(one.size) for one in indices]
    return math.prod(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))


def sorting(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Copies through which values and their positions are sorted: an interval.

    Between nothing (rows of up to 4,096 values are sorted in place in the outputs; few of the largest are selected by
    radix) and three times values with int64 positions, and 1 MiB: a copy, CUB's second one, and for the largest of long
    rows the sorted copy from which they are cut. The upper end is ours.

    Source: ``aten/src/ATen/native/cuda/Sort.cpp``, ``SortStable.cu``, ``TensorTopK.cu``, ``Sorting.cpp``.
    """
    tensor = tensor_argument(signature, 0, "self")
    if tensor is None:
        return None
    pairs = numel(tensor) * (element_bytes(tensor.dtype) + 8)
    return between(0, blocks(3 * pairs + _SORT_SLACK_BYTES), "copies through which CUB sorts")


RULES = (
    Rule(
        operators=("embedding_dense_backward",),
        formula="up to 3,072 indices nothing; else 2 x indices x index bytes, 3 x segments and p indices, and p x "
        "columns x accumulator bytes with p = indices // 10 + min(indices, table rows)",
        kind="exact or interval",
        source="Embedding.cu embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu embedding_backward_cuda_kernel",
        versions="read at copies of 2024 or later; 1.12 and later",
        compute=embedding_backward,
    ),
    Rule(
        operators=("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
        formula="accumulating: 4 x positions x 8 B and CUB's storage, to that with copies of indices and values",
        kind="interval",
        source="Indexing.cu index_put_with_sort_kernel",
        versions="read at a copy of 2025 or later; 1.9 and later",
        compute=index_put,
    ),
    Rule(
        operators=(
            *("sort", "argsort", "topk", "kthvalue", "median", "mode", "nonzero", "bincount", "histc"),
            *("_unique2", "unique_dim", "unique_consecutive"),
        ),
        formula="0 to 3 x elements x (element bytes + 8) + 1 MiB",
        kind="interval",
        source="Sort.cpp, SortStable.cu, TensorTopK.cu (upper end assumed)",
        versions="1.9 and later",
        compute=sorting,
    ),
)
"""The rules of this module."""
