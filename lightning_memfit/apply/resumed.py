"""The checkpoint that a run is resumed from.

Adapter for Lightning's checkpoint connector: reads ``trainer._checkpoint_connector._loaded_checkpoint``, which is
filled before ``Precision.convert_module`` runs, and emptied when everything is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_memfit.errors import UnsupportedError


def resumed_checkpoint(trainer: Any) -> Mapping[str, Any] | None:
    """What the Trainer has loaded and not restored whole yet; ``None`` for a run that begins anew.

    Raises:
        UnsupportedError: if this release of Lightning keeps it elsewhere.
    """
    connector: Any = getattr(trainer, "_checkpoint_connector", None)
    if not hasattr(connector, "_loaded_checkpoint"):
        raise UnsupportedError(
            f"{type(trainer).__name__} has no '_checkpoint_connector._loaded_checkpoint' in this version of Lightning; "
            "MemFit knows 2.5 and 2.6. Install one of those, or set MEMFIT=off in the environment."
        )
    loaded: Mapping[str, Any] | None = connector._loaded_checkpoint
    return loaded or None
