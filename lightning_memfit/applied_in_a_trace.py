"""What a candidate changes in a step while it is followed: the forward's context, dtypes, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import Candidate, Precision

StepContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context of one forward."""


def floating_dtype(candidate: Candidate) -> torch.dtype | None:
    """The dtype that module and batch have under a precision, if not their own."""
    return torch.bfloat16 if candidate.precision == "bf16-true" else None


def autocast_context(precision: Precision) -> StepContext:
    """The forward's context for a precision, as Lightning's plugins make it.

    Source: ``lightning/pytorch/plugins/precision/amp.py`` and ``half.py``, 2.6: autocast without a cache of casted
    weights; for ``bf16-true`` the default dtype of new tensors.

    Raises:
        ConfigurationError: for a precision that is not forecast.
    """
    if precision == "32-true":
        return nullcontext
    if precision == "bf16-mixed":
        return lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    if precision == "16-mixed":
        return lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)
    if precision == "bf16-true":
        return _bfloat16_by_default
    raise ConfigurationError(
        f"precision={precision!r} is not forecast. Choose '32-true', 'bf16-mixed', '16-mixed' or 'bf16-true'."
    )


@contextmanager
def _bfloat16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def checkpointed(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Recompute the named modules within this context."""
    undo = checkpoint_modules(module, names)
    try:
        yield
    finally:
        undo()
