"""Gradients of an optimizer's parameters, wherever they lie."""

from __future__ import annotations

from typing import Any


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
