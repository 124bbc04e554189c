"""Which calls of which modules could be recomputed, noted where activation checkpointing would take hold of them.

Adapter for ``torch.nn.Module``: touches ``Module.__dict__["forward"]`` and ``Module._buffers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memfit.key_value_caches import is_cache, tokens_held
from lightning_memfit.trace.saved_tensors import SavedTensorTracer
from lightning_memfit.trace.step_record import BlockCall, BufferCopy
from lightning_memfit.trace.tensors import tensors_in

_RUNNING_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


class FollowedBlocks:
    """The calls of the modules that are followed.

    Args:
        tracer: counts events and marks.
        module: the root of the qualified names.
        names: qualified names of the modules.
        without_caches: give them no key/value caches that hold nothing of them, as checkpointing does.
    """

    def __init__(
        self, tracer: SavedTensorTracer, module: nn.Module, names: Sequence[str], *, without_caches: bool = False
    ) -> None:
        self.calls: list[BlockCall] = []
        self._tracer, self._without_caches = tracer, without_caches
        named = dict(module.named_modules(remove_duplicate=False))
        self._blocks = {id(named[name]): (name, named[name]) for name in names if name in named}
        self._changing: dict[tuple[int, bool], frozenset[int]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note every call within this context."""
        blocks = [block for _, block in self._blocks.values()]
        forwards = [block.__dict__.get("forward") for block in blocks]
        for name, block in self._blocks.values():
            block.__dict__["forward"] = _FollowedForward(self, name, block, block.__dict__.get("forward"))
        try:
            yield
        finally:
            for block, forward in zip(blocks, forwards, strict=True):
                if forward is None:
                    block.__dict__.pop("forward", None)
                else:
                    block.__dict__["forward"] = forward

    def call(self, name: str, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a block and note the call, if checkpointing would recompute it."""
        given = list(tensors_in((args, kwargs)))
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*given, *block.parameters())):
            return forward(*args, **kwargs)
        tracer, position = self._tracer, len(self.calls)
        if self._without_caches:
            args = tuple(None if _is_unused_cache(value, block) else value for value in args)
            kwargs = {name: None if _is_unused_cache(value, block) else value for name, value in kwargs.items()}
        started = BlockCall(
            module=name,
            micro_step=tracer.micro_step,
            first_event=len(tracer.events),
            end_event=len(tracer.events),
            first_mark=len(tracer.marks),
            end_mark=len(tracer.marks),
            inputs=tracer.storages_of(given),
            buffers=(),
            has_cache=any(is_cache(value) for value in (*args, *kwargs.values())),
        )
        self.calls.append(started)
        buffers = [(part, buffer, buffer._version) for part, buffer in _buffers(block)]
        result = forward(*args, **kwargs)
        self.calls[position] = started._replace(
            end_event=len(tracer.events), end_mark=len(tracer.marks), buffers=self._copies(block, buffers)
        )
        return result

    def _copies(self, block: nn.Module, before: list[tuple[nn.Module, torch.Tensor, int]]) -> tuple[BufferCopy, ...]:
        # In the first call every buffer is copied and compared afterwards, from then on only those that changed.
        key = id(block), block.training
        known, now = self._changing.get(key), [buffer for _, buffer in _buffers(block)]
        copied = range(len(before)) if known is None else sorted(known)
        changing = known if known is not None else frozenset(
            index
            for index, (part, buffer, version) in enumerate(before)
            if isinstance(part, _RUNNING_STATISTICS) or _replaced(now, index, buffer) or buffer._version != version
        )  # fmt: skip
        self._changing[key] = changing
        copies = []
        for index in copied:
            buffer = before[index][1]
            for storage in self._tracer.storages_of([buffer]):
                copies.append(BufferCopy(storage, buffer.numel() * buffer.element_size(), index in changing))
        return tuple(copies)


class _FollowedForward:
    """Stands in for the ``forward`` of a block while it is followed."""

    def __init__(self, blocks: FollowedBlocks, name: str, block: nn.Module, forward: Callable[..., Any] | None) -> None:
        self._blocks, self._name, self._block = blocks, name, block
        self._forward = forward if forward is not None else partial(type(block).forward, block)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._blocks.call(self._name, self._block, self._forward, args, kwargs)


def _is_unused_cache(value: Any, block: nn.Module) -> bool:
    return is_cache(value) and not tokens_held(value, block)


def _replaced(now: Sequence[torch.Tensor], index: int, buffer: torch.Tensor) -> bool:
    return index >= len(now) or now[index] is not buffer


def _buffers(block: nn.Module) -> list[tuple[nn.Module, torch.Tensor]]:
    return [
        (part, buffer) for part in block.modules() for buffer in vars(part)["_buffers"].values() if buffer is not None
    ]
