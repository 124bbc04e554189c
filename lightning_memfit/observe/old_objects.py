"""Garbage collections that leave alone what was there before: a trace makes as many new objects again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_at_rest: ContextVar[bool | None] = ContextVar("at_rest", default=None)  # None where nobody has asked


@contextmanager
def old_objects_at_rest() -> Iterator[None]:
    """Garbage collections look at new objects only.

    Where old ones are frozen already, by someone else too, everything stays as it is: afterwards the ones could not be
    told from the others.
    """
    if _are_at_rest():
        yield
        return
    gc.freeze()
    try:
        with _told(True):
            yield
    finally:
        gc.unfreeze()


@contextmanager
def frozen_objects_counted_once() -> Iterator[None]:
    """Within it, whether someone else froze objects is not asked again: Python counts them one by one."""
    with _told(_are_at_rest()):
        yield


def _are_at_rest() -> bool:
    known = _at_rest.get()
    return gc.get_freeze_count() > 0 if known is None else known


@contextmanager
def _told(at_rest: bool) -> Iterator[None]:
    token = _at_rest.set(at_rest)
    try:
        yield
    finally:
        _at_rest.reset(token)
