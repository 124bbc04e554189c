"""What decides the plan of a run, as one key: the fingerprint, the user's code, and what else the run holds.

A fingerprint compares a plan that the user hands over with a run; it is deliberately blind to code. A plan that is used
again unasked must not be: a changed ``training_step`` is another run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memfit.fingerprint import fingerprint_key
from lightning_memfit.plan import PlanRequest
from lightning_memfit.users_code import file_of, is_of_a_library, used_files

TAKES_NO_MEMORY = re.compile(
    r"seed|.*_seed|lr|.*_lr|learning_rate|.*_learning_rate|weight_decay|warmup_steps|max_steps|max_epochs"
)
"""Names of settings that change from run to run and take no memory."""
_DECIDES_NO_PLAN = ("mode", "on_no_fit", "num_profiled_steps")
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
# Of every module: parameters, children and hooks, which the fingerprint and the classes tell; and Lightning's own.
_NOT_THE_USERS = frozenset(vars(nn.Module())) - {"training"} | {"_trainer", "_fabric", "_hparams_initial"}
_MOST_DEPTH = 6
_MOST_ATTRIBUTES = 20_000  # a dataset kept in a module is no setting
_PLAIN = (bool, int, float, str, type(None))


def run_words(fingerprint: Mapping[str, str], module: nn.Module, *, beside: Iterable[object]) -> dict[str, str]:
    """What a forecast of a run depends on, in named parts of plain text.

    Args:
        fingerprint: of the run.
        module: the model; of its classes the code counts with the user's files that it uses, and of all its modules the
            plain attributes, those in configs and hyperparameters too.
        beside: callbacks and functions of the run, whose classes and code count.
    """
    bases = {base for cls in {type(each) for each in module.modules()} for base in cls.__mro__}
    definitions = [definition for each in beside for definition in _definitions(each)]
    return {
        **fingerprint,
        "code": _digest(_codes(bases)),
        "files": _digest(used_files([*bases, *definitions])),
        "attributes": _digest(itertools.islice(_attributes(module), _MOST_ATTRIBUTES)),
        "beside": _digest(_codes(dict.fromkeys(definitions))),
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


# Code


def _definitions(each: object) -> Iterator[Any]:
    """A function itself, the class of anything else; of a partial application the function, too."""
    while isinstance(each, functools.partial):
        each = each.func
    yield each if inspect.isroutine(each) else type(each)


def _codes(definitions: Iterable[Any]) -> Iterator[str]:
    """A line for each class or function: its name and its code."""
    for each in definitions:
        yield f"{_name(each)} {_code(each)}"


def _name(definition: Any) -> str:
    return f"{getattr(definition, '__module__', '')}.{getattr(definition, '__qualname__', repr(type(definition)))}"


def _code(definition: Any) -> str:
    """Of a library, where another version may be installed, the digest of its file; else the source.

    In a notebook or at a prompt a class has no source, and what it was compiled to stands for it.
    """
    try:
        path = Path(inspect.getfile(definition)).resolve()
        if is_of_a_library(path):
            # ``__main__`` may be a program that the user's code was typed into.
            return _compiled(definition) if definition.__module__ == "__main__" else _file_digest(path)
        return inspect.getsource(definition)
    except (OSError, TypeError):  # built in, or typed in
        return _compiled(definition)


@functools.cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compiled(definition: Any) -> str:
    if isinstance(definition, type):
        return " ".join(f"{name}: {_compiled(each)}" for name, each in sorted(vars(definition).items()))
    if isinstance(definition, property):
        definition = definition.fget
    function = inspect.unwrap(getattr(definition, "__func__", definition))
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return _code_words(code)
    return repr(definition) if isinstance(definition, _PLAIN) else ""


def _code_words(code: types.CodeType) -> str:
    constants = [_code_words(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    return f"({code.co_code.hex()} {code.co_names} {constants})"


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


# Attributes


def _attributes(module: nn.Module) -> Iterator[str]:
    """Plain attributes of every module, also within mappings, lists, dataclasses and configs."""
    for name, each in module.named_modules():
        of_torch = type(each).__module__.startswith("torch.nn.")
        for attribute, value in sorted(vars(each).items()):
            if attribute in _NOT_THE_USERS or attribute.startswith("__"):
                continue
            if of_torch and isinstance(value, float):
                # A probability of dropout decides memory where it is 0, and nothing else does.
                yield f"{name}.{attribute}={'0' if value == 0 else 'not 0'}"
            else:
                yield from (f"{name}.{line}" for line in _told(attribute, value))


def _told(key: str, value: Any, depth: int = 0) -> Iterator[str]:
    if TAKES_NO_MEMORY.fullmatch(key.rpartition(".")[2]) or depth > _MOST_DEPTH:
        return
    if isinstance(value, functools.partial):
        value = {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, _PLAIN):
        yield f"{key}={value!r}"
    elif isinstance(value, (tuple, list)) and all(isinstance(each, _PLAIN) for each in value):
        yield f"{key}={tuple(value)!r}"  # in one line: it may be long
    elif isinstance(value, type) or inspect.isroutine(value):
        yield f"{key}={_name(value)}"
    else:
        yield f"{key} is a {type(value).__qualname__}"
        for name, part in _parts(value):
            yield from _told(f"{key}.{name}", part, depth + 1)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """What a container or a config holds, by name; nothing of anything else."""
    if isinstance(value, Mapping):
        try:
            return [(str(name), each) for name, each in value.items()]
        except Exception:  # a config of OmegaConf may lack values
            return ()
    if isinstance(value, (tuple, list)):
        return [(str(index), each) for index, each in enumerate(value)]
    path = file_of(type(value))
    is_users = path is not None and not is_of_a_library(path) and not isinstance(value, nn.Module)
    is_namespace = is_users or isinstance(value, (argparse.Namespace, types.SimpleNamespace))
    is_config = is_namespace or callable(getattr(type(value), "to_dict", None))  # such as those of transformers
    if (is_config or dataclasses.is_dataclass(value)) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value):  # with slots
        return [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    return ()


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "backslashreplace")).hexdigest()[:16]
