"""What the rules for hidden bytes of CUDA operators share: the device, the answer, and reading a traced call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_memfit.trace.timeline import Signature, TensorShape

_BLOCK_BYTES = 512
_DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
HALF_DTYPES = frozenset({"float16", "bfloat16"})
"""Dtypes of two bytes that kernels accumulate in float32."""


@dataclass(frozen=True, kw_only=True)
class CudaArchitecture:
    """What the formulas need to know of a GPU and of the torch that runs on it."""

    compute_capability: tuple[int, int]
    """Major and minor compute capability, such as ``(9, 0)``."""
    multiprocessors: int | None
    """Streaming multiprocessors of the GPU; ``None`` if unknown, which turns some exact answers into intervals."""
    torch_minor: tuple[int, int] = (2, 13)
    """Major and minor version of torch."""
    deterministic_algorithms: bool = False
    """Whether ``torch.use_deterministic_algorithms(True)`` holds: some kernels then accumulate in more copies."""
    cublas_workspace_config: str = ""
    """What the environment says of cuBLAS's workspaces in ``CUBLAS_WORKSPACE_CONFIG``; empty where nothing."""

    @property
    def threads_per_multiprocessor(self) -> int:
        """Most resident threads of one multiprocessor.

        Source: CUDA C++ Programming Guide 13.0, table "Technical Specifications per Compute Capability".
        """
        major, minor = self.compute_capability
        if (major, minor) == (7, 5):
            return 1024
        return 1536 if (major == 8 and minor > 0) or major >= 11 else 2048


@dataclass(frozen=True, kw_only=True)
class HiddenBytes:
    """Bytes that an operator takes inside and gives back before it returns."""

    low_bytes: int
    """Least bytes beyond the outputs at the peak within one call."""
    high_bytes: int
    """Most bytes; equal to :attr:`low_bytes` where the formula is exact."""
    reason: str
    """What the bytes are, in words."""

    @property
    def exact(self) -> bool:
        """Whether the formula leaves no room."""
        return self.low_bytes == self.high_bytes


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A formula for the hidden bytes of some operators."""

    operators: tuple[str, ...]
    """Names without namespace and overload, such as ``"native_layer_norm_backward"``."""
    formula: str
    """The formula in words."""
    kind: str
    """``"exact"``, ``"interval"``, or ``"exact or interval"`` where it depends on the call."""
    source: str
    """Upstream file and function."""
    versions: str
    """Versions of torch that the formula was read from, and those that it holds for as far as known."""
    compute: Callable[[Signature, CudaArchitecture], HiddenBytes | None]
    """Apply it to one call; ``None`` if the call takes nothing that is known."""


def exactly(size_bytes: int, reason: str) -> HiddenBytes:
    """Make an exact answer."""
    return HiddenBytes(low_bytes=size_bytes, high_bytes=size_bytes, reason=reason)


def between(low_bytes: int, high_bytes: int, reason: str) -> HiddenBytes:
    """Make an interval."""
    return HiddenBytes(low_bytes=low_bytes, high_bytes=max(low_bytes, high_bytes), reason=reason)


def blocks(*sizes: float) -> int:
    """Bytes that the caching allocator counts for tensors of the given bytes: each fills whole blocks of 512 bytes.

    Source: ``c10/cuda/CUDACachingAllocator.cpp``, ``round_size`` and ``kMinBlockSize``.
    """
    return sum(_BLOCK_BYTES * math.ceil(size / _BLOCK_BYTES) for size in sizes)


def round_up(value: int, multiple: int) -> int:
    """Next multiple that is not smaller."""
    return -(-value // multiple) * multiple


def element_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        KeyError: if the dtype is not one that the rules know.
    """
    return _DTYPE_BYTES[dtype]


def accumulator_bytes(dtype: str) -> int:
    """Bytes of one element of the type that CUDA kernels accumulate it in: float32 for the half types.

    Source: ``aten/src/ATen/AccumulateType.h``.
    """
    return max(4, element_bytes(dtype)) if dtype in HALF_DTYPES or dtype.startswith("float") else 8


def numel(tensor: TensorShape) -> int:
    """Elements of a tensor."""
    return math.prod(tensor.size)


def tensor_bytes(tensor: TensorShape) -> int:
    """Bytes of its elements, without gaps."""
    return numel(tensor) * element_bytes(tensor.dtype)


def is_contiguous(tensor: TensorShape, order: tuple[int, ...] | None = None) -> bool:
    """Whether the tensor, its dimensions taken in the given order, lies row by row without gaps."""
    expected = 1
    for dimension in reversed(order or tuple(range(len(tensor.size)))):
        if tensor.size[dimension] != 1 and tensor.stride[dimension] != expected:
            return numel(tensor) == 0
        expected *= tensor.size[dimension]
    return True


def argument(signature: Signature, position: int, name: str, default: Any = None) -> Any:
    """Argument of a call, given by position or by name."""
    if position < len(signature.args):
        return signature.args[position]
    return signature.kwargs.get(name, default)


def tensor_argument(signature: Signature, position: int, name: str) -> TensorShape | None:
    """Tensor argument of a call; ``None`` if it is absent or not a tensor."""
    value = argument(signature, position, name)
    return value if isinstance(value, TensorShape) else None
