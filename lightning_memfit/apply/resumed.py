"""The checkpoint that a run is resumed from.

Adapter for Lightning's checkpoint connector: reads ``trainer._checkpoint_connector._loaded_checkpoint``, which is
filled before ``Precision.convert_module`` runs, and emptied when everything is restored. Strategies that restore after
their set-up fill it later: of these the path is read, an argument of ``Trainer._run``. So it is of a run that ended
while it loaded its checkpoint.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Mapping
from types import FrameType
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


def path_to_restore(trainer: Any) -> str | None:
    """Where the checkpoint is that the strategy restores after its set-up; ``None`` if there is none.

    Lightning sets ``trainer.ckpt_path`` only when it restores. Until then the path that it chose ("last" and "best"
    are resolved) is an argument of ``Trainer._run``, which is among the callers of ``Precision.convert_module``.

    Raises:
        UnsupportedError: if this release of Lightning keeps it elsewhere.
    """
    if not trainer.strategy.restore_checkpoint_after_setup:
        return None
    frame = inspect.currentframe()
    while frame is not None:
        run = _run_of(frame)
        if run is not None and run[0] is trainer:
            return run[1]
        frame = frame.f_back
    raise UnsupportedError(
        f"No caller is {type(trainer).__name__}._run(ckpt_path=...), which says which checkpoint is resumed, in this "
        "version of Lightning; MemFit knows 2.5 and 2.6. Install one of those, or set MEMFIT=off in the environment."
    )


def run_that_failed(error: BaseException) -> tuple[Any, str] | None:
    """The Trainer and the path of the checkpoint of the run that an error ended; ``None`` if it resumed none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        run = _run_of(frame)
        if run is not None and run[1] is not None:
            return run[0], run[1]
    return None


def _run_of(frame: FrameType) -> tuple[Any, str | None] | None:
    """The Trainer and the path that it resumes from, where a frame is its ``_run``."""
    local = frame.f_locals if frame.f_code.co_name == "_run" else {}
    if "self" not in local or "ckpt_path" not in local:
        return None
    path = local["ckpt_path"]
    return local["self"], None if path is None else os.fspath(path)
