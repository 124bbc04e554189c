"""Llama-shaped modules of four sizes, for what planning costs; on ``meta`` they have no weights.

Source of the shapes: the published configurations of Llama (7B), Llama 2 (70B, grouped queries), and the usual shapes
of GPT-3's 125M and 1.3B with Llama's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The numbers that decide a Llama's size."""

    width: int
    """Features of the hidden state."""
    depth: int
    """Blocks."""
    heads: int
    """Query heads."""
    key_value_heads: int
    """Key and value heads; each serves ``heads / key_value_heads`` query heads."""
    mlp_width: int
    """Features inside the feed-forward."""
    vocabulary: int = 32_000
    length: int = 2048
    """Positions in tokens."""


SHAPES: dict[str, LlamaShape] = {
    "125M": LlamaShape(width=768, depth=12, heads=12, key_value_heads=12, mlp_width=2048),
    "1.3B": LlamaShape(width=2048, depth=24, heads=16, key_value_heads=16, mlp_width=5504),
    "7B": LlamaShape(width=4096, depth=32, heads=32, key_value_heads=32, mlp_width=11_008),
    "70B": LlamaShape(width=8192, depth=80, heads=64, key_value_heads=8, mlp_width=28_672),
}
"""By name; the embedding and the output layer are counted, and not tied."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, written out as in the published code."""

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape with ``width`` last to the same."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return scaled.type_as(hidden) * self.weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.key_value_heads = shape.heads, shape.key_value_heads
        self.head_width = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.heads * self.head_width, bias=False)
        self.key = nn.Linear(shape.width, shape.key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(shape.width, shape.key_value_heads * self.head_width, bias=False)
        self.out = nn.Linear(shape.heads * self.head_width, shape.width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """``(batch, sequence, width)``, with ``(sequence, head width)`` of both rotations, to the same."""
        batch, length, width = hidden.shape
        query = self._by_head(self.query(hidden), self.heads)
        key = self._by_head(self.key(hidden), self.key_value_heads)
        value = self._by_head(self.value(hidden), self.key_value_heads)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        group = self.heads // self.key_value_heads
        if group > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _by_head(self, projected: Tensor, heads: int) -> Tensor:
        return projected.unflatten(-1, (heads, self.head_width)).transpose(1, 2)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of features of ``(batch, heads, sequence, head width)`` by their position.

    Source: Su et al., RoFormer (arXiv 2104.09864), equation 34, with the halves paired as in Llama.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine.type_as(heads) + torch.cat((-second, first), dim=-1) * sine.type_as(heads)


class Block(nn.Module):
    """Attention and a gated feed-forward (SwiGLU), each normalised before and added after."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_mlp = RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        hidden = hidden + self.attention(self.norm_attention(hidden), cosine, sine)
        normed = self.norm_mlp(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Causal language model."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        head_width = shape.width // shape.heads
        frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2).float() / head_width)
        angles = torch.outer(torch.arange(shape.length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, sequence)`` to ``(batch, sequence, vocabulary)``."""
        length = ids.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        return self.head(self.norm(hidden))


def next_token_loss(module: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross entropy of each next token; ``ids`` is ``(batch, sequence + 1)``."""
    logits = module(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
