"""Other kernels for operators of torch, for the duration of a trace.

At a dispatch key and not as a mode of functions, so that they hold too while activation checkpointing recomputes within
the backward.

Adapter for a private name of torch: ``torch.library.Library._destroy``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def overridden(kernels: Mapping[str, Any], dispatch_key: str) -> Iterator[None]:
    """Within this context operators run other kernels.

    Args:
        kernels: by name of an operator of ``aten``, such as ``"sum.dim_IntList"``.
        dispatch_key: the key at which they run, such as ``"AutogradCPU"``.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are overridden: they are meant to be
            for name, kernel in kernels.items():
                library.impl(name, kernel, dispatch_key, allow_override=True)
        yield
    finally:
        library._destroy()
