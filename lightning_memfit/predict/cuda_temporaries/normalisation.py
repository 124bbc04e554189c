"""Hidden bytes of normalisation layers on CUDA."""

from __future__ import annotations

import math

from lightning_memfit.predict.cuda_temporaries.reductions import reduction_bytes
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
    tensor_argument,
    tensor_bytes,
)
from lightning_memfit.trace.timeline import Signature, TensorShape

_MANY_ROWS = 64 * 1024
_MOST_GRID = 32 * 1024
_FIRST_WITH_PARTIAL_SUMS = (2, 8)
_MOST_ROWS_OF_BLOCKS = 128


def layer_norm_backward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Partial sums of the weight's and bias's gradients, for very many short rows.

    1. ``rows`` and ``columns`` of the normalised matrix. Only beyond 65,536 rows, and if ``columns // 32`` is less than
       half of the multiprocessors, are partial sums stored.
    2. ``p = min(ceil(rows / 32), 32768 // ceil(columns / 32))`` partial sums of each column, in the dtype of the
       weight, for the weight and (layer norm) for the bias.
    3. They are summed by an ordinary reduction, into a new tensor that replaces the gradient allocated before.
    4. Copies of gradient and input that are not contiguous.

    Source: ``aten/src/ATen/native/cuda/layer_norm_kernel.cu``, ``LaunchGammaBetaBackwardCUDAKernel``; before that
    (2.7 and earlier) no path for NVIDIA stored partial sums.
    """
    grad, tensor = tensor_argument(signature, 0, "grad_out"), tensor_argument(signature, 1, "input")
    shape = argument(signature, 2, "normalized_shape")
    if grad is None or tensor is None or shape is None:
        return None
    root_mean_square = "rms" in signature.op
    weight = tensor_argument(signature, 4 if root_mean_square else 5, "weight")
    mask = argument(signature, 5 if root_mean_square else 7, "output_mask", (True, True, True))
    columns = math.prod(shape)
    rows = math.prod(tensor.size) // max(1, columns)
    copies = sum(blocks(tensor_bytes(one)) for one in (grad, tensor) if not is_contiguous(one))
    gradients = sum(bool(wanted) for wanted in mask[1:])
    reason = "partial sums of the parameters' gradients and copies of what is not contiguous"
    if not gradients or rows <= _MANY_ROWS or architecture.torch_minor < _FIRST_WITH_PARTIAL_SUMS:
        return exactly(copies, reason)
    dtype = tensor.dtype if weight is None else weight.dtype
    partial_rows = min(-(-rows // 32), _MOST_GRID // -(-columns // 32))
    partial = TensorShape(dtype, (partial_rows, columns), (columns, 1), None)
    low, high = reduction_bytes(partial, (0,), accumulator_bytes(dtype), architecture)
    stored = gradients * blocks(tensor_bytes(partial)) + blocks(columns * element_bytes(dtype))
    if architecture.multiprocessors is None:
        return between(copies, copies + stored + high, reason)
    if columns // 32 >= architecture.multiprocessors // 2:
        return exactly(copies, reason)
    return between(copies + stored + low, copies + stored + high, reason)


def norm_forward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """A copy of the input if it is not contiguous; mean and reciprocal deviation are outputs.

    Source: ``aten/src/ATen/native/cuda/layer_norm_kernel.cu``, ``layer_norm_cuda`` and ``_fused_rms_norm_cuda``.
    """
    tensor = tensor_argument(signature, 0, "input")
    if tensor is None:
        return None
    return exactly(0 if is_contiguous(tensor) else blocks(tensor_bytes(tensor)), "a copy if not contiguous")


def group_norm(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Scale and shift of every channel of a sample: twice ``samples x channels`` accumulators, or nothing.

    Nothing without weight and bias or with one value per channel.

    Source: ``aten/src/ATen/native/cuda/group_norm_kernel.cu``, ``GroupNormKernelImplInternal``.
    """
    tensor = tensor_argument(signature, 0, "input")
    samples, channels, spatial = (argument(signature, index, "") for index in (3, 4, 5))
    if tensor is None or None in (samples, channels, spatial):
        return None
    affine = any(tensor_argument(signature, index, "") is not None for index in (1, 2))
    size = samples * channels * accumulator_bytes(tensor.dtype) if affine and spatial > 1 else 0
    return exactly(2 * blocks(size), "scale and shift per channel of a sample")


def group_norm_backward(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Sums per channel and factors per group.

    1. ``ds`` and ``db``: samples x channels accumulators each.
    2. If the input needs a gradient: ``c2`` and ``c3`` of samples x groups, and (with a weight) ``c1`` of samples x
       channels; with one value per channel only the former two.
    3. A copy of the gradient may be needed: not counted in the low end.

    Source: ``aten/src/ATen/native/cuda/group_norm_kernel.cu``, ``GroupNormBackwardKernelImplInternal``.
    """
    grad, tensor = tensor_argument(signature, 0, "grad_out"), tensor_argument(signature, 1, "input")
    samples, channels, spatial, groups = (argument(signature, index, "") for index in (5, 6, 7, 8))
    if grad is None or tensor is None or None in (samples, channels, spatial, groups):
        return None
    wants_input = bool(argument(signature, 9, "output_mask", (True, True, True))[0])
    size = accumulator_bytes(tensor.dtype)
    total = 2 * blocks(samples * channels * size)
    if wants_input:
        total += 2 * blocks(samples * groups * size)
    if wants_input and spatial > 1 and tensor_argument(signature, 4, "weight") is not None:
        total += blocks(samples * channels * size)
    copy = 0 if is_contiguous(grad) else blocks(tensor_bytes(grad))
    return between(total, total + copy, "sums per channel and factors per group")


def batch_norm(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Staging of the channels-last kernels, or cuDNN's workspace: an interval.

    Between nothing (contiguous, torch's own kernels) and ``4 x channels x 128`` float32, the most that torch's own
    channels-last kernels stage; cuDNN is assumed to stay below. The reserve that cuDNN keeps for the backward is an
    output.

    Source: ``aten/src/ATen/native/cuda/Normalization.cuh``, ``batch_norm_stats_channels_last_cuda_template``;
    ``cudnn/BatchNorm.cpp``, whose size is what cuDNN answers.
    """
    backward = "backward" in signature.op
    first, second = tensor_argument(signature, 0, "input"), tensor_argument(signature, 1, "input")
    tensor = second if backward else first
    if tensor is None or len(tensor.size) < 2:
        return None
    return between(0, blocks(16 * tensor.size[1] * _MOST_ROWS_OF_BLOCKS, 4096), "staging of a channels-last kernel")


RULES = (
    Rule(
        operators=("native_layer_norm_backward", "_fused_rms_norm_backward"),
        formula="beyond 65,536 rows of few columns: partial sums min(ceil(rows / 32), 32768 // ceil(columns / 32)) x "
        "columns per parameter, and the reduction of one; copies of what is not contiguous",
        kind="exact or interval",
        source="layer_norm_kernel.cu LaunchGammaBetaBackwardCUDAKernel",
        versions="read at a copy with rms_norm (2.9 or later); 2.8 and later, nothing before",
        compute=layer_norm_backward,
    ),
    Rule(
        operators=("native_layer_norm", "_fused_rms_norm"),
        formula="a copy of the input if not contiguous",
        kind="exact",
        source="layer_norm_kernel.cu layer_norm_cuda",
        versions="1.8 and later",
        compute=norm_forward,
    ),
    Rule(
        operators=("native_group_norm",),
        formula="2 x samples x channels accumulators; 0 without weight and bias or with one value per channel",
        kind="exact",
        source="group_norm_kernel.cu GroupNormKernelImplInternal",
        versions="read at a copy of 2024 or later; 1.8 and later",
        compute=group_norm,
    ),
    Rule(
        operators=("native_group_norm_backward",),
        formula="2 x samples x channels accumulators; for the input's gradient 2 x samples x groups and, with a "
        "weight, samples x channels more",
        kind="exact or interval",
        source="group_norm_kernel.cu GroupNormBackwardKernelImplInternal",
        versions="read at a copy of 2024 or later; 1.8 and later",
        compute=group_norm_backward,
    ),
    Rule(
        operators=(
            *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"),
            *("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward"),
        ),
        formula="0 to 4 x channels x 128 x 4 B",
        kind="interval",
        source="Normalization.cuh batch_norm_stats_channels_last_cuda_template; cuDNN assumed to stay below",
        versions="1.8 and later",
        compute=batch_norm,
    ),
)
"""The rules of this module."""
