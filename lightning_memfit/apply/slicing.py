"""Which slices a collated batch is divided into, and what each one's mean loss counts."""

from __future__ import annotations

import math
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.errors import BatchStructureError, ConfigurationError, users_errors_as
from lightning_memfit.plan import BatchSplit, LossWeightWord, balanced_slices

SplitBatch = Callable[[Any, int], Sequence[tuple[Any, int]]]
"""The user's ``(batch, micro_batch_size) -> pairs of (slice, number of samples)``."""
LossWeight = LossWeightWord | Callable[[Any], float] | str
"""A :data:`~lightning_memfit.plan.LossWeightWord`, or what a slice's mean loss counts as a function of the slice."""

LOSS_WEIGHT_WORDS: tuple[str, ...] = get_args(LossWeightWord)
IGNORED_LABEL = -100
"""The label that losses leave out. Source: ``torch.nn.functional.cross_entropy``, ``ignore_index``."""


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Part of one collated batch."""

    batch: Any
    """What ``training_step`` gets: views of the collated batch."""
    samples: int
    """Samples in it."""
    weight: float
    """What its mean loss counts in the mean of the window."""


def _check_as_many(present: int, wanted: int, what: str) -> None:
    if present != wanted:
        raise BatchStructureError(
            f"This rank's batch has {present} {what}, and another rank divides its own into {wanted} slices: under "
            "this strategy every rank runs as many. Use drop_last=True, or a sampler that gives every rank as much."
        )


class BatchDivider:
    """Divides batches into balanced slices and weighs them.

    Attributes:
        sums: whether losses of slices are added, and not averaged by their weights.
        weighs_samples: whether a slice weighs as much as it has samples.
    """

    def __init__(self, *, split: BatchSplit, split_batch: SplitBatch | None, loss_weight: LossWeight) -> None:
        """Check the settings.

        Args:
            split: a plan of one slice never divides; else no slice exceeds its largest.
            split_batch: the user's function, in place of dividing every tensor along dimension 0.
            loss_weight: what a slice's mean loss counts; the words are those of :func:`weight_of`.

        Raises:
            ConfigurationError: if ``loss_weight`` is neither a known word nor callable.
        """
        check_loss_weight(loss_weight)
        self.sums = loss_weight == "sum"
        self.weighs_samples = loss_weight in ("samples", "sum")
        self._split = split
        self._split_batch = split_batch
        self._loss_weight = loss_weight
        self._warned = False
        self._lists_of_samples: set[str] = set()

    def divide(self, batch: Any, as_many: Callable[[int], int] = int) -> list[BatchSlice]:
        """The slices of one collated batch.

        Args:
            batch: the batch.
            as_many: gives the number of slices from how many this batch needs: where ranks wait for each other in
                every slice, the most that one of them needs.

        Raises:
            BatchStructureError: if the batch cannot be divided.
            ConfigurationError: if ``split_batch`` or ``loss_weight`` give something unusable.
        """
        parts = [(batch, self._samples_of(batch))] if self._split.num_slices == 1 else self._parts(batch, as_many)
        return [BatchSlice(batch=part, samples=samples, weight=self._weigh(part, samples)) for part, samples in parts]

    def _parts(self, batch: Any, as_many: Callable[[int], int]) -> Sequence[tuple[Any, int]]:
        micro = self._split.micro_batch_size
        if self._split_batch is not None:
            parts = divided_by_user(self._split_batch, batch, micro)
            _check_as_many(len(parts), as_many(len(parts)), "slices of split_batch=")
            return parts
        samples = batch_size_of(batch)
        count = as_many(math.ceil(samples / micro))
        _check_as_many(samples, max(samples, count), "samples")
        if count == 1:
            return [(batch, samples)]
        sizes = balanced_slices(samples, count)
        slices = split_by_sizes(batch, sizes, lists_of_samples=self._lists_of_samples)
        return list(zip(slices, sizes, strict=True))

    def _samples_of(self, batch: Any) -> int:
        """Samples of an undivided batch, needed only to weigh it against the others of its window."""
        if self._loss_weight not in ("samples", "sum"):
            return self._split.loader_batch_size  # the weight comes from the batch itself
        if self._split_batch is not None:
            return samples_by_user(self._split_batch, batch)
        try:
            return batch_size_of(batch)
        except BatchStructureError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"Every batch counts as {self._split.loader_batch_size} samples of its accumulation window, also a "
                    f"smaller last one, since its number of samples is not known. {error}",
                    UserWarning,
                    stacklevel=2,
                )
            return self._split.loader_batch_size

    def _weigh(self, batch: Any, samples: int) -> float:
        return weight_of(batch, samples, self._loss_weight)


def check_loss_weight(loss_weight: object) -> None:
    """Refuse what is neither a known word nor a function.

    Raises:
        ConfigurationError: with the value and what works.
    """
    if not callable(loss_weight) and loss_weight not in LOSS_WEIGHT_WORDS:
        raise ConfigurationError(
            f"loss_weight={reprlib.repr(loss_weight)} is not known. Choose {', '.join(map(repr, LOSS_WEIGHT_WORDS))}, "
            "or a function of a slice that returns what its mean loss counts."
        )


def weight_of(batch: Any, samples: int, loss_weight: LossWeight) -> float:
    """What the mean loss of a slice counts.

    Args:
        batch: the slice.
        samples: samples in it.
        loss_weight: ``"samples"``, ``"tokens"`` (labels other than -100), ``"next-tokens"`` (of these, the ones behind
            the first of each sample: causal language models predict them from what is in front), ``"sum"`` or a
            function of the slice.

    Raises:
        ConfigurationError: if tokens cannot be counted, or the function returns something unusable.
    """
    if loss_weight in ("samples", "sum"):
        return float(samples)
    if not callable(loss_weight):
        return float(_labelled_tokens(batch, loss_weight))
    with users_errors_as(ConfigurationError, f"loss_weight= failed for a slice of {samples} samples: "):
        weight = float(loss_weight(batch))
    if not math.isfinite(weight) or weight < 0:
        raise ConfigurationError(
            f"loss_weight= returned {weight} for a slice of {samples} samples. Return a finite number of at least "
            "0: what the mean loss of that slice counts."
        )
    return weight


def samples_by_user(split_batch: SplitBatch, batch: Any) -> int:
    """Samples of an undivided batch, by the user's function.

    Raises:
        ConfigurationError: if the function raises, or returns something unusable.
    """
    return sum(samples for _, samples in divided_by_user(split_batch, batch, sys.maxsize))


def divided_by_user(split_batch: SplitBatch, batch: Any, micro_batch_size: int) -> list[tuple[Any, int]]:
    """The slices that the user's function makes, each with its samples.

    Raises:
        ConfigurationError: if the function raises, or returns something unusable.
    """
    with users_errors_as(ConfigurationError, "split_batch= failed: "):
        pairs = split_batch(batch, micro_batch_size)
    try:
        checked = [(part, samples) for part, samples in pairs]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"split_batch= returned {type(pairs).__name__}, not pairs of (slice, number of samples). Return such as "
            "[(batch[:4], 4), (batch[4:], 3)]."
        ) from error
    sizes = [samples for _, samples in checked]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigurationError(
            f"split_batch= returned slices of {sizes} samples. Return at least one slice, each with a whole number of "
            "at least 1."
        )
    if max(sizes) > micro_batch_size:
        raise ConfigurationError(
            f"split_batch= returned slices of {sizes} samples, more than micro_batch_size={micro_batch_size}, for "
            "which memory was planned. Return smaller slices."
        )
    return checked


def _labelled_tokens(batch: Any, word: str) -> int:
    for name in ("labels", "label"):
        labels = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(labels, Tensor):
            counted = labels[:, 1:] if word == "next-tokens" and labels.dim() > 1 else labels
            return int((counted != IGNORED_LABEL).sum())
    found = f"keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
    raise ConfigurationError(
        f"loss_weight={word!r} counts batch['labels'] other than {IGNORED_LABEL}, but the batch has {found} and no "
        "tensor 'labels' or 'label'. Pass loss_weight= a function of the batch: what its mean loss counts."
    )
