"""The tensors among an operator's arguments and results, and what this rank holds of a distributed one.

Adapter for a private name of torch: ``DTensor._local_tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings (faster than a pytree for operator arguments)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself, or its own part of one spread over several ranks."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
