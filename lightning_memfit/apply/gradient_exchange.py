"""When the ranks of a run exchange gradients: in the last slice of a batch, or in every one.

Adapter for Lightning's ``ParallelStrategy.block_backward_sync`` and ``DistributedDataParallel.no_sync``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.apply.deepspeed_config import is_deepspeed
from lightning_memfit.apply.deepspeed_engine import ZeroExchange
from lightning_memfit.apply.fsdp2 import Fsdp2Exchange, is_fully_sharded
from lightning_memfit.apply.gradients import multiply_gradients
from lightning_memfit.apply.sharding import is_ddp, is_model_parallel
from lightning_memfit.sharding import Sharding


class GradientExchange(Protocol):
    """How an engine lets gradients be exchanged less often than there are slices."""

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Forward and backward of a slice run within it.

        Args:
            is_last: whether it is the last slice of the Lightning batch that goes backward.
        """

    def never(self) -> AbstractContextManager[Any] | None:
        """Within it steps run on this rank alone; ``None`` where the engine cannot do without the others."""

    @property
    def alone_takes_more(self) -> bool:
        """Whether a step within :meth:`never` holds what one with the others does not: its peak says nothing then."""

    def held_bytes(self) -> int:
        """Bytes of torch's allocator that the engine holds all the time, beside module and optimizer."""

    def rescale(self, optimizer: Any, factor: float) -> None:
        """Multiply all gradients that the optimizer is about to see.

        Args:
            optimizer: whose.
            factor: above 0.
        """

    @property
    def in_every_slice(self) -> bool:
        """Whether every slice's backward waits for the other ranks, so that none may leave one out."""

    @property
    def settles(self) -> bool:
        """Whether the first steps make anew what the engine holds, so that only those behind them are measured."""


class NoExchange:
    """One device: there is nothing to exchange."""

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """As ever."""
        return nullcontext()

    def never(self) -> AbstractContextManager[Any] | None:
        """As ever."""
        return nullcontext()

    def held_bytes(self) -> int:
        """Nothing."""
        return 0

    def rescale(self, optimizer: Any, factor: float) -> None:
        """Multiply them where they are."""
        multiply_gradients(optimizer, factor)

    settles = False
    in_every_slice = False
    alone_takes_more = False


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

    @property
    def alone_takes_more(self) -> bool:
        """With gradients as views of the buckets: they become views where they are exchanged, and tensors otherwise.

        Source: pytorch/pytorch ``torch/csrc/distributed/c10d/reducer.cpp``, 2.13: ``mark_variable_ready_dense``.
        """
        return bool(getattr(self._strategy.model, "gradient_as_bucket_view", False))

    def held_bytes(self) -> int:
        """The buckets: one element for each of every parameter that is trained.

        Source: pytorch/pytorch ``torch/csrc/distributed/c10d/reducer.cpp``, 2.13: ``initialize_buckets``.
        """
        model = self._strategy.model
        if not isinstance(model, DistributedDataParallel):  # not wrapped yet
            return 0
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        return sum(parameter.numel() * parameter.element_size() for parameter in trained)

    def rescale(self, optimizer: Any, factor: float) -> None:
        """Multiply them where they are."""
        multiply_gradients(optimizer, factor)

    # Behind the first backward that exchanges, the buckets are made anew in the order in which gradients came.
    settles = True
    in_every_slice = False


def exchange_of(strategy: Any, sharding: Sharding | None = None) -> GradientExchange:
    """How the strategy of a run exchanges gradients.

    Args:
        strategy: the run's.
        sharding: what a plan chose of it; ``None`` where that does not matter.
    """
    if is_deepspeed(strategy):
        return ZeroExchange(strategy)
    if is_model_parallel(strategy) and is_fully_sharded(strategy.lightning_module):
        when = "slice" if sharding is None else sharding.synchronisation
        return Fsdp2Exchange(strategy.lightning_module, synchronisation=when)
    if is_ddp(strategy):
        return DdpExchange(strategy)
    return NoExchange()
