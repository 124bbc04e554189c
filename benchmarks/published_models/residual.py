"""ResNet of 18, 101 and 152 layers; torchvision and timm allocate alike.

Source: arXiv:1512.03385, table 1; as in torchvision, the three by three convolution of a bottleneck has the stride, the
sum is formed in place and ReLUs run in place.
"""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.published_models.plain_convolutions import conv_norm

_REPEATS = {18: (2, 2, 2, 2), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_BOTTLENECK_EXPANSION = 4


class _Block(nn.Module):
    """A body beside a shortcut, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        changed = stride != 1 or inputs != outputs
        self.shortcut = conv_norm(inputs, outputs, 1, stride=stride) if changed else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.body(inputs)
        result += inputs if self.shortcut is None else self.shortcut(inputs)
        activated: Tensor = self.relu(result)
        return activated


def _relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def _basic(inputs: int, width: int, stride: int) -> _Block:
    body = nn.Sequential(
        conv_norm(inputs, width, 3, stride=stride, activation=_relu()),
        conv_norm(width, width, 3),
    )
    return _Block(inputs, width, stride, body)


def _bottleneck(inputs: int, width: int, stride: int) -> _Block:
    outputs = width * _BOTTLENECK_EXPANSION
    body = nn.Sequential(
        conv_norm(inputs, width, 1, activation=_relu()),
        conv_norm(width, width, 3, stride=stride, activation=_relu()),
        conv_norm(width, outputs, 1),
    )
    return _Block(inputs, outputs, stride, body)


def resnet(depth: int) -> nn.Module:
    """A ResNet of 18, 101 or 152 layers for 1000 classes."""
    block, expansion = (_basic, 1) if depth == 18 else (_bottleneck, _BOTTLENECK_EXPANSION)
    layers: list[nn.Module] = [
        conv_norm(3, 64, 7, stride=2, activation=_relu()),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for stage, times in enumerate(_REPEATS[depth]):
        width = 64 * 2**stage
        for index in range(times):
            layers.append(block(channels, width, 2 if stage and not index else 1))
            channels = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
