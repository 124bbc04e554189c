"""Spread a model over several devices with torch's ``fully_shard`` (FSDP2): the repeated blocks, and the rest.

Adapter for ``torch.distributed.fsdp``, which is imported where it is needed: forecasts for one device do without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.search.checkpointing import closest_names, find_repeated_blocks
from lightning_memfit.sharding import Sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

Module = TypeVar("Module", bound=nn.Module)

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
"""What Lightning calls on a module instead of its ``forward``."""


def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = None,
    groups: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> Module:
    """Shard a module's repeated blocks and then the module itself; for ``configure_model`` of a ``LightningModule``.

    Parameters, gradients and optimizer states are divided over the ranks. The parameters of a block are gathered in
    front of it and let go behind it, those of the module itself stay from its forward to the end of its backward.

    What cannot be changed afterwards, so that MemFit leaves it as it is: which modules are gathered together. What can:
    MemFit's activation checkpointing may come after this call, since it replaces the ``forward`` of a block and not the
    block; the hooks that gather its parameters stay outside of what is recomputed,
    and the parameters are there when the backward recomputes it.

        def configure_model(self):
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    Lightning calls ``configure_model`` again for every ``fit``, ``validate``, ``test`` and ``predict``: a module that
    is sharded already is left as it is.

    Of a ``LightningModule`` itself, which Lightning does not call by its ``forward``, the step methods gather the
    parameters too.

    Args:
        module: the root; its parameters are whole, on the device or on ``meta``.
        mesh: the ranks, one dimension; by default that of ``module.device_mesh["data_parallel"]`` where Lightning gave
            the module one, else all ranks.
        groups: qualified names of the modules to shard beside the root; by default the repeated blocks that
            :func:`~lightning_memfit.search.checkpointing.find_repeated_blocks` finds.
        reshard_after_forward: whether the parameters of blocks are let go between forward and backward; ``False``
            takes their whole size for less exchange.
        mixed_precision: torch's policy; ``None`` computes in the parameters' own dtype. Under one, MemFit leaves
            precision at ``"32-true"``; under ``precision="bf16-mixed"`` leave it out: autocast chooses the dtypes.

    Returns:
        The module, changed in place.

    Raises:
        ConfigurationError: if there is no module of a name in ``groups``.
    """
    is_done = is_sharded(module)
    if is_done:
        return module
    names = find_repeated_blocks(module) if groups is None else tuple(groups)
    if mesh is None:
        mesh = _lightnings_mesh(module)
    for part in group_modules(module, (*(name for name in names if name), "")):
        shard_one(part, mesh, reshard_after_forward=reshard_after_forward, mixed_precision=mixed_precision)
    run_steps_as_forward(module)
    return module


def group_modules(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of shard groups, inner ones first, as torch wants them.

    Raises:
        ConfigurationError: if there is no module of a name, or no name.
    """
    named = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if name not in named:
            close = ", ".join(map(repr, closest_names(name, module)))
            raise ConfigurationError(
                f"shard groups: {name!r} is none of the {len(named)} modules of {type(module).__name__}. "
                f"{f'Close names: {close}.' if close else 'Name its blocks, or leave groups out.'}"
            )
    if not names:
        raise ConfigurationError("shard groups: there is none. Name the repeated blocks, and '' for the root.")
    deepest_first = sorted(dict.fromkeys(names), key=lambda name: name.count(".") + bool(name), reverse=True)
    return list({id(named[name]): named[name] for name in deepest_first}.values())


def shard_one(
    part: nn.Module,
    mesh: DeviceMesh | None,
    *,
    reshard_after_forward: bool,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Call torch's ``fully_shard`` on one module."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    # None means True, but not for the outermost: the backward wants its parameters again at once.
    reshard = None if reshard_after_forward else False
    shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=mixed_precision or MixedPrecisionPolicy())


def policy_of(sharding: Sharding) -> MixedPrecisionPolicy | None:
    """Torch's mixed-precision policy of a sharding; ``None`` if it chooses no dtype."""
    if not sharding.has_policy:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, name)

    return MixedPrecisionPolicy(
        param_dtype=dtype(sharding.param_dtype),
        reduce_dtype=dtype(sharding.reduce_dtype),
        output_dtype=dtype(sharding.output_dtype),
    )


def run_steps_as_forward(module: nn.Module) -> None:
    """Let the step methods of a sharded ``LightningModule`` gather its parameters, as ``forward`` does."""
    for name in step_methods(module):
        run_as_forward(module, name)


def step_methods(module: nn.Module) -> list[str]:
    """The names of the step methods that a module has of its own."""
    return [
        name
        for name in STEP_METHODS
        if callable(method := getattr(module, name, None))
        and name not in vars(module)
        and not _is_lightnings_own(method)
    ]


def run_as_forward(module: nn.Module, name: str) -> None:
    """Let one method of a sharded module gather its parameters; it tells its own signature, as torch's does not."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    signature = inspect.signature(getattr(module, name))
    register_fsdp_forward_method(module, name)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    in_place: Any = getattr(module, name)
    in_place.__func__.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])


def is_sharded(part: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether ``fully_shard`` was called on this very module; imports nothing."""
    return any(base.__name__ == "FSDPModule" and "fsdp" in base.__module__ for base in type(part).__mro__)


@contextmanager
def without_exchange(module: nn.Module) -> Iterator[None]:
    """Within this context a backward keeps the whole gradients on its rank instead of reducing and dividing them."""
    parts = [part for part in module.modules() if is_sharded(part)]
    for part in parts:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_requires_gradient_sync(True, recurse=False)


def _is_lightnings_own(method: Any) -> bool:
    """Whether a method is the empty one of the base class: whether it is overridden decides what a Trainer does."""
    return str(getattr(method, "__module__", "")).startswith(("lightning.", "pytorch_lightning."))


def _lightnings_mesh(module: nn.Module) -> DeviceMesh | None:
    mesh: Any = vars(module).get("_device_mesh")
    return None if mesh is None else mesh["data_parallel"]
