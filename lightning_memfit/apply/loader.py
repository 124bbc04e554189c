"""The loaders of a fit: asked for once, looked at without a trace, rebuilt where that is wanted.

Limits, besides side effects inside user datasets: the user's hook runs when the plan is made instead of when training
starts. Random numbers that it draws then, and those that a stream draws for the batches that are handed on, are drawn
again, as it were, when Lightning asks, provided that nothing else drew in between; if something did (training, before a
validation stream is read), the run is a different, equally valid one. Loaders that are rebuilt while workers read an
``IterableDataset`` start their workers anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_memfit.apply.batch_scan import ScanLimits, ScannedBatch, together
from lightning_memfit.apply.batch_shapes import measure
from lightning_memfit.apply.data_source import (
    answer_once,
    answer_to_come,
    answer_with,
    ask,
    ask_again,
    combined,
    forget_answer,
    mode_of,
    of_this_rank,
    structured,
    train_source,
    validation_loaders,
    validation_source,
    worker_seeding,
)
from lightning_memfit.apply.epoch_scan import Scan, ScanBounds, scan_of
from lightning_memfit.apply.first_batch import Look, look_at
from lightning_memfit.apply.handed_on import stop_handing_on
from lightning_memfit.apply.looks import first_batches, largest_batches
from lightning_memfit.apply.random_sources import Move
from lightning_memfit.apply.rebuild import declared_batch_size, describe, length_of, rebuild, rebuild_obstacle
from lightning_memfit.apply.side_by_side import uneven_batches
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.undo import Undo, set_instance_attribute


class TrainLoader:
    """What Lightning will train from: asked for once, looked at without a trace, rebuilt where that is wanted."""

    def __init__(self, trainer: Any, source: Any, loader: Any, hook_move: Move) -> None:
        """Use :meth:`request` instead."""
        self.loader = loader
        """What the user's hook returned, or what was passed to ``fit``; with this rank's share of it."""
        self._trainer, self._source, self._hook_move = trainer, source, hook_move
        self._instance = source.instance
        self._combined = combined(source, loader, "max_size_cycle")
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
        source = train_source(trainer)
        loader, move = ask(source)
        if loader is None:
            raise ConfigurationError(
                "train_dataloader() returned None, so there is no batch to plan with. Return a DataLoader or another "
                "iterable over batches."
            )
        members = combined(source, loader, "max_size_cycle")
        shares = [of_this_rank(trainer, member) for member in members.flattened]
        return cls(trainer, source, _put_back(members, loader, shares), move)

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
        if mode_of(self._combined) == "min_size":
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
    def uneven_batches(self) -> str | None:
        """Which batch of several loaders has more samples of one than of another; ``None`` if none is known to."""
        mode = mode_of(self._combined)
        if len(self._combined.flattened) == 1 or mode == "sequential":
            return None
        return uneven_batches(self._combined.flattened, self.num_batches, cycled=mode == "max_size_cycle")

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
        batches = first_batches(looks, self._hook_move)
        if batches is None:
            raise self._no_batch()
        self._hand_on(looks)
        return structured(self._combined, batches)

    def scan(
        self, limits: ScanLimits, batch_size: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> ScannedBatch:
        """The largest batch of the first epoch that is found within the limits; as careful as :meth:`peek`.

        Of several loaders the largest of each are put together. What cannot be rewound hands on all batches that were
        looked at, in order.

        Args:
            limits: where to end.
            batch_size: samples per batch, where :meth:`install` will be asked for another number than the loader's.
            clock: tells seconds.

        Raises:
            ConfigurationError: if the loader yields no batch, or cannot be rebuilt with this batch size.
        """
        self._check_rebuild(batch_size)
        rebuilt = self._with_batch_size(self._handed, batch_size)
        members = self._combined.flattened if rebuilt is self._handed else [rebuilt]
        looks = [self._look(member) for member in members]
        out_of_time = _Deadline(limits, clock)
        most_held = self._trainer.max_steps if self._trainer.max_steps >= 0 else None
        scans = [
            scan_of(
                look,
                ScanBounds(
                    limits=limits, total=self._total_of(look.loader), out_of_time=out_of_time, most_held=most_held
                ),
            )
            for look in looks
        ]
        found = largest_batches(looks, scans, self._hook_move)
        if found is None:
            raise self._no_batch()
        if rebuilt is self._handed:
            self._hand_on(looks)
        batch = structured(self._combined, [each.batch for each in found])
        if len(found) > 1:
            return together(batch, found, total=self.num_batches)
        return replace(found[0], batch=batch, rival=self._as_yielded(found[0].rival))

    def install(self, batch_size: int | None = None) -> Undo:
        """Make Lightning get this very loader when it asks next, and later ones from the user's hook.

        Args:
            batch_size: samples per batch; loaders with another batch size are rebuilt. ``None`` changes nothing.

        Raises:
            ConfigurationError: if another batch size is asked of a loader that cannot be rebuilt.
        """
        self._check_rebuild(batch_size)
        return answer_with(self._source, lambda: self._deliver(batch_size))

    def combined_at(self, batch_size: int | None) -> Any:
        """What Lightning makes of the loader, as :meth:`install` with this batch size hands it on."""
        return combined(self._source, self._with_batch_size(self._handed, batch_size), "max_size_cycle")

    def close(self) -> None:
        """End workers that were started for a look and that nobody went on to use."""
        rebuilt = [] if self._rebuilt is None else [self._rebuilt[1]]
        for member in (*self._combined.flattened, *rebuilt):
            if isinstance(member, DataLoader) and member.num_workers > 0:
                stop_handing_on(member)

    def _hand_on(self, looks: Sequence[Look]) -> None:
        """Let what was looked at stand for loaders that are used up by looking, from the first look on."""
        delivered = [look.deliver() for look in looks]
        if any(old is not new for old, new in zip(self._combined.flattened, delivered, strict=True)):
            self._handed = _put_back(self._combined, self.loader, delivered)

    def _look(self, member: Any) -> Look:
        return _look_at(self._trainer, self._source, member, starts=2)

    def _total_of(self, member: Any) -> int | None:
        """Batches of one of the loaders in an epoch."""
        total = _limited(length_of(member), self._trainer.limit_train_batches)
        if mode_of(self._combined) != "min_size":
            return total
        return min((bound for bound in (total, self.num_batches) if bound is not None), default=None)

    def _as_yielded(self, rival: ScannedBatch | None) -> ScannedBatch | None:
        return None if rival is None else replace(rival, batch=structured(self._combined, [rival.batch]))

    def _no_batch(self) -> ConfigurationError:
        return ConfigurationError(
            f"The train loader yields 0 batches ({self.describe}), so there is nothing to plan with or to train "
            "on. Check the dataset's length, drop_last and the sampler."
        )

    def _check_rebuild(self, batch_size: int | None) -> None:
        if batch_size is not None and batch_size != self.batch_size and self.rebuild_obstacle is not None:
            raise ConfigurationError(
                f"The train loader cannot be rebuilt with {batch_size} samples per batch instead of "
                f"{self.batch_size}: {self.rebuild_obstacle}. Give it this batch size where it is made."
            )

    def _deliver(self, batch_size: int | None) -> Any:
        if self._asked or self._source.instance is not self._instance:
            return self._with_batch_size(ask_again(self._source), batch_size)
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
        known = self._rebuilt
        if known is None or known[0] is not loader or declared_batch_size(known[1]) != batch_size:
            self.close()
            stop_handing_on(loader)
            self._rebuilt = (loader, rebuild(loader, batch_size))
        assert self._rebuilt is not None
        return self._rebuilt[1]


def scan_validation_batches(
    trainer: Any,
    limits: ScanLimits,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> ScannedBatch | None:
    """The largest batch of any validation loader, without a trace; ``None`` if the run does not validate.

    Call it when sanity validation starts, or when training starts. The user's ``val_dataloader()`` runs here if it has
    not run yet, and Lightning then gets what it returned. See :func:`forget_validation_loader`.

    Args:
        trainer: the Trainer, fitting.
        limits: where to end; the seconds are for all loaders together, the batches for each.
        clock: tells seconds.
    """
    if not trainer.enable_validation or trainer.limit_val_batches == 0 or _never_validates(trainer):
        return None
    source, loaders = validation_source(trainer), validation_loaders(trainer)
    loader, move = (None, None) if loaders is not None else ask(source)
    if loaders is None:
        loaders = combined(source, loader, "sequential")
    members = list(loaders.flattened)
    looks = [_look_at(trainer, source, member, starts=1 if move is None else 2) for member in members]
    all_bounds = _validation_bounds(trainer, members, limits, clock)
    scans = [scan_of(look, bounds) for look, bounds in zip(looks, all_bounds, strict=True)]
    if mode_of(loaders) == "sequential":
        found = _largest(looks, scans, move, [bounds.total for bounds in all_bounds])
    else:
        found = _side_by_side(loaders, looks, scans, move)
    delivered = [look.deliver() for look in looks]
    if move is not None:
        answer_once(source, _put_back(loaders, loader, delivered), move)
    elif any(old is not new for old, new in zip(members, delivered, strict=True)):
        loaders.flattened = delivered
    return found


@contextmanager
def loaders_in_sight(trainer: Any, train: TrainLoader, batch_size: int | None) -> Iterator[None]:
    """Within this context the Trainer tells its loaders, and their numbers of batches, as it will once it trains.

    Lightning sets up each loop's loaders when the loop begins: those of training behind the sanity check, those of
    validation with the first validation. What user code asks before, it would be told as none and as infinity. Loaders
    that are set up already are left alone.

    Args:
        trainer: the Trainer, fitting; a look at the validation loaders was taken, if it validates.
        train: its train loader.
        batch_size: as :meth:`TrainLoader.install` was given it.
    """
    fit_loop = trainer.fit_loop
    val_loop = fit_loop.epoch_loop.val_loop
    with ExitStack() as undos:
        if fit_loop._combined_loader is None:
            batches = train.num_batches_at(batch_size)
            shown = {"_combined_loader": train.combined_at(batch_size), "max_batches": _or_infinite(batches)}
            for name, value in shown.items():
                undos.callback(set_instance_attribute(fit_loop, name, value))
        source, loader = validation_source(trainer), answer_to_come(validation_source(trainer))
        if validation_loaders(trainer) is None and loader is not None:
            loaders = combined(source, loader, "sequential")
            lengths = [_limited(length_of(member), trainer.limit_val_batches) for member in loaders.flattened]
            shown = {"_combined_loader": loaders, "_max_batches": [_or_infinite(length) for length in lengths]}
            for name, value in shown.items():
                undos.callback(set_instance_attribute(val_loop, name, value))
        yield


def forget_validation_loader(trainer: Any) -> None:
    """Drop what a look at the validation loaders keeps for Lightning, where Lightning never asked for it."""
    forget_answer(validation_source(trainer))


def _validation_bounds(
    trainer: Any, members: Sequence[Any], limits: ScanLimits, clock: Callable[[], float]
) -> list[ScanBounds]:
    out_of_time = _Deadline(limits, clock)
    # The sanity check reads its few batches and starts again: what it leaves would be lost.
    sanity = trainer.num_sanity_val_steps if trainer.sanity_checking else float("inf")
    return [
        ScanBounds(
            limits=limits,
            total=_limited(length_of(member), trainer.limit_val_batches),
            out_of_time=out_of_time,
            most_held=None if sanity == float("inf") else int(sanity),
        )
        for member in members
    ]


def _largest(
    looks: list[Look], scans: list[Scan], move: Move | None, totals: Sequence[int | None]
) -> ScannedBatch | None:
    """The largest batch of loaders that are read one after another."""
    each_largest: list[tuple[int, int, ScannedBatch]] = []
    for index, (look, scan) in enumerate(zip(looks, scans, strict=True)):
        found = largest_batches([look], [scan], move)
        if found is not None:
            each_largest.append((measure(found[0].batch).num_bytes, index, found[0]))
    if not each_largest:
        return None
    size, index, largest = max(each_largest, key=lambda each: (each[0], -each[1]))
    largest = replace(largest, dataloader_idx=index if len(looks) > 1 else None)
    counts = [total for total in totals if total is not None]
    if len(counts) < len(totals):
        return largest
    whole = sum(counts[at] * one * found.mean_share for one, at, found in each_largest)
    return replace(
        largest,
        epoch_batches=sum(counts),
        mean_share=whole / (max(1, sum(counts)) * max(1, size)),
    )


def _side_by_side(loaders: Any, looks: list[Look], scans: list[Scan], move: Move | None) -> ScannedBatch | None:
    found = largest_batches(looks, scans, move)
    if found is None:
        return None
    return together(structured(loaders, [each.batch for each in found]), found, total=None)


def _look_at(trainer: Any, source: Any, member: Any, *, starts: int) -> Look:
    return look_at(
        member,
        shared=(trainer, trainer.lightning_module, trainer.datamodule),
        prepare=worker_seeding(source, trainer),
        starts=starts,
        in_order=trainer.overfit_batches > 0,
    )


class _Deadline:
    """Whether the time of a scan is over; it runs from the first question, when the first batch is there."""

    def __init__(self, limits: ScanLimits, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = limits.max_seconds, clock
        self._end: float | None = None

    def __call__(self) -> bool:
        now = self._clock()
        if self._end is None:
            self._end = now + self._seconds
        return now >= self._end


def _never_validates(trainer: Any) -> bool:
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    return not trainer.sanity_checking and None not in (every, epochs) and 0 <= epochs < every


def _put_back(combined: Any, loader: Any, delivered: list[Any]) -> Any:
    """``loader`` with what must be handed to Lightning in place of its members; itself where that is the same."""
    if all(old is new for old, new in zip(combined.flattened, delivered, strict=True)):
        return loader
    combined.flattened = delivered
    return loader if combined is loader else combined.iterables


def _or_infinite(length: int | None) -> float:
    return float("inf") if length is None else length


def _limited(length: int | None, limit: int | float) -> int | None:
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    return None if length is None else int(length * limit)
