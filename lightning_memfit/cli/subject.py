"""What is planned, of the user's own code: a module, a batch, and how the one is trained on the other."""

from __future__ import annotations

import importlib
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit.cli.batch_text import batch_from_text
from lightning_memfit.cli.import_paths import called, import_named, is_import_path
from lightning_memfit.cli.quiet import lightning_quietened
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
    notes: tuple[str, ...] = ()
    """What the user should know."""


def subject_of_functions(arguments: Namespace) -> Subject:
    """Make what the options ``--model``, ``--batch``, ``--loss`` and ``--optimizer`` name.

    Raises:
        ConfigurationError: if one of them is missing, cannot be imported, raises, or returns something else.
    """
    if arguments.batch is None:
        raise ConfigurationError(
            "--model needs --batch: a function that makes one batch, such as my_models:batch, or its shapes, such as "
            "4x512:int64."
        )
    factory = import_named(arguments.model, option="--model")
    loss, optimizer = (
        None if path is None else import_named(path, option=option)
        for option, path in (("--loss", arguments.loss), ("--optimizer", arguments.optimizer))
    )
    batch = _batch(arguments.batch)
    made, on_meta, notes = made_on_meta(factory, what=f"--model={arguments.model}", real=arguments.real)
    module, loss, optimizer = _taken_apart(made, loss, optimizer, arguments.model)
    if optimizer is None and _attach_stand_in(module):
        notes = (
            *notes,
            f"configure_optimizers saw a Trainer of {STEPS_OF_THE_STAND_IN} steps; another length changes no memory",
        )
    return Subject(
        words=f"{arguments.model} on {arguments.batch}",
        module=module,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        on_meta=on_meta,
        notes=notes,
    )


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


def _batch(text: str) -> Any:
    if not is_import_path(text):
        return batch_from_text(text)
    factory, what = import_named(text, option="--batch"), f"--batch={text}"
    if not callable(factory):
        return factory
    batch = called(factory, what=what)
    return first_of(batch, what=what) if isinstance(batch, DataLoader) else batch


def _taken_apart(made: Any, loss: Any, optimizer: Any, path: str) -> tuple[nn.Module, Any, Any]:
    """Module, loss and optimizer: what the factory returned, and the options beside it.

    Raises:
        ConfigurationError: if it returned something else, or both say something.
    """
    if isinstance(made, tuple) and len(made) == 3:
        if loss is not None or optimizer is not None:
            raise ConfigurationError(
                f"--model={path} returns its own loss and optimizer. Leave --loss and --optimizer out, or return the "
                "module alone."
            )
        made, loss, optimizer = made
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"--model={path} returned a {type(made).__name__}. Return a LightningModule, (module, loss, optimizer), or "
            "a module to go with --loss and --optimizer."
        )
    for name, missing, given in (("training_step", "loss", loss), ("configure_optimizers", "optimizer", optimizer)):
        if given is None and not callable(getattr(made, name, None)):
            raise ConfigurationError(
                f"{type(made).__name__} of --model={path} has no {name}. Add --{missing} package.module:function, or "
                "return (module, loss, optimizer)."
            )
    return made, loss, optimizer


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


def _attach_stand_in(module: Any) -> bool:
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


@contextmanager
def subject_of(arguments: Namespace) -> Iterator[Subject]:
    """What the command line names; within the context it can be planned.

    Raises:
        ConfigurationError: if it cannot be made, or it is not clear what is meant.
    """
    if arguments.model is not None:
        if arguments.overrides or arguments.config_dir or arguments.config_name:
            given = " ".join(arguments.overrides) or "--config-dir, --config-name"
            raise ConfigurationError(
                f"--model={arguments.model} and a Hydra config ({given}) are two things to plan. Give one of them."
            )
        yield subject_of_functions(arguments)
        return
    for option in ("batch", "loss", "optimizer"):
        if getattr(arguments, option) is not None:
            raise ConfigurationError(f"--{option} goes with --model package.module:function, which is missing.")
    from lightning_memfit.cli.composed import composed_subject

    with composed_subject(
        config_dir=arguments.config_dir,
        config_name=arguments.config_name,
        overrides=arguments.overrides,
        real=arguments.real,
        effective_batch_size=arguments.effective_batch_size,
    ) as subject:
        yield subject
