"""Of two batches, the largest and one with more per sample, the one that was planned is the one that is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memfit import MemFit

LENGTHS = [4] * 16 + [30] * 2
BATCHES = [list(range(16)), [16, 17]]
"""Of about as many positions each: many short samples, and few long ones."""
SEEN: list[tuple[int, ...]] = []  # not the module's: a warm-up leaves no trace there


class Sequences(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(LENGTHS[index], 2)


class Pairs(lightning.LightningModule):
    """Something of every pair of positions is kept, so that long samples need more than many."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(2, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if type(batch) is Tensor:  # and no fake
            SEEN.append(tuple(batch.shape))
        wide = self.wide(batch)
        return (wide.unsqueeze(1) * wide.unsqueeze(2)).tanh().sum(-1).tanh().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_batch_that_was_planned_is_the_one_that_is_proven(tmp_path: Path) -> None:
    loader: Any = DataLoader(Sequences(), batch_sampler=BATCHES)
    memfit = MemFit(precision="32-true", activation_checkpointing="none", cache_dir=None, verbose=False)
    SEEN.clear()
    lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[memfit],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Pairs(), loader)
    assert memfit.plan is not None and memfit.measured is not None
    assert "(2, 30, 2)" in memfit.plan.planned_batch
    warmed_up_with = set(SEEN[: -len(BATCHES)])
    assert warmed_up_with == {(2, 30, 2)}
    predicted = memfit.plan.forecast.memory.peak_allocated_bytes
    assert abs(predicted - memfit.measured.measured_peak_allocated_bytes) <= 0.05 * predicted
