"""MobileNetV2 and EfficientNet-B0: inverted residual blocks.

Source: arXiv:1801.04381, table 2; arXiv:1905.11946, table 1, with squeeze and excitation of a quarter of a block's
input; activations in place, stochastic depth and dropout of 0.2 as in torchvision. timm's training script has neither.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.published_models.plain_convolutions import Residual, conv_norm

_MOBILE_BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, repeats, stride of the first."""
_EFFICIENT_BLOCKS = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Expansion, kernel, stride of the first, channels, repeats."""
_LAST_CHANNELS = 1280
_STOCHASTIC_DEPTH = 0.2


def mobilenet_v2() -> nn.Module:
    """As torchvision has it, 1000 classes."""
    layers: list[nn.Module] = [conv_norm(3, 32, 3, stride=2, activation=_relu6())]
    channels = 32
    for expansion, width, times, first_stride in _MOBILE_BLOCKS:
        for index in range(times):
            stride = first_stride if index == 0 else 1
            inner = channels * expansion
            expand = [conv_norm(channels, inner, 1, activation=_relu6())] if expansion != 1 else []
            body = nn.Sequential(
                *expand,
                conv_norm(inner, inner, 3, stride=stride, groups=inner, activation=_relu6()),
                conv_norm(inner, width, 1),
            )
            layers.append(Residual(body) if stride == 1 and channels == width else body)
            channels = width
    layers += [conv_norm(channels, _LAST_CHANNELS, 1, activation=_relu6()), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(_LAST_CHANNELS, 1000))


def efficientnet_b0(*, regularised: bool = True) -> nn.Module:
    """1000 classes; ``regularised`` as in torchvision, else as in timm's training script."""
    blocks = sum(times for *_, times in _EFFICIENT_BLOCKS)
    layers: list[nn.Module] = [conv_norm(3, 32, 3, stride=2, activation=_silu())]
    channels, position = 32, 0
    for expansion, kernel, first_stride, width, times in _EFFICIENT_BLOCKS:
        for index in range(times):
            stride = first_stride if index == 0 else 1
            inner = channels * expansion
            expand = [conv_norm(channels, inner, 1, activation=_silu())] if expansion != 1 else []
            body: list[nn.Module] = [
                *expand,
                conv_norm(inner, inner, kernel, stride=stride, groups=inner, activation=_silu()),
                _SqueezeExcitation(inner, channels // 4),
                conv_norm(inner, width, 1),
            ]
            kept = stride == 1 and channels == width
            if kept and regularised:
                body.append(StochasticDepth(_STOCHASTIC_DEPTH * position / blocks))
            whole = nn.Sequential(*body)
            layers.append(Residual(whole, in_place=regularised) if kept else whole)
            channels, position = width, position + 1
    layers += [conv_norm(channels, _LAST_CHANNELS, 1, activation=_silu()), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2 if regularised else 0.0), nn.Linear(_LAST_CHANNELS, 1000))


class StochasticDepth(nn.Module):
    """Zero whole samples with a probability, and scale the others up. Source: arXiv:1603.09382."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return inputs
        kept = 1 - self.probability
        noise = torch.empty(len(inputs), *[1] * (inputs.dim() - 1), dtype=inputs.dtype, device=inputs.device)
        return inputs * noise.bernoulli_(kept).div_(kept)


class _SqueezeExcitation(nn.Module):
    """Channels scaled by what two small layers make of their means. Source: arXiv:1709.01507."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, squeezed, 1), _silu(), nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.scale(inputs) * inputs
        return result


def _relu6() -> nn.Module:
    return nn.ReLU6(inplace=True)


def _silu() -> nn.Module:
    return nn.SiLU(inplace=True)
