"""The user's functions for batches of a structure of their own, beside those that MemFit has for every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_memfit.apply.slicing import LossWeight, SplitBatch, divided_by_user, samples_by_user, weight_of
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes


@dataclass(frozen=True, kw_only=True)
class BatchFunctions:
    """The user's functions for batches, which a plan cannot carry as data."""

    split_batch: SplitBatch | None
    """Divides batches of a structure of their own."""
    loss_weight: LossWeight
    """What a slice's mean loss counts."""
    lists_of_samples: set[str] = field(default_factory=set, compare=False)
    """Where in a batch lists of samples were found: a part of the batch may no longer tell them from structures."""

    @property
    def given(self) -> tuple[object, ...]:
        """Those that the user gave."""
        return tuple(each for each in (self.split_batch, self.loss_weight) if callable(each))

    def divide(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """The slices of ``batch``, of these numbers of samples.

        The user's function is only told the size of the first, so that further ones may have other sizes and numbers.
        """
        if self.split_batch is None:
            return split_by_sizes(batch, sizes, lists_of_samples=self.lists_of_samples)
        return [part for part, _ in divided_by_user(self.split_batch, batch, sizes[0])]

    def samples_of(self, batch: Any) -> int:
        """Samples in ``batch``.

        Raises:
            BatchStructureError: if nothing tells.
            ConfigurationError: if the user's function fails.
        """
        if self.split_batch is None:
            return batch_size_of(batch)
        return samples_by_user(self.split_batch, batch)

    def weight_of(self, batch: Any) -> float:
        """What the mean loss of ``batch`` counts."""
        return weight_of(batch, self.samples_of(batch), self.loss_weight)
