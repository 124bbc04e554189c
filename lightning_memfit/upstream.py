"""Which of Lightning's two packages an object comes from: ``lightning.pytorch`` or ``pytorch_lightning``.

Their classes differ. Nothing here imports either package by itself.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lightning_memfit.errors import UnsupportedError

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
"""The packages whose Trainer MemFit works with."""


def namespace_of(trainer: Any) -> str:
    """The package that a Trainer comes from, also if its class is the user's own.

    Raises:
        UnsupportedError: if it is neither of :data:`NAMESPACES`.
    """
    for cls in type(trainer).__mro__:
        for namespace in NAMESPACES:
            if cls.__module__.startswith(f"{namespace}."):
                return namespace
    raise UnsupportedError(
        f"The Trainer is a {type(trainer).__module__}.{type(trainer).__qualname__}. MemFit works with the Trainer of: "
        f"{', '.join(NAMESPACES)}. Derive yours from one of them."
    )


def upstream_module(trainer: Any, name: str) -> Any:
    """The module ``name``, such as ``"trainer.call"``, of the package that a Trainer comes from.

    Raises:
        UnsupportedError: if the Trainer comes from neither package.
    """
    return importlib.import_module(f"{namespace_of(trainer)}.{name}")


def defining_module(instance: Any, class_name: str) -> Any:
    """The module that defines the class of that name among the bases of an instance; else that of its own class."""
    defining = next((cls for cls in type(instance).__mro__ if cls.__name__ == class_name), type(instance))
    return sys.modules[defining.__module__]
