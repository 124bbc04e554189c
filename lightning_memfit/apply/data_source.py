"""Adapter for the data sources of Lightning's loops (2.5 and 2.6): asking them, and answering in their place.

Touches ``trainer.fit_loop._data_source`` and ``trainer.fit_loop.epoch_loop.val_loop._data_source`` with their
``instance`` and ``dataloader()``, ``val_loop._combined_loader``, ``CombinedLoader._mode``,
``trainer._data_connector._prepare_dataloader`` (with ``RunningStage`` of its module), and, of the module that defines
the data source, ``_request_dataloader``, ``CombinedLoader`` and ``_auto_add_worker_init_fn``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning_memfit.apply.random_sources import Move, RandomSources
from lightning_memfit.errors import UnsupportedError
from lightning_memfit.undo import Undo


def train_source(trainer: Any) -> Any:
    """Where Lightning asks for the train loader.

    Raises:
        UnsupportedError: if this version of Lightning keeps its data sources in another way.
    """
    return _attribute(trainer.fit_loop, "_data_source")


def validation_source(trainer: Any) -> Any:
    """Where Lightning asks for the validation loaders while fitting.

    Raises:
        UnsupportedError: if this version of Lightning keeps its data sources in another way.
    """
    return _attribute(trainer.fit_loop.epoch_loop.val_loop, "_data_source")


def validation_loaders(trainer: Any) -> Any | None:
    """The ``CombinedLoader`` that Lightning validates with; ``None`` if it has not asked for one yet."""
    return _attribute(trainer.fit_loop.epoch_loop.val_loop, "_combined_loader")


def ask(source: Any) -> tuple[Any, Move]:
    """What the user's hook returns, and how it moved the random generators, which get their states back.

    Lightning's own function calls the hook, so that it notes constructor arguments as it always does.
    """
    sources = RandomSources()
    with sources.kept():
        loader, move = sources.record(lambda: defined_beside(source, "_request_dataloader")(source))
    return loader, move


def ask_again(source: Any) -> Any:
    """What the user's hook returns, whoever answers in its place at present."""
    return type(source).dataloader(source)


def combined(source: Any, loader: Any, mode: str) -> Any:
    """The loader as a ``CombinedLoader``: itself if it is one, else one of this mode around it."""
    combined_loader = defined_beside(source, "CombinedLoader")
    return loader if isinstance(loader, combined_loader) else combined_loader(loader, mode)


def of_this_rank(trainer: Any, loader: Any) -> Any:
    """One of the train loaders as this rank reads it: with a ``DistributedSampler`` where Lightning puts one.

    Lightning leaves it as it is when it processes it a second time.

    Raises:
        UnsupportedError: if this version of Lightning prepares loaders in another way.
    """
    if trainer.world_size == 1:
        return loader
    connector = _attribute(trainer, "_data_connector")
    stage = sys.modules[type(connector).__module__].RunningStage.TRAINING
    return _attribute(connector, "_prepare_dataloader")(loader, shuffle=True, mode=stage)


def mode_of(combined: Any) -> str:
    """How a ``CombinedLoader`` combines its members, such as ``"sequential"``."""
    mode: str = combined._mode
    return mode


def structured(combined: Any, batches: list[Any]) -> Any:
    """One batch of each member, structured as the loaders are."""
    shape = type(combined)(combined.iterables)
    shape.flattened = batches
    return shape.iterables


def answer_with(source: Any, answer: Callable[[], Any]) -> Undo:
    """Answer Lightning in place of the user's hook."""
    missing = object()
    before = source.__dict__.get("dataloader", missing)
    source.__dict__["dataloader"] = answer

    def undo() -> None:
        if source.__dict__.get("dataloader") is not answer:
            return
        if before is missing:
            del source.__dict__["dataloader"]
        else:
            source.__dict__["dataloader"] = before

    return undo


def answer_once(source: Any, loader: Any, move: Move) -> None:
    """Give Lightning this loader when it asks next, with the random numbers that the hook drew."""
    source.__dict__["dataloader"] = _AnswerOnce(source, loader, move)


def answer_to_come(source: Any) -> Any | None:
    """The loader that :func:`answer_once` gives Lightning when it asks; ``None`` if there is none."""
    answer = source.__dict__.get("dataloader")
    return answer._loader if isinstance(answer, _AnswerOnce) else None


def forget_answer(source: Any) -> None:
    """Drop the answer of :func:`answer_once`, where Lightning never asked."""
    if isinstance(source.__dict__.get("dataloader"), _AnswerOnce):
        del source.__dict__["dataloader"]


def worker_seeding(source: Any, trainer: Any) -> Callable[[Any], None]:
    """What Lightning does to a loader before its workers start."""
    add_worker_init_fn = defined_beside(source, "_auto_add_worker_init_fn")
    return lambda loader: add_worker_init_fn(loader, trainer.global_rank)


def defined_beside(source: Any, name: str) -> Any:
    """A name of the module that defines the data source: of the namespace that the user imported.

    Raises:
        UnsupportedError: if this version of Lightning has no such name.
    """
    module = sys.modules[type(source).__module__]
    if not hasattr(module, name):
        raise UnsupportedError(
            f"{module.__name__} has no {name!r} in this version of Lightning; MemFit knows 2.5 and 2.6. "
            "Install one of those, or set MEMFIT=off in the environment to train without MemFit."
        )
    return getattr(module, name)


class _AnswerOnce:
    def __init__(self, source: Any, loader: Any, move: Move) -> None:
        self._source, self._instance, self._loader, self._move = source, source.instance, loader, move

    def __call__(self) -> Any:
        del self._source.__dict__["dataloader"]
        if self._source.instance is not self._instance:
            return ask_again(self._source)
        self._move.replay()
        return self._loader


def _attribute(loop: Any, name: str) -> Any:
    if not hasattr(loop, name):
        raise UnsupportedError(
            f"{type(loop).__name__} has no attribute {name!r} in this version of Lightning; MemFit knows 2.5 and 2.6. "
            "Install one of those, or set MEMFIT=off in the environment to train without MemFit."
        )
    return getattr(loop, name)
