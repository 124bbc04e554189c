"""What is planned: a module, a batch, and how the one is trained on the other."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_memfit.application.import_paths import called
from lightning_memfit.application.quiet import lightning_quietened
from lightning_memfit.errors import ConfigurationError, first_line, is_out_of_memory
from lightning_memfit.trace.step_program import LossFunction, OptimizerFactory
from lightning_memfit.upstream import NAMESPACES

STEPS_OF_THE_STAND_IN = 1000
"""Optimizer steps of the Trainer that a module's ``configure_optimizers`` sees; schedules take no memory."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned."""

    words: str
    """What it is, in words."""
    module: nn.Module
    """The module, on the CPU or on ``meta``."""
    batch: Any
    """One collated batch, as ``training_step`` gets it."""
    loss: LossFunction | None = None
    """Replaces ``training_step``."""
    optimizer: OptimizerFactory | None = None
    """Replaces ``configure_optimizers``."""
    on_meta: bool
    """Whether the module was made on ``meta``, without values."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``make_plan`` that it brings along."""
    optimizer_steps: int | None = None
    """Optimizer steps of the whole run; ``None`` where that is not known."""
    device: str | None = None
    """What its config says to forecast for, ``hardware.device``; ``None`` where it says nothing."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    may_need_less_by: tuple[str, ...] = ()
    """Settings that a forecast leaves out, and under which training may need less than it says."""


def made_on_meta(factory: Callable[[], Any], *, what: str, real: bool) -> tuple[Any, bool, tuple[str, ...]]:
    """Call a factory on torch's ``meta`` device, or for real where it does not work there.

    Args:
        factory: makes a module, or a tuple that begins with one; a module itself is taken as it is.
        what: what it is, for messages.
        real: do not try ``meta``.

    Returns:
        What it made, whether that is on ``meta``, and what to tell the user.

    Raises:
        ConfigurationError: if it raises for real.
    """
    if isinstance(factory, nn.Module):
        return called(lambda: _configured(factory), what=what), False, ()
    if not callable(factory):
        raise ConfigurationError(
            f"{what} is a {type(factory).__name__}. Name a function, or a class, that makes the module."
        )

    def make() -> Any:
        return _configured(factory())

    if real:
        return called(make, what=what), False, ()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "initializing zero-element tensors is a no-op"
            return make(), True, ()
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        note = f"the module was made for real: on the meta device {type(error).__name__}: {first_line(error)}"
    return called(make, what=what), False, (note,)


def first_of(loader: Any, *, what: str) -> Any:
    """The first batch of a loader.

    Raises:
        ConfigurationError: if there is none, or loading it raises.
    """
    missing = object()
    batch = called(lambda: next(iter(loader), missing), what=what)
    if batch is missing:
        raise ConfigurationError(f"{what} has no batch. Give it data.")
    return batch


def lightning_namespace(module: nn.Module) -> str | None:
    """Which of Lightning's packages a module comes from; ``None`` for a plain module."""
    for cls in type(module).__mro__:
        for namespace in NAMESPACES:
            if cls.__module__.startswith(f"{namespace}.") and cls.__name__ == "LightningModule":
                return namespace
    return None


def _configured(made: Any) -> Any:
    """What a factory made, its ``configure_model`` called as a Trainer does before training."""
    module = made[0] if isinstance(made, tuple) and made else made
    hook = getattr(type(module), "configure_model", None)
    if hook is not None and not str(hook.__module__).startswith(NAMESPACES):
        module.configure_model()
    return made


def attach_stand_in(module: Any) -> bool:
    """Let a LightningModule read ``self.trainer``, as ``configure_optimizers`` often does for a schedule."""
    namespace = lightning_namespace(module)
    if namespace is None or module._trainer is not None:
        return False
    with lightning_quietened():
        module.trainer = _stand_in(namespace)
    return True


def _stand_in(namespace: str) -> Any:
    return importlib.import_module(namespace).Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=-1, max_steps=STEPS_OF_THE_STAND_IN,
    )  # fmt: skip
