"""The files of a user's code: those of given classes and functions, and all that they use, outside of libraries."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))


def file_of(definition: Any) -> Path | None:
    """The file of a module, class or function; ``None`` where it was typed at a prompt, or is built in."""
    try:
        path = Path(inspect.getfile(definition)).resolve()
    except (OSError, TypeError):
        return None
    return path if path.is_file() else None


def is_of_a_library(path: Path) -> bool:
    """Whether a file belongs to an installed library, or to Python's own."""
    return any(path.is_relative_to(folder) for folder in _LIBRARIES)


def used_files(definitions: Iterable[Any]) -> Iterator[str]:
    """The text of every file of the user's that defines one of the definitions, or is used there.

    Files are followed from one to the next by what their namespaces hold: modules, functions and classes of others.
    """
    waiting, seen = [sys.modules.get(str(getattr(each, "__module__", ""))) for each in definitions], set()
    known: dict[int, ModuleType] = {}  # thousands of names lead to a few modules, and asking for a file is slow
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in known:
            continue
        known[id(module)] = module
        path = file_of(module)
        if path is None or path in seen or is_of_a_library(path):
            continue
        seen.add(path)
        yield f"{path.name} {path.read_text(encoding='utf-8', errors='replace')}"
        waiting += [_module_of(value) for value in list(vars(module).values())]


def _module_of(value: Any) -> ModuleType | None:
    kind = type(value)  # ``isinstance`` would ask the value, and some of torch's warn when they are asked
    if issubclass(kind, ModuleType):
        return cast(ModuleType, value)
    is_definition = issubclass(kind, (type, FunctionType))
    return sys.modules.get(str(getattr(value, "__module__", ""))) if is_definition else None
