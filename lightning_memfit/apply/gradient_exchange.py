"""When the ranks of a run exchange gradients: in the last slice of a batch, or in every one.

Adapter for Lightning's ``ParallelStrategy.block_backward_sync`` and ``DistributedDataParallel.no_sync``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel


class GradientExchange(Protocol):
    """How an engine lets gradients be exchanged less often than there are slices."""

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Forward and backward of a slice run within it.

        Args:
            is_last: whether it is the last slice of the Lightning batch that goes backward.
        """

    def never(self) -> AbstractContextManager[Any] | None:
        """Within it steps run on this rank alone; ``None`` where the engine cannot do without the others."""


class NoExchange:
    """One device: there is nothing to exchange."""

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """As ever."""
        return nullcontext()

    def never(self) -> AbstractContextManager[Any] | None:
        """As ever."""
        return nullcontext()


class DdpExchange:
    """DDP: once per optimizer step, in the backward of the last slice of its last batch.

    Both forward and backward of the other slices are under ``no_sync``: the reducer is told in the forward whether
    gradients will be exchanged. Around batches that only accumulate Lightning itself blocks the exchange.
    """

    def __init__(self, strategy: Any) -> None:
        """Of a strategy whose model is, or will be, wrapped in DDP."""
        self._strategy = strategy

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Exchange in the last slice alone."""
        context: AbstractContextManager[Any] = nullcontext() if is_last else self._strategy.block_backward_sync()
        return context

    @contextmanager
    def never(self) -> Iterator[None]:
        """No gradients and no buffers are exchanged."""
        model = self._strategy.model
        assert isinstance(model, DistributedDataParallel), "steps run after the model was wrapped"
        before, model.require_forward_param_sync = model.require_forward_param_sync, False
        try:
            with model.no_sync():
                yield
        finally:
            model.require_forward_param_sync = before


def exchange_of(strategy: Any) -> GradientExchange:
    """How the strategy of a run exchanges gradients."""
    if any(cls.__name__ == "DDPStrategy" for cls in type(strategy).__mro__):
        return DdpExchange(strategy)
    return NoExchange()
