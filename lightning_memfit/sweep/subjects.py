"""What a job of a sweep trains: made of its config, or by the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_memfit.application.composed import answering_hydra, may_need_less_by, settings_of, subject_of_config
from lightning_memfit.application.import_paths import called
from lightning_memfit.application.subject import Subject, attach_stand_in, made_on_meta
from lightning_memfit.batch_tree import batch_size_of
from lightning_memfit.config import memfit_arguments
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.observe.random_state import random_state_kept
from lightning_memfit.run_key import TAKES_NO_MEMORY
from lightning_memfit.sweep.job import SweepJob

SubjectFunction = Callable[[Any], Any]
"""From a job's config to ``(module, batch)``, or to something that has them as attributes."""
_ASKED = "hydra.sweeper.subject"
_OTHERWISE = f"set {_ASKED} to a function from a job's config to (module, batch)"
_PARTS = ("loss", "optimizer", "optimizer_steps", "settings")


def subject_function(path: str | None) -> SubjectFunction | None:
    """The function that ``hydra.sweeper.subject`` names; ``None`` for none.

    Raises:
        ConfigurationError: if it cannot be imported, or is no function.
    """
    if path is None:
        return None
    from hydra.utils import get_object

    try:
        found = get_object(path)
    except Exception as error:
        words = " ".join(str(error).split())  # in one line: it is the last one of what the user sees
        raise ConfigurationError(
            f"{_ASKED}={path!r} cannot be imported: {words} Write package.module.function, and run where that package "
            "can be imported."
        ) from error
    if not callable(found):
        raise ConfigurationError(
            f"{_ASKED}={path!r} is a {type(found).__name__}. Name a function from a job's config to (module, batch)."
        )
    function: SubjectFunction = found
    return function


@contextmanager
def subject_of_job(job: SweepJob, function: SubjectFunction | None, *, real: bool) -> Iterator[Subject]:
    """Make what a job trains; within the context it can be planned.

    Raises:
        ConfigurationError: if it cannot be made, or is trained without MemFit.
    """
    with answering_hydra(job.config) as config:
        _require_planning(config)
        if function is not None:
            with random_state_kept():
                yield _made_by(function, config, job)
            return
        # Not its number: what cannot be told of all jobs for one reason is said once.
        with subject_of_config(config, words=job.words, source="this job", otherwise=_OTHERWISE, real=real) as subject:
            yield subject


def _require_planning(config: Any) -> None:
    if memfit_arguments(config.get("memfit") or {})["mode"] == "off":
        raise ConfigurationError("memfit.mode='off': this job is trained without a plan, whatever its budget.")


def _made_by(function: SubjectFunction, config: Any, job: SweepJob) -> Subject:
    what = f"{_ASKED} ({getattr(function, '__qualname__', function)})"
    made = called(lambda: function(config), what=what)
    module, batch, parts = called(lambda: _taken_apart(made), what=what)
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"{what} gave a {type(module).__name__} in place of a module. Return (module, batch), or an object with "
            "the attributes module and batch."
        )
    module, _, _ = made_on_meta(module, what=what, real=True)
    if parts["optimizer"] is None:
        attach_stand_in(module)
    settings, notes = settings_of(config)
    settings.update(parts["settings"] or {})
    settings.setdefault("effective_batch_size", batch_size_of(batch))
    return Subject(
        words=job.words,
        module=module,
        batch=batch,
        loss=parts["loss"],
        optimizer=parts["optimizer"],
        on_meta=any(parameter.is_meta for parameter in module.parameters()),
        settings=settings,
        notes=notes,
        may_need_less_by=may_need_less_by(config),
        optimizer_steps=parts["optimizer_steps"],
    )


def _taken_apart(made: Any) -> tuple[Any, Any, dict[str, Any]]:
    if isinstance(made, tuple) and not hasattr(made, "_fields"):
        module, batch = made
        return module, batch, dict.fromkeys(_PARTS)
    return made.module, made.batch, {name: getattr(made, name, None) for name in _PARTS}


def told_settings(config: Any, *, whole: bool) -> list[str]:
    """Settings of a config that may change what a job needs beside what its plan's fingerprint tells.

    A model's own numbers, such as a rate of dropout or of masking, change what is saved and no shape of a parameter.

    Args:
        config: a job's config; its ``hydra`` part does not count.
        whole: all of it, since it is not known which part makes the model.
    """
    from omegaconf import OmegaConf

    if not whole:
        return sorted(_leaves("model", OmegaConf.to_container(config.model, resolve=True)))
    # As it is written: what an interpolation names is told where it stands.
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return sorted(_leaves("", OmegaConf.to_container(own)))


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            if not TAKES_NO_MEMORY.fullmatch(str(name)):
                yield from _leaves(f"{key}.{name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(f"{key}.{index}", item)
    else:
        yield f"{key}={value!r}"
