"""Optimizer states that go on growing for many steps, as large as they will become."""

from __future__ import annotations

import torch
from torch.optim import LBFGS, Optimizer


def grows(optimizer: Optimizer) -> str | None:
    """How the states of an optimizer grow after its first steps, in words; ``None`` if they do not."""
    if not isinstance(optimizer, LBFGS):
        return None
    return f"LBFGS keeps its last {optimizer.param_groups[0]['history_size']} moves and differences of gradients"


def let_states_grow(optimizer: Optimizer) -> None:
    """Give an optimizer that has stepped the states of a late step; those that do not grow are left as they are.

    Moves of zero are added to the front of the history of ``LBFGS``: they change no direction. Its last move becomes
    zero, too, so that the next iteration holds a move and a difference that it does not take into its history, as it
    does wherever the curvature along the move is not positive: two vectors more.
    Source: ``torch/optim/lbfgs.py`` (2.13): ``old_stps`` and ``old_dirs`` of ``history_size`` flat vectors each.
    """
    if not isinstance(optimizer, LBFGS):
        return
    size: int = optimizer.param_groups[0]["history_size"]
    for state in optimizer.state.values():
        latest = state.get("prev_flat_grad")
        if latest is None or "old_dirs" not in state:
            continue
        missing = max(0, size - len(state["old_dirs"]))
        for name in ("old_dirs", "old_stps"):
            state[name][:0] = [torch.zeros_like(latest) for _ in range(missing)]
        state["ro"][:0] = [torch.zeros((), dtype=latest.dtype, device=latest.device) for _ in range(missing)]
        state["d"].zero_()
