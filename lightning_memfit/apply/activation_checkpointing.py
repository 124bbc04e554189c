"""Recompute the activations of chosen modules instead of saving them.

Adapter for ``torch.nn.Module``: touches ``Module.__dict__["forward"]``, ``Module._buffers`` and ``Tensor._version``.

Only the entry ``"forward"`` in a module's ``__dict__`` is set: keys of ``state_dict``, classes and strict loading stay
as they are. The entry is a small callable object. It may not be a closure, because a deep copy of the module (SWA, EMA)
would then run the weights of the original; nor a bound method of a function that is no attribute of the module's class,
because that is pickled by name and cannot be loaded. An object that holds the module is copied and pickled with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_memfit.apply.model_switches import switch_models
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.key_value_caches import is_cache, tokens_held
from lightning_memfit.search.checkpointing import (
    closest_names,
    is_compiled,
    reason_not_checkpointable,
    without_recomputing,
)
from lightning_memfit.undo import Undo

_RUNNING_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def checkpoint_modules(module: nn.Module, names: Sequence[str]) -> Undo:
    """Recompute the activations of the named modules in the backward instead of saving them.

    Gradients, buffers and random numbers are those of a run without it. What cannot be kept: hooks and Python
    attributes (counters) *inside* a block run twice per step, those on the block itself once. Modules that recompute
    their activations already are left alone.

    Args:
        module: the root of the qualified names.
        names: qualified names of the modules, such as ``("blocks.0", "blocks.1")``.

    Returns:
        Takes the change back: afterwards every ``__dict__`` equals the one before. Calling it twice is harmless.

    Raises:
        ConfigurationError: if there is no module of that name; nothing is changed then.
        UnsupportedError: if a module is compiled or scripted, or lies in one that is; nothing is changed then.
    """
    blocks = {name: block for name, block in _resolve(module, names).items() if _is_to_be_patched(block)}
    switch_back = switch_models(module, blocks)
    forwards = [(block, block.__dict__.get("forward")) for block in blocks.values()]
    for block, instance_forward in forwards:
        block.__dict__["forward"] = CheckpointedForward(block, instance_forward)

    def undo() -> None:
        switch_back()
        while forwards:
            block, instance_forward = forwards.pop()
            if instance_forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = instance_forward

    return undo


class CheckpointedForward:
    """Stands in for the ``forward`` of one module and recomputes it in the backward (non-reentrant).

    It recomputes only where that saves something: gradients are enabled, and the module or an input requires one.
    """

    def __init__(self, block: nn.Module, instance_forward: Callable[..., Any] | None = None) -> None:
        """Hold ``block``, and the ``forward`` its ``__dict__`` had, if it had one."""
        self.block = block
        self.instance_forward = instance_forward
        self.changing_buffers: dict[tuple[bool, bool], frozenset[str]] = {}
        """Buffers that a call changes, by mode and kind of tensors; found in the first call of each."""

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own ``forward``, for callers that inspect it."""
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        if not (torch.is_grad_enabled() and self._requires_grad((args, kwargs))):
            return self._original()(*args, **kwargs)
        args = tuple(self._without_cache(f"number {place}", value) for place, value in enumerate(args, 1))
        kwargs = {key: self._without_cache(repr(key), value) for key, value in kwargs.items()}
        # Values of keyword arguments travel as positional ones: torch frees those after the backward, and no name can
        # collide with an argument of torch's own function.
        run = functools.partial(_call_with_keywords, self._original(), tuple(kwargs))
        return checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=self._context_fn(),
        )

    def _original(self) -> Callable[..., Any]:
        if self.instance_forward is not None:
            return self.instance_forward
        return functools.partial(type(self.block).forward, self.block)

    def _requires_grad(self, inputs: Any) -> bool:
        if any(parameter.requires_grad for parameter in self.block.parameters()):
            return True
        return any(tensor.requires_grad for tensor in _tensors_in(inputs))

    def _without_cache(self, argument: str, value: Any) -> Any:
        """``None`` for a key/value cache that holds nothing of this block: recomputing would append to it again.

        Transformers does the same when it recomputes layers itself; training never reads the cache. Most caches do not
        come here: see :func:`~lightning_memfit.apply.model_switches.switch_models`.
        """
        if not is_cache(value):
            return value
        held = tokens_held(value, self.block)
        if held:
            raise UnsupportedError(
                f"activation_checkpointing of a {type(self.block).__name__}: its argument {argument} is a key/value "
                f"cache that holds {held} tokens, and recomputing would append to it a second time. Turn the cache off "
                "for training (use_cache=False), or set activation_checkpointing='none'."
            )
        return None

    def _context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        buffers = [buffer for _, _, _, buffer in _buffer_slots(self.block)]
        # Fake and other tensor subclasses have no values to compare, so that what is learnt from them is kept apart.
        kind = (self.block.training, all(_has_values(buffer) for buffer in buffers))
        known = self.changing_buffers.get(kind)
        if not buffers or (known is not None and not known):
            return noop_context_fn
        first = _FirstPass(self.block, known, functools.partial(self.changing_buffers.__setitem__, kind))
        return lambda: (first, _Recomputation(self.block, first.kept))


class _FirstPass:
    """Keeps the values that buffers have before a block runs, of those buffers that the run changes.

    Running statistics, power iterations and codebooks are updated by the forward. In the first call every buffer is
    copied and compared afterwards; one that the first call leaves unchanged is taken to be constant from then on.
    """

    def __init__(self, block: nn.Module, known: frozenset[str] | None, learn: Callable[[frozenset[str]], None]) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self._block = block
        self._known = known
        self._learn = learn
        self._before: dict[str, tuple[torch.Tensor, int]] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        for name, _, _, buffer in _buffer_slots(self._block):
            if self._known is None or name in self._known:
                self.kept[name] = buffer.clone()
                self._before[name] = (buffer, buffer._version)

    @torch.no_grad()
    def __exit__(self, error_type: object, *_: object) -> None:
        if self._known is None and error_type is None:
            changing = frozenset(
                name
                for name, module, _, buffer in _buffer_slots(self._block)
                if name in self.kept and (isinstance(module, _RUNNING_STATISTICS) or self._changed(name, buffer))
            )
            self._learn(changing)
            for name in self.kept.keys() - changing:
                del self.kept[name]
        self._before.clear()

    def _changed(self, name: str, now: torch.Tensor) -> bool:
        before, version = self._before[name]
        if now is not before or now._version != version:
            return True
        # A change through `.data` moves no version counter.
        return _has_values(now) and not torch.equal(now, self.kept[name])


class _Recomputation:
    """Lends the block copies of its buffers as they were before the first pass, and takes them away afterwards.

    So the recomputed pass reads what the first one read, and what it writes is dropped: running statistics are those
    of one pass. Entered once per backward, more than once with ``retain_graph=True``.
    """

    def __init__(self, block: nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
        self._block = block
        self._kept = kept
        self._held: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        for name, module, key, buffer in _buffer_slots(self._block):
            if name in self._kept:
                self._held.append((module._buffers, key, buffer))
                module._buffers[key] = self._kept[name].clone()

    def __exit__(self, *_: object) -> None:
        while self._held:
            holder, key, buffer = self._held.pop()
            holder[key] = buffer


def _resolve(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Look the modules up by their names, each once, without those that recompute already.

    Raises:
        ConfigurationError: if there is no module of that name.
        UnsupportedError: if one is compiled or scripted, or lies in one that is.
    """
    named = dict(module.named_modules(remove_duplicate=False))
    blocks: dict[str, nn.Module] = {}
    for name in names:
        if name not in named:
            close = closest_names(name, module)
            hint = f"Close names: {', '.join(map(repr, close))}." if close else "The plan is for another model."
            raise ConfigurationError(
                f"activation_checkpointing: {name!r} is none of the {len(named)} modules of {type(module).__name__}. "
                f"{hint}"
            )
        parts = name.split(".")
        around = [named[".".join(parts[:end])] for end in range(len(parts))]  # the root is ""
        reason = reason_not_checkpointable(named[name]) or _reason_around(around)
        if reason is not None:
            raise UnsupportedError(
                f"activation_checkpointing of {name!r} cannot be switched on: {reason}. Leave it out of "
                "activation_checkpointing, or compile after MemFit has been applied."
            )
        if all(named[name] is not other for other in blocks.values()):
            blocks[name] = named[name]
    return {name: blocks[name] for name in without_recomputing(module, tuple(blocks))}


def _reason_around(around: Iterable[nn.Module]) -> str | None:
    if any(isinstance(outer, torch.jit.ScriptModule) or is_compiled(outer) for outer in around):
        return "it lies inside a compiled or scripted module, which would not see the change"
    return None


def _is_to_be_patched(block: nn.Module) -> bool:
    return not isinstance(block.__dict__.get("forward"), CheckpointedForward)


def _call_with_keywords(forward: Callable[..., Any], keywords: tuple[str, ...], *values: Any) -> Any:
    """Call ``forward``; the last values belong to the keywords."""
    positional = len(values) - len(keywords)
    return forward(*values[:positional], **dict(zip(keywords, values[positional:], strict=True)))


def _buffer_slots(block: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """Each buffer of a block: qualified name, the module that holds it, its key there, and the tensor."""
    return [
        (f"{prefix}.{key}", module, key, buffer)
        for prefix, module in block.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def _has_values(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.is_meta


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors_in(vars(value) if hasattr(value, "__dict__") else ())
