"""A stacked LSTM over bytes: few activations per parameter, and no repeated blocks to recompute."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_memfit.demo.next_byte import VOCABULARY, adamw_with_schedule, next_byte_loss


class ByteLSTM(LightningModule):
    """LSTM language model over bytes.

    Args:
        hidden_size: width of the embedding and of every layer.
        num_layers: stacked LSTM layers.
        dropout: probability of dropping a value between layers while training.
        learning_rate: highest learning rate.
        weight_decay: decay of the matrices.
        warmup_steps: optimizer steps until the highest learning rate.
    """

    def __init__(
        self,
        hidden_size: int = 384,
        num_layers: int = 2,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.embedding = nn.Embedding(VOCABULARY, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(hidden_size, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte after each position: ``(batch, sequence)`` int64 to ``(batch, sequence, 256)``."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch of ``(inputs, targets)``, both ``(batch, sequence)``."""
        inputs, targets = batch
        loss = next_byte_loss(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss of one validation batch."""
        inputs, targets = batch
        self.log("val_loss", next_byte_loss(self(inputs), targets), prog_bar=True, batch_size=inputs.shape[0])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a linear warm-up and a cosine over the steps of this run."""
        return adamw_with_schedule(
            self,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
        )
