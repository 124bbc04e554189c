"""Another optimizer in the place of the one that a Trainer holds: same parameters, same schedules, taken back at will.

Adapter for Lightning's strategies: touches ``Strategy._lightning_optimizers`` (the wrappers that loops step), beside
the public ``optimizers`` and ``lr_scheduler_configs``; and for ``torch.optim.Optimizer``: touches
``_optimizer_step_pre_hooks`` and ``_optimizer_step_post_hooks``.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memfit.apply.optimizer_formats import (
    check_same_parameters,
    hyperparameters,
    is_bitsandbytes,
    moves_momentum,
)
from lightning_memfit.apply.scheduler_binding import (
    Exchange,
    check_momentum,
    count_steps,
    is_wrapper,
    link_momentum,
    rebind,
)
from lightning_memfit.errors import UnsupportedError

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Carry = Callable[[Any, Any], None]
"""Gives the second optimizer the states of the first."""


class OptimizerSwap:
    """A swap that was made. Calling it takes it back; calling it twice is harmless.

    Attributes:
        replaced: each optimizer of before with the one in its place.
    """

    def __init__(self, trainer: Any, swapped: Sequence[_Swapped], carry: Carry | None) -> None:
        """Remember what to take back."""
        self.replaced = tuple((each.old, each.new) for each in swapped)
        self._trainer = trainer
        self._pending = list(swapped)
        self._carry = carry

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """What could not follow, a sentence each. The first look takes about 0.1 s: it goes through every object."""
        return tuple(_notes(self.replaced, self._carry))

    def __call__(self) -> None:
        """Put the optimizers of before back, with the learning rates and momentum of now.

        Their states are those that they had. One that had none takes the states of the one in its place, as ``carry``
        converts them: after a resume they are nowhere else.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        for each in pending:
            if self._carry is not None and each.new.state and not each.old.state:
                self._carry(each.new, each.old)
            each.take_back()
        _exchange(
            self._trainer,
            [(each.new, each.old) for each in pending],
            {id(each.new): each.wrapper for each in pending if each.wrapper is not None},
        )


class _Swapped:
    """One optimizer made ready for the place of another."""

    def __init__(self, old: Optimizer, new: Optimizer, wrapper: Any, carry: Carry | None) -> None:
        self.old, self.new, self.wrapper = old, new, wrapper
        self._link: RemovableHandle | None = None
        self._torch_form = is_bitsandbytes(new) and not is_bitsandbytes(old)
        _carry_group_entries(old, new)
        if carry is not None:
            carry(old, new)

    def settle(self) -> None:
        """Join what refers to both: hooks of steps, the momentum that is written, the count of steps."""
        for name in _STEP_HOOKS:  # the same dictionaries, so that the user's handles still remove them
            setattr(self.new, name, getattr(self.old, name))
        if moves_momentum(self.old, self.new):
            self._link = link_momentum(self.new)
        count_steps(self.old, self.new)
        self._before = hyperparameters(self.new, torch_form=self._torch_form)

    def take_back(self) -> None:
        """Bring to the old optimizer what changed in the groups of the new one since."""
        if self._link is not None:
            self._link.remove()
        count_steps(self.new, self.old)
        now = hyperparameters(self.new, torch_form=self._torch_form)
        added = len(self._before)
        for values, group in zip(now[added:], self.new.param_groups[added:], strict=True):
            own = {k: v for k, v in values.items() if k in self.old.defaults or k not in self.new.defaults}
            self.old.add_param_group({**own, "params": group["params"]})
        for before, values, group in zip(self._before, now, self.old.param_groups, strict=False):
            for name, value in values.items():
                if name not in before or not _equal(before[name], value):
                    _write(group, name, value)


def swap_optimizer(
    trainer: Any,
    replacement: Callable[[Optimizer], Optimizer],
    *,
    carry: Carry | None = None,
    keep_states: bool = True,
) -> OptimizerSwap:
    """Let a Trainer step ``replacement(optimizer)`` in the place of every optimizer that it holds.

    Its schedules, nested ones too, go on driving the new one with the same learning rates; a momentum that they move
    is carried over (torch's ``momentum`` to bitsandbytes' ``betas[0]``). References that the module, its submodules,
    the data module and the callbacks have as attributes, one level deep, follow. May be called when optimizers were
    just made, as in ``Precision.connect``, whose lists are then changed in place, and on a live Trainer between steps.

    Args:
        trainer: the Trainer, with optimizers.
        replacement: makes an optimizer over the same parameters in the same groups; what it returns unchanged stays.
        carry: called as ``carry(old, new)`` before anything else is changed; may convert states.
        keep_states: let the old optimizer keep its own states, so that taking the swap back is exact; their bytes stay
            allocated until the swap is forgotten. Otherwise they are dropped once ``carry`` has converted all.

    Returns:
        What takes the swap back, with notes on what could not follow.

    Raises:
        UnsupportedError: before anything is changed: if the parameters differ, or a momentum that a schedule moves
            has no place in the new optimizer; or if this release of Lightning has no wrappers where they are expected.
    """
    strategy = trainer.strategy
    if not hasattr(strategy, "_lightning_optimizers"):
        raise UnsupportedError(
            f"{type(strategy).__module__}.{type(strategy).__qualname__} has no `_lightning_optimizers`: this release "
            "of Lightning changed it. Use Lightning 2.5 or 2.6, or optimizer_states='as-configured'."
        )
    pairs = _new_pairs(strategy.optimizers, replacement)
    schedules = [config.scheduler for config in strategy.lr_scheduler_configs]
    for old, new in pairs:
        check_same_parameters(old, new)
        check_momentum(schedules, old, new)
    wrappers = {id(wrapper._optimizer): wrapper for wrapper in strategy._lightning_optimizers}
    swapped = [_Swapped(old, new, wrappers.get(id(old)), carry) for old, new in pairs]
    for each in swapped:  # after every conversion succeeded
        each.settle()
        if carry is not None and not keep_states:
            each.old.state.clear()
    _exchange(trainer, pairs, {})
    return OptimizerSwap(trainer, swapped, carry)


def _new_pairs(optimizers: Sequence[Any], replacement: Callable[[Optimizer], Optimizer]) -> list[tuple[Any, Any]]:
    # A user may return wrappers from configure_optimizers.
    olds = [each._optimizer if is_wrapper(each) else each for each in optimizers]
    pairs = [(old, replacement(old)) for old in olds]
    return [(old, new) for old, new in pairs if new is not old]


def _exchange(trainer: Any, pairs: Sequence[tuple[Any, Any]], wrappers: dict[int, Any]) -> None:
    """Put the second of each pair wherever the first is held; ``wrappers`` are those to be used again."""
    strategy = trainer.strategy
    optimizers, wrapped_before = strategy.optimizers, list(strategy._lightning_optimizers)
    plain = Exchange(pairs, {})
    for index, each in enumerate(optimizers):  # in place: Precision.connect returns this very list
        counterpart = plain.counterpart(each)
        optimizers[index] = each if counterpart is None else counterpart
    strategy.optimizers = optimizers  # wraps every one anew
    sources = {id(new): id(old) for old, new in pairs}
    known = {id(wrapper._optimizer): wrapper for wrapper in wrapped_before}
    strategy._lightning_optimizers = [
        known.get(id(wrapper._optimizer)) or wrappers.get(sources.get(id(wrapper._optimizer), 0)) or wrapper
        for wrapper in strategy._lightning_optimizers
    ]
    targets = {sources.get(id(wrapper._optimizer), 0): wrapper for wrapper in strategy._lightning_optimizers}
    exchange, seen = Exchange(pairs, targets), set[int]()
    for holder in _holders(trainer):
        rebind(holder, exchange, seen)


def _holders(trainer: Any) -> Iterator[Any]:
    for config in trainer.strategy.lr_scheduler_configs:
        yield config.scheduler
    module = trainer.strategy.lightning_module
    if isinstance(module, nn.Module):
        yield from module.modules()
    yield from trainer.callbacks
    if getattr(trainer, "datamodule", None) is not None:
        yield trainer.datamodule


def _carry_group_entries(old: Optimizer, new: Optimizer) -> None:
    """Give the new groups what schedules and users put beside the hyperparameters, and the learning rate of now."""
    for group, target in zip(old.param_groups, new.param_groups, strict=True):
        for name, value in group.items():
            if name not in old.defaults and name != "params":
                target.setdefault(name, value.clone() if isinstance(value, Tensor) else value)
        if float(target["lr"]) != float(group["lr"]):
            target["lr"] = group["lr"]


def _write(group: dict[str, Any], name: str, value: Any) -> None:
    tensor = group.get(name)
    if isinstance(tensor, Tensor) and (not isinstance(value, Tensor) or value.shape == tensor.shape):
        tensor.detach().copy_(torch.as_tensor(value))
    else:
        group[name] = value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    try:
        return bool(left == right)
    except (RuntimeError, ValueError):  # what has several elements may have no single answer
        return False


def _notes(pairs: Sequence[tuple[Any, Any]], carry: Carry | None) -> Iterator[str]:
    for old, new in pairs:
        name = type(old).__qualname__
        if old.state and carry is None:
            yield f"The states of {name} were not carried over to {type(new).__qualname__}, which begins without any."
        step = vars(old).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            yield f"The step of this {name} was replaced on the object; {type(new).__qualname__} runs its own step."
        for holder in _other_holders(old, pairs):
            yield (
                f"{name} is also held by {holder}, which MemFit cannot reach: what is done to it there has no effect "
                "on training. Ask trainer.optimizers for the optimizer instead."
            )


# Who else holds an optimizer


def _other_holders(optimizer: Optimizer, pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    """What refers to the optimizer beside frames, Lightning's former wrapper of it and this module, in words."""
    ours = {id(pair) for pair in pairs}
    referrers = [each for each in gc.get_referrers(optimizer) if id(each) not in ours]
    return sorted({description for each in referrers if (description := _described(each)) is not None})


def _described(referrer: Any) -> str | None:
    if isinstance(referrer, (types.FrameType, types.GeneratorType, _Swapped, Exchange)) or is_wrapper(referrer):
        return None
    if isinstance(referrer, types.MethodType):
        return f"the bound method {referrer.__func__.__qualname__}"
    if isinstance(referrer, types.CellType):
        return _closure_of(referrer)
    if isinstance(referrer, dict):
        owner = next((each for each in gc.get_referrers(referrer) if getattr(each, "__dict__", None) is referrer), None)
        return "a dict" if owner is None else _described(owner)
    if isinstance(referrer, (list, tuple, set)):
        return f"a {type(referrer).__name__}"
    return f"an object of {type(referrer).__module__}.{type(referrer).__qualname__}"


def _closure_of(cell: types.CellType) -> str | None:
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if getattr(function, "__closure__", None) is closure:
                return f"the function {function.__module__}.{function.__qualname__}"
    return None  # a variable of a frame
