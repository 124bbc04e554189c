"""Inception v3 without the auxiliary classifier, in torchvision's form.

Source: arXiv:1512.00567, table 1 and figures 5 to 7; normalisation with eps 0.001, ReLUs in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.published_models.plain_convolutions import conv_norm

_Kernel = int | tuple[int, int]


class _Branches(nn.Module):
    """What several branches make of the same input, channels beside each other."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


def inception_v3() -> nn.Module:
    """1000 classes, images of 299 by 299."""
    stem = (
        _conv(3, 32, 3, stride=2), _conv(32, 32, 3), _conv(32, 64, 3, padding=1), nn.MaxPool2d(3, 2),
        _conv(64, 80, 1), _conv(80, 192, 3), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    mixed = (
        _mixed_35(192, 32), _mixed_35(256, 64), _mixed_35(288, 64), _reduction_35(288),
        _mixed_17(128), _mixed_17(160), _mixed_17(160), _mixed_17(192), _reduction_17(),
        _mixed_8(1280), _mixed_8(2048),
    )  # fmt: skip
    return nn.Sequential(*stem, *mixed, nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, 1000))


def _conv(
    inputs: int, outputs: int, kernel: _Kernel, *, stride: int = 1, padding: int | tuple[int, int] = 0
) -> nn.Module:
    return conv_norm(
        inputs, outputs, kernel, stride=stride, padding=padding, eps=0.001, activation=nn.ReLU(inplace=True)
    )


def _chain(inputs: int, *layers: tuple[int, _Kernel]) -> nn.Module:
    """Convolutions that keep the size, each given by its channels and kernel."""
    chain: list[nn.Module] = []
    for outputs, kernel in layers:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        chain.append(_conv(inputs, outputs, kernel, padding=padding))
        inputs = outputs
    return nn.Sequential(*chain)


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, outputs, 1))


def _mixed_35(inputs: int, pooled: int) -> nn.Module:
    return _Branches(
        _chain(inputs, (64, 1)),
        _chain(inputs, (48, 1), (64, 5)),
        _chain(inputs, (64, 1), (96, 3), (96, 3)),
        _pooled(inputs, pooled),
    )


def _reduction_35(inputs: int) -> nn.Module:
    double = nn.Sequential(_chain(inputs, (64, 1), (96, 3)), _conv(96, 96, 3, stride=2))
    return _Branches(_conv(inputs, 384, 3, stride=2), double, nn.MaxPool2d(3, 2))


def _mixed_17(inner: int) -> nn.Module:
    row, column = (1, 7), (7, 1)
    return _Branches(
        _chain(768, (192, 1)),
        _chain(768, (inner, 1), (inner, row), (192, column)),
        _chain(768, (inner, 1), (inner, column), (inner, row), (inner, column), (192, row)),
        _pooled(768, 192),
    )


def _reduction_17() -> nn.Module:
    return _Branches(
        nn.Sequential(_chain(768, (192, 1)), _conv(192, 320, 3, stride=2)),
        nn.Sequential(_chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))), _conv(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


def _mixed_8(inputs: int) -> nn.Module:
    def fork(channels: int) -> nn.Module:
        sides: Sequence[_Kernel] = ((1, 3), (3, 1))
        return _Branches(*(_chain(channels, (384, side)) for side in sides))

    return _Branches(
        _chain(inputs, (320, 1)),
        nn.Sequential(_chain(inputs, (384, 1)), fork(384)),
        nn.Sequential(_chain(inputs, (448, 1), (384, 3)), fork(384)),
        _pooled(inputs, 192),
    )
