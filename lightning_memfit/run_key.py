"""What decides the plan of a run, as one key: the fingerprint, the user's code, and what else the run holds.

A fingerprint compares a plan that the user hands over with a run; it is deliberately blind to code. A plan that is used
again unasked must not be: a changed ``training_step`` is another run.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightning_memfit.fingerprint import fingerprint_key
from lightning_memfit.plan import PlanRequest

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
_DECIDES_NO_PLAN = ("mode", "on_no_fit", "num_profiled_steps")
_TAKES_NO_MEMORY = re.compile(r"training|(.*_)?(seed|lr|learning_rate|steps|epochs?)")
_MOST_DEPTH = 6
_MOST_ATTRIBUTES = 20_000  # a dataset kept in a module is no setting
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))


def run_words(fingerprint: Mapping[str, str], module: nn.Module, *, beside: Iterable[object]) -> dict[str, str]:
    """What a forecast of a run depends on, in named parts of plain text.

    Args:
        fingerprint: of the run.
        module: the model; of its classes outside of installed libraries the files count, with those that they use, and
            of all its modules the plain attributes.
        beside: callbacks and functions of the run, whose classes and sources count.
    """
    classes = {type(each) for each in module.modules()}
    objects = list(beside)
    return {
        **fingerprint,
        "code": _digest(_sources({base for cls in classes for base in cls.__mro__})),
        "attributes": _digest(itertools.islice(_attributes(module), _MOST_ATTRIBUTES)),
        "beside": _digest(_sources({each if inspect.isroutine(each) else type(each) for each in objects})),
        "environment": " ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES),
        "threads": str(torch.get_num_threads()),  # operators take memory for each
    }


def corrections_key(words: Mapping[str, str]) -> str:
    """The key of what was measured of a run's forecasts; whatever is asked for, it is the same."""
    return fingerprint_key(words)


def plan_key(words: Mapping[str, str], request: PlanRequest) -> str:
    """The key of a run's plan. What a device leaves free is no part of it."""
    asked = {name: value for name, value in asdict(request).items() if name not in _DECIDES_NO_PLAN}
    return fingerprint_key({**words, "request": json.dumps(asked, sort_keys=True, default=str)})


def _sources(definitions: Iterable[Any]) -> Iterator[str]:
    """A line for each class or function, and the source of every file of the user's that defines them or is used there.

    Files are followed from one to the next by what their namespaces hold: modules, functions and classes of others.
    """
    found = list(definitions)
    yield from (
        f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', repr(type(each)))}" for each in found
    )
    yield from (_source(each) for each in found if not _is_of_a_library(each) and _file(each) is None)
    waiting, seen = [sys.modules.get(getattr(each, "__module__", "")) for each in found], set()
    while waiting:
        module = waiting.pop()
        path = None if module is None else _file(module)
        if module is None or path is None or path in seen or _is_of_a_library(module):
            continue
        seen.add(path)
        yield f"{path.name} {path.read_text(encoding='utf-8', errors='replace')}"
        waiting += [_module_of(value) for value in list(vars(module).values())]


def _module_of(value: Any) -> ModuleType | None:
    if isinstance(value, ModuleType):
        return value
    return sys.modules.get(str(getattr(value, "__module__", ""))) if callable(value) else None


def _file(definition: Any) -> Path | None:
    """The file of a module, class or function; ``None`` where it was typed at a prompt, or is built in."""
    try:
        path = Path(inspect.getfile(definition)).resolve()
    except (OSError, TypeError):
        return None
    return path if path.is_file() else None


def _is_of_a_library(definition: Any) -> bool:
    path = _file(definition)
    return path is not None and any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _source(definition: Any) -> str:
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        return ""


def _attributes(module: nn.Module) -> Iterator[str]:
    """Plain attributes of every module, those within dicts, lists and plain objects too.

    Flags, text and whole numbers are told by value, but for seeds and numbers of steps. Of a float only whether it is 0
    is told: a probability of dropout decides memory there, and a learning rate nothing.
    """
    for name, each in module.named_modules():
        for attribute, value in vars(each).items():
            if not attribute.startswith("_") or attribute == "_hparams":
                yield from _told(f"{name}.{attribute}", attribute, value, _MOST_DEPTH)


def _told(path: str, name: str, value: Any, depth: int) -> Iterator[str]:
    if _TAKES_NO_MEMORY.fullmatch(name) or depth == 0:
        return
    if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.Size)):
        yield f"{path}={value!r}"
    elif isinstance(value, float):
        yield f"{path}={'0' if value == 0 else 'not 0'}"
    elif isinstance(value, Mapping):
        for key in list(value):
            yield from _told(f"{path}[{key!r}]", str(key), value[key], depth - 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for number, item in enumerate(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value):
            yield from _told(f"{path}[{number}]", "", item, depth - 1)
    elif _is_plain_object(value):
        for key, item in vars(value).items():
            yield from _told(f"{path}.{key}", key, item, depth - 1)


def _is_plain_object(value: Any) -> bool:
    """Whether an object holds settings: a namespace, a dataclass, a configuration, or one of the user's own."""
    if (
        isinstance(value, (torch.Tensor, nn.Module, type, ModuleType))
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    return not type(value).__module__.startswith(("torch.", "lightning.", "pytorch_lightning.", "torchmetrics."))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "backslashreplace")).hexdigest()[:16]
