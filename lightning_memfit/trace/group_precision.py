"""A step on one device in the dtypes that a mixed-precision policy of ``fully_shard`` gives the parts of a module.

Adapter for a private name of torch: ``torch.distributed.utils._apply_to_tensors``, which finds the tensors to cast.

What torch 2.9 to 2.13 does (``torch/distributed/fsdp/_fully_shard``, ``_fsdp_state.py``: ``_pre_forward`` and
``_post_forward``; ``_fsdp_param.py``: ``init_dtype_attrs``): parameters of a group are gathered in ``param_dtype``,
buffers stay as they are; what a group is called with is cast in front of its forward, what it returns behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memfit.sharded_model import group_modules, step_methods
from lightning_memfit.sharding import GroupPrecision
from lightning_memfit.trace.converted_fakes import ConvertedFakes, fakes_in
from lightning_memfit.trace.fake_module import FakeTensors, new_fake_mode
from lightning_memfit.trace.tracer import StepTracer


def fakes_under(
    module: nn.Module, precision: GroupPrecision | None, floating: torch.dtype | None = None
) -> FakeTensors:
    """Makes fakes of a module in the dtypes of its groups; without any, as :func:`fakes_in` does."""
    if precision is None or precision.param_dtype is None:
        return fakes_in(new_fake_mode(), floating)
    return GroupFakes(module, precision.groups, getattr(torch, precision.param_dtype))


class GroupFakes(ConvertedFakes):
    """Fakes of the floating parameters of groups have another dtype and storages of their own, as gathered ones do.

    Args:
        module: the root of the groups' names.
        groups: qualified names of the groups.
        dtype: what their parameters are gathered in.
    """

    def __init__(self, module: nn.Module, groups: tuple[str, ...], dtype: torch.dtype) -> None:
        super().__init__(new_fake_mode(), dtype)
        parts = group_modules(module, groups)
        self._grouped = {id(parameter) for part in parts for parameter in part.parameters()}

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return super()._dtype_of(tensor) if id(tensor) in self._grouped else tensor.dtype

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype_of(tensor) is tensor.dtype:
            return FakeTensors._plain(self, tensor)
        return torch.empty(tensor.size(), dtype=self._floating, device=self.device)

    @property
    def dtypes_at_rest(self) -> dict[int, torch.dtype]:
        """By ``id`` of the fake: the dtype of the parameter that it stands for."""
        return {id(fake): original.dtype for original, fake in self.pairs() if id(original) in self._grouped}


@contextmanager
def cast_between_groups(module: nn.Module, precision: GroupPrecision | None, tracer: StepTracer) -> Iterator[None]:
    """Within this context what groups are called with, and what they return, is cast; of ``None`` nothing is.

    Enter it within :func:`~lightning_memfit.trace.faked_step.faked_step`, which puts back the methods that are wrapped.

    Args:
        module: the root of the groups' names.
        precision: the groups and their dtypes.
        tracer: is told that what is cast belongs to the caller: it happens before a group gathers its parameters.
    """
    if precision is None:
        yield
        return
    names = {id(part): name for name, part in module.named_modules()}
    enter, leave = _cast_to(precision.param_dtype), _cast_to(precision.output_dtype)
    methods = tracer.registered_methods
    with ExitStack() as ending:
        for part in group_modules(module, precision.groups):

            def before(part: nn.Module, args: Any, kwargs: Any) -> Any:
                with tracer.beside_the_call():
                    return enter(args), enter(kwargs)

            def behind(part: nn.Module, args: Any, output: Any) -> Any:
                return leave(output)

            ending.callback(part.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            ending.callback(part.register_forward_hook(behind).remove)
            for name in step_methods(part) if methods is None else methods.get(part, ()):
                vars(part)[name] = _cast_around(getattr(part, name), names[id(part)], enter, leave, tracer)
        yield


def _cast_around(
    method: Callable[..., Any], part: str, enter: Callable[[Any], Any], leave: Callable[[Any], Any], tracer: StepTracer
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = enter(args), enter(kwargs)
        with tracer.calling(part):
            output = method(*args, **kwargs)
        return leave(output)

    in_place: Any = run
    in_place.__signature__ = inspect.signature(method)
    return run


def _cast_to(name: str | None) -> Callable[[Any], Any]:
    if name is None:
        return lambda value: value
    from torch.distributed.utils import _apply_to_tensors

    dtype = getattr(torch, name)
    return partial(_apply_to_tensors, lambda each: each.to(dtype) if each.is_floating_point() else each)
