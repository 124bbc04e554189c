"""ConvNeXt-Tiny, in torchvision's form and in timm's, which train without stochastic depth by default.

Source: arXiv:2201.03545, table 9; blocks of a depthwise convolution and a two-layer perceptron on channels last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published_models.mobile import StochasticDepth

_STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))
_STOCHASTIC_DEPTH = 0.1


class _ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of ``(batch, channels, height, width)``."""

    def forward(self, inputs: Tensor) -> Tensor:
        last = inputs.permute(0, 2, 3, 1)
        return F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class _Permute(nn.Module):
    def __init__(self, *dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.permute(self.dimensions)


class _Block(nn.Module):
    """With torchvision the input is added in place, with timm into a new tensor."""

    def __init__(self, channels: int, drop: float, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            _Permute(0, 2, 3, 1),
            nn.LayerNorm(channels, eps=1e-6),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            _Permute(0, 3, 1, 2),
        )
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))
        self.drop = StochasticDepth(drop)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.drop(self.scale * self.body(inputs))
        return result.add_(inputs) if self.in_place else result + inputs


def convnext_tiny(*, regularised: bool = True) -> nn.Module:
    """1000 classes; ``regularised`` as in torchvision, else as in timm's training script."""
    blocks = sum(times for _, times in _STAGES)
    layers: list[nn.Module] = []
    channels, position = 3, 0
    for width, times in _STAGES:
        if channels == 3:
            layers += [nn.Conv2d(3, width, 4, stride=4), _ChannelNorm(width, eps=1e-6)]
        else:
            layers += [_ChannelNorm(channels, eps=1e-6), nn.Conv2d(channels, width, 2, stride=2)]
        for _ in range(times):
            drop = _STOCHASTIC_DEPTH * position / (blocks - 1) if regularised else 0.0
            layers.append(_Block(width, drop, in_place=regularised))
            position += 1
        channels = width
    head = (nn.AdaptiveAvgPool2d(1), _ChannelNorm(channels, eps=1e-6), nn.Flatten(), nn.Linear(channels, 1000))
    return nn.Sequential(*layers, *head)
