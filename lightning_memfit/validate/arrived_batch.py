"""The batch as it will arrive at ``training_step``, found out without a trace before training begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_memfit.apply.batch_transfer import hook_owners, transferred
from lightning_memfit.errors import first_line, is_out_of_memory
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.validate.warmup import silenced


@dataclass(frozen=True, kw_only=True)
class ArrivedBatch:
    """A batch behind the transfer hooks."""

    batch: Any
    """What ``training_step`` gets; the loader's own where no hook of the user's changes it."""
    failure: str | None = None
    """Why the hooks could not run yet, so that ``batch`` is the loader's; ``None`` if they ran, or there are none."""


def arrived_batch(trainer: Any, module: Any, batch: Any) -> ArrivedBatch:
    """Send a batch through the user's transfer hooks; random generators and everything reachable are put back.

    It stays on the host, where the module still is: the hooks are given that for a device.

    Args:
        trainer: the Trainer, fitting.
        module: its LightningModule.
        batch: one collated batch, as the loader gives it.
    """
    owners = hook_owners(trainer)
    if not owners:
        return ArrivedBatch(batch=batch)
    try:
        with take_snapshot(module, extra_roots=[batch, *owners]), silenced(trainer):
            return ArrivedBatch(batch=transferred(trainer, module, batch, device=torch.device("cpu")))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # A hook may need what a later hook sets up. The warm-up runs after those, and raises the user's own errors.
        return ArrivedBatch(batch=batch, failure=f"{type(error).__name__}: {first_line(error)}")
