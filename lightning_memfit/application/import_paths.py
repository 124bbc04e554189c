"""The user's own code by its import path, such as ``my_models:gpt``; what it raises becomes a message."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_memfit.errors import ConfigurationError, first_line, is_out_of_memory

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_WAY_OUT = "Run with --debug for the traceback."


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Let modules of the folder that the command runs in be imported, as ``python -m`` does."""
    before, folder = list(sys.path), str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def is_import_path(text: str) -> bool:
    """Whether a text is written as ``package.module:name``.

    >>> is_import_path("my_models:gpt"), is_import_path("4x512:int64")
    (True, False)
    """
    return _IMPORT_PATH.fullmatch(text) is not None


def import_named(path: str, *, option: str) -> Any:
    """What an import path names.

    Args:
        path: ``package.module:name``; the name may be dotted, such as ``models:GPT.small``.
        option: the option that it was given to, for the message.

    Raises:
        ConfigurationError: if it is no import path, or there is no such module or name, or importing it raises.
    """
    if not is_import_path(path):
        raise ConfigurationError(
            f"{option}={path!r} is no import path. Write package.module:name, such as my_models:gpt for the function "
            "gpt of my_models.py in this folder."
        )
    module_name, _, name = path.partition(":")
    found: Any = _import_module(module_name, path, option)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{option}={path!r}: {module_name} has no {part!r}. {_nearest(part, found)}")
        found = getattr(found, part)
    return found


def called(function: Callable[[], Any], *, what: str) -> Any:
    """What a function of the user's returns.

    Errors of memory pass through.

    Args:
        function: is called without arguments.
        what: what it is, for the message.

    Raises:
        ConfigurationError: if it raises.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        said = _as_the_user_raised_it(error)
        raise ConfigurationError(f"{what} raised {type(said).__name__}: {first_line(said)}. {_WAY_OUT}") from error


def _as_the_user_raised_it(error: BaseException) -> BaseException:
    """What lies behind Hydra's error of a call, whose first line names the target alone."""
    cause = error.__cause__ if type(error).__name__ == "InstantiationException" else None
    return error if cause is None else cause


def _import_module(name: str, path: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"{option}={path!r}: importing {name} needs {error.name}, which is not installed. Install it here."
            ) from error
        raise ConfigurationError(
            f"{option}={path!r}: there is no module {error.name!r}. Run memfit in the folder that holds it, or put "
            "that folder into PYTHONPATH."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{option}={path!r}: importing {name} raised {type(error).__name__}: {first_line(error)}. {_WAY_OUT}"
        ) from error


def _nearest(name: str, owner: Any) -> str:
    names = [each for each in vars(owner) if not each.startswith("_")] if hasattr(owner, "__dict__") else []
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"The nearest names: {', '.join(close)}."
    return "Look at its spelling."
