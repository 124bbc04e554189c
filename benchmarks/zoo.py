"""Small but real models of seven kinds, each with a batch: what predictions are checked against.

Every model peaks between 30 and 150 MiB in fp32, runs a step well under a second on one core, and has repeated blocks
that can be recomputed. Everything is seeded: the same case is the same weights and the same batch.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

Precision = Literal["32-true", "bf16-mixed"]
Checkpointing = Literal["none", "blocks"]
Optimizer = Literal["adamw", "sgd"]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ZooCase:
    """One model at one setting."""

    name: str
    """Key of ``MODELS``."""
    precision: Precision
    """In Lightning's words."""
    checkpointing: Checkpointing
    """Whether the repeated blocks are recomputed."""
    optimizer: Optimizer
    """AdamW, or SGD with momentum 0.9."""

    @property
    def label(self) -> str:
        """Such as ``"gpt 32-true none adamw"``."""
        return f"{self.name} {self.precision} {self.checkpointing} {self.optimizer}"


def all_cases() -> tuple[ZooCase, ...]:
    """Every model x precision x checkpointing x optimizer: 56 cases."""
    settings = itertools.product(MODELS, get_args(Precision), get_args(Checkpointing), get_args(Optimizer))
    return tuple(ZooCase(*setting) for setting in settings)


def select_cases(pattern: str) -> tuple[ZooCase, ...]:
    """The cases whose label matches a pattern as in ``fnmatch``, such as ``"gpt *"``.

    Raises:
        ValueError: if none does.
    """
    selected = tuple(case for case in all_cases() if fnmatch.fnmatchcase(case.label, pattern))
    if not selected:
        raise ValueError(f"no case matches {pattern!r}; labels are such as {all_cases()[0].label!r}")
    return selected


def build(case: ZooCase) -> tuple[ZooModule, Batch]:
    """The module and one batch of a case, the same for every call. The global random state is left alone.

    Precision and checkpointing are for the caller to apply: they are settings of the run, not of the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, batch = MODELS[case.name]()
        return ZooModule(network, case.optimizer), batch


class ZooModule(LightningModule):
    """A network and its loss under Lightning; knows nothing of MemFit."""

    def __init__(self, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Mean cross entropy over the targets; targets of -100 are left out."""
        logits = self.network(**{name: value for name, value in batch.items() if name != "targets"})
        return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the case, with torch's default implementation."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class MLP(nn.Module):
    """Feed-forward blocks on flat features."""

    def __init__(self, features: int = 256, width: int = 512, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(batch, features)`` to ``(batch, classes)``."""
        return self.head(self.blocks(self.stem(inputs)))


class AttentionBlock(nn.Module):
    """Pre-norm self-attention and feed-forward, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.norm_mlp(hidden))


class GPT(nn.Module):
    """Causal language model; the output layer shares the embedding's weights."""

    def __init__(self, vocabulary: int = 4096, length: int = 128, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads=6, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, sequence)`` to ``(batch, sequence, vocabulary)``."""
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class ViT(nn.Module):
    """Vision transformer with a class token."""

    def __init__(self, image: int = 64, patch: int = 8, width: int = 192, depth: int = 4, classes: int = 100) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads=3, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, 3, height, width)`` to ``(batch, classes)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, 0]))


class Bert(nn.Module):
    """Masked language model on torch's own encoder, with padding and dropout."""

    def __init__(self, vocabulary: int = 4096, length: int = 96, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            width, nhead=6, dim_feedforward=4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """``(batch, sequence)`` and its padding mask (true where padded) to ``(batch, sequence, vocabulary)``."""
        hidden = self.dropout(self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]]))
        return self.head(self.encoder(hidden, src_key_padding_mask=padding))


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


class LSTMBlock(nn.Module):
    """A two-layer LSTM around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        return hidden + self.lstm(self.norm(hidden))[0]


class LSTM(nn.Module):
    """Recurrent language model."""

    def __init__(self, vocabulary: int = 1024, width: int = 192, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LSTMBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, sequence)`` to ``(batch, sequence, vocabulary)``."""
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _mlp() -> tuple[nn.Module, Batch]:
    return MLP(), {"inputs": torch.randn(2048, 256), "targets": torch.randint(10, (2048,))}


def _gpt() -> tuple[nn.Module, Batch]:
    ids = torch.randint(4096, (8, 129))
    return GPT(), {"ids": ids[:, :-1], "targets": ids[:, 1:]}


def _vit() -> tuple[nn.Module, Batch]:
    return ViT(), {"images": torch.randn(16, 3, 64, 64), "targets": torch.randint(100, (16,))}


def _bert() -> tuple[nn.Module, Batch]:
    ids = torch.randint(1, 4096, (8, 96))
    lengths = torch.arange(96, 32, -8)  # 96, 88, ..., 40
    padding = torch.arange(96) >= lengths[:, None]
    ids = ids.masked_fill(padding, 0)
    # One token in seven is to be guessed; padding never is.
    guessed = (torch.arange(96) % 7 == 0) & ~padding
    return Bert(), {
        "ids": ids.masked_fill(guessed, 1),
        "padding": padding,
        "targets": ids.masked_fill(~guessed, -100),
    }


def _unet() -> tuple[nn.Module, Batch]:
    return UNet(), {"images": torch.randn(8, 3, 64, 64), "targets": torch.randint(4, (8, 64, 64))}


def _resnet() -> tuple[nn.Module, Batch]:
    return ResNet(), {"images": torch.randn(32, 3, 32, 32), "targets": torch.randint(100, (32,))}


def _lstm() -> tuple[nn.Module, Batch]:
    ids = torch.randint(1024, (16, 65))
    return LSTM(), {"ids": ids[:, :-1], "targets": ids[:, 1:]}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "vit": _vit,
    "bert": _bert,
    "unet": _unet,
    "resnet": _resnet,
    "lstm": _lstm,
}
"""Each kind of model, with the function that makes the network and one batch."""
