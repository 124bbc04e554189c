"""Which optimizer a schedule drives: bound to another one, it goes on with the same learning rates and momentum.

A schedule writes into ``param_groups`` of the optimizer that it holds, so it goes on as before once every reference in
it, and in schedules that it contains, is to the other one, whose groups hold the same values.

Adapter for ``torch.optim.lr_scheduler``: touches ``Optimizer._opt_called`` and the mark ``_wrapped_by_lr_sched`` on
``Optimizer.step`` (a schedule's second step warns without them), ``use_beta1`` and ``cycle_momentum`` of schedules that
move the momentum.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from torch.utils.hooks import RemovableHandle

from lightning_memfit.apply.optimizer_formats import moves_momentum
from lightning_memfit.errors import UnsupportedError

_NEVER_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, weakref.ProxyType, weakref.CallableProxyType)


class Exchange:
    """Optimizers that take the place of others, with their groups and Lightning's wrappers of them."""

    def __init__(self, pairs: Sequence[tuple[Optimizer, Optimizer]], wrappers: Mapping[int, Any]) -> None:
        """Take the optimizers as they are now.

        Args:
            pairs: each optimizer with the one that takes its place.
            wrappers: Lightning's wrapper of each second one, by the ``id`` of the first; the optimizer itself where
                there is none.
        """
        self._pairs = tuple(pairs)  # keeps them alive, and so their ids
        self._counterparts = {id(source): target for source, target in pairs}
        self._groups = {id(source.param_groups): target.param_groups for source, target in pairs}
        self._wrappers = {id(source): wrappers.get(id(source), target) for source, target in pairs}

    def counterpart(self, value: Any) -> Any:
        """What takes the place of ``value``; ``None`` for anything but an optimizer, its groups, or a wrapper of it."""
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if id(value) in self._groups:
            return self._groups[id(value)]
        return self._wrappers.get(id(vars(value).get("_optimizer"))) if is_wrapper(value) else None


_MOST_ITEMS = 1000
"""Containers of more hold data, not optimizers, and are not looked into."""


def rebind(holder: Any, exchange: Exchange, seen: set[int] | None = None) -> None:
    """Exchange the optimizers that ``holder`` refers to, and those in schedules and containers that it holds.

    Args:
        holder: a schedule, or any object with attributes; of what it holds, objects are looked into that are
            schedules of torch or themselves have one of the optimizers as an attribute.
        exchange: what takes the place of what.
        seen: the ``id`` of objects that were looked into before.
    """
    seen = set() if seen is None else seen
    attributes = _attributes(holder)
    if attributes is None or id(holder) in seen:
        return
    seen.add(id(holder))
    _rebind_items(attributes, list(attributes.items()), exchange, seen)


def _rebind_items(container: Any, items: list[tuple[Any, Any]], exchange: Exchange, seen: set[int]) -> None:
    for key, value in items:
        replacement = _rebound(value, exchange, seen)
        if replacement is not value:
            container[key] = replacement


def _rebound(value: Any, exchange: Exchange, seen: set[int]) -> Any:
    counterpart = exchange.counterpart(value)
    if counterpart is not None:
        return counterpart
    if isinstance(value, (list, dict)):
        if id(value) not in seen and len(value) <= _MOST_ITEMS:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            _rebind_items(value, list(items), exchange, seen)
    elif isinstance(value, tuple) and len(value) <= _MOST_ITEMS:
        rebound = [_rebound(item, exchange, seen) for item in value]
        if any(new is not old for new, old in zip(rebound, value, strict=True)):
            return type(value)(*rebound) if hasattr(value, "_fields") else tuple(rebound)
    elif _holds_optimizer(value, exchange):
        rebind(value, exchange, seen)
    return value


def _holds_optimizer(value: Any, exchange: Exchange) -> bool:
    attributes = _attributes(value)
    if attributes is None:
        return False
    return isinstance(value, LRScheduler) or any(
        exchange.counterpart(attribute) is not None for attribute in attributes.values()
    )


def _attributes(value: Any) -> dict[str, Any] | None:
    if isinstance(value, _NEVER_LOOKED_INTO) or is_wrapper(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def is_wrapper(value: Any) -> bool:
    """Whether ``value`` is Lightning's wrapper of an optimizer, from either package."""
    cls = type(value)
    return cls.__name__.startswith("Lightning") and any(base.__name__ == "LightningOptimizer" for base in cls.__mro__)


# Steps are counted


def count_steps(source: Optimizer, target: Optimizer) -> None:
    """Let schedules of ``source`` find on ``target`` what they ask for: that its steps are counted, and were.

    A schedule that changes nothing has torch install its own counter.
    """
    if hasattr(source.step, "_wrapped_by_lr_sched") and not hasattr(target.step, "_wrapped_by_lr_sched"):
        fresh = [group for group in target.param_groups if "initial_lr" not in group]
        ConstantLR(target, factor=1.0, total_iters=0)
        for group in fresh:
            del group["initial_lr"]
    if getattr(source, "_opt_called", False):
        target._opt_called = True  # type: ignore[attr-defined]


# Momentum


class MomentumGroup(dict[str, Any]):
    """A parameter group in which ``momentum`` and ``betas[0]`` are one value, whichever is written.

    Schedules made for torch's SGD write the one, bitsandbytes' reads the other.

    >>> group = MomentumGroup(betas=(0.9, 0.0), momentum=0.9)
    >>> group["momentum"] = 0.85
    >>> group
    {'betas': (0.85, 0.0), 'momentum': 0.85}
    """

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name == "momentum" and "betas" in self:
            super().__setitem__("betas", (value, *self["betas"][1:]))
        elif name == "betas":
            super().__setitem__("momentum", value[0])

    def update(self, *values: Any, **named: Any) -> None:
        """Write one by one."""
        for name, value in dict(*values, **named).items():
            self[name] = value


def link_momentum(optimizer: Optimizer) -> RemovableHandle:
    """Make ``momentum`` and ``betas[0]`` one value in every group, also in groups that are loaded or added later."""
    _link(optimizer)
    return optimizer.register_step_pre_hook(_link)


def _link(optimizer: Optimizer, *ignored: Any) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if not isinstance(group, MomentumGroup):
            linked = MomentumGroup(group)
            # What a schedule wrote before the link was there counts.
            name = "momentum" if "momentum" in group else "betas"
            linked[name] = group[name]
            optimizer.param_groups[index] = linked


def check_momentum(schedules: Iterable[Any], source: Optimizer, target: Optimizer) -> None:
    """Check that a momentum which a schedule moves has a place in the groups of ``target``.

    Raises:
        UnsupportedError: if it would be written where nobody reads it.
    """
    for schedule in _with_nested(schedules):
        if getattr(schedule, "optimizer", None) is not source or not getattr(schedule, "cycle_momentum", False):
            continue
        name = "betas" if getattr(schedule, "use_beta1", False) else "momentum"
        if name in target.defaults or (name == "momentum" and moves_momentum(source, target)):
            continue
        raise UnsupportedError(
            f"{type(schedule).__qualname__} moves {name!r} of {type(source).__qualname__}, and "
            f"{type(target).__qualname__} has none that works in the same way. Use cycle_momentum=False, or keep the "
            "optimizer with optimizer_states='as-configured'."
        )


def _with_nested(schedules: Iterable[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    pending = list(schedules)
    while pending:
        schedule = pending.pop()
        attributes = _attributes(schedule)
        if attributes is None or id(schedule) in seen:
            continue
        seen.add(id(schedule))
        yield schedule
        for value in attributes.values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            pending += [each for each in inner if isinstance(each, LRScheduler)]
