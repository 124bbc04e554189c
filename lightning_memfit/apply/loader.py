"""Adapter for the data sources of Lightning's loops (2.5 and 2.6).

Touches ``trainer.fit_loop._data_source`` and ``trainer.fit_loop.epoch_loop.val_loop._data_source`` with their
``instance`` and ``dataloader()``, ``val_loop._combined_loader``, ``CombinedLoader._mode``, and, of the module that
defines the data source, ``_request_dataloader``, ``CombinedLoader`` and ``_auto_add_worker_init_fn``.

Limits, besides side effects inside user datasets: the user's hook runs when the plan is made instead of when training
starts. Random numbers that it draws then, and those that a stream draws for the batch that is handed on, are drawn
again, as it were, when Lightning asks, provided that nothing else drew in between; if something did (training, before a
validation stream is read), the run is a different, equally valid one. Loaders that are rebuilt while workers read an
``IterableDataset`` start their workers anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_memfit.apply.first_batch import Look, NoBatchError, look_at
from lightning_memfit.apply.handed_on import Move, RandomSources, stop_handing_on
from lightning_memfit.apply.rebuild import declared_batch_size, describe, length_of, rebuild, rebuild_obstacle
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.undo import Undo


class TrainLoader:
    """What Lightning will train from: asked for once, looked at without a trace, rebuilt where that is wanted."""

    def __init__(self, trainer: Any, source: Any, loader: Any, hook_move: Move) -> None:
        """Use :meth:`request` instead."""
        self.loader = loader
        """What the user's hook returned, or what was passed to ``fit``."""
        self._trainer, self._source, self._hook_move = trainer, source, hook_move
        self._instance = source.instance
        combined = _defined_beside(source, "CombinedLoader")
        self._combined = loader if isinstance(loader, combined) else combined(loader, "max_size_cycle")
        self._handed = loader
        self._asked = False
        self._rebuilt: tuple[Any, Any] | None = None

    @classmethod
    def request(cls, trainer: Any) -> TrainLoader:
        """Ask for the loader, calling the user's ``train_dataloader()`` where there is one, and keep it for Lightning.

        Raises:
            ConfigurationError: if there is no loader, or the Trainer is told to train on no batch.
            UnsupportedError: if this version of Lightning keeps its data sources in another way.
        """
        if trainer.limit_train_batches == 0:
            raise ConfigurationError(
                "limit_train_batches=0 trains on 0 batches, so there is no batch to plan with. "
                "Set it to 1 or more, or use MemFit(mode='off')."
            )
        source = _attribute(trainer.fit_loop, "_data_source")
        loader, move = _ask(source)
        if loader is None:
            raise ConfigurationError(
                "train_dataloader() returned None, so there is no batch to plan with. Return a DataLoader or another "
                "iterable over batches."
            )
        return cls(trainer, source, loader, move)

    @property
    def batch_size(self) -> int | None:
        """Samples per batch as the loader declares them; ``None`` if only the batches themselves tell."""
        return declared_batch_size(self.loader)

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch after the Trainer's limits; ``None`` if the loader has no length and none is set."""
        return self.num_batches_at(None)

    def num_batches_at(self, batch_size: int | None) -> int | None:
        """Batches per epoch if the loader is rebuilt with ``batch_size`` samples (``None``: as it is)."""
        members = self._combined.flattened
        if batch_size is not None and self.can_rebuild and batch_size != self.batch_size:
            members = [rebuild(self.loader, batch_size)]
        lengths = [_limited(length_of(member), self._trainer.limit_train_batches) for member in members]
        known = [length for length in lengths if length is not None]
        if self._combined._mode == "min_size":
            return min(known, default=None)
        return max(known) if known and len(known) == len(lengths) else None

    @property
    def can_rebuild(self) -> bool:
        """Whether the loader can be rebuilt with another batch size."""
        return self.rebuild_obstacle is None

    @property
    def rebuild_obstacle(self) -> str | None:
        """Why the loader cannot be rebuilt with another batch size; ``None`` if it can."""
        return rebuild_obstacle(self.loader)

    @property
    def describe(self) -> str:
        """One line for reports."""
        if len(self._combined.flattened) != 1 or self._combined is self.loader:
            members = ", ".join(describe(member) for member in self._combined.flattened)
            return f"{type(self.loader).__name__} of {len(self._combined.flattened)} loaders: {members}"
        return describe(self.loader)

    def peek(self) -> Any:
        """The first batch, collated, structured as Lightning yields it, on the host.

        The run's data is left as it was: a map-style loader is read through a copy; what cannot be rewound hands the
        batch on to the next who iterates it; random generators get their states back. The batch is the caller's own.

        Raises:
            ConfigurationError: if the loader yields no batch.
        """
        looks = [self._look(member) for member in self._combined.flattened]
        batches = _first_batches(looks, self._hook_move)
        if batches is None:
            raise ConfigurationError(
                f"The train loader yields 0 batches ({self.describe}), so there is nothing to plan with or to train "
                "on. Check the dataset's length, drop_last and the sampler."
            )
        self._handed = _put_back(self._combined, self.loader, [look.deliver() for look in looks])
        return _structured(self._combined, batches)

    def install(self, batch_size: int | None = None) -> Undo:
        """Make Lightning get this very loader when it asks next, and later ones from the user's hook.

        Args:
            batch_size: samples per batch; loaders with another batch size are rebuilt. ``None`` changes nothing.

        Raises:
            ConfigurationError: if another batch size is asked of a loader that cannot be rebuilt.
        """
        if batch_size is not None and batch_size != self.batch_size and self.rebuild_obstacle is not None:
            raise ConfigurationError(
                f"The train loader cannot be rebuilt with {batch_size} samples per batch instead of "
                f"{self.batch_size}: {self.rebuild_obstacle}. Give it this batch size where it is made."
            )
        return _answer_with(self._source, lambda: self._deliver(batch_size))

    def close(self) -> None:
        """End workers that were started for a peek and that nobody went on to use."""
        for member in self._combined.flattened:
            if isinstance(member, DataLoader) and member.num_workers > 0:
                stop_handing_on(member)

    def _look(self, member: Any) -> Look:
        return look_at(
            member,
            shared=(self._trainer, self._trainer.lightning_module, self._trainer.datamodule),
            prepare=_worker_seeding(self._source, self._trainer),
            starts=2,
        )

    def _deliver(self, batch_size: int | None) -> Any:
        if self._asked or self._source.instance is not self._instance:
            return self._with_batch_size(_original(self._source), batch_size)
        self._asked = True
        self._hook_move.replay()
        return self._with_batch_size(self._handed, batch_size)

    def _with_batch_size(self, loader: Any, batch_size: int | None) -> Any:
        if batch_size is None or declared_batch_size(loader) == batch_size:
            return loader
        obstacle = rebuild_obstacle(loader)
        if obstacle is not None:
            raise ConfigurationError(
                f"train_dataloader() returned a loader that cannot be rebuilt with {batch_size} samples per batch: "
                f"{obstacle}. Return the same kind of loader each time it is called."
            )
        if self._rebuilt is None or self._rebuilt[0] is not loader:
            stop_handing_on(loader)
            self._rebuilt = (loader, rebuild(loader, batch_size))
        return self._rebuilt[1]


def request_validation_batch(trainer: Any) -> Any | None:
    """The first batch of the first validation loader that has one, without a trace; ``None`` if nothing validates.

    Call it when sanity validation starts, or when training starts. The user's ``val_dataloader()`` runs here if it has
    not run yet, and Lightning then gets what it returned. See :func:`forget_validation_loader`.
    """
    if not trainer.enable_validation or trainer.limit_val_batches == 0 or _never_validates(trainer):
        return None
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    source = _attribute(val_loop, "_data_source")
    combined_class = _defined_beside(source, "CombinedLoader")
    combined, loader, move = _attribute(val_loop, "_combined_loader"), None, None
    if combined is None:
        loader, move = _ask(source)
        combined = loader if isinstance(loader, combined_class) else combined_class(loader, "sequential")

    def look(member: Any) -> Look:
        return look_at(
            member,
            shared=(trainer, trainer.lightning_module, trainer.datamodule),
            prepare=_worker_seeding(source, trainer),
            starts=1 if move is None else 2,
        )

    batch, delivered = _validation_batch(combined, look, move)
    if move is None:
        if any(old is not new for old, new in zip(combined.flattened, delivered, strict=True)):
            combined.flattened = delivered
    else:
        _answer_once(source, _put_back(combined, loader, delivered), move)
    return batch


def forget_validation_loader(trainer: Any) -> None:
    """Drop what :func:`request_validation_batch` keeps for Lightning, where Lightning never asked for it."""
    source = _attribute(trainer.fit_loop.epoch_loop.val_loop, "_data_source")
    answer = source.__dict__.get("dataloader")
    if isinstance(answer, _AnswerOnce):
        del source.__dict__["dataloader"]


class _AnswerOnce:
    def __init__(self, source: Any, loader: Any, move: Move) -> None:
        self._source, self._instance, self._loader, self._move = source, source.instance, loader, move

    def __call__(self) -> Any:
        del self._source.__dict__["dataloader"]
        if self._source.instance is not self._instance:
            return _original(self._source)
        self._move.replay()
        return self._loader


def _answer_once(source: Any, loader: Any, move: Move) -> None:
    source.__dict__["dataloader"] = _AnswerOnce(source, loader, move)


def _answer_with(source: Any, answer: Callable[[], Any]) -> Undo:
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


def _ask(source: Any) -> tuple[Any, Move]:
    """Let Lightning's own function call the hook, so that it notes constructor arguments as it always does."""
    sources = RandomSources()
    with sources.kept():
        loader, move = sources.record(lambda: _defined_beside(source, "_request_dataloader")(source))
    return loader, move


def _original(source: Any) -> Any:
    return type(source).dataloader(source)


def _validation_batch(combined: Any, look: Callable[[Any], Look], move: Move | None) -> tuple[Any | None, list[Any]]:
    """The batch, and the loaders to hand to Lightning in place of those that were looked at."""
    members = list(combined.flattened)
    if combined._mode != "sequential":
        looks = [look(member) for member in members]
        batches = _first_batches(looks, move)
        if batches is None:
            return None, members
        return _structured(combined, batches), [each.deliver() for each in looks]
    for index, member in enumerate(members):
        one = look(member)
        batches = _first_batches([one], move)
        if batches is not None:
            return batches[0], [*members[:index], one.deliver(), *members[index + 1 :]]
    return None, members


def _first_batches(looks: list[Look], move: Move | None) -> list[Any] | None:
    """One batch of each, drawn in Lightning's order: first all iterators are made, then each is advanced."""
    sources = RandomSources(*(generator for look in looks for generator in look.generators))
    try:
        with sources.kept():
            if move is not None:
                move.replay()
            for look in looks:
                look.start()
            return [look.first() for look in looks]
    except NoBatchError:
        return None
    finally:
        for look in looks:
            look.end()


def _never_validates(trainer: Any) -> bool:
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    return not trainer.sanity_checking and None not in (every, epochs) and 0 <= epochs < every


def _structured(combined: Any, batches: list[Any]) -> Any:
    shape = type(combined)(combined.iterables)
    shape.flattened = batches
    return shape.iterables


def _put_back(combined: Any, loader: Any, delivered: list[Any]) -> Any:
    """``loader`` with what must be handed to Lightning in place of its members; itself where that is the same."""
    if all(old is new for old, new in zip(combined.flattened, delivered, strict=True)):
        return loader
    combined.flattened = delivered
    return loader if combined is loader else combined.iterables


def _worker_seeding(source: Any, trainer: Any) -> Callable[[Any], None]:
    add_worker_init_fn = _defined_beside(source, "_auto_add_worker_init_fn")
    return lambda loader: add_worker_init_fn(loader, trainer.global_rank)


def _defined_beside(source: Any, name: str) -> Any:
    """A name of the module that defines the data source: of the namespace that the user imported."""
    module = sys.modules[type(source).__module__]
    if not hasattr(module, name):
        raise UnsupportedError(
            f"{module.__name__} has no {name!r} in this version of Lightning; MemFit knows 2.5 and 2.6. "
            "Install one of those, or set MEMFIT=off in the environment to train without MemFit."
        )
    return getattr(module, name)


def _attribute(loop: Any, name: str) -> Any:
    if not hasattr(loop, name):
        raise UnsupportedError(
            f"{type(loop).__name__} has no attribute {name!r} in this version of Lightning; MemFit knows 2.5 and 2.6. "
            "Install one of those, or set MEMFIT=off in the environment to train without MemFit."
        )
    return getattr(loop, name)


def _limited(length: int | None, limit: int | float) -> int | None:
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    return None if length is None else int(length * limit)
