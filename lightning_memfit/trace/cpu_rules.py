"""What makes a fake run on the CPU behave like a real one: branches taken, and memory formats of results.

Adapter for names that are patched for the duration of a trace: ``torch.get_rng_state`` and ``torch.set_rng_state``
(activation checkpointing keeps a generator state per call, a tensor that only real runs would allocate), torch's list
of types for which gradient clipping takes its multi-tensor path, and transformers' test for fake tensors (with which
its models take another branch than in training).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

_aten = torch.ops.aten

# Operators whose outputs are contiguous on a CPU where the fake run keeps the strides of an input, or whose outputs
# have the memory format of the input named. It decides whether operators that follow make a contiguous copy.
# Measured: each called with transposed and channels-last inputs, torch 2.13, CPU.
_FORMAT_OF_INPUT: Mapping[Any, int | None] = {
    _aten.glu_backward.default: None,
    _aten.huber_loss_backward.default: None,
    _aten.log_sigmoid_forward.default: None,
    _aten.mse_loss_backward.default: None,
    _aten.rrelu_with_noise.default: None,
    _aten.smooth_l1_loss_backward.default: None,
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}


def as_on_cpu(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The outputs of an operator in the memory format that the CPU's own kernel gives them.

    Ignores: results of an expanded ``bfloat16`` gradient of a sum, which fakes make contiguous and the CPU does not.
    """
    if func not in _FORMAT_OF_INPUT:
        return out
    source = _FORMAT_OF_INPUT[func]
    memory_format = torch.contiguous_format if source is None else _suggested_format(args[source])
    if isinstance(out, torch.Tensor):
        return out.contiguous(memory_format=memory_format)
    ranks = {tensor.dim() for tensor in out if tensor is not None}
    return tuple(
        tensor.contiguous(memory_format=memory_format) if tensor is not None and tensor.dim() == max(ranks) else tensor
        for tensor in out
    )


def _suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    # Source: TensorImpl::suggest_memory_format; contiguous where both would do.
    if not tensor.is_contiguous():
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


@contextmanager
def real_cpu_behaviour() -> Iterator[None]:
    """Within this context a fake training step takes the branches, and allocates what, a real one would."""
    state_bytes = torch.get_rng_state().numel()

    def fake_rng_state() -> torch.Tensor:
        return torch.empty(state_bytes, dtype=torch.uint8)

    def ignore_rng_state(state: torch.Tensor) -> None:
        return None

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "get_rng_state", fake_rng_state))
        patches.enter_context(mock.patch.object(torch, "set_rng_state", ignore_rng_state))
        types = [*_foreach_utils._foreach_supported_types, FakeTensor]
        patches.enter_context(mock.patch.object(_foreach_utils, "_foreach_supported_types", types))
        imports = sys.modules.get("transformers.utils.import_utils")
        if imports is not None and hasattr(imports, "is_fake_tensor"):
            patches.enter_context(mock.patch.object(imports, "is_fake_tensor", _never))
        yield


def _never(_: Any) -> bool:
    return False
