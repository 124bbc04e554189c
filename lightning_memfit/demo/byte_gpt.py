"""A decoder-only transformer over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_memfit.demo.next_byte import VOCABULARY, NextByteModel
from lightning_memfit.demo.transformer import Block, initialise_blocks, sinusoids

_TOKEN_DEVIATION = 0.5
"""Standard deviation of what the first block reads before training, and of the scores. With one weight at both ends a
byte scores itself by ``d_model ** 0.5`` of these: an untrained model of deviation 1 would be sure of repetitions."""


class ByteGPT(NextByteModel):
    """GPT over bytes: learned positions, pre-norm blocks, one weight for the embedding and the head if tied.

    Source: Radford et al., GPT-2 (2019), for the layout of the blocks; Vaswani et al., Attention Is All You Need
    (2017), section 3.4, for one weight at both ends, which is scaled where bytes go in.

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
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        self.save_hyperparameters()
        self.scale = d_model**0.5
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Embedding(max_sequence_length, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads, dropout, causal=True) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        initialise_blocks(self.blocks, token_deviation=_TOKEN_DEVIATION)
        self._initialise_ends()
        if tie_head:
            self.head.weight = self.embedding.weight

    def _initialise_ends(self) -> None:
        """Draw the weights where bytes go in and where scores come out, and set the positions."""
        weight_deviation = _TOKEN_DEVIATION / self.scale
        for end in (self.embedding, self.head):
            nn.init.normal_(end.weight, std=weight_deviation)
        waves = sinusoids(self.positions.num_embeddings, self.positions.embedding_dim, longest_wavelength=1000.0)
        with torch.no_grad():
            self.positions.weight.copy_(waves * weight_deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte after each position: ``(batch, sequence)`` int64 to ``(batch, sequence, 256)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = (self.embedding(tokens) + self.positions(positions)) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
