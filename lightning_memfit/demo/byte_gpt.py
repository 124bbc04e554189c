"""A decoder-only transformer over bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_memfit.demo.next_byte import VOCABULARY, adamw_with_schedule, next_byte_loss


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before.

    Args:
        d_model: width of the residual stream.
        num_heads: number of heads; divides ``d_model``.
        dropout: probability of dropping an attention weight while training.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, sequence, d_model)`` to the same shape."""
        batch, sequence, d_model = hidden.shape
        heads = self.query_key_value(hidden).view(batch, sequence, 3, self.num_heads, d_model // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        merged: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, d_model))
        return merged


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a feed-forward layer of four times the width.

    Args:
        d_model: width of the residual stream.
        num_heads: number of attention heads.
        dropout: probability of dropping a value while training.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = CausalSelfAttention(d_model, num_heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, sequence, d_model)`` to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        added: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return added


class ByteGPT(LightningModule):
    """GPT over bytes: learned positions, pre-norm blocks, one weight for the embedding and the head if tied.

    Source: Radford et al., GPT-2 (2019), for the layout of the blocks and the initial weights.

    Args:
        d_model: width of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads per block; divides ``d_model``.
        max_sequence_length: longest sequence in bytes.
        dropout: probability of dropping a value while training.
        tie_head: use the embedding's weight for the head.
        learning_rate: highest learning rate.
        weight_decay: decay of the matrices.
        warmup_steps: optimizer steps until the highest learning rate.

    Raises:
        ValueError: if ``num_heads`` does not divide ``d_model``.
    """

    def __init__(
        self,
        d_model: int = 192,
        num_layers: int = 6,
        num_heads: int = 6,
        max_sequence_length: int = 256,
        dropout: float = 0.0,
        tie_head: bool = True,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            nearest = d_model // num_heads * num_heads or num_heads
            raise ValueError(
                f"num_heads={num_heads} does not divide d_model={d_model}: each head would have "
                f"{d_model / num_heads:g} channels. Choose d_model={nearest}, or another num_heads."
            )
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Embedding(max_sequence_length, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        self._initialise(num_layers)
        if tie_head:
            self.head.weight = self.embedding.weight

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # Each block adds twice to the residual stream: scaling what it adds keeps the sum's variance near one.
            adds_to_stream = name.endswith(("attention.output.weight", "feed_forward.2.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if adds_to_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte after each position: ``(batch, sequence)`` int64 to ``(batch, sequence, 256)``."""
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
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
