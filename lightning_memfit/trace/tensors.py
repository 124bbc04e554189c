"""The tensors among an operator's arguments and results, and what this rank holds of a distributed one.

Adapter for a private name of torch: ``DTensor._local_tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings (faster than a pytree for operator arguments)."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    # Into one list: generators inside generators take twice as long, and every operator asks several times.
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself, or its own part of one spread over several ranks."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
