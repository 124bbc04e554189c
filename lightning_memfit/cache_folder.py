"""Where what is worth keeping between runs is kept: what was measured of operators and device, plans, corrections."""

from __future__ import annotations

import os
import reprlib
from contextlib import suppress
from pathlib import Path

from lightning_memfit.errors import ConfigurationError, first_line


def default_cache_dir() -> Path:
    """Where measurements are kept: ``$XDG_CACHE_HOME/lightning_memfit``, or below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_memfit"


def cache_directory(value: str | Path | None) -> Path | None:
    """The folder that ``MemFit(cache_dir=value)`` means; ``None`` for none.

    Raises:
        ConfigurationError: if it is no path.
    """
    if value is None or value == "auto":
        return None if value is None else default_cache_dir()
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"cache_dir={value!r} is no directory. Pass a path, 'auto', or None for no cache.")
    try:
        path = Path(value).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # then nothing is remembered
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL character, no such user
        raise ConfigurationError(
            f"cache_dir={reprlib.repr(value)} is no directory: {first_line(error).rstrip('.')[:80]}. Pass a path, "
            "'auto', or None for no cache."
        ) from error
    return path
