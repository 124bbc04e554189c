"""What a model of the zoo is trained on: a network, one batch, and the loss between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def cross_entropy(network: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the network's logits over ``batch["targets"]``; targets of -100 are left out."""
    logits = network(**{name: value for name, value in batch.items() if name != "targets"})
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())


def own_loss(network: nn.Module, batch: Batch) -> Tensor:
    """The loss that the network computes itself from ``batch["labels"]``, as models of transformers do."""
    output: Any = network(**batch)
    loss: Tensor = output.loss
    return loss


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network with what it is trained on."""

    network: nn.Module
    """Its forward takes the batch's entries by name."""
    batch: Batch
    """One collated batch."""
    loss: Loss = cross_entropy
    """Network and batch to a scalar."""
