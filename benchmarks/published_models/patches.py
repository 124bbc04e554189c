"""Models on patches of sixteen by sixteen pixels: vision transformers and the MLP-Mixer, in timm's form.

Source: arXiv:2010.11929, table 1; arXiv:2105.01601, table 1; attention by torch's fused operator, no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published_models.plain_convolutions import Residual

_PATCH = 16
_PATCHES = (224 // _PATCH) ** 2
_VIT = {"small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, blocks, heads."""


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        samples, length, width = inputs.shape
        packed = self.inward(inputs).reshape(samples, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.outward(attended.transpose(1, 2).reshape(samples, length, width))
        return result


class _Patches(nn.Module):
    """Patches as ``(batch, patches, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, _PATCH, stride=_PATCH)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.project(images)
        return patches.flatten(2).transpose(1, 2)


class _VisionTransformer(nn.Module):
    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.patches = _Patches(width)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, _PATCHES + 1, width))
        self.blocks = nn.Sequential(*(_vit_block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1) + self.positions
        result: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return result


def vit(size: str) -> nn.Module:
    """A vision transformer, ``"small"``, ``"base"`` or ``"large"``, for 224 by 224 pixels and 1000 classes."""
    return _VisionTransformer(*_VIT[size])


def mixer_base() -> nn.Module:
    """The MLP-Mixer B/16 for 224 by 224 pixels and 1000 classes."""
    width, blocks = 768, 12
    return nn.Sequential(
        _Patches(width),
        *(_mixer_block(width) for _ in range(blocks)),
        nn.LayerNorm(width, eps=1e-6),
        _MeanOfTokens(),
        nn.Linear(width, 1000),
    )


def _vit_block(width: int, heads: int) -> nn.Module:
    attention = nn.Sequential(nn.LayerNorm(width, eps=1e-6), _Attention(width, heads))
    return nn.Sequential(Residual(attention), Residual(_perceptron(width, 4 * width, width)))


def _mixer_block(width: int) -> nn.Module:
    return nn.Sequential(Residual(_TokenMixing(width)), Residual(_perceptron(width, 4 * width, width)))


def _perceptron(width: int, hidden: int, normed: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(normed, eps=1e-6), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class _TokenMixing(nn.Module):
    """A perceptron over the patches, the same for every channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        hidden = width // 2
        self.mix = nn.Sequential(nn.Linear(_PATCHES, hidden), nn.GELU(), nn.Linear(hidden, _PATCHES))

    def forward(self, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.mix(self.norm(tokens).transpose(1, 2))
        return mixed.transpose(1, 2)


class _MeanOfTokens(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)
