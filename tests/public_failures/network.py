"""The small network that these tests train: four equal blocks and a head, on samples of 64 numbers."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit, forecast

FEATURES = 64
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
    "activation_checkpointing": "none",
}
"""Levers that most of these tests are not about."""


class Block(nn.Module):
    """A layer and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Network(lightning.LightningModule):
    """Learns two classes; the peak of a step is in proportion to its samples."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def is_real(tensor: Tensor) -> bool:
    """Whether a step runs, or is only traced."""
    return not isinstance(tensor, FakeTensor)


def samples(count: int = 128) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, FEATURES, generator=generator), torch.arange(count) % 2)


def loader(size: int = 64, count: int = 128, **settings: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), size, **settings)


def quiet(**settings: Any) -> MemFit:
    return MemFit(verbose=False, **{**AS_IT_IS, **settings})


def predicted_peak(module: Network, size: int = 64, checkpoint: Any = "none") -> int:
    """The predicted peak of a step with an undivided batch, with room for the few bytes that probing adds."""
    batch = [part.clone() for part in samples(size)[:]]
    memory = forecast(module, batch, activation_checkpointing=checkpoint, probe_operators=False)
    return memory.peak_allocated_bytes + 1024


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]
