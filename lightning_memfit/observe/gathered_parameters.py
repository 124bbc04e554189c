"""Parameters that ``fully_shard`` gathered for a forward and still holds: its root keeps them until a backward ends."""

from __future__ import annotations

from torch import nn

from lightning_memfit.sharded_model import is_sharded


def let_go_of_gathered(module: nn.Module) -> None:
    """Let every rank hold its own part of the parameters alone, as before a forward. Needs no other rank."""
    for part in module.modules():
        if is_sharded(part):
            part.reshard()
