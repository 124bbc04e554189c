"""What callbacks keep beside the model while it trains, such as averaged copies of the weights."""

from __future__ import annotations

from typing import Any

from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.observe.snapshot import reachable_tensors


def callback_bytes(trainer: Any, module: Any) -> int:
    """Bytes of tensors that the Trainer's callbacks hold, those of the module and the optimizers not counted.

    EMA and SWA make their copies of the weights when the fit is set up, before anything is planned.

    Args:
        trainer: the Trainer.
        module: its LightningModule.
    """
    own = reachable_tensors([module, *trainer.optimizers])
    held = reachable_tensors(list(trainer.callbacks))
    return storage_bytes([*own, *held]) - storage_bytes(own)
