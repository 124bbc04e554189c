"""The worst batch of a run: what is known about it, how far it is looked for, and the one that the user gives.

Batches are compared by the bytes of their tensors: what one costs grows with samples x length. Where batches differ in
their numbers of samples that is not all: attention grows with the square of the length, and a slice of some samples
with what each of them takes. So the batch with the most bytes per sample is named beside the largest, as its rival.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memfit.apply.batch_shapes import ShapeRange, shapes_in_words, structure_of
from lightning_memfit.apply.random_sources import RandomSources
from lightning_memfit.errors import ConfigurationError, users_errors_as
from lightning_memfit.units import MIB


@dataclass(frozen=True, kw_only=True)
class ScanLimits:
    """Where a scan ends. The first batch is always looked at."""

    max_batches: int = 64
    """Batches loaded of one loader."""
    max_seconds: float = 5.0
    """Seconds after the first batch in which further ones may be begun, of all loaders together."""
    max_handed_on: int = 4
    """Batches held for training, of one loader that cannot be rewound."""
    max_held_bytes: int = 256 * MIB
    """Bytes of those batches after which no further one is held."""


@dataclass(frozen=True, kw_only=True)
class ScannedBatch:
    """The largest batch that was found."""

    batch: Any
    """The batch itself, collated, on the host; the caller's own."""
    index: int = 0
    """Position in its loader, from 0, as ``batch_idx``."""
    scanned: int = 1
    """Batches looked at."""
    total: int | None = None
    """Batches of the epoch; ``None`` if unknown."""
    complete: bool = False
    """Whether every batch of the epoch was looked at."""
    ranked_by: str | None = None
    """What told the lengths of the samples, so that most batches were not loaded; ``None`` if each one was."""
    larger_elsewhere: tuple[str, ...] = ()
    """Tensors of which another batch has more than this one, in words: no batch need have the most of all."""
    shape_ranges: tuple[ShapeRange, ...] = ()
    """How the shape of each tensor varies over the batches that were loaded."""
    rival: ScannedBatch | None = None
    """A batch of fewer bytes, but more per sample; ``None`` if the largest has the most of both."""
    dataloader_idx: int | None = None
    """Which of several validation loaders that are read one after another it comes from; ``None`` if there is one."""
    mean_share: float = 1.0
    """Mean bytes of the batches that were loaded, over those of this one; over all loaders of an evaluation."""
    epoch_batches: int | None = None
    """Batches of a whole evaluation, over all loaders; ``None`` if unknown, or if it is no validation batch."""
    held_bytes: int = 0
    """Bytes of batches that wait on the host to be handed on."""
    unreadable: str | None = None
    """The first batch that could not be read, and why, in words."""
    origin: str | None = None
    """Where the batch is from, in words, if not simply from a scan."""

    def describe(self) -> str:
        """Which batch it is, how it was found, and its shapes, for reports."""
        words = self.origin or self._found_how()
        if self.unreadable is not None:
            words += f" ({self.unreadable})"
        words += f": {shapes_in_words(self.batch)}"
        if self.larger_elsewhere:
            words += f"; another batch has more of {', '.join(self.larger_elsewhere)}"
        if self.rival is not None:
            words += f"; batch_idx {self.rival.index} has more per sample: {shapes_in_words(self.rival.batch)}"
        return words

    def _found_how(self) -> str:
        of_total = "" if self.total is None else f" of {self.total:,} batches"
        how = "looked at" if self.ranked_by is None else f"ranked by {self.ranked_by}"
        if self.complete:
            return f"batch_idx {self.index} of {self.scanned:,} batches (all {how})"
        which = "the only one" if self.scanned == 1 else f"the largest of {self.scanned:,}"
        return f"batch_idx {self.index}, {which} {how}{of_total}"


def together(batch: Any, found: Sequence[ScannedBatch], *, total: int | None) -> ScannedBatch:
    """The largest batches of several loaders that are read side by side, as one batch.

    Each loader shuffles for itself, so that any of their batches may meet in some epoch.

    Args:
        batch: those of ``found``, structured as the loaders are.
        found: what was found in each loader.
        total: batches of an epoch of all together.
    """
    complete = all(each.complete for each in found)
    where = ", ".join(f"batch_idx {each.index} of {each.total or 'an unknown number'}" for each in found)
    return ScannedBatch(
        batch=batch,
        index=found[0].index,
        scanned=max(each.scanned for each in found),
        total=total,
        complete=complete,
        larger_elsewhere=tuple(words for each in found for words in each.larger_elsewhere),
        shape_ranges=tuple(ranges for each in found for ranges in each.shape_ranges),
        held_bytes=sum(each.held_bytes for each in found),
        unreadable=next((each.unreadable for each in found if each.unreadable is not None), None),
        origin=f"the largest of each of {len(found)} loaders ({where}; {'' if complete else 'not '}all looked at)",
    )


def given_worst_batch(value: Any, first_batch: Any) -> ScannedBatch:
    """The batch that the user gave as the largest. Random generators keep their states.

    Args:
        value: a batch, a function without arguments that makes one, or a function that makes one of the first batch.
        first_batch: the first batch of the run, which the function may change.

    Raises:
        ConfigurationError: if the batch is not built as the first one is, or the function fails or takes other
            arguments.

    >>> import torch
    >>> first = {"ids": torch.zeros(4, 8, dtype=torch.int64)}
    >>> given_worst_batch(lambda batch: {"ids": batch["ids"].repeat(1, 3)}, first).describe()
    'the batch given as worst_batch=: (4, 24) int64'
    """
    expected = structure_of(first_batch)
    with RandomSources().kept():
        if callable(value):
            with users_errors_as(ConfigurationError, "worst_batch= failed: "):
                batch = _called(value, first_batch)
        else:
            batch = value
    given = structure_of(batch)
    if given != expected:
        raise ConfigurationError(
            "worst_batch= gives a batch that is built in another way than those of the run.\n"
            f"  worst_batch=: {given}\n"
            f"  first batch:  {expected}\n"
            "Give one with the same keys, types, dtypes and numbers of dimensions, for instance one made of the first "
            "batch, by worst_batch= a function of it."
        )
    return ScannedBatch(batch=batch, origin="the batch given as worst_batch=")


def _called(function: Callable[..., Any], first_batch: Any) -> Any:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C do not tell theirs
        return function(first_batch)
    for arguments in ((), (first_batch,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return function(*arguments)
    raise ConfigurationError(
        f"worst_batch= is a function of {signature}, which takes neither 0 arguments nor 1, the first batch. Make it a "
        "function of none or of one."
    )
