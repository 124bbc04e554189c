"""A batch as long as a batch may be: a stand-in for one that was not found, made by extending the sequences of another.

What is a sequence is told by shapes alone:

1. Tensors of integers or booleans of shape ``(batch, length)`` tell the lengths: token numbers, labels, masks. Where
   several batches of the run were seen, only those that vary do: a target of fixed width is no sequence.
2. Every later dimension of any tensor that is as long as one of them is extended too: masks ``(batch, 1, length,
   length)``, embeddings ``(batch, length, hidden)``.
3. Of integers ``(batch,)`` whose largest is such a length, those that equal it grow as well: they are the lengths that
   a step packs its sequences by.

New positions repeat the last one, so that labels of -100 and masked positions go on as they are.

Ignores: the last position that a model has embeddings for; a longer batch fails there as it would in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.apply.batch_shapes import ShapeRange, named_tensors, shape_of, shapes_in_words, structure_of
from lightning_memfit.batch_tree import map_tensors
from lightning_memfit.errors import ConfigurationError

_WAY_OUT = "Pass worst_batch= the largest batch that may occur, or a function of the first batch that makes it."

_Size = tuple[int, int, int]
"""Of one dimension: its size in the batch, the smallest and the largest that were seen."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor of the batch, and the sizes of its dimensions."""

    name: str
    tensor: Tensor
    sizes: tuple[_Size, ...]

    @property
    def tells_length(self) -> bool:
        return len(self.sizes) == 2 and _is_whole(self.tensor) and self.sizes[1][0] > 1


def pad_to_length(batch: Any, max_length: int, *, shape_ranges: Sequence[ShapeRange] = ()) -> Any:
    """A batch in which every sequence has ``max_length`` positions; the one given is not changed.

    Args:
        batch: a collated batch of tensors ``(batch, ...)``.
        max_length: positions of the longest sequence that may occur, such as tokens.
        shape_ranges: how the shape of each tensor varies over batches of the run, as ``ScannedBatch.shape_ranges``.

    Raises:
        ConfigurationError: if no dimension is known to be a sequence, or one is longer than ``max_length`` already.

    >>> pad_to_length({"ids": torch.tensor([[1, 2], [3, 0]]), "y": torch.zeros(2)}, 4)["ids"]
    tensor([[1, 2, 2, 2],
            [3, 0, 0, 0]])
    """
    parts = _parts(batch, shape_ranges)
    lengths = _sequence_lengths(parts)
    _check(batch, parts, lengths, max_length)
    extended = {id(part.tensor): _extended(part, lengths, max_length) for part in parts}
    return map_tensors(batch, lambda tensor: extended.get(id(tensor), tensor))


def at_max_length(scanned: ScannedBatch, max_length: int) -> ScannedBatch:
    """The batch that was found, its sequences extended to ``max_length`` positions.

    Raises:
        ConfigurationError: as :func:`pad_to_length` does.
    """
    lengths = _sequence_lengths(_parts(scanned.batch, scanned.shape_ranges))
    shown = " and ".join(f"{length:,}" for length in sorted({length for length, _, _ in lengths}))
    batch = pad_to_length(scanned.batch, max_length, shape_ranges=scanned.shape_ranges)
    return replace(
        scanned,
        batch=batch,
        ranked_by=None,
        larger_elsewhere=(),
        rival=None,
        origin=f"a stand-in for the longest batch: batch_idx {scanned.index}, its sequences extended from {shown} to "
        f"max_length={max_length:,}",
    )


def _parts(batch: Any, shape_ranges: Sequence[ShapeRange]) -> list[_Part]:
    named = list(named_tensors(batch))
    shapes = [shape_of(tensor) for _, tensor in named]
    if list(map(len, shape_ranges)) != list(map(len, shapes)):
        shape_ranges = [tuple((size, size) for size in shape) for shape in shapes]
    return [
        _Part(
            name=name,
            tensor=tensor,
            sizes=tuple((size, *seen) for size, seen in zip(shape, ranges, strict=True)),
        )
        for (name, tensor), shape, ranges in zip(named, shapes, shape_ranges, strict=True)
    ]


def _sequence_lengths(parts: list[_Part]) -> set[_Size]:
    found = {part.sizes[1] for part in parts if part.tells_length}
    return {size for size in found if size[1] != size[2]} or found


def _check(batch: Any, parts: list[_Part], lengths: set[_Size], max_length: int) -> None:
    if "PackedSequence(" in structure_of(batch):
        raise ConfigurationError(
            f"max_length={max_length} cannot extend a batch with a PackedSequence ({shapes_in_words(batch)}), whose "
            f"sequences are not apart. {_WAY_OUT}"
        )
    if not lengths:
        raise ConfigurationError(
            f"max_length={max_length}: which dimension of the batch is a sequence cannot be told, since it has no "
            "tensor of integers or booleans of shape (batch, length) with a length of at least 2: "
            f"{shapes_in_words(batch, shown=8)}. {_WAY_OUT}"
        )
    longest = max(largest for _, _, largest in lengths)
    if longest > max_length:
        name = next(part.name for part in parts if part.tells_length and part.sizes[1][2] == longest)
        raise ConfigurationError(
            f"max_length={max_length} is less than the {longest} positions that batch{name} has in a batch of this "
            f"run. Set max_length={longest} or more, or truncate where batches are made."
        )


def _extended(part: _Part, lengths: set[_Size], max_length: int) -> Tensor:
    tensor = part.tensor
    if tensor.is_nested or tensor.layout != torch.strided:
        return tensor
    if len(part.sizes) == 1:
        return _grown(tensor, lengths, max_length)
    for dim, size in enumerate(part.sizes):
        missing = max_length - size[0]
        if dim > 0 and size in lengths and missing:
            last = tensor.narrow(dim, size[0] - 1, 1)
            shape = [missing if at == dim else -1 for at in range(tensor.dim())]
            tensor = torch.cat([tensor, last.expand(shape)], dim)
    return tensor


def _grown(tensor: Tensor, lengths: set[_Size], max_length: int) -> Tensor:
    """The lengths of sequences ``(batch,)``, where it is these."""
    if not _is_whole(tensor) or tensor.dtype == torch.bool or not tensor.numel():
        return tensor
    longest = int(tensor.max())
    if longest not in {length for length, _, _ in lengths}:
        return tensor
    return tensor.masked_fill(tensor == longest, max_length)


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
