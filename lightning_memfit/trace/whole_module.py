"""A module that ``fully_shard`` spread over ranks, as it was before, for the duration of a trace.

Adapter for private names of torch 2.9 to 2.13: the registry of ``fully_shard`` in a module's ``__dict__``
(``STATE_KEY`` and ``REGISTRY_KEY`` of ``torch.distributed._composable.contract``) and outside of it
(``_module_state_mapping`` of ``torch.distributed._composable_state``), ``FSDPState._pre_forward_hook_handle`` and
``_post_forward_hook_handle``, ``FSDPModule._orig_cls_mro_index``, and the module in which
``register_fsdp_forward_method`` defines what it puts in place of a method.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from lightning_memfit.sharded_model import is_sharded

RegisteredMethods = dict[nn.Module, tuple[str, ...]]
"""By module that was sharded: the methods that gather its parameters beside ``forward``."""


@contextmanager
def whole_module(module: nn.Module) -> Iterator[RegisteredMethods | None]:
    """Within this context the module is one that ``fully_shard`` was never called on; its parameters are not touched.

    What is taken from the modules' ``__dict__`` is put back by whoever made a snapshot of it, as
    :func:`~lightning_memfit.trace.faked_step.faked_step` does.

    Yields:
        The methods that were registered; ``None`` if the module is not sharded.
    """
    sharded: list[Any] = [part for part in module.modules() if is_sharded(part)]
    if not sharded:
        yield None
        return
    from torch.distributed._composable_state import _module_state_mapping

    before = [(part, type(part), _module_state_mapping.get(part)) for part in sharded]
    try:
        yield {part: _taken_off(part) for part in sharded}
    finally:
        for part, kind, reference in before:
            part.__class__ = kind
            if reference is not None:
                _module_state_mapping[part] = reference


def leave(part: nn.Module, kind: type) -> None:
    """Let a module that was sharded for a trace be of its own kind again."""
    from torch.distributed._composable_state import _module_state_mapping

    part.__class__ = kind
    _module_state_mapping.pop(part, None)


def _taken_off(part: Any) -> tuple[str, ...]:
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    state = part._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    attributes = vars(part)
    methods = tuple(name for name, value in attributes.items() if _is_registered(value))
    for name in (*methods, STATE_KEY, REGISTRY_KEY):
        attributes.pop(name, None)
    _module_state_mapping.pop(part, None)
    kind = type(part)
    part.__class__ = kind.__mro__[kind._orig_cls_mro_index]
    return methods


def _is_registered(value: Any) -> bool:
    if not isinstance(value, MethodType):
        return False
    made_in = getattr(value.__func__, "__globals__", {}).get("__name__", "")
    return str(made_in).startswith("torch.distributed.fsdp.")
