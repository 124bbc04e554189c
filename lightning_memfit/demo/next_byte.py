"""What the byte-level language models share: the loss, the steps, and how they are optimized."""

from __future__ import annotations

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from lightning_memfit.demo.byte_text import NO_LABEL, ByteSample
from lightning_memfit.demo.optimization import adamw_with_schedule

VOCABULARY = 256
"""Number of values of a byte."""


def next_byte_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats per labelled byte.

    Args:
        logits: scores of every byte value, ``(batch, sequence, 256)``.
        labels: the bytes that follow, ``(batch, sequence)``, int64; where they are ``NO_LABEL`` nothing is counted.
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)


class NextByteModel(LightningModule):
    """A module that scores the byte after each position, trained on pairs of bytes and the bytes that follow.

    Args:
        learning_rate: highest learning rate, per optimizer step.
        weight_decay: decay of the matrices, per unit of learning rate.
        warmup_steps: optimizer steps until the highest learning rate.
    """

    loss_unit = "nats per byte"
    """What ``train_loss`` and ``val_loss`` are in."""

    def __init__(self, *, learning_rate: float, weight_decay: float, warmup_steps: int) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps

    def loss(self, batch: ByteSample) -> Tensor:
        """Mean loss of the labelled bytes of a batch, in nats per byte."""
        return next_byte_loss(self(batch.inputs), batch.labels)

    def training_step(self, batch: ByteSample, batch_idx: int) -> Tensor:
        """Return the loss of one batch of ``(inputs, labels)``, both ``(batch, sequence)``."""
        loss = self.loss(ByteSample(*batch))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: ByteSample, batch_idx: int) -> None:
        """Log the loss of one validation batch, which counts as many times as it has labelled bytes."""
        batch = ByteSample(*batch)
        labelled = int((batch.labels != NO_LABEL).sum())
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=labelled)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a linear warm-up and a cosine over the steps of this run."""
        return adamw_with_schedule(
            self,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
        )
