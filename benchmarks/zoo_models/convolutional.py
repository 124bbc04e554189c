"""Models on images: ResNet, U-Net, and inverted residuals with depthwise convolutions; all with BatchNorm."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import Workload


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut, at constant width and resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to the same."""
        return F.relu(images + self.body(images))


def _residual_stage(width: int) -> nn.Sequential:
    return nn.Sequential(ResidualBlock(width), ResidualBlock(width))


def _change_width(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


class ResNet(nn.Module):
    """Residual stages of rising width and falling resolution."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), classes: int = 100) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for before, after in itertools.pairwise((3, *widths)):
            stages += [_change_width(before, after, stride=1 if before == 3 else 2), _residual_stage(after)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, 3, height, width)`` to ``(batch, classes)``."""
        return self.head(self.stages(images).mean(dim=(2, 3)))


class UNet(nn.Module):
    """Encoder and decoder with skips, for a class per pixel."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), classes: int = 4) -> None:
        super().__init__()
        self.stem = _change_width(3, widths[0], stride=1)
        self.encoder = nn.ModuleList(_residual_stage(width) for width in widths)
        self.down = nn.ModuleList(_change_width(*pair, stride=2) for pair in itertools.pairwise(widths))
        rising = tuple(itertools.pairwise(reversed(widths)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, stride=2) for low, high in rising)
        self.merge = nn.ModuleList(_change_width(2 * high, high, stride=1) for _, high in rising)
        self.decoder = nn.ModuleList(_residual_stage(high) for _, high in rising)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, 3, height, width)`` to ``(batch, height, width, classes)``."""
        hidden = self.encoder[0](self.stem(images))
        skips: list[Tensor] = []
        for down, stage in zip(self.down, self.encoder[1:], strict=True):
            skips.append(hidden)
            hidden = stage(down(hidden))
        for up, merge, stage in zip(self.up, self.merge, self.decoder, strict=True):
            hidden = stage(merge(torch.cat([skips.pop(), up(hidden)], dim=1)))
        return self.head(hidden).permute(0, 2, 3, 1)


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, narrow again, around a shortcut.

    Source: Sandler et al., MobileNetV2 (arXiv 1801.04381), figure 4b.
    """

    def __init__(self, width: int, expansion: int = 4) -> None:
        super().__init__()
        wide = expansion * width
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to the same."""
        return images + self.body(images)


class MobileNet(nn.Module):
    """Stages of inverted residuals, each at twice the width and half the resolution of the one before."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), depth: int = 2, classes: int = 100) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for before, after in itertools.pairwise((3, *widths)):
            stages += [
                _change_width(before, after, stride=2),
                nn.Sequential(*(InvertedResidual(after) for _ in range(depth))),
            ]
        self.stages = nn.Sequential(*stages)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, 3, height, width)`` to ``(batch, classes)``."""
        return self.head(self.dropout(self.stages(images).mean(dim=(2, 3))))


def resnet() -> Workload:
    """Small images."""
    return Workload(
        network=ResNet(), batch={"images": torch.randn(32, 3, 32, 32), "targets": torch.randint(100, (32,))}
    )


def unet() -> Workload:
    """A class for every pixel."""
    return Workload(
        network=UNet(), batch={"images": torch.randn(8, 3, 64, 64), "targets": torch.randint(4, (8, 64, 64))}
    )


def mobile() -> Workload:
    """Images."""
    return Workload(
        network=MobileNet(), batch={"images": torch.randn(16, 3, 64, 64), "targets": torch.randint(100, (16,))}
    )
