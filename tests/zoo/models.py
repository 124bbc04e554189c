"""The modules of the zoo's programs: small, with repeated blocks, and matrices large enough for 8-bit states."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.program import SGD_MOMENTUM

WIDTH = 64
"""Matrices of 64 x 64 = 4096 elements are the smallest that are quantised."""


def blocks(count: int = 3, width: int = WIDTH) -> nn.Sequential:
    """Residual-free blocks that can be recomputed."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


class Classifier(lightning.LightningModule):
    """Features ``(batch, WIDTH)`` to four classes, by the mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), **SGD_MOMENTUM)
