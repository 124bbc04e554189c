"""What decides the plan of a run, as one key: the fingerprint, the user's code, and what else the run holds.

A fingerprint compares a plan that the user hands over with a run; it is deliberately blind to code. A plan that is used
again unasked must not be: a changed ``training_step`` is another run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memfit.fingerprint import fingerprint_key
from lightning_memfit.plan import PlanRequest

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
_DECIDES_NO_PLAN = ("mode", "on_no_fit", "num_profiled_steps")
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))


def run_words(fingerprint: Mapping[str, str], module: nn.Module, *, beside: Iterable[object]) -> dict[str, str]:
    """What a forecast of a run depends on, in named parts of plain text.

    Args:
        fingerprint: of the run.
        module: the model; of its classes outside of installed libraries the source counts, and of all its modules the
            plain attributes.
        beside: callbacks and functions of the run, whose classes and sources count.
    """
    classes = {type(each) for each in module.modules()}
    objects = list(beside)
    return {
        **fingerprint,
        "code": _digest(_sources({base for cls in classes for base in cls.__mro__})),
        "attributes": _digest(_attributes(module)),
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
    """A line for each class or function: its name, and its source where it is the user's own."""
    for each in definitions:
        name = f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', repr(type(each)))}"
        yield f"{name} {'' if _is_of_a_library(each) else _source(each)}"


def _is_of_a_library(definition: Any) -> bool:
    try:
        path = Path(inspect.getfile(definition)).resolve()
    except (OSError, TypeError):  # built in, or typed at a prompt
        return False
    return any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _source(definition: Any) -> str:
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        return ""


def _attributes(module: nn.Module) -> Iterator[str]:
    """Plain attributes of every module: flags and whole numbers by value, others as the fingerprint tells settings.

    Of a float only whether it is 0 is told: a probability of dropout decides memory there, and a learning rate nothing.
    """
    for name, each in module.named_modules():
        for attribute, value in sorted(vars(each).items()):
            told = _told(value)
            if told is not None and attribute != "training" and not attribute.startswith("__"):
                yield f"{name}.{attribute}={told}"


def _told(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return "0" if value == 0 else "not 0"
    if isinstance(value, (tuple, list)) and all(isinstance(each, (bool, int, str)) for each in value):
        return repr(tuple(value))
    return None


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "backslashreplace")).hexdigest()[:16]
