"""Loaders that are read side by side: whether every batch of them has as many samples of one as of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader


def uneven_batches(members: Sequence[Any], num_batches: int | None, *, cycled: bool) -> str | None:
    """Which batch of an epoch cannot be divided, in words; ``None`` if none is known to be so.

    The last batch of a loader may be short while another's, at the same time, is not. Told from lengths alone, before
    an epoch is trained; what is no ordinary map-style loader is taken to be even.

    Args:
        members: the loaders.
        num_batches: batches of the epoch; ``None`` if unknown.
        cycled: whether a loader that is exhausted begins anew.
    """
    counts = [count for count in map(_count, members) if count is not None]
    for index in sorted(count.batches - 1 for count in counts):
        if num_batches is not None and index >= num_batches:
            continue
        sizes = [size for count in counts if (size := count.size_of(index, cycled=cycled)) is not None]
        if len(set(sizes)) > 1:
            return (
                f"batch_idx {index} has {' and '.join(map(str, sizes))} samples of the loaders that are read side by "
                "side: give them drop_last=True, or pass MemFit(split_batch=...), a function (batch, micro_batch_size) "
                "-> pairs of (slice, samples)."
            )
    return None


class _Count(NamedTuple):
    batches: int
    batch_size: int
    last: int

    def size_of(self, index: int, *, cycled: bool) -> int | None:
        if index >= self.batches and not cycled:
            return None
        return self.last if index % self.batches == self.batches - 1 else self.batch_size


def _count(loader: Any) -> _Count | None:
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not BatchSampler:
        return None
    try:
        samples = len(sampler.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    full, rest = divmod(samples, sampler.batch_size)
    if sampler.drop_last or not rest:
        return _Count(full, sampler.batch_size, sampler.batch_size) if full else None
    return _Count(full + 1, sampler.batch_size, rest)
