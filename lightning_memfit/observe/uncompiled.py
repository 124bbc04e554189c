"""Code under ``torch.compile``, run as it was written: for looks at it that are no part of training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within this context nothing is compiled and no compiled code is run.

    A look at a few samples would otherwise leave the compiler with their shapes, so that it compiles the run's for any
    shape. torch's advice on global hooks of modules is not for the user here: they are MemFit's own, and gone with the
    look.
    """
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        yield
