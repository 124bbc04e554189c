"""The block that the transformers of this package are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself.

    Args:
        d_model: width of the residual stream.
        num_heads: number of heads; divides ``d_model``.
        dropout: probability of dropping an attention weight while training.
        causal: let a position see only itself and what came before.

    Raises:
        ValueError: if ``num_heads`` does not divide ``d_model``.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        if d_model % num_heads:
            nearest = d_model // num_heads * num_heads or num_heads
            raise ValueError(
                f"num_heads={num_heads} does not divide d_model={d_model}: each head would have "
                f"{d_model / num_heads:g} channels. Choose d_model={nearest}, or another num_heads."
            )
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, sequence, d_model)`` to the same shape."""
        batch, sequence, d_model = hidden.shape
        heads = self.query_key_value(hidden).view(batch, sequence, 3, self.num_heads, d_model // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        merged: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, d_model))
        return merged


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a feed-forward layer of four times the width.

    Args:
        d_model: width of the residual stream.
        num_heads: number of attention heads; divides ``d_model``.
        dropout: probability of dropping a value while training.
        causal: let a position see only itself and what came before.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = SelfAttention(d_model, num_heads, dropout, causal=causal)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, sequence, d_model)`` to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        added: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return added


def initialise_blocks(blocks: nn.ModuleList, *, token_deviation: float) -> None:
    """Draw the matrices of all blocks from normal distributions; gains and biases stay.

    The standard deviation is ``inputs ** -0.5``, which keeps the variance of what is read, and where a result is added
    to the residual stream ``token_deviation * (2 * blocks) ** -0.5`` of that: each block adds twice, so that the
    variance of all that is added stays near that of the tokens.

    Args:
        blocks: the :class:`Block` s of a model.
        token_deviation: standard deviation of the tokens that the first block reads.

    Source: LeCun et al., Efficient BackProp (1998), equation 16; Radford et al., Language Models are Unsupervised
    Multitask Learners (2019), section 2.3.
    """
    for name, parameter in blocks.named_parameters():
        if parameter.dim() >= 2:
            adds_to_stream = name.endswith(("attention.output.weight", "feed_forward.2.weight"))
            scale = token_deviation * (2 * len(blocks)) ** -0.5 if adds_to_stream else 1.0
            nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)


def sinusoids(positions: int, d_model: int, longest_wavelength: float) -> Tensor:
    """One vector per position, ``(positions, d_model)``, such that a shift of the position is a rotation.

    Learnt positions that start from these need not find out first what "one before" means.

    Args:
        positions: number of positions.
        d_model: width of the vectors, sines and cosines in turn; their length is about ``(d_model / 2) ** 0.5``.
        longest_wavelength: period of the slowest pair, in positions, divided by 2 pi.

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.5, with 10000 as ``longest_wavelength``.

    >>> sinusoids(2, 4, 100.0)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0998, 0.9950]])
    """
    frequencies = longest_wavelength ** (-torch.arange(0, d_model, 2) / d_model)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]
