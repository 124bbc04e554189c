"""``self.log`` without a loop to log to, and loggers that write nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_memfit.observe.logger_stand_ins import loggers_standing_in
from lightning_memfit.undo import set_instance_attribute


@contextmanager
def unlogged(module: nn.Module) -> Iterator[None]:
    """Let ``log`` and ``log_dict`` of a module, and of Lightning modules inside it, do nothing within this context.

    Nor does what its steps log with the loggers of its Trainer reach them, if it has one.
    """
    trainer = getattr(module, "_trainer", None)
    with ExitStack() as undos:
        if hasattr(trainer, "loggers"):
            undos.enter_context(loggers_standing_in(trainer))
        for part in module.modules():
            if callable(getattr(part, "training_step", None)):
                for name in ("log", "log_dict"):
                    if callable(getattr(part, name, None)):
                        undos.callback(set_instance_attribute(part, name, _ignore))
        yield


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
