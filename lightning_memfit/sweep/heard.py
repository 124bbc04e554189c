"""Tells who started a sweep where it is: Hydra's own entry point returns nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_LISTENER: ContextVar[list[Path] | None] = ContextVar("sweeps_heard", default=None)


@contextmanager
def sweeps_heard() -> Iterator[list[Path]]:
    """Within it, the folder of every sweep that begins is added to the list."""
    folders: list[Path] = []
    token = _LISTENER.set(folders)
    try:
        yield folders
    finally:
        _LISTENER.reset(token)


def tell(folder: Path) -> None:
    """Say that a sweep begins."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.append(folder)
