"""The levers of an optimizer's step together: what can be chosen for it, and how a choice is applied to it.

What is made under fake tensors while a step is traced gets its levers here; the live one gets the same functions, with
a way back, in ``step_levers.py``.

Adapter for a private name of bitsandbytes (0.50): ``functional.create_dynamic_map``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.apply.host_optimizer import why_not_cpu_adam
from lightning_memfit.apply.optimizer_implementation import implementations_of, set_implementation
from lightning_memfit.apply.quantised_states import quantisation_obstacle, quantise, sparse_gradients
from lightning_memfit.apply.update_rules import public_name
from lightning_memfit.apply.zero_optimizers import why_not_under_zero
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import Candidate, OptimizerImplementation, OptimizerStates
from lightning_memfit.trace.closure_step import needs_closure


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What can be chosen for one optimizer."""

    name: str
    """Its class, under the name by which it is imported."""
    implementations: tuple[OptimizerImplementation, ...]
    """What its step can be run with beside what it is run with now."""
    quantisation_obstacle: str | None
    """Why its states cannot be quantised, in words with its name; ``None`` if they can."""
    left_as_configured: str | None = None
    """Which of several optimizers would keep their states, and why, where others' can be quantised; else ``None``."""
    needs_closure: bool = False
    """Whether its step runs forward and backward itself; how often, and so for how long, is not known beforehand."""
    unscales_by_itself: bool = False
    """Whether it takes scaled gradients, as with ``fused=True``: Lightning refuses to clip those in mixed precision."""
    zero_obstacle: str | None = None
    """Why it is not what it is where ZeRO gives it flat tensors; ``None`` where it is, or where nobody knows."""
    cpu_adam_obstacle: str | None = None
    """Why it cannot be exchanged for DeepSpeed's Adam, where it is kept on the host; ``None`` if it can."""


def optimizer_facts(optimizer: Optimizer, module: nn.Module) -> OptimizerFacts:
    """Look at an optimizer and the module that its parameters belong to; change neither."""
    return OptimizerFacts(
        name=public_name(type(optimizer)),
        implementations=_implementations(optimizer, module),
        quantisation_obstacle=quantisation_obstacle(optimizer, module),
        needs_closure=needs_closure(optimizer),
        unscales_by_itself=bool(getattr(optimizer, "_step_supports_amp_scaling", False)),
        zero_obstacle=why_not_under_zero(optimizer),
        cpu_adam_obstacle=why_not_cpu_adam(optimizer),
    )


def joint_facts(facts: Sequence[OptimizerFacts]) -> OptimizerFacts:
    """What can be chosen for several optimizers of one run.

    Implementations are those that each of them can have; states are quantised where one of them can have it. Without
    any, there is nothing to choose.
    """
    if not facts:
        none = "configure_optimizers returned no optimizer"
        return OptimizerFacts(name="no optimizer", implementations=(), quantisation_obstacle=none)
    first, *others = facts
    obstacles = [each.quantisation_obstacle for each in facts]
    known = "; ".join(dict.fromkeys(obstacle.rstrip(".") for obstacle in obstacles if obstacle is not None))
    some_can = None in obstacles
    return OptimizerFacts(
        name=", ".join(each.name for each in facts),
        implementations=tuple(
            name for name in first.implementations if all(name in other.implementations for other in others)
        ),
        quantisation_obstacle=None if some_can else known,
        left_as_configured=known if some_can and known else None,
        needs_closure=any(each.needs_closure for each in facts),
        unscales_by_itself=any(each.unscales_by_itself for each in facts),
        zero_obstacle=next((each.zero_obstacle for each in facts if each.zero_obstacle is not None), None),
        cpu_adam_obstacle=next((each.cpu_adam_obstacle for each in facts if each.cpu_adam_obstacle is not None), None),
    )


def with_levers_it_can_have(optimizer: Optimizer, module: nn.Module, candidate: Candidate) -> Optimizer:
    """As :func:`with_levers`, but one of several optimizers whose states cannot be quantised stays as it is."""
    if candidate.optimizer_states == "8bit" and quantisation_obstacle(optimizer, module) is not None:
        return optimizer
    return with_levers(
        optimizer,
        module,
        optimizer_states=candidate.optimizer_states,
        implementation=candidate.optimizer_implementation,
    )


def with_levers(
    optimizer: Optimizer,
    module: nn.Module,
    *,
    optimizer_states: OptimizerStates,
    implementation: OptimizerImplementation,
) -> Optimizer:
    """The optimizer as a candidate wants it: another one with 8-bit states, or itself with its step run otherwise.

    To take an implementation back, use :func:`~lightning_memfit.apply.optimizer_implementation.set_implementation`.

    Args:
        optimizer: real or made under fake tensors; with 8-bit states it is left as it is.
        module: the module that its parameters belong to.
        optimizer_states: format of the states.
        implementation: implementation of the step; quantised states have one of their own.

    Raises:
        ConfigurationError: if one of them cannot be had, or both are asked for.
    """
    if optimizer_states == "8bit":
        if implementation != "as-configured":
            raise ConfigurationError(
                f"optimizer_implementation={implementation!r} cannot be had with optimizer_states='8bit': quantised "
                "states have one implementation. Leave one of the two out."
            )
        return quantise(optimizer, module)
    if implementation == "fused" and _is_sparse(optimizer, module):
        raise ConfigurationError(
            f"optimizer_implementation='fused' cannot be had for {public_name(type(optimizer))}: an embedding has "
            "sparse gradients. Choose 'foreach', or 'as-configured'."
        )
    set_implementation(optimizer, implementation)
    return optimizer


def _implementations(optimizer: Optimizer, module: nn.Module) -> tuple[OptimizerImplementation, ...]:
    sparse = _is_sparse(optimizer, module)
    return tuple(each for each in implementations_of(optimizer) if not (sparse and each == "fused"))


def _is_sparse(optimizer: Optimizer, module: nn.Module) -> bool:
    sparse = {id(parameter) for parameter in sparse_gradients(module)}
    return any(id(parameter) in sparse for group in optimizer.param_groups for parameter in group["params"])


@contextmanager
def faked_quantisation() -> Iterator[None]:
    """Within this context the user's own optimizers of bitsandbytes can be made and stepped under fake tensors.

    Their constructor reads a table of codes back, which fakes do not hold: the table is made for real. Where the user's
    code imports bitsandbytes only now, it is imported outside of fake modes, because tables that it makes on import
    would be fakes for the rest of the process. Optimizers made by :func:`with_levers` need none of this.
    """
    with ExitStack() as patches:
        library = sys.modules.get("bitsandbytes.functional")
        if library is not None:
            patches.enter_context(_real_tables(library))
        else:
            finder = _OutsideOfFakes(patches)
            sys.meta_path.insert(0, finder)
            patches.callback(sys.meta_path.remove, finder)
        yield


@contextmanager
def _real_tables(library: ModuleType) -> Iterator[None]:
    make = library.create_dynamic_map

    def make_for_real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return make(*args, **kwargs)

    with mock.patch.object(library, "create_dynamic_map", make_for_real):
        yield


class _OutsideOfFakes:
    """Finds bitsandbytes before the import system does, and has it executed while no mode is active."""

    def __init__(self, patches: ExitStack) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "bitsandbytes":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = partial(self._execute, execute)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Any, module: ModuleType) -> None:
        assert module.__spec__ is not None
        vars(module.__spec__.loader).pop("exec_module")
        with _disable_current_modes():
            execute(module)
        self._patches.enter_context(_real_tables(sys.modules["bitsandbytes.functional"]))
