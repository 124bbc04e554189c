"""Hidden bytes of reductions on CUDA: the staging memory through which several blocks compute one output."""

from __future__ import annotations

from typing import NamedTuple

from lightning_memfit.predict.cuda_temporaries.rule import (
    CudaArchitecture,
    HiddenBytes,
    Rule,
    accumulator_bytes,
    argument,
    between,
    blocks,
    element_bytes,
    numel,
    tensor_argument,
    tensor_bytes,
)
from lightning_memfit.trace.timeline import Signature, TensorShape

_WARP = 32
_MOST_THREADS = 512
_VALUES_TO_LOAD = 4
_LEAST_VALUES_PER_THREAD = 16
_MOST_VALUES_PER_THREAD = 256
_CHUNK_ELEMENTS = 65536
_GLOBAL_NORM_SLOTS = 320
_LARGEST_32_BIT = 2**31 - 1


class _Dimension(NamedTuple):
    size: int
    stride: int
    output_stride: int


def reduction_bytes(
    tensor: TensorShape, reduced: tuple[int, ...], value_bytes: int, architecture: CudaArchitecture
) -> tuple[int, int]:
    """Least and most bytes that a reduction stages in global memory.

    1. Dimensions are ordered as the kernel does: reduced ones first, by stride; neighbours without a gap are merged.
    2. A block has up to 512 threads; along the outputs each thread loads up to 4 outputs at once. If a thread would
       still sum 256 values or more and the grid does not fill the multiprocessors, several blocks share an output:
       ``max(min(ceil(slots / grid), ceil(values / 16)), ceil(values / 256))``.
    3. Staged are ``value_bytes x outputs x blocks per output``; where the threads of a warp lie along the outputs, the
       kernel asks for that times the width of the block and the outputs per thread, which is far more than it uses.
    4. 4 bytes of semaphore per block along the outputs.

    Args:
        tensor: what is reduced.
        reduced: its reduced dimensions.
        value_bytes: bytes of one partial result.
        architecture: the GPU.

    Source: ``aten/src/ATen/native/cuda/Reduce.cuh``, ``setReduceConfig``, ``ReduceConfig::global_memory_size``.

    Whether a thread loads 4 or 8 values at once along the inputs (half types, later versions) changes nothing: rows
    that it could matter for are too short to be shared by several blocks.

    A tensor of 2 GiB or more is reduced in parts, and half types then keep their results in float32: an interval.

    Ignores: storages that do not begin at a multiple of 16 bytes, which load fewer outputs at once.
    """
    if not numel(tensor):
        return 0, 0
    dimensions = _merged(tensor, reduced)
    reduce_count = sum(dimension.output_stride == 0 for dimension in dimensions)
    outputs = 1
    for dimension in dimensions[reduce_count:]:
        outputs *= dimension.size
    inputs = numel(tensor) // outputs
    along_inputs = reduce_count == len(dimensions) or dimensions[0].stride < dimensions[reduce_count].stride
    fastest = dimensions[0].stride if along_inputs else dimensions[reduce_count].stride
    width, height = (inputs, outputs) if along_inputs else (outputs, inputs)
    outputs_per_thread = 1
    if fastest == 1 and along_inputs and width >= 128 and reduce_count == 1:
        width //= _VALUES_TO_LOAD
    elif fastest == 1 and not along_inputs:
        outputs_per_thread = _outputs_per_thread(dimensions, reduce_count)
        width //= outputs_per_thread
    block_width, block_height = _block(width, height, _MOST_THREADS // outputs_per_thread)
    step_input, step_output = (block_width, 1) if along_inputs else (1, block_width)
    across_warps = -(-inputs // step_input) >= min(block_height * 16, _MOST_VALUES_PER_THREAD)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    values = -(-inputs // step_input)
    grid = -(-(outputs // outputs_per_thread) // step_output)
    in_parts = tensor_bytes(tensor) > _LARGEST_32_BIT
    results = blocks(value_bytes * outputs) if in_parts else 0
    if not across_warps or values < _MOST_VALUES_PER_THREAD:
        return 0, results
    by_values = -(-values // _LEAST_VALUES_PER_THREAD)
    at_least = -(-values // _MOST_VALUES_PER_THREAD)

    def staged(blocks_per_output: int) -> int:
        if blocks_per_output < 1:
            return 0
        lanes = 1 if along_inputs else block_width * outputs_per_thread
        return blocks(value_bytes * outputs * blocks_per_output * lanes, 4 * grid)

    if architecture.multiprocessors is None:
        return 0, staged(max(by_values, at_least)) + results
    threads = block_width * block_height
    slots = architecture.multiprocessors * (architecture.threads_per_multiprocessor // threads)
    if grid > slots:
        return 0, results
    size = staged(max(min(-(-slots // grid), by_values), at_least))
    return (0 if in_parts else size), size + results


def _merged(tensor: TensorShape, reduced: tuple[int, ...]) -> list[_Dimension]:
    kept_stride, dimensions = 1, []
    for index in reversed(range(len(tensor.size))):
        size = tensor.size[index]
        output_stride = 0 if index in reduced else kept_stride
        if index not in reduced:
            kept_stride *= size
        if size != 1:
            dimensions.append(_Dimension(size, tensor.stride[index], output_stride))
    if not dimensions:
        return [_Dimension(1, 1, 0)]
    dimensions.sort(key=lambda one: (one.output_stride != 0, one.output_stride, one.stride))
    merged = dimensions[:1]
    for dimension in dimensions[1:]:
        last = merged[-1]
        if (last.size * last.stride, last.size * last.output_stride) == (dimension.stride, dimension.output_stride):
            merged[-1] = last._replace(size=last.size * dimension.size)
        else:
            merged.append(dimension)
    return merged


def _outputs_per_thread(dimensions: list[_Dimension], reduce_count: int) -> int:
    vector = 4
    others = [one.stride for index, one in enumerate(dimensions) if index != reduce_count]
    for value in (dimensions[reduce_count].size, *others):
        while value % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most_threads: int) -> tuple[int, int]:
    width, height = _power_of_two(width, most_threads), _power_of_two(height, most_threads)
    block_height = min(height, most_threads // min(width, _WARP))
    return min(width, most_threads // block_height), block_height


def _power_of_two(value: int, most: int) -> int:
    return most if value >= most else 1 << max(0, value.bit_length() - 1)


_DIM_POSITION = {"linalg_vector_norm": 2}
_PLAIN_VALUES = frozenset({"amax", "amin", "any", "all"})
_WELFORD = frozenset({"var", "std", "var_mean", "std_mean"})
_WITH_INDEX = frozenset({"argmax", "argmin", "max", "min"})


def reduction(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Staging memory of a reduction: see :func:`reduction_bytes`.

    A partial result is the accumulator (float32 for half types) of a sum, mean, product or norm; the value itself of a
    largest or smallest; mean, squares and two counts (16 bytes, 32 for float64) of a variance; value and index (16
    bytes) of an argmax.

    Source: ``aten/src/ATen/native/cuda/Reduce*Kernel.cu``, ``SharedReduceOps.h``.
    """
    tensor = tensor_argument(signature, 0, "self")
    if tensor is None:
        return None
    name = signature.op.split(".")[1]
    dims = argument(signature, _DIM_POSITION.get(name, 1), "dim")
    if isinstance(dims, bool):  # the overload of a variance without dimensions
        dims = None
    if dims is None or dims == () or dims == []:
        reduced = tuple(range(len(tensor.size)))
    else:
        listed = (dims,) if isinstance(dims, int) else tuple(dims)
        reduced = tuple(dim % max(1, len(tensor.size)) for dim in listed)
    low, high = reduction_bytes(tensor, reduced, _value_bytes(name, tensor.dtype), architecture)
    return between(low, high, "partial results of several blocks per output, and their semaphores")


def _value_bytes(name: str, dtype: str) -> int:
    if name in _WELFORD:
        return 32 if dtype == "float64" else 16
    if name in _WITH_INDEX:
        return 16
    return element_bytes(dtype) if name in _PLAIN_VALUES else accumulator_bytes(dtype)


def foreach_norm(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Partial norms of a list of tensors.

    1. Each tensor is cut into chunks of 65,536 elements; the longest one has ``c`` of them.
    2. ``tensors x c`` accumulators (float32 for half types), whatever the length of the shorter tensors.
    3. After 2.13 it may moreover keep 320 accumulators and one scalar for a norm of everything: an interval.

    The norms themselves are outputs. A list of several dtypes is computed one by one and takes what each norm does.

    Source: ``aten/src/ATen/native/cuda/ForeachReduceOp.cu``, ``foreach_tensor_norm_cuda``; ``MultiTensorApply.cuh``,
    ``kChunkSize``.
    """
    listed = argument(signature, 0, "self", ())
    tensors = [one for one in listed if isinstance(one, TensorShape)] if not isinstance(listed, TensorShape) else []
    if not tensors:
        return None
    if len({tensor.dtype for tensor in tensors}) > 1:
        everything = [
            reduction_bytes(one, tuple(range(len(one.size))), accumulator_bytes(one.dtype), architecture)[1]
            for one in tensors
        ]
        return between(0, max(everything), "norms of several dtypes are computed one by one")
    output_dtype = str(argument(signature, 2, "dtype") or tensors[0].dtype).removeprefix("torch.")
    size = 8 if output_dtype == "float64" else 4
    chunks = max(-(-numel(tensor) // _CHUNK_ELEMENTS) for tensor in tensors)
    partial = blocks(size * len(tensors) * chunks)
    everything_norm = blocks(size * _GLOBAL_NORM_SLOTS, size) if architecture.torch_minor > (2, 13) else 0
    return between(partial, partial + everything_norm, "one accumulator per tensor and chunk of the longest tensor")


def scan(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """State of a scan and a copy of what does not lie contiguously.

    Between nothing and 1 byte per 64 elements and 64 KiB, which is our bound on what CUB asks for a scan (16 bytes per
    tile of at least 1,024 elements), and a contiguous copy of the argument.

    Source: ``aten/src/ATen/native/cuda/ScanKernels.cpp`` and ``ScanUtils.cuh``; CUB ``DeviceScan``.
    """
    tensor = tensor_argument(signature, 0, "self")
    if tensor is None:
        return None
    strides, expected = tensor.stride, 1
    for size, stride in zip(reversed(tensor.size), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return between(0, blocks(numel(tensor) * 8, numel(tensor) // 64 + 65536), "a copy, and the state of a scan")
        expected *= size
    return between(0, blocks(numel(tensor) // 64 + 65536), "state of a scan")


RULES = (
    Rule(
        operators=(
            *("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm", "amax", "amin", "any", "all"),
            *("var", "std", "var_mean", "std_mean", "argmax", "argmin"),
        ),
        formula="outputs x blocks per output x accumulator bytes, times the width of a block and outputs per thread "
        "where the outputs lie along the fastest dimension; 0 if a thread sums fewer than 256 values or the grid is "
        "full",
        kind="exact or interval",
        source="Reduce.cuh setReduceConfig, ReduceConfig::global_memory_size, semaphore_size",
        versions="header of 2.13; 1.13 and later as far as known",
        compute=reduction,
    ),
    Rule(
        operators=("_foreach_norm",),
        formula="tensors x chunks of 65,536 elements of the longest tensor x accumulator bytes (after 2.13 up "
        "to 321 accumulators more)",
        kind="exact or interval",
        source="ForeachReduceOp.cu _foreach_tensor_norm_cuda_impl; MultiTensorApply.cuh kChunkSize",
        versions="read at pytorch 0124626f (with the norm of everything, which 2.13 lacks) and at a copy without it; "
        "chunk size from the header of 2.13; 2.4 and later",
        compute=foreach_norm,
    ),
    Rule(
        operators=("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"),
        formula="0 to elements / 64 + 64 KiB, and a copy if not contiguous",
        kind="interval",
        source="ScanKernels.cpp, ScanUtils.cuh; the upper end is assumed",
        versions="2.0 and later",
        compute=scan,
    ),
)
"""The rules of this module."""
