"""Plain networks of linear layers: one whose activations fill memory, and one whose optimizer step does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo_models.workload import Workload


class MLP(nn.Module):
    """Feed-forward blocks on flat features."""

    def __init__(self, features: int = 256, width: int = 512, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(batch, features)`` to ``(batch, classes)``."""
        return self.head(self.blocks(self.stem(inputs)))


def mlp() -> Workload:
    """Rows of flat features."""
    return Workload(network=MLP(), batch={"inputs": torch.randn(2048, 256), "targets": torch.randint(10, (2048,))})


def wide() -> Workload:
    """Few rows for many weights: the peak is that of the optimizer's step, whatever is done about activations."""
    network = MLP(width=1024, depth=3)
    return Workload(network=network, batch={"inputs": torch.randn(64, 256), "targets": torch.randint(10, (64,))})
