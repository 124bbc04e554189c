"""Frozen language models with low-rank adapters on queries and values, operator by operator as litgpt trained them.

Source: Lightning-AI/litgpt lit_gpt/model.py, lit_gpt/lora.py and finetune/lora.py of late 2023: one linear layer for
queries, keys and values, whose adapter is a grouped convolution padded with zeros for the keys; positions turned in
float32; logits and their cross entropy in pieces of 128 positions. Lightning-AI/pytorch-lightning
src/lightning/fabric/plugins/precision/half.py@2.1.0, ``convert_output``: what the network returns is cast to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import Batch

_RANK = 8
_DROPOUT = 0.05
_SCALING = 16 / _RANK
_PIECE = 128
_IGNORED = -1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the models differ in."""

    width: int
    """Of an embedding."""
    layers: int
    """Blocks."""
    heads: int
    """Of queries, keys and values alike."""
    hidden: int
    """Width inside a block's perceptron."""
    vocabulary: int
    """Rows of the embedding, padded."""
    positions: int
    """Longest sequence."""
    gated: bool = False
    """Gated perceptron and root mean square norms without biases, one branch after the other, as in Llama."""
    rotary: float = 1.0
    """Share of a head that is rotated."""
    one_norm: bool = False
    """Both branches of a block read the same normalised input."""
    output_bias: bool = False
    """The output layer has a bias."""


PHI_1_5 = Shape(
    width=2048, layers=24, heads=32, hidden=8192, vocabulary=51200, positions=2048, rotary=0.5, one_norm=True,
    output_bias=True,
)  # fmt: skip
STABLELM_ALPHA_3B = Shape(width=4096, layers=16, heads=32, hidden=16384, vocabulary=50688, positions=4096, rotary=0.25)
LLAMA_2_7B = Shape(width=4096, layers=32, heads=32, hidden=11008, vocabulary=32000, positions=4096, gated=True)
LLAMA_2_13B = Shape(width=5120, layers=40, heads=40, hidden=13824, vocabulary=32000, positions=4096, gated=True)


class AdaptedLanguageModel(nn.Module):
    """Token numbers ``(batch, sequence)`` to fp32 logits ``(batch, 128, vocabulary)``; adapters alone train."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=shape.output_bias)
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        rotated = int(shape.width // shape.heads * shape.rotary)
        self.register_buffer("cosines", torch.ones(shape.positions, rotated), persistent=False)
        self.register_buffer("sines", torch.ones(shape.positions, rotated), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "low_rank" in name

    def forward(self, ids: Tensor) -> list[Tensor]:
        length = ids.shape[1]
        cosines, sines = self.cosines[:length].float(), self.sines[:length].float()
        stream = self.embed(ids)
        for block in self.blocks:
            stream = block(stream, cosines, sines)
        pieces = [self.output(piece) for piece in self.norm(stream).split(_PIECE, dim=1)]
        return [piece.float() for piece in pieces]


def next_token_loss(network: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of every piece by itself."""
    pieces = network(batch["ids"])
    pieces[-1] = pieces[-1][:, :-1]
    targets = batch["labels"][:, 1:].split(_PIECE, dim=1)
    losses = [
        F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), wanted.reshape(-1), ignore_index=_IGNORED, reduction="none"
        )
        for logits, wanted in zip(pieces, targets, strict=True)
    ]
    return torch.cat(losses).mean()


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.parallel = not shape.gated
        self.norm_1 = _norm(shape)
        self.attention = _Attention(shape)
        self.norm_2 = None if shape.one_norm else _norm(shape)
        self.perceptron = _GatedPerceptron(shape) if shape.gated else _Perceptron(shape)

    def forward(self, stream: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        normed = self.norm_1(stream)
        attended = self.attention(normed, cosines, sines)
        if self.parallel:
            second = normed if self.norm_2 is None else self.norm_2(stream)
            summed: Tensor = self.perceptron(second) + attended + stream
            return summed
        assert self.norm_2 is not None
        stream = stream + attended
        result: Tensor = self.perceptron(self.norm_2(stream)) + stream
        return result


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inward = _AdaptedLinear(shape.width, bias=not shape.gated)
        self.outward = nn.Linear(shape.width, shape.width, bias=not shape.gated)

    def forward(self, stream: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        samples, length, width = stream.shape
        packed = self.inward(stream).view(samples, length, self.heads, 3, width // self.heads).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(samples, self.heads, length, -1) for part in packed.split(1, dim=2))
        query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.outward(attended.transpose(1, 2).reshape(samples, length, width))
        return result


class _AdaptedLinear(nn.Module):
    """Queries, keys and values from one frozen layer, queries and values corrected by products of two thin matrices."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, 3 * width, bias=bias)
        self.dropout = nn.Dropout(_DROPOUT)
        self.low_rank_in = nn.Parameter(torch.zeros(2 * _RANK, width))
        self.low_rank_out = nn.Parameter(torch.zeros(2 * width, _RANK))
        third = torch.arange(3 * width).chunk(3)
        self.register_buffer("corrected", torch.cat([third[0], third[2]]), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        plain = self.frozen(inputs)
        thin = F.linear(self.dropout(inputs), self.low_rank_in)
        wide = F.conv1d(thin.transpose(-2, -1), self.low_rank_out.unsqueeze(-1), groups=2).transpose(-2, -1)
        padded = wide.new_zeros(wide.shape[0] * wide.shape[1], plain.shape[-1])
        padded = padded.index_copy(1, self.corrected, wide.reshape(-1, wide.shape[-1]))
        result: Tensor = plain + padded.view(plain.shape) * _SCALING
        return result


class _Perceptron(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, shape.width)

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.outward(F.gelu(self.inward(stream)))
        return result


class _GatedPerceptron(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.inward = nn.Linear(shape.width, shape.hidden, bias=False)
        self.outward = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        result: Tensor = self.outward(F.silu(self.gate(stream)) * self.inward(stream))
        return result


class _RootMeanSquare(nn.Module):
    """Normalisation computed in float32.

    Source: Lightning-AI/litgpt lit_gpt/rmsnorm.py@98898ca.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, stream: Tensor) -> Tensor:
        wide = stream.float()
        mean = torch.mean(wide * wide, dim=-1, keepdim=True)
        return (self.weight * (wide * torch.rsqrt(mean + 1e-5))).to(stream.dtype)


def _norm(shape: Shape) -> nn.Module:
    return _RootMeanSquare(shape.width) if shape.gated else nn.LayerNorm(shape.width)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The first part of every head turned by its position, beside the rest."""
    size = cosines.shape[-1]
    turned = heads[..., :size]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    roped = (turned * cosines) + (swapped * sines)
    return torch.cat((roped.to(heads.dtype), heads[..., size:]), dim=-1)
