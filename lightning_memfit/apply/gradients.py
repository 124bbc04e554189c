"""Gradients of an optimizer's parameters, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def multiply_gradients(optimizer: Any, factor: float) -> None:
    """Multiply the gradient of every parameter of an optimizer in place; shares of divided ones likewise.

    Args:
        optimizer: whose.
        factor: what by.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@contextmanager
def gradients_of_zero(module: nn.Module) -> Iterator[None]:
    """Within it a backward adds 0 to every gradient, whatever it computes.

    The mean over nothing is no number, and neither is what its backward makes of a factor of 0.

    Ignores: parameters that ``fully_shard`` or DeepSpeed's stage 3 put in place of the module's own during a step.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    handles = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
