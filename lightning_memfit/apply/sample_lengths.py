"""How long the samples of a data set are, where that is known without loading them.

Only values that are stored are looked at: a property could compute for minutes, and note its result in the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset, default_collate, default_convert

_ATTRIBUTES = ("lengths", "sizes")
_COLUMNS = ("length", "lengths")
_MOST_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class SampleLengths:
    """Lengths of all samples of a data set."""

    source: str
    """Where they are from, in words, such as ``"ByteDataset.lengths"``."""
    table: np.ndarray[Any, Any]
    """Shape (samples, columns): a sample may have several, such as a source's and a target's."""
    constant: bool = False
    """Whether every sample has the same shape, so that batches differ only in their numbers of samples."""

    def rank(self, first: Any) -> LengthRanking | None:
        """Begin to rank batches, with the indices of the first one; ``None`` if they are no indices of this table."""
        ranking = LengthRanking(self)
        return ranking if ranking.consider(0, first) else None

    def same_for_every_batch(self, loader: DataLoader[Any], first: Any) -> bool:
        """Whether no batch can be larger than the first one, whose indices are ``first``."""
        if loader.batch_sampler is None:  # then a sampler may draw lists of indices of any length
            return self.constant and isinstance(first, (int, np.integer))
        return self.constant and type(loader.batch_sampler) is BatchSampler


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """What the lengths say about one batch; each number counts only against that of another batch."""

    padded: float
    """Samples times the longest one, summed over the columns: what padding makes of it."""
    total: float
    """All lengths together: what packing makes of it."""
    longest: float
    """The longest sample, summed over the columns: what a slice of a single sample is padded to."""


class LengthRanking:
    """Batches ranked by the lengths of their samples alone."""

    def __init__(self, lengths: SampleLengths) -> None:
        """Nothing is ranked yet."""
        self.source = lengths.source
        """Where the lengths are from, in words."""
        self.ranked = 0
        """Batches ranked so far."""
        self._table = lengths.table
        self._extremes: dict[str, tuple[float, int, Any]] = {}

    def consider(self, position: int, indices: Any) -> bool:
        """Rank one more batch; whether its indices have lengths."""
        cost = self._cost(indices)
        if cost is None:
            return False
        self.ranked += 1
        for name, value in (*vars(cost).items(), ("smallest", -cost.padded)):
            if name not in self._extremes or value > self._extremes[name][0]:
                self._extremes[name] = value, position, indices
        return True

    def passing_by(self, batches: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Rank batches while they are passed on; ends at one without lengths."""
        for position, indices in batches:
            if not self.consider(position, indices):
                return
            yield position, indices

    def extremes(self) -> dict[int, Any]:
        """Position and indices of the largest in each way, and of the smallest, which must then be smaller."""
        return {position: indices for _, position, indices in self._extremes.values()}

    def holds(self, measured: Sequence[tuple[Any, int]]) -> bool:
        """Whether batches measure as one of the ways to rank them says.

        Args:
            measured: indices of batches, and the bytes that they really have.
        """
        known = [(self._cost(indices), size) for indices, size in measured]
        return any(
            _agrees([(getattr(cost, way), size) for cost, size in known if cost is not None])
            for way in ("padded", "total")
        )

    def _cost(self, indices: Any) -> _Cost | None:
        rows = _rows(self._table, indices)
        if rows is None or not len(rows):
            return None
        longest = float(rows.max(axis=0).sum())
        return _Cost(padded=len(rows) * longest, total=float(rows.sum()), longest=longest)


def known_lengths(loader: DataLoader[Any]) -> SampleLengths | None:
    """Lengths of the samples of a map-style loader, as far as something tells; ``None`` if nothing does.

    Looked at are constant shapes (a ``TensorDataset`` with torch's own collation), a stored ``lengths`` or ``sizes`` of
    the data set, a column ``length`` of a data set with columns, and a stored ``lengths`` or ``sizes`` of the samplers.
    """
    return _of_dataset(loader, loader.dataset) or _of_samplers(loader)


def _of_dataset(loader: DataLoader[Any], dataset: Any) -> SampleLengths | None:
    if type(dataset) is Subset:
        whole = _of_dataset(loader, dataset.dataset)
        rows = None if whole is None else _rows(whole.table, dataset.indices)
        return None if whole is None or rows is None else replace(whole, table=rows)
    size = _size_of(dataset)
    if size is None:
        return None
    if type(dataset) is TensorDataset and loader.collate_fn in (default_collate, default_convert):
        return SampleLengths(source="TensorDataset", table=np.ones((size, 1), dtype=np.int64), constant=True)
    name = type(dataset).__name__
    return _stored(dataset, name, size) or _column(dataset, name, size)


def _of_samplers(loader: DataLoader[Any]) -> SampleLengths | None:
    size = _size_of(loader.dataset)
    if size is None:
        return None
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        found = None if sampler is None else _stored(sampler, type(sampler).__name__, size)
        if found is not None:
            return found
    return None


def _stored(holder: Any, name: str, size: int) -> SampleLengths | None:
    held = getattr(holder, "__dict__", {})
    for attribute in _ATTRIBUTES:
        table = _table(held.get(attribute), size)
        if table is not None:
            return SampleLengths(source=f"{name}.{attribute}", table=table)
    return None


def _column(dataset: Any, name: str, size: int) -> SampleLengths | None:
    """A column of a data set as the library ``datasets`` makes them, where reading a column loads no other."""
    columns = getattr(dataset, "column_names", None)
    column = next((column for column in _COLUMNS if isinstance(columns, list) and column in columns), None)
    if column is None:
        return None
    try:
        # Without the user's transform, which is made for samples.
        values = (dataset.with_format(None) if hasattr(dataset, "with_format") else dataset)[column]
        table = _table(values if isinstance(values, (torch.Tensor, np.ndarray)) else list(values), size)
    except Exception:  # lengths are a short cut: whatever is wrong with them, batches are loaded instead
        return None
    return None if table is None else SampleLengths(source=f"{name}[{column!r}]", table=table)


def _table(values: Any, size: int) -> np.ndarray[Any, Any] | None:
    """Numbers of at least 0, one row a sample; ``None`` for anything else."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy() if values.layout == torch.strided else None
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)) or len(values) != size:
        return None
    try:
        table = np.asarray(values)
    except (TypeError, ValueError):  # rows of different lengths
        return None
    if table.dtype.kind not in "iuf" or table.ndim not in (1, 2) or not size:
        return None
    table = table.reshape(size, -1)
    if not 1 <= table.shape[1] <= _MOST_COLUMNS or not np.isfinite(table).all() or (table < 0).any():
        return None
    return table


def _rows(table: np.ndarray[Any, Any], indices: Any) -> np.ndarray[Any, Any] | None:
    """The rows of these indices; ``None`` if they are something else, such as names of files."""
    try:
        rows: np.ndarray[Any, Any] = table[np.asarray(indices, dtype=np.int64).reshape(-1)]
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return rows


def _size_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _agrees(pairs: list[tuple[float, int]]) -> bool:
    """Whether a larger cost never has fewer bytes."""
    pairs = sorted(pairs)
    return all(size >= smaller for (_, smaller), (_, size) in pairwise(pairs))
