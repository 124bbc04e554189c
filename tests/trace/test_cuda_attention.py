"""Which kernel computes attention on which GPU. Run: ``pytest tests/trace/test_cuda_attention.py``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memfit.trace.cuda_attention import AttentionCall, alike_in_attention, attention, chosen_backend

T4, A100, RTX_3090, H100, B200, RTX_5090 = (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)


def _call(**changes: Any) -> AttentionCall:
    """Attention of 2 x 8 heads over 128 positions with 64 features in ``float16``, causal, as in training."""
    dtype, head = changes.pop("dtype", torch.float16), changes.pop("head", 64)
    heads = changes.pop("key_heads", 8)
    with FakeTensorMode():
        query = torch.empty(2, 8, 128, head, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, heads, 128, head, dtype=dtype, requires_grad=True) for _ in range(2))
        if changes.pop("masked", False):
            changes["mask"] = torch.empty(2, 1, 128, 128, dtype=torch.bool)
    whole = {"mask": None, "dropout": 0.0, "is_causal": "mask" not in changes, "enable_gqa": False}
    return AttentionCall(query=query, key=key, value=value, **{**whole, **changes})


@pytest.mark.parametrize(
    ("capability", "changes", "backend"),
    [
        (A100, {}, "flash"),
        (A100, {"dtype": torch.bfloat16}, "flash"),
        (T4, {}, "efficient"),  # flash needs 8.0
        (T4, {"dtype": torch.bfloat16}, "math"),  # and the other has no bfloat16 below 8.0
        (A100, {"dtype": torch.float32}, "efficient"),
        (A100, {"masked": True}, "efficient"),
        (H100, {}, "cudnn"),
        (B200, {"masked": True}, "cudnn"),
        (H100, {"head": 256}, "flash"),  # cuDNN takes up to 128
        (H100, {"dropout": 0.1}, "flash"),  # cuDNN's probabilities are multiples of 1/16
        (H100, {"dropout": 0.125}, "cudnn"),
        (A100, {"head": 256}, "flash"),
        (RTX_3090, {"head": 208}, "efficient"),  # no backward between 192 and 224 on consumer GPUs
        (RTX_3090, {"head": 256}, "flash"),
        (RTX_3090, {"head": 256, "dropout": 0.1}, "efficient"),
        (RTX_5090, {"head": 208}, "efficient"),
        (A100, {"head": 60}, "flash"),  # padded to 64
        (A100, {"head": 60, "masked": True}, "math"),  # 16 bits need multiples of 8
        (A100, {"head": 60, "dtype": torch.float32}, "efficient"),  # 32 bits multiples of 4
        (A100, {"key_heads": 2, "enable_gqa": True}, "flash"),
        (A100, {"key_heads": 2, "enable_gqa": True, "masked": True}, "math"),
        (A100, {"dtype": torch.float64}, "math"),
    ],
)
def test_the_kernel_follows_from_the_gpu_and_the_call(
    capability: tuple[int, int], changes: dict[str, Any], backend: str
) -> None:
    assert chosen_backend(_call(**changes), capability) == backend


def test_kernels_that_the_user_switches_off_are_not_chosen() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen_backend(_call(), A100) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert chosen_backend(_call(), A100) == "efficient"


@pytest.mark.parametrize("capability", [T4, A100, H100])
@pytest.mark.parametrize("changes", [{}, {"masked": True}, {"head": 60}, {"dtype": torch.float32}])
def test_the_result_has_the_shape_and_dtype_of_the_query(capability: tuple[int, int], changes: dict[str, Any]) -> None:
    call = _call(**changes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = attention(
            capability, call.query, call.key, call.value, call.mask, call.dropout, call.is_causal, scale=None
        )
    assert (out.shape, out.dtype) == (call.query.shape, call.query.dtype)


def test_a_mask_whose_rows_are_not_aligned_is_padded() -> None:
    # 100 keys: rows of the mask begin at multiples of 112 elements.
    with FakeTensorMode():
        tensors = [torch.empty(1, 2, 100, 64, dtype=torch.float16) for _ in range(3)]
        mask = torch.empty(1, 1, 100, 100, dtype=torch.float16)
        from lightning_memfit.trace.cuda_attention import _aligned

        aligned = _aligned(mask, tensors[0], tensors[1])
    assert aligned is not None
    assert aligned.shape == (1, 2, 100, 100)
    assert aligned.stride() == (100 * 112, 0, 112, 1)


@pytest.mark.parametrize(
    "capability",
    [(3, 5), (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0),
     (12, 0), (12, 1), (13, 0)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpus_that_count_as_alike_choose_the_same_kernel(capability: tuple[int, int], dtype: torch.dtype) -> None:
    alike = alike_in_attention(capability)
    for head, queries, dropout, grouped in itertools.product((1, 12, 64, 200, 256), (1, 7), (0.0, 0.1), (False, True)):
        query = torch.empty(2, 4, queries, head, dtype=dtype, device="meta", requires_grad=True)
        key = torch.empty(2, 2 if grouped else 4, 7, head, dtype=dtype, device="meta")
        call = AttentionCall(
            query=query, key=key, value=key, mask=None, dropout=dropout, is_causal=False, enable_gqa=grouped
        )
        assert chosen_backend(call, alike) == chosen_backend(call, capability)


def test_cudnn_is_chosen_where_the_user_allows_nothing_else() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert chosen_backend(_call(dtype=torch.bfloat16), A100) == "cudnn"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):  # the plain one comes first
        assert chosen_backend(_call(dtype=torch.bfloat16), A100) == "math"


def test_a_call_that_no_allowed_kernel_can_compute_raises_as_torch_does() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        chosen_backend(_call(dtype=torch.float32), A100)
