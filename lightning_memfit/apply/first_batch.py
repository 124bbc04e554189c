"""Looking at the first batches of one loader, in the way that leaves no trace for its kind.

* A map-style ``DataLoader`` is read through a copy: the same dataset, but copies of its samplers. With workers, the
  batches are fetched in one worker, as in training: handles that a dataset opens on first use must not be opened in
  the process from which workers are forked.
* An ``IterableDataset`` without workers cannot be rewound: its samples are looked at and handed on, so that the loader
  may still be rebuilt with another batch size.
* Any other iterable is advanced, and what it yielded is handed on; workers stay open.
* A sequence is asked for its elements.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, IterDataPipe, SequentialSampler

from lightning_memfit.apply.handed_on import HandedOn, Stream, can_hand_on, hand_on, own_class, stream_of
from lightning_memfit.apply.random_sources import RandomSources, is_generator
from lightning_memfit.errors import ConfigurationError

# What a sampler may change in place is copied, also if the dataset holds it too.
_COPIED = (list, dict, set, deque, bytearray, torch.Tensor, np.ndarray)


class NoBatchError(Exception):
    """The loader yields no batch."""


class Look(ABC):
    """One look at the first batches: ``start``, then ``first`` or ``batches``, then ``end``."""

    def __init__(self, loader: Any) -> None:
        """Nothing is read yet."""
        self.loader = loader

    @property
    def generators(self) -> list[object]:
        """Random generators that must get their states back afterwards, besides the global ones."""
        generator = getattr(self.loader, "generator", None)
        return [generator] if is_generator(generator) else []

    @abstractmethod
    def start(self) -> None:
        """Make an iterator."""

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """The batches in order, one at a time; some are what the data still holds, see :meth:`own`."""

    def own(self, batch: Any) -> Any:
        """One of :meth:`batches` that the caller may change."""
        return _own_copy(batch)

    def first(self) -> Any:
        """The first batch, the caller's own.

        Raises:
            NoBatchError: if there is none.
        """
        missing = object()  # StopIteration is not let out: inside a generator it would turn into another exception
        batch = next(self.batches(), missing)
        if batch is missing:
            raise NoBatchError
        return self.own(batch)

    def end(self) -> None:  # noqa: B027 (some kinds have nothing to let go)
        """Let go of what was only needed for the look; called also after an exception."""

    def deliver(self) -> Any:
        """What Lightning must get in place of the loader: the loader itself, wherever that is possible."""
        return self.loader


def look_at(
    loader: Any,
    *,
    shared: Iterable[object],
    prepare: Callable[[Any], None],
    starts: int,
    in_order: bool = False,
) -> Look:
    """Choose the way for this kind of loader.

    Args:
        loader: one loader.
        shared: objects that samplers may refer to and that must not be copied with them.
        prepare: completes a loader whose workers are about to start.
        starts: how often Lightning makes an iterator of an object that is no ``DataLoader`` before it reads from it.
        in_order: whether Lightning will replace the sampler by one that does not shuffle, as for overfitting.

    Raises:
        ConfigurationError: if the object is no iterable.
    """
    if isinstance(loader, DataLoader):
        if not _is_standard(loader) or stream_of(loader) is not None:
            return _Items(loader, prepare, 1)
        if not isinstance(loader.dataset, IterableDataset):
            copied = _copy_samplers(loader, shared)
            if copied is None:
                return _Items(loader, prepare, 1)
            return MapStyleLook(loader, _unshuffled(loader, copied) if in_order else copied, prepare)
        in_this_process = loader.num_workers == 0 and not isinstance(loader.dataset, IterDataPipe)
        if in_this_process and can_hand_on(loader.dataset):
            return _Samples(loader)
        return _Items(loader, prepare, 1)
    if isinstance(loader, (list, tuple, range, str, bytes, torch.Tensor, np.ndarray)):
        return _Elements(loader)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"The loader is a {type(loader).__name__}, which is no iterable over batches. "
            "Return a DataLoader or another iterable."
        )
    return _Items(loader, prepare, starts)


class MapStyleLook(Look):
    """Of a map-style loader: through copies of its samplers, which tell the whole order without loading a sample."""

    def __init__(self, loader: DataLoader[Any], copied: tuple[Any, Any], prepare: Callable[[Any], None]) -> None:
        super().__init__(loader)
        self.select: Callable[[Iterator[Any]], Iterable[Any]] = _first_only
        """Which of the batches, given as their indices, are loaded. Set it before ``start``; by default the first."""
        self.collate: Callable[[Any], Any] = loader.collate_fn
        """Makes a batch of samples, where they are loaded: in a worker if the run has any."""
        self._indices, self._generator = copied
        self._prepare = prepare
        self._iterator: Iterator[Any] = iter(())

    @property
    def generators(self) -> list[object]:
        """Those that the dataset and the collation hold; samplers are copied with theirs."""
        return _generators_in(self.loader)

    def start(self) -> None:
        """Begin to load what is selected."""
        self.load(_Selected(self._indices, lambda order: self.select(order)))

    def batches(self) -> Iterator[Any]:
        """Those that are being loaded."""
        return self._iterator

    def own(self, batch: Any) -> Any:
        """The batch; a copy where it is not collated from samples, since the dataset may hold it."""
        return batch if self.loader.batch_sampler is not None else _own_copy(batch)

    def end(self) -> None:
        """End the worker, if there is one, and let go of who selected."""
        self._iterator = iter(())
        self.select, self.collate = _first_only, self.loader.collate_fn

    def load(self, indices: Iterable[Any]) -> None:
        """Begin to load the batches of these indices, as in training, in place of what was being loaded."""
        loader = self.loader
        settings: dict[str, Any] = {"collate_fn": self.collate, "generator": self._generator}
        settings.update(_batching(loader, indices))
        if loader.num_workers > 0:
            settings.update(
                num_workers=1,
                prefetch_factor=1,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
            )
        reader: DataLoader[Any] = DataLoader(loader.dataset, **settings)
        if loader.num_workers > 0:
            self._prepare(reader)
        self._iterator = iter(reader)


class HandedOnLook(Look):
    """Of what cannot be rewound: hands on what was looked at, unless nothing was found."""

    def __init__(self, loader: Any, owner: Any, stream: Stream) -> None:
        super().__init__(loader)
        self._owner, self._stream = owner, stream
        self._found = False
        self._delivered = loader

    def batches(self) -> Iterator[Any]:
        """The batches in order; each one is handed on."""
        for batch in self._read():
            self._found = True
            yield batch

    @abstractmethod
    def _read(self) -> Iterator[Any]:
        """The batches, on which nobody has laid hands yet."""

    @property
    def may_go_on(self) -> bool:
        """Whether a further batch can be looked at so that training is as in a plain run.

        Not where reading draws the random numbers that training draws too, nor of an object whose position is saved:
        a checkpoint would hold one that training has not reached.
        """
        saves_position = any(hasattr(held, "state_dict") for held in (self.loader, self._owner))
        return not saves_position and not self._stream.draws

    def end(self) -> None:
        """Let what was looked at wait for the next who iterates."""
        if stream_of(self._owner) is not None:  # waits since an earlier look
            return
        if not self._found:
            self._stream.drop()
        elif can_hand_on(self._owner):
            hand_on(self._owner, self._stream)
        else:
            self._delivered = HandedOn(self._owner, self._stream)

    def deliver(self) -> Any:
        """The loader, or what stands for it."""
        return self._delivered


class _Samples(HandedOnLook):
    """Of an ``IterableDataset`` in this process: its samples."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        dataset = loader.dataset
        stream = stream_of(dataset) or Stream(lambda: iter(dataset), RandomSources(loader.generator))
        super().__init__(loader, dataset, stream)
        self._iterator: Iterator[Any] = iter(())

    def start(self) -> None:
        loader = self.loader
        reader: DataLoader[Any] = DataLoader(
            _LookedAt(self._stream),
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            generator=loader.generator,
        )
        self._iterator = iter(reader)

    def _read(self) -> Iterator[Any]:
        return self._iterator

    def own(self, batch: Any) -> Any:
        return batch if self.loader.batch_sampler is not None else _own_copy(batch)

    def end(self) -> None:
        self._iterator = iter(())
        super().end()


class _Items(HandedOnLook):
    """Of any iterable: its items."""

    def __init__(self, loader: Any, prepare: Callable[[Any], None], starts: int) -> None:
        stream = stream_of(loader) or Stream(
            lambda: iter(loader),
            RandomSources(getattr(loader, "generator", None)),
            starts=starts,
            redraw=(lambda: _draw_as_a_start(loader)) if _is_standard(loader) else None,
            on_claim=(lambda iterator: setattr(loader, "_iterator", iterator)) if _keeps_workers(loader) else None,
        )
        super().__init__(loader, loader, stream)
        self._prepare = prepare

    def start(self) -> None:
        if isinstance(self.loader, DataLoader) and self.loader.num_workers > 0:
            self._prepare(self.loader)
        self._stream.open()
        if _keeps_workers(self.loader):
            self.loader._iterator = None

    def _read(self) -> Iterator[Any]:
        return self._stream.look_ahead()


class _Elements(Look):
    """Of a sequence: its elements."""

    def start(self) -> None:
        pass

    def batches(self) -> Iterator[Any]:
        return iter(self.loader)


def _first_only(order: Iterator[Any]) -> Iterator[Any]:
    return islice(order, 1)


class _Selected:
    """Some of the elements of an iterable, so that a worker fetches no other batch."""

    def __init__(self, iterable: Iterable[Any], select: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        self._iterable, self._select = iterable, select

    def __iter__(self) -> Iterator[Any]:
        return iter(self._select(iter(self._iterable)))


class _LookedAt(IterableDataset[Any]):
    """The samples of a stream, without using them up."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        self._stream.open()
        return self._stream.look_ahead()


class _NoSamples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _is_standard(loader: Any) -> bool:
    """Whether iterating is torch's own, so that a copy of the loader yields the same."""
    if not isinstance(loader, DataLoader):
        return False
    cls: Any = own_class(loader)
    return cls.__iter__ is DataLoader.__iter__ and cls._get_iterator is DataLoader._get_iterator


def _keeps_workers(loader: Any) -> bool:
    return _is_standard(loader) and bool(loader.persistent_workers) and loader.num_workers > 0


def _draw_as_a_start(loader: DataLoader[Any]) -> None:
    """Draw what ``iter(loader)`` draws: the seed that workers are seeded from."""
    iter(DataLoader(_NoSamples(), batch_size=None, generator=loader.generator))


def _batching(loader: DataLoader[Any], indices: Any) -> dict[str, Any]:
    if loader.batch_sampler is not None:
        return {"batch_sampler": indices}
    return {"batch_size": None, "sampler": indices}


def _unshuffled(loader: DataLoader[Any], copied: tuple[Any, Any]) -> tuple[Any, Any]:
    """What yields the indices after Lightning has replaced the sampler; a batch sampler of another kind is kept."""
    in_order: Any = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    if loader.batch_sampler is None:
        return in_order, copied[1]
    if type(loader.batch_sampler) is not BatchSampler:
        return copied
    sampler = loader.batch_sampler
    return BatchSampler(in_order, sampler.batch_size, sampler.drop_last), copied[1]


def _copy_samplers(loader: DataLoader[Any], shared: Iterable[object]) -> tuple[Any, Any] | None:
    """Copies of what yields the loader's indices, and of its generator; ``None`` if they cannot be copied.

    Samplers refer to datasets, modules and trainers; those are not copied.
    """
    memo: dict[int, Any] = {}
    for kept in (*shared, *_dataset_parts(loader.dataset)):
        memo[id(kept)] = kept
        if isinstance(kept, torch.nn.Module):
            memo.update({id(module): module for module in kept.modules()})
    indices = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    try:
        copied: tuple[Any, Any] = copy.deepcopy((indices, loader.generator), memo)
    except Exception:  # objects refuse to be copied in any way they like; the batch is then handed on
        return None
    return copied


def _dataset_parts(dataset: object) -> list[object]:
    parts: list[object] = []
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        if any(part is other for other in parts):
            continue
        parts.append(part)
        values = list(getattr(part, "__dict__", {}).values())
        waiting.extend(value for value in values if isinstance(value, Dataset))
        parts.extend(
            value for value in values if not isinstance(value, (Dataset, *_COPIED)) and not is_generator(value)
        )
    return parts


def _generators_in(loader: DataLoader[Any]) -> list[object]:
    """Random generators that the dataset and the collation hold as attributes; samplers are copied with theirs."""
    holders = [loader.collate_fn, *(part for part in _dataset_parts(loader.dataset) if isinstance(part, Dataset))]
    values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    return [value for value in values if is_generator(value)]


def _own_copy(batch: Any) -> Any:
    """A copy that the caller may change, while the batch itself is still to be trained on."""
    try:
        return copy.deepcopy(batch)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        return batch  # a batch that cannot be copied is at least shown
