"""Loggers that write nothing, in the place of a Trainer's own, for steps that are no part of training.

Adapter for Lightning's ``loggers.logger.DummyLogger``, and for the public ``Trainer.loggers``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_memfit.upstream import upstream_module

_FACTS = ("name", "version", "save_dir", "log_dir", "root_dir")


@contextmanager
def loggers_standing_in(trainer: Any) -> Iterator[None]:
    """Within this context what user code logs with the Trainer's loggers goes nowhere.

    A stand-in tells its name and directories as the real logger would, and is an instance of the same classes, since
    user code looks for its logger by class.
    """
    loggers = trainer.loggers
    dummy = upstream_module(trainer, "loggers.logger").DummyLogger
    trainer.loggers = [_stand_in(dummy, logger) for logger in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def _stand_in(dummy: Any, logger: Any) -> Any:
    def fact(name: str) -> property:
        return property(lambda _: getattr(logger, name, None))

    facts = {name: fact(name) for name in _FACTS}
    return type("StandInLogger", (dummy,), {**facts, "__class__": property(lambda _: type(logger))})()
