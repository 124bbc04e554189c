"""Which kernel computes ``scaled_dot_product_attention`` on a GPU, and what is called for it.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``select_sdp_backend`` and its checks) and
``aten/src/ATen/native/transformers/attention.cpp`` (``scaled_dot_product_attention``), torch 2.13; grouped queries by
the memory-efficient kernel came after it.

Ignores: nested tensors, AMD's kernels, alignment of storage offsets for the memory-efficient kernel, kernels that the
user switches off by environment variables (``torch.nn.attention.sdpa_kernel`` is followed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

Backend = Literal["flash", "efficient", "cudnn", "math"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 16  # elements
_LARGEST_FLASH_HEAD, _LARGEST_CUDNN_HEAD = 256, 128


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of one call that decide which kernel runs."""

    query: torch.Tensor
    """``(batch, heads, queries, head dimension)``."""
    key: torch.Tensor
    """``(batch, key heads, keys, head dimension)``."""
    value: torch.Tensor
    """``(batch, key heads, keys, value dimension)``."""
    mask: torch.Tensor | None
    """Added to the scores, or flags of what takes part."""
    dropout: float
    """Probability of dropout."""
    is_causal: bool
    """Whether queries see no later keys."""
    enable_gqa: bool
    """Whether several query heads share a key head."""

    @property
    def requires_grad(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def chosen_backend(call: AttentionCall, capability: tuple[int, int]) -> Backend:
    """The kernel that torch chooses on a GPU of this compute capability.

    Raises:
        RuntimeError: as torch does, if the user allows only kernels that cannot compute the call.

    Source: ``sdp_priority_order`` of ``ATen/Context.h`` (header of torch 2.13).
    """
    order: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
    if capability[0] in (9, 10):
        order = ("cudnn", "flash", "efficient", "math")
    switches: Any = torch.backends.cuda
    allowed = {
        "flash": switches.flash_sdp_enabled() and _can_flash(call, capability),
        "efficient": switches.mem_efficient_sdp_enabled() and _can_efficient(call, capability),
        "math": switches.math_sdp_enabled(),
        "cudnn": switches.cudnn_sdp_enabled() and _can_cudnn(call, capability),
    }
    for backend in order:
        if allowed[backend]:
            return backend
    raise RuntimeError("No available kernel: scaled_dot_product_attention has none of those that sdpa_kernel allows")


def alike_in_attention(capability: tuple[int, int]) -> tuple[int, int]:
    """A compute capability of those with which :func:`chosen_backend` answers every call as with the given one.

    >>> [alike_in_attention(each) for each in ((7, 5), (8, 0), (8, 9), (12, 0), (10, 0))]
    [(7, 0), (8, 0), (8, 6), (8, 6), (9, 0)]
    """
    if not (5, 0) <= capability <= (12, 1):
        return (13, 0)  # no kernel but the plain one
    if capability < (8, 0):
        return (7, 0) if capability[0] == 7 else (5, 0)
    if _has_small_shared_memory(capability):
        return (8, 6)
    return (9, 0) if capability[0] in (9, 10) else (8, 0)


def _has_small_shared_memory(capability: tuple[int, int]) -> bool:
    return (8, 6) <= capability <= (8, 9) or capability >= (12, 0)


def _can_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    head = call.query.size(-1)
    consumer = _has_small_shared_memory(capability)
    return (
        (8, 0) <= capability <= (12, 1)
        and _is_four_dimensional(call)
        and call.mask is None
        and head == call.key.size(-1) == call.value.size(-1)
        and head <= _LARGEST_FLASH_HEAD
        and not (consumer and call.requires_grad and head > 192 and not (call.dropout == 0 and head > 224))
        and not (call.is_causal and call.query.size(-2) != call.key.size(-2))
        and _is_dtype(call, _HALF)
        and _heads_match(call, grouped=True)
        and _is_dense(call)
    )


def _can_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    half = call.query.dtype in _HALF
    tensor_cores = capability[0] >= 8 or (capability[0] >= 7 and half)
    alignment = max(4 if capability[0] >= 8 else 1, (8 if half else 4) if tensor_cores else 1)
    head, values = call.query.size(-1), call.value.size(-1)
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if capability[0] >= 8 else ()))
    return (
        (5, 0) <= capability <= (12, 1)
        and _is_four_dimensional(call)
        and head == call.key.size(-1)
        and head % alignment == values % alignment == 0
        and head > 0 < values
        and _is_dtype(call, dtypes)
        and _heads_match(call, grouped=False)
        and _is_dense(call)
    )


def _can_cudnn(call: AttentionCall, capability: tuple[int, int]) -> bool:
    head, values = call.query.size(-1), call.value.size(-1)
    return (
        (8, 0) <= capability <= (12, 1)
        and _is_four_dimensional(call)
        and not torch.are_deterministic_algorithms_enabled()
        and _is_dtype(call, _HALF)
        and call.dropout * 16 == math.floor(call.dropout * 16)
        and head <= _LARGEST_CUDNN_HEAD >= values
        and head % 8 == values % 8 == 0
        and call.key.size(-2) > 1
        and not (call.dropout and call.query.size(-2) == 1)
        and _heads_match(call, grouped=True)
        and _is_dense(call)
    )


def _is_four_dimensional(call: AttentionCall) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _is_dtype(call: AttentionCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in dtypes


def _heads_match(call: AttentionCall, *, grouped: bool) -> bool:
    queries, keys, values = (tensor.size(-3) for tensor in (call.query, call.key, call.value))
    same_batch = call.query.size(0) == call.key.size(0) == call.value.size(0)
    if call.enable_gqa and grouped:
        return same_batch and keys == values and queries % keys == 0
    return same_batch and queries == keys == values


def _is_dense(call: AttentionCall) -> bool:
    tensors = [call.query, call.key, call.value, *([] if call.mask is None else [call.mask])]
    nonzero = call.query.size(-2) > 0 < call.key.size(-2)
    return nonzero and all(tensor.stride(-1) == 1 or tensor.size(-1) == 1 for tensor in tensors)


def attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What ``torch.nn.functional.scaled_dot_product_attention`` calls on a GPU of a compute capability.

    Args:
        capability: major and minor number.
        query: ``(batch, heads, queries, head dimension)``.
        key: ``(batch, key heads, keys, head dimension)``.
        value: ``(batch, key heads, keys, value dimension)``.
        attn_mask: broadcasts to ``(batch, heads, queries, keys)``.
        dropout_p: probability of dropout.
        is_causal: whether queries see no later keys.
        scale: factor of the scores; the inverse root of the head dimension by default.
        enable_gqa: whether several query heads share a key head.

    Returns:
        ``(batch, heads, queries, value dimension)``.
    """
    call = AttentionCall(
        query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )
    backend = chosen_backend(call, capability)
    mask = _as_bias(attn_mask, query.dtype)
    if backend == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == "efficient":
        found = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(mask, query, key), call.requires_grad, dropout_p, is_causal, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]
    if backend == "cudnn":
        found = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.requires_grad, dropout_p, is_causal, False, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]
    found = _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]  # type: ignore[no-any-return]


def _flash(query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: float | None) -> torch.Tensor:
    """The head dimension is padded to a multiple of 8, the scores keep the scale of the given one."""
    head = query.size(-1)
    missing = -head % 8
    if missing:
        scale = 1 / math.sqrt(head) if scale is None else scale
        query, key, value = (torch.nn.functional.pad(each, (0, missing)) for each in (query, key, value))
    found = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)
    out: torch.Tensor = found[0]
    return out.narrow(-1, 0, head) if missing else out


def _as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Flags become zeros and minus infinities. Source: ``convert_boolean_attn_mask``."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    negative = torch.full((), -math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), negative)


def _aligned(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask whose rows begin at multiples of 16 elements, expanded to all heads. Source: ``preprocess_mask``."""
    if mask is None:
        return None
    keys = mask.size(-1)
    missing = -keys % _MASK_ALIGNMENT
    if missing and not (keys == 1 and key.size(-2) != 1):
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :keys]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
