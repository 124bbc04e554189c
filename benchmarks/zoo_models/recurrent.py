"""Recurrent language models: LSTM and GRU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo_models.workload import Workload


class RecurrentBlock(nn.Module):
    """Two recurrent layers around a shortcut, with dropout between them if asked for."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.recurrent = kind(width, width, num_layers=2, batch_first=True, dropout=dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        return hidden + self.recurrent(self.norm(hidden))[0]


class RecurrentModel(nn.Module):
    """Language model of recurrent blocks."""

    def __init__(
        self,
        kind: type[nn.LSTM] | type[nn.GRU],
        vocabulary: int = 1024,
        width: int = 192,
        depth: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(RecurrentBlock(kind, width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, sequence)`` to ``(batch, sequence, vocabulary)``."""
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def lstm() -> Workload:
    """Whole sequences."""
    return _language_model(RecurrentModel(nn.LSTM))


def gru() -> Workload:
    """Whole sequences; dropout between the layers."""
    return _language_model(RecurrentModel(nn.GRU, dropout=0.1))


def _language_model(network: nn.Module) -> Workload:
    ids = torch.randint(1024, (16, 65))
    return Workload(network=network, batch={"ids": ids[:, :-1], "targets": ids[:, 1:]})
