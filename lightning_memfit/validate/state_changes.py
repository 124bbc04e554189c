"""Which parameters and buffers a training step changes by itself: what slices would change once each.

Adapter for a private name of torch: ``Tensor._version``, which counts writes in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

StateMarks = Mapping[str, tuple[int, int, float]]
"""By qualified name: which storage, how often it was written to, and the sum of its values."""


def mark_state(module: nn.Module) -> StateMarks:
    """What tells later whether a parameter or a buffer was changed, also through ``.data``."""
    return {name: (tensor.data_ptr(), tensor._version, _sum(tensor)) for name, tensor in _named(module)}


def changed_between(earlier: StateMarks, later: StateMarks) -> tuple[str, ...]:
    """The names whose tensors were changed, made or dropped."""
    return tuple(name for name in {**earlier, **later} if _differ(earlier.get(name), later.get(name)))


def _differ(one: tuple[int, int, float] | None, other: tuple[int, int, float] | None) -> bool:
    if one is None or other is None:
        return one is not other
    both_nan = one[2] != one[2] and other[2] != other[2]
    return one[:2] != other[:2] or (one[2] != other[2] and not both_nan)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _sum(tensor: torch.Tensor) -> float:
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_quantized:
        return 0.0
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(values.detach().sum(dtype=torch.float64))
