"""Peaks are exact where torch applies an operator in place unless a dispatch mode is active.

Run: ``pytest tests/trace/test_accuracy_in_place.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

INDEX = torch.randint(0, 64, (16, 64, 128))
ROWS = torch.randint(0, 64, (100,))


class Between(nn.Module):
    """A layer, an operation, and a scalar."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.operation = nn.Linear(128, 128), nn.Linear(128, 128), operation

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.operation(self.second(self.first(inputs))) * 1.0).sum()


class Moved(nn.Module):
    """A linear layer over the channels of images, as in ConvNeXt and mixers: its input is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.transpose(1, 2)).relu().sum()


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(128, 64, 2, bidirectional=True, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.recurrent(inputs)[0].sum()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "gather": lambda: Between(lambda x: x.gather(1, INDEX)),
    "rows": lambda: Between(lambda x: x[:, ROWS]),
    "sort": lambda: Between(lambda x: x.sort(1).values),
    "topk": lambda: Between(lambda x: x.topk(4, 1).values),
    "max": lambda: Between(lambda x: x.max(1).values),
    "linear layer on a transposed input": Moved,
    "bidirectional GRU": Bidirectional,
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", MODULES)
def test_the_peak_is_exact(compare: Callable[..., Any], name: str, precision: str) -> None:
    torch.manual_seed(0)
    result = compare(
        MODULES[name](),
        torch.randn(16, 64, 128),
        loss=lambda module, batch: module(batch),
        optimizer=torch.optim.SGD,
        precision=precision,
    )
    assert abs(result.predicted.peak_allocated_bytes - result.measured_bytes) <= 64
