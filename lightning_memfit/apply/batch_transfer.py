"""From the batch of a loader to that of ``training_step``: the transfer hooks of the module or of its data module.

They may change everything: bytes become floats, samples are stacked, images are augmented. So what is planned, and what
is divided, is the batch that comes out of them.

Adapter for ``LightningModule._on_before_batch_transfer``, ``Strategy.batch_to_device`` and
``trainer._data_connector._datahook_selector``.
"""

from __future__ import annotations

from typing import Any

import torch

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def transferred(
    trainer: Any, module: Any, batch: Any, dataloader_idx: int = 0, *, device: torch.device | None = None
) -> Any:
    """What ``training_step`` gets, through the same hooks as in training; on another device if one is given."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return trainer.strategy.batch_to_device(batch, device=device, dataloader_idx=dataloader_idx)


def hook_owners(trainer: Any) -> list[Any]:
    """Who has transfer hooks of the user's own, once each: the data module, the module, both, or nobody."""
    selector = trainer._data_connector._datahook_selector
    owners = {name: selector.get_instance(name) for name in _HOOKS}
    own = [owner for name, owner in owners.items() if not _is_upstream(getattr(owner, name))]
    return list({id(owner): owner for owner in own}.values())


def _is_upstream(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("lightning.", "pytorch_lightning."))
