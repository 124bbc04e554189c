"""Predicted peaks equal measured ones for many kinds of layers. Run: ``pytest tests/trace/test_accuracy_models.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Compare = Callable[..., Any]


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    output = module(batch)
    return F.mse_loss(output, torch.zeros_like(output))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool), diagonal=1)
        return self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(32, 64, batch_first=True, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)[0]


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(2000, 32, **options)
        self.head = nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(32, 10),
    )  # fmt: skip


class Busy(nn.Module):
    """Makes tensors, counts in buffers, computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)
        self.register_buffer("mean", torch.zeros(128))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.table = torch.ones(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.calls += 1
            scale = self.inner(x).abs().amax()
        positions = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.tensor([0.5, 2.0]).sum()
        return self.inner(x - self.mean) / (1 + scale) + self.table[: x.shape[1]] + positions


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention with a mask": (Attention, lambda: torch.randn(4, 32, 64)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), lambda: torch.randn(4, 32, 64)),
    "convolutions": (convolutions, lambda: torch.randn(8, 3, 32, 32)),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2)),
        lambda: torch.randn(4, 16, 24, 24),
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(8, 64, 5), nn.GELU(), nn.Conv1d(64, 8, 3)),
        lambda: torch.randn(4, 8, 99),
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.1), lambda: torch.randn(8, 20, 32)),
    "LSTM both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True), lambda: torch.randn(8, 20, 32)),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: torch.randn(8, 20, 32)),
    "bags": (Bags, lambda: torch.randint(0, 2000, (64, 12))),
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: torch.randn(8, 3, 32, 32).contiguous(memory_format=torch.channels_last),
    ),
    "busy": (Busy, lambda: torch.randn(8, 32, 128)),
    "float64": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).double(),
        lambda: torch.randn(64, 64, dtype=torch.float64),
    ),
}


IN_BFLOAT16 = ("attention with a mask", "convolutions", "LSTM", "busy")


@pytest.mark.parametrize(
    ("name", "precision"), [(name, "32-true") for name in MODELS] + [(name, "bf16-mixed") for name in IN_BFLOAT16]
)
def test_the_peak_of_a_model_is_exact(compare: Compare, name: str, precision: str) -> None:
    """Reported in hpcaitech/ColossalAI#753, Hsword/Hetu#70, MIC-DKFZ/nnUNet#1152, MakazhanAlpamys/Soup#64."""
    make_module, make_batch = MODELS[name]
    torch.manual_seed(0)
    result = compare(make_module(), make_batch(), loss=mean_square, optimizer=torch.optim.AdamW, precision=precision)
    assert abs(result.error) < 0.005, (result.error, result.measured_bytes, result.predicted, result.probes.failures)
