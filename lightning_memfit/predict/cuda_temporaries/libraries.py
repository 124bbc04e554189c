"""Bytes that cuBLAS and cuDNN take from torch's allocator: kept workspaces, and those of single calls."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_memfit.plan import Phase
from lightning_memfit.predict.cuda_temporaries.rule import (
    CudaArchitecture,
    HiddenBytes,
    Rule,
    argument,
    between,
    blocks,
    exactly,
    is_contiguous,
    numel,
    tensor_argument,
    tensor_bytes,
)
from lightning_memfit.trace.timeline import Signature, TensorShape

_MIB = 2**20
_SMALL_CUBLAS_BYTES = (2 * 4096 + 8 * 16) * 1024
_LARGE_CUBLAS_BYTES = 32 * _MIB
_LT_BYTES = _MIB
_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "_addmm_activation"),
        *("_scaled_mm", "_int_mm", "_grouped_mm", "linalg_solve_triangular", "triangular_solve"),
    }
)
_MAY_USE_LT = frozenset({"addmm", "_addmm_activation", "_scaled_mm", "_int_mm", "linear"})
_SORTED_IF_DETERMINISTIC = frozenset({"index_add", "scatter", "scatter_add"})
_AUTOGRAD_PHASES: frozenset[Phase] = frozenset({"backward"})


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Memory that a library keeps from its first call on to the end of the process."""

    name: str
    """What keeps it, such as ``"cuBLAS, forward thread"``."""
    low_bytes: int
    """Least bytes that it keeps."""
    high_bytes: int
    """Most bytes; equal to :attr:`low_bytes` where the size is known."""
    reason: str
    """Why it has this size."""
    first_phase: Phase
    """The first phase that calls the library in this thread."""


def cublas_workspace(architecture: CudaArchitecture) -> tuple[int, int, str]:
    """Least and most bytes of one cuBLAS workspace, and why.

    1. ``CUBLAS_WORKSPACE_CONFIG`` has pairs of KiB and a count, each behind a colon; what is no such pair is skipped,
       and without any the default counts. ``:0:0`` is no workspace; ``:16:8`` is 131,072 bytes.
    2. The default ``:4096:2:16:8`` is two areas of 4,096 KiB and eight of 16 KiB: 8,519,680 bytes.
    3. Compute capability 9.0 has 32 MiB.
    4. 10.x and 12.x have 32 MiB in torch 2.13, 8,519,680 bytes up to 2.10; between them the change is not dated: an
       interval. 11.x follows after 2.13: an interval there.

    Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``parseChosenWorkspaceSize``: a copy whose declarations are
    those of 2.13's ``CUDAContextLight.h`` (capabilities 9, 10 and 12), an earlier one (9.0 alone) and a later one.

    Ignores: ``torch.backends.cuda.cublas_workspace_size``, and what cuBLAS then takes from the driver by itself.
    """
    config = architecture.cublas_workspace_config
    if pairs := re.findall(r":([0-9]+):([0-9]+)", config):
        told = sum(int(kibibytes) * 1024 * int(count) for kibibytes, count in pairs)
        return told, told, f"CUBLAS_WORKSPACE_CONFIG={config}"
    major, version = architecture.compute_capability[0], architecture.torch_minor
    if major < 9:
        return _SMALL_CUBLAS_BYTES, _SMALL_CUBLAS_BYTES, ":4096:2:16:8"
    if architecture.compute_capability == (9, 0) or (major in (9, 10, 12) and version >= (2, 13)):
        return _LARGE_CUBLAS_BYTES, _LARGE_CUBLAS_BYTES, f"32 MiB for compute capability {major}.x"
    if version <= (2, 10):
        return _SMALL_CUBLAS_BYTES, _SMALL_CUBLAS_BYTES, ":4096:2:16:8 up to torch 2.10"
    return _SMALL_CUBLAS_BYTES, _LARGE_CUBLAS_BYTES, "8.1 or 32 MiB: it depends on the version of torch"


def library_workspaces(operators: Iterable[tuple[str, Phase]], architecture: CudaArchitecture) -> tuple[Workspace, ...]:
    """Workspaces that cuBLAS keeps in torch's allocator after a step with these operators.

    1. A workspace belongs to a cuBLAS handle and stream; a thread has a handle of its own. The autograd engine computes
       the backward in another thread than the forward: two workspaces, from the first product in each on.
    2. Their size: :func:`cublas_workspace`.
    3. cuBLASLt (:func:`may_use_lt`) has 1 MiB of its own from 2.7 to 2.12 or shares that of cuBLAS (the switch to
       sharing by default is not dated: an interval); from 2.13 on it shares.
    4. After 2.13 a workspace is given back at the end of each call unless ``TORCH_CUBLAS_WORKSPACE_CACHE`` is set: the
       low end is nothing.

    Args:
        operators: name (with namespace and overload) and phase of each operator, in order.
        architecture: the GPU and torch's version.

    Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``setWorkspaceForHandle`` and ``getCUDABlasLtWorkspace``;
    ``torch/backends/cuda/__init__.py`` of 2.13, ``blas_workspace_size`` ("physically reuses the same allocation").

    Ignores: other streams (DDP's and FSDP's do no products), products in a custom thread, cuSOLVER and cuSPARSE.
    """
    first: dict[tuple[str, str], Phase] = {}
    for op, phase in operators:
        name = _plain(op)
        thread = "autograd" if phase in _AUTOGRAD_PHASES else "forward"
        if name in _PRODUCTS:
            first.setdefault(("cuBLAS", thread), phase)
        if name in _MAY_USE_LT:
            first.setdefault(("cuBLASLt", thread), phase)
    low, high, reason = cublas_workspace(architecture)
    version = architecture.torch_minor
    workspaces = []
    for (library, thread), phase in first.items():
        if library == "cuBLAS":
            least = 0 if version > (2, 13) else low
            why = reason if version <= (2, 13) else reason + "; given back after each call by default"
            workspaces.append(_workspace(library, thread, least, high, why, phase))
        elif (2, 7) <= version < (2, 13):
            workspaces.append(_workspace(library, thread, 0, _LT_BYTES, "1 MiB, or shared with cuBLAS", phase))
    return tuple(workspaces)


def _workspace(library: str, thread: str, low: int, high: int, reason: str, phase: Phase) -> Workspace:
    name = f"{library}, {thread} thread"
    return Workspace(name=name, low_bytes=low, high_bytes=high, reason=reason, first_phase=phase)


def _plain(op: str) -> str:
    return op.split(".")[1].rstrip("_") if "." in op else op.rstrip("_")


def product(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Copies of matrices that cuBLAS cannot read as they lie, and the workspace where it is not kept.

    1. A matrix is read as it is if one of its two strides is 1 and the other at least as long as a row; otherwise it is
       copied. A bias is copied into the output, or added by cuBLASLt: nothing.
    2. Up to torch 2.6, cuBLASLt took 1 MiB for each call: an interval for those that may use it.
    3. After 2.13 the workspace is given back after each call by default: an interval.

    Source: ``aten/src/ATen/native/cuda/Blas.cpp``, ``prepare_matrix_for_cublas`` and
    ``prepare_batch_matrix_for_cublas``; ``CUDABlas.cpp``, ``gemm_and_bias``.
    """
    name = _plain(signature.op)
    first = 1 if name in ("addmm", "baddbmm", "addbmm", "_addmm_activation") else 0
    matrices = [tensor_argument(signature, first + index, "") for index in range(2)]
    copies = sum(blocks(tensor_bytes(one)) for one in matrices if one is not None and not _readable(one))
    transient = 0
    if architecture.torch_minor < (2, 7) and name in _MAY_USE_LT:
        transient = _LT_BYTES
    if architecture.torch_minor > (2, 13):
        transient = cublas_workspace(architecture)[1]
    return between(copies, copies + transient, "copies of matrices whose rows and columns both have gaps")


def _readable(matrix: TensorShape) -> bool:
    if len(matrix.size) < 2 or not numel(matrix) or is_contiguous(matrix):
        return True
    (rows, columns), (row_stride, column_stride) = matrix.size[-2:], matrix.stride[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))


def may_use_lt(signature: Signature) -> bool:
    """Whether a product may go through cuBLASLt: its bias is added in the epilogue.

    ``addmm`` with a contiguous bias of one row as long as those of the result, which it adds once, if no matrix has a
    single row or column; ``_scaled_mm`` and ``_int_mm`` always.

    Source: ``aten/src/ATen/native/cuda/Blas.cpp``, ``isInputCompliesAddmmCudaLt``.

    Ignores: the bound of 65,535 on sizes for CUDA before 12.1.
    """
    name = _plain(signature.op)
    if name in ("_scaled_mm", "_int_mm"):
        return True
    bias, left, right = (tensor_argument(signature, index, "") for index in range(3))
    if name not in _MAY_USE_LT or bias is None or left is None or right is None:
        return False
    adds_once = signature.kwargs.get("beta", 1) == 1
    row = max(bias.size, default=1) == numel(bias) and bias.size[-1:] == right.size[-1:] and is_contiguous(bias)
    return adds_once and row and min(*left.size, *right.size) > 1


def convolution(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Workspace of a convolution: an interval, because cuDNN alone knows.

    Without benchmarking, torch takes the first plan of cuDNN's heuristics whose workspace can be allocated, however
    large; with benchmarking, plans that need more than the largest free block are left out. No upper bound is
    documented. The one given here is ours: another copy of input, weight and result, as for an internal change between
    NCHW and NHWC, and for the backward of both gradients, one after the other, with a float32 gradient of the weight.

    Source: ``aten/src/ATen/native/cudnn/Conv_v8.cpp``, ``run_single_conv``, ``generate_and_filter_plans`` and
    ``get_available_workspace``.

    Ignores: FFT and unfused Winograd, which may need several times that; the trial runs of benchmarking, which reserve
    the largest workspace of all plans tried.
    """
    backward = "backward" in signature.op
    tensors = [tensor_argument(signature, index, "") for index in range(3 if backward else 2)]
    if any(one is None for one in tensors):
        return None
    known = [one for one in tensors if one is not None]
    if backward:
        weight = known[2]
        return between(0, blocks(*map(tensor_bytes, known), 4 * numel(weight)), "cuDNN's choice; the upper end is ours")
    result = _convolution_elements(signature, known[0], known[1]) * tensor_bytes(known[0]) // max(1, numel(known[0]))
    return between(0, blocks(*map(tensor_bytes, known), result), "cuDNN's choice; the upper end is ours")


def _convolution_elements(signature: Signature, tensor: TensorShape, weight: TensorShape) -> int:
    stride, padding, dilation = (argument(signature, index, "") for index in (3, 4, 5))
    transposed, extra, groups = (argument(signature, index, "") for index in (6, 7, 8))
    if transposed:
        spatial = [
            (size - 1) * step - 2 * pad + gap * (kernel - 1) + more + 1
            for size, step, pad, gap, kernel, more in zip(
                tensor.size[2:], stride, padding, dilation, weight.size[2:], extra, strict=True
            )
        ]
        return math.prod((tensor.size[0], weight.size[1], groups, *spatial))
    spatial = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, step, pad, gap, kernel in zip(
            tensor.size[2:], stride, padding, dilation, weight.size[2:], strict=True
        )
    ]
    return math.prod((tensor.size[0], weight.size[0], *spatial))


def recurrent(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Workspace of cuDNN's recurrent layers: an interval, because cuDNN alone knows.

    Between nothing and the pre-activations of one layer and direction pair, four per unit and time step, twice. The
    upper end is ours. The reserve and the flattened weights are outputs.

    Source: ``aten/src/ATen/native/cudnn/RNN.cpp``, ``_cudnn_rnn``: ``cudnnGetRNNTempSpaceSizes``.

    Ignores: hidden sizes other than the width of the input in the backward.
    """
    tensor, hidden = tensor_argument(signature, 0, "input"), argument(signature, 7, "hidden_size")
    if tensor is None:
        return None
    columns = tensor.size[-1]
    width = columns if "backward" in signature.op or not isinstance(hidden, int) else hidden
    return between(0, blocks(16 * tensor_bytes(tensor) // max(1, columns) * width), "cuDNN's choice; the end is ours")


def none(signature: Signature, architecture: CudaArchitecture) -> HiddenBytes | None:
    """Nothing: the kernels use their outputs and arguments alone.

    Scattering with deterministic algorithms goes through a sort instead, of which no formula is given.
    """
    if architecture.deterministic_algorithms and _plain(signature.op) in _SORTED_IF_DETERMINISTIC:
        return None
    return exactly(0, "its kernels take no memory besides outputs and arguments")


RULES = (
    Rule(
        operators=("mm", "addmm", "bmm", "baddbmm", "addbmm", "_addmm_activation"),
        formula="copies of matrices whose rows and columns both have gaps; up to 2.6 with a fused bias up to 1 MiB; "
        "after 2.13 up to the workspace",
        kind="exact or interval",
        source="Blas.cpp prepare_matrix_for_cublas, prepare_batch_matrix_for_cublas; CUDABlas.cpp gemm_and_bias",
        versions="read at pytorch 002253ce (2022) and later copies; 1.13 and later",
        compute=product,
    ),
    Rule(
        operators=(
            *("convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
            "convolution_backward",
        ),
        formula="0 to another copy of input, weight and result",
        kind="interval",
        source="cudnn/Conv_v8.cpp run_single_conv (no bound upstream; the upper end is assumed)",
        versions="2.0 and later",
        compute=convolution,
    ),
    Rule(
        operators=("_cudnn_rnn", "_cudnn_rnn_backward"),
        formula="0 to 16 x time steps x batch x hidden size x element bytes",
        kind="interval",
        source="cudnn/RNN.cpp _cudnn_rnn (upper end assumed)",
        versions="2.0 and later",
        compute=recurrent,
    ),
    Rule(
        operators=(
            *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_fused_adam", "_fused_adamw"),
            *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "optimizer_update_8bit_blockwise"),
            *("optimizer_update_32bit", "native_dropout", "native_dropout_backward", "_softmax", "_log_softmax"),
            *("_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
            *("nll_loss2d_forward", "nll_loss2d_backward", "embedding", "gather", "index_select", "scatter"),
            *("scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"),
        ),
        formula="0",
        kind="exact",
        source="cuda/fused_adam*_impl.cuh, MultiTensorApply.cuh, AmpKernels.cu, Dropout.cu, SoftMax.cu, NLLLoss2d.cu, "
        "Loss.cu; bitsandbytes csrc/kernels.cu kOptimizerStatic8bit2StateBlockwise",
        versions="2.0 and later; contiguous arguments, without deterministic algorithms",
        compute=none,
    ),
)
"""The rules of this module."""
