"""Looking for the largest batch of an epoch, within limits and without a trace.

1. Where lengths of the samples are known without loading them, every batch of the epoch is ranked by them, and only
   those at the top are loaded, and two others. If the loaded ones contradict the lengths, these are not believed.
2. Otherwise map-style batches are loaded as far as the limits allow, spread over the epoch: data that are sorted have
   their longest samples at one end.
3. What cannot be rewound is held until training takes it, so only a few batches are looked at, and only as long as
   training is afterwards as in a plain run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memfit.apply.batch_scan import ScanLimits, ScannedBatch
from lightning_memfit.apply.batch_shapes import BatchShapes, ShapeRange, measure
from lightning_memfit.apply.first_batch import HandedOnLook, Look, MapStyleLook, NoBatchError
from lightning_memfit.apply.sample_lengths import LengthRanking, SampleLengths, known_lengths

_MOST_FAILURES = 3


@dataclass(frozen=True, kw_only=True)
class ScanBounds:
    """What bounds the scan of one loader."""

    limits: ScanLimits
    """What was asked for."""
    total: int | None
    """Batches of the epoch; ``None`` if unknown."""
    out_of_time: Callable[[], bool]
    """Whether no further batch may be begun."""
    most_held: int | None = None
    """Batches that the next iteration will certainly take, where they cannot be rewound; ``None`` if it takes all."""


class Scan(ABC):
    """One scan: make it, start its look, then ``begin``, ``go_on`` and ``found``, and end the look."""

    def __init__(self, bounds: ScanBounds) -> None:
        """Read nothing yet."""
        self._bounds = bounds
        self._tally = _Tally()
        self._unreadable: str | None = None

    @abstractmethod
    def begin(self) -> None:
        """Look at the first batch.

        Raises:
            NoBatchError: if there is none.
        """

    @abstractmethod
    def go_on(self) -> None:
        """Look at others within the bounds."""

    @abstractmethod
    def found(self) -> ScannedBatch:
        """The largest."""

    def _found(self, rival: ScannedBatch | None, **facts: Any) -> ScannedBatch:
        return ScannedBatch(
            batch=self._tally.largest_batch,
            index=self._tally.largest,
            total=self._bounds.total,
            larger_elsewhere=self._tally.larger_elsewhere(),
            shape_ranges=self._tally.shape_ranges(),
            mean_share=self._tally.mean_share(),
            rival=rival,
            unreadable=self._unreadable,
            **facts,
        )

    def _could_not_read(self, position: int, error: Exception) -> None:
        # What a plain run meets, if at all, in the middle of training is no reason to end it before it began.
        words = (str(error).strip().splitlines() or [""])[0][:120]
        self._unreadable = self._unreadable or f"batch_idx {position} raised {type(error).__name__}: {words}"


def scan_of(look: Look, bounds: ScanBounds) -> Scan:
    """The scan for a kind of loader, its look not started."""
    return _MapStyleScan(look, bounds) if isinstance(look, MapStyleLook) else _InOrderScan(look, bounds)


class _InOrderScan(Scan):
    """Of batches that come one after another: streams, whose batches are held, and sequences."""

    def __init__(self, look: Look, bounds: ScanBounds) -> None:
        super().__init__(bounds)
        self._look = look
        self._batches: Iterator[Any] = iter(())
        self._ended = False
        self._densest_batch: Any = None
        self._held_bytes = 0

    def begin(self) -> None:
        self._batches = self._look.batches()
        if not self._take():
            raise NoBatchError

    def go_on(self) -> None:
        while self._may_go_on() and not self._bounds.out_of_time():
            try:
                self._ended = not self._take()
            except Exception as error:
                self._could_not_read(self._tally.scanned, error)
                return

    def found(self) -> ScannedBatch:
        scanned, rival = self._tally.scanned, None
        if self._tally.has_rival:
            batch = self._look.own(self._densest_batch)
            rival = ScannedBatch(batch=batch, index=self._tally.densest, total=self._bounds.total)
        complete = self._ended or scanned == self._bounds.total
        return self._found(rival, scanned=scanned, complete=complete, held_bytes=self._held_bytes)

    def _may_go_on(self) -> bool:
        limits, bounds = self._bounds.limits, [self._bounds.total, self._bounds.limits.max_batches]
        if isinstance(self._look, HandedOnLook):
            if not self._look.may_go_on or self._held_bytes >= limits.max_held_bytes:
                return False
            bounds += [self._bounds.most_held, limits.max_handed_on]
        return not self._ended and self._tally.scanned < min(bound for bound in bounds if bound is not None)

    def _take(self) -> bool:
        missing = object()
        batch = next(self._batches, missing)
        if batch is missing:
            return False
        position, shapes = self._tally.scanned, measure(batch)
        if self._tally.add(position, shapes):
            self._tally.largest_batch = self._look.own(batch)
        if self._tally.densest == position:
            self._densest_batch = batch
        if isinstance(self._look, HandedOnLook):
            self._held_bytes += shapes.num_bytes
        return True


class _MapStyleScan(Scan):
    """Of a map-style loader. At most two batches are held at once: the largest so far and the one just made.

    With workers, the scan's own worker may already be making the next one.
    """

    def __init__(self, look: MapStyleLook, bounds: ScanBounds) -> None:
        super().__init__(bounds)
        self._look = look
        self._collate = look.collate
        self._lengths: SampleLengths | None = None
        self._ranking: LengthRanking | None = None
        self._given: list[tuple[int, Any]] = []
        """Position and indices of every batch that is loaded, in the order of loading."""
        self._set_aside: list[tuple[int, Any]] = []
        """Those to load as well if the lengths do not tell all."""
        self._num_loaded = self._num_failed = 0
        self._ended = False
        look.select, look.collate = self._select, _KeepLargest(self._collate, above=None)

    def begin(self) -> None:
        if not self._take():
            raise NoBatchError

    def go_on(self) -> None:
        self._take_all()
        if self._ranking is None:
            return
        self._give_up_lengths_if_contradicted()
        # Lengths of a source say nothing of a target's.
        if self._ranking is None or self._tally.larger_elsewhere():
            self._load(self._set_aside)
            self._give_up_lengths_if_contradicted()

    def _give_up_lengths_if_contradicted(self) -> None:
        measured = [(indices, size) for at, indices in self._given if (size := self._tally.bytes_at(at)) is not None]
        if self._ranking is not None and not self._ranking.holds(measured):
            self._ranking = None

    def found(self) -> ScannedBatch:
        rival = self._loaded_again(self._tally.densest) if self._tally.has_rival else None
        if self._is_constant():
            assert self._lengths is not None
            origin = f"batch_idx 0, as large as any other (all samples of the {self._lengths.source} have one shape)"
            return self._found(rival, scanned=1, complete=True, origin=origin)
        scanned = self._tally.scanned if self._ranking is None else self._ranking.ranked
        total = self._bounds.total
        if total is None and self._ended:
            total = len(self._given) if self._ranking is None else scanned
        ranked_by = None if self._ranking is None else self._ranking.source
        complete = scanned == total and not self._num_failed
        return self._found(rival, scanned=scanned, complete=complete, ranked_by=ranked_by)

    # Which batches are loaded

    def _select(self, order: Iterator[Any]) -> Iterator[Any]:
        """The indices of the batches to load; runs step by step while they are loaded."""
        missing = object()
        first = next(order, missing)
        if first is missing:
            return
        yield self._give(0, first)
        if self._bounds.limits.max_batches == 1:
            return
        self._lengths = known_lengths(self._look.loader)
        if self._is_constant():
            return
        further = self._further(order)
        self._ranking = None if self._lengths is None else self._lengths.rank(first)
        if self._ranking is None:
            for position, indices in self._spread(further):
                yield self._give(position, indices)
            return
        self._set_aside = [*self._spread(self._ranking.passing_by(further))]
        # A batch that has nothing to do with the extremes is one more on which lengths of no meaning would fail.
        chosen = {**self._ranking.extremes(), **dict(self._set_aside[len(self._set_aside) // 2 :][:1])}
        for position in sorted(chosen.keys() - {0}):
            yield self._give(position, chosen[position])

    def _is_constant(self) -> bool:
        if self._lengths is None:
            return False
        _, first = self._given[0]
        return self._lengths.same_for_every_batch(self._look.loader, first)

    def _give(self, position: int, indices: Any) -> Any:
        self._given.append((position, indices))
        return indices

    def _further(self, order: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """Every batch after the first, until the epoch or the time is over."""
        total = self._bounds.total
        for position, indices in enumerate(order, start=1):
            if total is not None and position >= total:
                break
            if self._bounds.out_of_time():
                return
            yield position, indices
        self._ended = True

    def _spread(self, batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Those of the batches that are loaded where nothing ranks them."""
        total, most = self._bounds.total, self._bounds.limits.max_batches
        wanted = range(most) if total is None else spread_over(total, most)
        for position, indices in batches:
            if position in wanted:
                yield position, indices
            elif total is None and self._ranking is None:
                return

    # What they measure

    def _take(self) -> bool:
        seen = next(self._look.batches(), None)
        if seen is None:
            return False
        position, _ = self._given[self._num_loaded]
        self._num_loaded += 1
        if self._tally.add(position, seen.shapes):
            self._tally.largest_batch = self._look.own(seen.batch)
        return True

    def _take_all(self) -> None:
        more = True
        while more and self._num_failed < _MOST_FAILURES:
            try:
                more = self._take()
            except Exception as error:
                self._skip(error)

    def _skip(self, error: Exception) -> None:
        position, _ = self._given[min(self._num_loaded, len(self._given) - 1)]
        self._num_loaded += 1
        self._num_failed += 1
        self._could_not_read(position, error)
        # An error of a worker refers to itself by its traceback, and by that to the worker, which must end in time.
        error.__traceback__ = None

    def _load(self, batches: Iterable[tuple[int, Any]]) -> None:
        known = {position for position, _ in self._given}

        def in_time() -> Iterator[Any]:
            for position, indices in batches:
                if self._bounds.out_of_time():
                    return
                if position not in known:
                    yield self._give(position, indices)

        self._look.collate = _KeepLargest(self._collate, above=self._tally.bytes_at(self._tally.largest) or 0)
        self._num_loaded = len(self._given)
        self._look.load(in_time())
        self._take_all()

    def _loaded_again(self, position: int) -> ScannedBatch | None:
        """The batch at a position once more: it was let go, not being the largest."""
        indices = next(indices for given, indices in self._given if given == position)
        self._look.collate = self._collate
        try:
            self._look.load([indices])
            batch = next(self._look.batches())
        except Exception as error:
            self._skip(error)
            return None
        return ScannedBatch(batch=self._look.own(batch), index=position, total=self._bounds.total)


def spread_over(total: int, most: int) -> frozenset[int]:
    """At most ``most`` positions of ``total``, evenly, with both ends and the last one that is certainly full.

    >>> sorted(spread_over(100, 5))
    [0, 33, 66, 98, 99]
    """
    if total <= most:
        return frozenset(range(total))
    if most < 4:
        return frozenset(range(most))
    steps = most - 2
    return frozenset({total - 2, *(round(step * (total - 1) / steps) for step in range(steps + 1))})


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What comes back from where a batch was made."""

    shapes: BatchShapes
    batch: Any
    """The batch, if it is larger than all before; ``None`` otherwise, so that a worker does not send it."""


class _KeepLargest:
    """Collation that measures, and lets go of what is not larger than all before. Runs in a worker if there is one."""

    def __init__(self, collate: Callable[[Any], Any], *, above: int | None) -> None:
        self._collate, self._largest = collate, above

    def __call__(self, samples: Any) -> _Seen:
        batch = self._collate(samples)
        shapes = measure(batch)
        if self._largest is not None and shapes.num_bytes <= self._largest:
            return _Seen(shapes=shapes, batch=None)
        self._largest = shapes.num_bytes
        return _Seen(shapes=shapes, batch=batch)


class _Tally:
    """What was measured so far, by position."""

    def __init__(self) -> None:
        self.largest_batch: Any = None
        self.largest = self.densest = 0
        self._measured: dict[int, BatchShapes] = {}

    def add(self, position: int, shapes: BatchShapes) -> bool:
        """Note a batch; whether it is larger than all before."""
        is_first = not self._measured
        self._measured[position] = shapes
        is_largest = is_first or shapes.num_bytes > self._measured[self.largest].num_bytes
        if is_largest:
            self.largest = position
        if is_first or shapes.bytes_per_sample > self._measured[self.densest].bytes_per_sample:
            self.densest = position
        return is_largest

    @property
    def scanned(self) -> int:
        return len(self._measured)

    @property
    def has_rival(self) -> bool:
        densest, largest = self._measured[self.densest], self._measured[self.largest]
        return densest.bytes_per_sample > largest.bytes_per_sample

    def bytes_at(self, position: int) -> int | None:
        return self._measured[position].num_bytes if position in self._measured else None

    def mean_share(self) -> float:
        """Mean bytes of a batch over those of the largest."""
        largest = self._measured[self.largest].num_bytes
        return sum(each.num_bytes for each in self._measured.values()) / (len(self._measured) * max(1, largest))

    def larger_elsewhere(self) -> tuple[str, ...]:
        """Tensors of which another batch has more elements than the largest one, in words."""
        largest, alike = self._measured[self.largest], self._alike()
        words = []
        for place, (name, shape) in enumerate(zip(largest.names, largest.shapes, strict=True)):
            most, most_shape = max((shapes.elements[place], shapes.shapes[place]) for shapes in alike)
            if most > largest.elements[place]:
                words.append(f"batch{name}: {most_shape} instead of {shape}")
        return tuple(words)

    def shape_ranges(self) -> tuple[ShapeRange, ...]:
        by_tensor = zip(*(shapes.shapes for shapes in self._alike()), strict=True)
        return tuple(tuple((min(sizes), max(sizes)) for sizes in zip(*shapes, strict=True)) for shapes in by_tensor)

    def _alike(self) -> list[BatchShapes]:
        """Batches with the same tensors as the largest one."""
        largest = self._measured[self.largest]
        ranks = list(map(len, largest.shapes))
        return [
            shapes
            for shapes in self._measured.values()
            if shapes.names == largest.names and list(map(len, shapes.shapes)) == ranks
        ]
