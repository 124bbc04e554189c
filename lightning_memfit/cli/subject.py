"""What is planned, as the options of the command line name it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit.application.import_paths import called, import_named, is_import_path
from lightning_memfit.application.subject import (
    STEPS_OF_THE_STAND_IN,
    Subject,
    attach_stand_in,
    first_of,
    made_on_meta,
)
from lightning_memfit.cli.batch_text import batch_from_text
from lightning_memfit.errors import ConfigurationError


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
    if optimizer is None and attach_stand_in(module):
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
    from lightning_memfit.cli.config_folder import composed_subject

    with composed_subject(
        config_dir=arguments.config_dir,
        config_name=arguments.config_name,
        overrides=arguments.overrides,
        real=arguments.real,
        effective_batch_size=arguments.effective_batch_size,
        num_devices=arguments.num_devices,
    ) as subject:
        yield subject
