"""Code that runs on one rank of several must not wait for the others.

Adapter for torch's operators of ``torch.distributed``: the namespaces ``c10d`` and ``_c10d_functional``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memfit.errors import UnsupportedError

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Of the operators by which ranks exchange tensors."""


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Within it an exchange with other ranks is an error instead of a wait for ranks that do something else.

    Raises:
        UnsupportedError: naming the operator.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    with _Refusing():  # type: ignore[no-untyped-call]  # of torch's base class
        yield


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch's base class
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise UnsupportedError(
                f"training_step exchanges tensors with other ranks ({func}), which are not running it now"
            )
        return func(*args, **(kwargs or {}))
