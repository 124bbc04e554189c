"""VGG: convolutions of three by three and maximum pooling, in torchvision's form and in timm's.

Source: arXiv:1409.1556, table 1, columns D and E. Both libraries run their ReLUs in place; torchvision has two linear
layers with dropout before the last, timm has convolutions in their place and no dropout.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

_REPEATS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDTHS = (64, 128, 256, 512, 512)


def _features(repeats: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, times in zip(_WIDTHS, repeats, strict=True):
        for _ in range(times):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg(depth: int) -> nn.Module:
    """As torchvision has it, 1000 classes."""
    return nn.Sequential(
        _features(_REPEATS[depth]),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 1000),
    )


def vgg_with_convolutional_head(depth: int) -> nn.Module:
    """As timm has it, 1000 classes."""
    return nn.Sequential(
        _features(_REPEATS[depth]),
        nn.Conv2d(512, 4096, 7),
        nn.ReLU(inplace=True),
        nn.Conv2d(4096, 4096, 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4096, 1000),
    )


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    groups: int = 1,
    eps: float = 1e-5,
    activation: nn.Module | None = None,
) -> nn.Sequential:
    """Convolution without bias, batch normalisation, and perhaps an activation; padded to keep the size by default."""
    if padding is None:
        assert isinstance(kernel, int)
        padding = kernel // 2
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=eps),
    ]
    if activation is not None:
        layers.append(activation)
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """The input added to what a body makes of it, into a new tensor or, in place, into the body's."""

    def __init__(self, body: nn.Module, *, in_place: bool = False) -> None:
        super().__init__()
        self.body = body
        self.in_place = in_place

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.body(inputs)
        return result.add_(inputs) if self.in_place else inputs + result
