"""A stacked LSTM over bytes: few activations per parameter, and no repeated blocks to recompute."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_memfit.demo.next_byte import VOCABULARY, NextByteModel


class ByteLSTM(NextByteModel):
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
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(hidden_size, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte after each position: ``(batch, sequence)`` int64 to ``(batch, sequence, 256)``."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits
