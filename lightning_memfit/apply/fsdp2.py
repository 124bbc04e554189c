"""A run whose module ``fully_shard`` (FSDP2) spread over several devices: what was spread how, and when it exchanges.

Adapter for private names of torch 2.9 to 2.13: ``FSDPModule._get_fsdp_state``, ``FSDPState._fsdp_param_group(s)``,
``_modules``, ``_mp_policy``, ``_is_root``, ``_auto_reshard_after_forward`` and the lists of states to prefetch;
``FSDPParamGroup.mesh_info``, ``post_forward_mesh_info``, ``fsdp_params``, ``offload_policy``, ``mp_policy``,
``_training_state``, ``is_sharded``, ``_all_gather_result`` and what its setters set; ``FSDPParam.fsdp_placement`` and
``is_dtensor``. A test reads each of them from a module that is sharded for real.

Every rank must run the same number of slices: gathering parameters is a collective of each forward and backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import nn

from lightning_memfit.apply.gradients import multiply_gradients
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.plan import OptimizerImplementation
from lightning_memfit.sharded_model import is_sharded, without_exchange
from lightning_memfit.sharding import PolicyDtype, Sharding, Synchronisation


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module or on one inside it."""
    return bool(_sharded_parts(module))


def sharding_of(module: nn.Module, *, synchronisation: Synchronisation = "slice") -> Sharding | None:
    """How a module was spread; ``None`` if ``fully_shard`` was called on nothing in it.

    Args:
        module: the root of the qualified names.
        synchronisation: when gradients are exchanged: ``"slice"`` or ``"step"``.

    Raises:
        UnsupportedError: if it was spread in a way that is not forecast, naming the module and the way.
    """
    parts = _sharded_parts(module)
    if not parts:
        return None
    for name, state in parts.items():
        reason = _reason_not_forecast(state)
        if reason is not None:
            raise UnsupportedError(
                f"fully_shard of {name or 'the root'!r}: {reason}. MemFit forecasts fully_shard over one dimension of "
                "ranks, a module at a time, with torch's own prefetching. Set MEMFIT=off, or shard it so."
            )
    groups = {name: group for name, state in parts.items() for group in _groups_of(state)}
    ranks = {group.mesh_info.shard_mesh_size for group in groups.values()}
    if len(ranks) != 1:
        raise UnsupportedError(f"fully_shard over {sorted(ranks)} ranks in one module is not forecast. Use one mesh.")
    policies = {state._mp_policy for state in parts.values()}
    if len(policies) > 1:
        raise UnsupportedError(
            f"fully_shard with {len(policies)} mixed-precision policies in one module is not forecast. Use one."
        )
    dtypes = _policy_dtypes(mixed_precision_of(module))
    kept = {name for name, state in parts.items() if _is_kept(state)} - {next(iter(parts))}
    inner = set(parts) - {next(iter(parts))}
    if kept and kept != inner:
        raise UnsupportedError(
            f"reshard_after_forward differs between groups: False for {sorted(kept)}, True for {sorted(inner - kept)}. "
            "MemFit forecasts one setting for all; use one."
        )
    return Sharding(
        engine="fsdp2",
        ranks=ranks.pop(),
        synchronisation=synchronisation,
        shard_groups=tuple(parts),
        reshard_after_forward=not kept,
        **dtypes,
    )


def mixed_precision_of(module: nn.Module) -> Any:
    """The ``MixedPrecisionPolicy`` that a module was sharded with; ``None`` if it computes in its own dtype."""
    for state in _sharded_parts(module).values():
        policy = state._mp_policy
        return policy if policy.param_dtype or policy.reduce_dtype or policy.output_dtype else None
    return None


def computing_dtype_of(module: nn.Module) -> Any:
    """The dtype in which a policy of mixed precision lets a module compute, gradients added up included.

    ``None`` without a policy; where it computes and adds up in two dtypes, the one of fewer digits.
    """
    policy = mixed_precision_of(module)
    dtypes = [] if policy is None else [each for each in (policy.param_dtype, policy.reduce_dtype) if each is not None]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _policy_dtypes(policy: Any) -> dict[str, Any]:
    """The fields of a :class:`Sharding` that a policy fills.

    Raises:
        UnsupportedError: for a dtype that is not forecast, or inputs that are not cast.
    """
    if policy is None:
        return {}
    found = {name: getattr(policy, name) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    names = {name: None if dtype is None else str(dtype).removeprefix("torch.") for name, dtype in found.items()}
    unknown = [f"{name}={names[name]}" for name in names if names[name] not in (None, *get_args(PolicyDtype))]
    if unknown:
        raise UnsupportedError(
            f"fully_shard with MixedPrecisionPolicy({', '.join(unknown)}) is not planned for: float16 would need a "
            "loss that is scaled, which Lightning does not do under ModelParallelStrategy, and other dtypes are not "
            f"known. Use {' or '.join(f'torch.{name}' for name in get_args(PolicyDtype))}, or leave the dtype out."
        )
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        raise UnsupportedError(
            f"fully_shard with MixedPrecisionPolicy(param_dtype={policy.param_dtype}, cast_forward_inputs=False) is "
            "not planned for: in which dtype each group computes is then the module's own business. Leave "
            "cast_forward_inputs=True, torch's default."
        )
    return names


def reason_precision_kept(sharding: Sharding | None) -> str | None:
    """Why precision is ``"32-true"`` under a mixed-precision policy; ``None`` without one."""
    if sharding is None or not sharding.has_policy:
        return None
    return "fully_shard's MixedPrecisionPolicy chooses the dtypes; autocast on top of it would be another computation"


def notes_on_policy(sharding: Sharding | None) -> tuple[str, ...]:
    """What is in which dtype under a mixed-precision policy; nothing without one."""
    if sharding is None or not sharding.has_policy:
        return ()
    computed = sharding.param_dtype or "the parameters' own dtype"
    output = "" if sharding.output_dtype is None else f", outputs of groups cast to {sharding.output_dtype}"
    return (
        f"under fully_shard's MixedPrecisionPolicy parameters are gathered and computed with in {computed}{output}, "
        f"and gradients added up over ranks in {sharding.reduce_dtype or computed}; shares of parameters, gradients "
        "and optimizer states stay in the parameters' own dtype",
    )


def reason_states_not_quantised(sharding: Sharding | None) -> str | None:
    """Why optimizer states in 8 bits cannot be had under a sharding; ``None`` if they can.

    Source: bitsandbytes-foundation/bitsandbytes#1633; with 0.50.2 and torch 2.13 its step raises "got mixed
    torch.Tensor and DTensor".
    """
    if sharding is None or sharding.engine != "fsdp2":
        return None
    return "fully_shard makes parameters DTensors, which bitsandbytes cannot step"


def steppable_implementations(
    optimizer: str, implementations: tuple[OptimizerImplementation, ...]
) -> tuple[OptimizerImplementation, ...]:
    """Which implementations of an optimizer's step run on DTensors.

    Source: pytorch/pytorch ``torch/distributed/tensor/_ops/_pointwise_ops.py``, 2.13: of the fused ones, Adam's alone.

    Args:
        optimizer: name of its class, with or without its module's.
        implementations: those that run on plain tensors.
    """
    fused = optimizer.rpartition(".")[2] in ("Adam", "AdamW")
    return tuple(each for each in implementations if each != "fused" or fused)


def check_steppable(optimizer: str, implementation: str) -> None:
    """Refuse a pinned implementation that does not run on DTensors, before torch does in the first step.

    Args:
        optimizer: name of its class, with or without its module's.
        implementation: as asked for.

    Raises:
        ConfigurationError: naming both, and what works.
    """
    if implementation == "fused" and optimizer.rpartition(".")[2] in ("SGD", "Adagrad"):
        raise ConfigurationError(
            f"optimizer_implementation='fused' cannot be had for {optimizer} under fully_shard: of the fused kernels "
            "torch runs those of Adam and AdamW alone on divided parameters. Choose 'as-configured', 'foreach' or "
            "'auto'."
        )


class Fsdp2Exchange:
    """When a sharded module exchanges gradients: after every slice, or in the last slice of a batch alone.

    By default after every slice: a rank then holds its share of the gradients and no more. With ``"step"`` it keeps
    the whole gradients of every parameter from the first slice to the last: :func:`deferred_bytes`, for
    less exchange.
    """

    def __init__(self, module: nn.Module, *, synchronisation: Synchronisation = "slice") -> None:
        """Of a module in which ``fully_shard`` was called."""
        self._module = module
        self._defers = synchronisation == "step"

    def around_slice(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Exchange in this slice, or only where it is the last."""
        return nullcontext() if is_last or not self._defers else without_exchange(self._module)

    def never(self) -> AbstractContextManager[Any] | None:
        """``None``: parameters are gathered from the other ranks in every forward and backward."""
        return None

    def held_bytes(self) -> int:
        """Nothing: what is gathered goes with the step."""
        return 0

    def rescale(self, optimizer: Any, factor: float) -> None:
        """Multiply this rank's share of them."""
        multiply_gradients(optimizer, factor)

    # The first step makes the storages into which later ones gather.
    settles = True
    alone_takes_more = False
    # Its forward gathers parameters, also where gradients wait.
    in_every_slice = True


def deferred_bytes(module: nn.Module) -> int:
    """Bytes of whole gradients that a rank keeps between slices where exchange waits for the last one.

    All trainable parameters, in the dtype in which gradients are reduced (by default their own).
    """
    found: dict[int, int] = {}
    for state in _sharded_parts(module).values():
        for group in _groups_of(state):
            dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
            for held in group.fsdp_params:
                if held.sharded_param.requires_grad:
                    parameter = held.sharded_param
                    found[id(parameter)] = parameter.numel() * (dtype or parameter.dtype).itemsize
    return sum(found.values())


# After an error in the midst of a step


def underway(module: nn.Module) -> str:
    """Which groups are in the midst of a step, and how far, in words; empty where none is, or nothing is sharded."""
    found = []
    for name, state in _sharded_parts(module).items():
        for group in _groups_of(state):
            gathered = "" if group.is_sharded else ", gathered"
            awaited = "" if group._all_gather_result is None else ", awaited"
            if gathered or awaited or group._training_state.name != "IDLE":
                found.append(f"{name or 'the root'} ({group._training_state.name}{gathered}{awaited})")
    return "; ".join(found)


def start_anew(module: nn.Module) -> None:
    """Let go of what an error left gathered in the midst of a step, so that the next one gathers on all ranks alike.

    Raises:
        UnsupportedError: if this release of torch has no way to.
    """
    left = underway(module)
    for root in (part for part in module.modules() if is_sharded(part) and part._get_fsdp_state()._is_root):
        if hasattr(root, "reset_iter_state"):
            root.reset_iter_state()  # also what belongs to no group: which of them were reached
        elif left:
            raise UnsupportedError(
                f"torch {torch.__version__} has no FSDPModule.reset_iter_state, by which parameters are let go that an "
                f"error left in the midst of a step: {left}. Repair what raised the error, or use torch 2.13."
            )


# What torch knows of a sharded module


def _sharded_parts(module: nn.Module) -> dict[str, Any]:
    """The states of what ``fully_shard`` was called on, by qualified name, outer ones first."""
    return {name: part._get_fsdp_state() for name, part in module.named_modules() if is_sharded(part)}


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _is_kept(state: Any) -> bool:
    return any(group.post_forward_mesh_info is None for group in _groups_of(state))


def _reason_not_forecast(state: Any) -> str | None:
    if len(state._modules) != 1:
        return f"{len(state._modules)} modules are one group"
    if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
        return "which groups are fetched ahead was set by hand"
    groups = _groups_of(state)
    if len(groups) > 1:
        return "its parameters are on several meshes"
    return next((reason for group in groups if (reason := _reason_of_group(group)) is not None), None)


def _reason_of_group(group: Any) -> str | None:
    if type(group.mesh_info).__name__ != "FSDPMeshInfo":
        return f"its mesh ({type(group.mesh_info).__name__}) has more than the one dimension it is sharded over"
    if group.post_forward_mesh_info not in (None, group.mesh_info):
        return "it is resharded to fewer ranks after the forward (reshard_after_forward as a number)"
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        return "it is offloaded to the host"
    for held in group.fsdp_params:
        if held.is_dtensor:
            return "its parameters are divided by tensor parallelism too"
        if held.fsdp_placement.dim != 0:
            return f"a parameter is divided along dimension {held.fsdp_placement.dim}"
    if not (group.reshard_after_backward and group.unshard_in_backward):
        return "resharding after, or gathering in, the backward was switched off"
    return None
