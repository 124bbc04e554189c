"""What ``self.log`` was given in the slices of one batch, merged into what the undivided batch would have logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memfit.batch_tree import weighted_mean


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One call of ``self.log``."""

    value: Any
    """A tensor of one element, or a torchmetrics ``Metric``."""
    weight: float
    """Loss weight of the slice in which it was logged."""
    settings: dict[str, Any]
    """The keyword arguments."""


class SliceLogs:
    """Collects per slice, emits once.

    A mean becomes the mean weighted by the batch sizes that were given, else by the loss weights of the slices; a sum,
    minimum or maximum the same over the slices. ``Metric`` objects, which accumulate by themselves, are emitted once,
    untouched. What only some slices log is merged over those.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, int], list[_Entry]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._weight = 1.0

    def begin_slice(self, weight: float) -> None:
        """Start the next slice, whose mean counts ``weight``."""
        self._weight = weight
        self._calls.clear()

    def record(self, fx: str, name: str, value: Any, **settings: Any) -> None:
        """Take the place of the result collection's ``log``: keep the value without its graph."""
        occurrence = self._calls[fx, name]  # a name logged twice in one step counts twice, as it does undivided
        self._calls[fx, name] += 1
        kept = value.detach() if isinstance(value, Tensor) else value
        entry = _Entry(value=kept, weight=self._weight, settings=settings)
        self._entries.setdefault((fx, name, occurrence), []).append(entry)

    def emit(self, log: Callable[..., None]) -> None:
        """Call ``log`` once for each call that the undivided batch would have made."""
        for (fx, name, _), entries in self._entries.items():
            value, settings = _merge(entries)
            log(fx, name, value, **settings)
        self._entries.clear()


def _merge(entries: list[_Entry]) -> tuple[Any, dict[str, Any]]:
    last = entries[-1]
    settings = dict(entries[0].settings)
    if not isinstance(last.value, Tensor):
        return last.value, settings
    given = [entry.settings.get("batch_size") for entry in entries]
    batch_sizes = [size for size in given if size is not None]
    has_sizes = len(batch_sizes) == len(entries)
    if "batch_size" in settings:
        settings["batch_size"] = sum(batch_sizes) if has_sizes else None
    weights = [float(size) for size in batch_sizes] if has_sizes else [entry.weight for entry in entries]
    return _reduce([entry.value for entry in entries], weights, settings.get("reduce_fx", "mean")), settings


def _reduce(values: list[Tensor], weights: list[float], reduce_fx: Any) -> Tensor:
    """The value of the undivided batch. An unknown reduction passes through, for Lightning to refuse it."""
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    stacked = torch.stack(values)
    if name == "sum":
        return stacked.sum()
    if name == "min":
        return stacked.min()
    if name == "max":
        return stacked.max()
    if name not in ("mean", "avg"):
        return values[0]
    if not stacked.is_floating_point() and bool((stacked == stacked[0]).all()):
        return values[0]
    return weighted_mean(values, weights)
