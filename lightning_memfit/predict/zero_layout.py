"""Where ZeRO puts each element: flat groups in stages 1 and 2, a share of every parameter in stage 3. Arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.sharding import Sharding, ZeroStage
from lightning_memfit.trace.timeline import ParameterLayout

Collectives = Literal["nccl", "gloo"]
"""The library that exchanges between ranks: gloo works on copies that it allocates, NCCL in place."""

ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by dtype, of those that parameters may have."""

DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""Elements that are reduced at once by default. Source: ``deepspeed/runtime/zero/config.py`` 0.19.8."""
LIGHTNING_BUCKET_ELEMENTS = 200_000_000
"""The same where Lightning writes the configuration. Source: ``lightning/pytorch/strategies/deepspeed.py`` 2.6."""
_PREFETCH_ELEMENTS, _PERSISTENT_ELEMENTS = 50_000_000, 100_000
_REUSE_ELEMENTS = _LIVE_ELEMENTS = 1_000_000_000
_START_ALIGNMENT = 2  # elements: 4 bytes of 16-bit ones


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """A :class:`Sharding` of DeepSpeed with DeepSpeed's own defaults for what it leaves open.

    Source: ``DeepSpeedZeroConfig`` in ``deepspeed/runtime/zero/config.py`` 0.19.8.
    """

    stage: ZeroStage
    """1 divides optimizer states, 2 gradients too, 3 parameters too."""
    ranks: int
    """Devices over which it is spread."""
    bucket_elements: int
    """Elements of gradients that are reduced at once."""
    buckets: int
    """Buckets that are alive in the backward: in stages 1 and 2 a second one is filled while the first is reduced."""
    overlaps: bool
    """Whether gradients are reduced while the backward goes on."""
    prefetch_elements: int
    """Stage 3: elements of parameters that are fetched ahead."""
    persistent_elements: int
    """Stage 3: parameters of at most as many elements are held whole by every rank."""
    reuse_elements: int = _REUSE_ELEMENTS
    """Stage 3: a gathered parameter is kept if it is used again within as many elements of parameters."""
    live_elements: int = _LIVE_ELEMENTS
    """Stage 3: nothing is fetched ahead beyond as many gathered elements."""

    @classmethod
    def of(cls, sharding: Sharding) -> ZeroSettings:
        """Fill in the defaults.

        Raises:
            UnsupportedError: if it is not one of DeepSpeed.
        """
        if sharding.zero_stage is None:
            raise UnsupportedError(f"{sharding.label} is none of DeepSpeed's stages: ZeRO's arithmetic is not its own.")
        stage, overlaps = sharding.zero_stage, sharding.overlap_communication
        overlaps = stage == 3 if overlaps is None else overlaps
        return cls(
            stage=stage,
            ranks=sharding.ranks,
            bucket_elements=_or(sharding.reduce_bucket_elements, DEEPSPEED_BUCKET_ELEMENTS),
            buckets=2 if overlaps and stage < 3 else 1,
            overlaps=overlaps,
            prefetch_elements=_or(sharding.prefetch_bucket_elements, _PREFETCH_ELEMENTS),
            persistent_elements=_or(sharding.persistence_threshold_elements, _PERSISTENT_ELEMENTS),
        )


def lightning_sharding(stage: ZeroStage, ranks: int) -> Sharding:
    """What ``DeepSpeedStrategy(stage=...)`` sets where the user gives no configuration of his own.

    Source: the defaults of ``lightning/pytorch/strategies/deepspeed.py`` 2.6.

    Args:
        stage: of ZeRO.
        ranks: devices.
    """
    return Sharding(
        engine="deepspeed",
        ranks=ranks,
        zero_stage=stage,
        synchronisation="step" if stage == 1 else "slice",
        reduce_bucket_elements=LIGHTNING_BUCKET_ELEMENTS,
        allgather_bucket_elements=LIGHTNING_BUCKET_ELEMENTS,
        overlap_communication=True,
    )


def elements_of(parameter: ParameterLayout) -> int:
    """Elements of a parameter, whole."""
    return prod(parameter.size)


def bytes_each(parameter: ParameterLayout) -> int:
    """Bytes of an element of a parameter.

    Raises:
        UnsupportedError: if ZeRO does not divide parameters of its dtype.
    """
    if parameter.dtype not in ELEMENT_BYTES:
        raise UnsupportedError(
            f"parameter {parameter.name} is of {parameter.dtype}. ZeRO divides: {', '.join(ELEMENT_BYTES)}."
        )
    return ELEMENT_BYTES[parameter.dtype]


def share_of(elements: int, ranks: int) -> int:
    """Stage 3: elements of one parameter that each rank holds, the last one's padded.

    Source: ``Init._aligned_size`` in ``deepspeed/runtime/zero/partition_parameters.py`` 0.19.8.

    >>> share_of(7, 2)
    4
    """
    return -(-elements // ranks)


def pinned_bytes(num_bytes: int) -> int:
    """Bytes of the host that a pinned tensor takes: torch rounds them up to a power of two.

    Source: ``allocate`` in ``ATen/core/CachingHostAllocator.h`` of torch 2.13, without a limit by default
    (``pinned_max_round_threshold`` in ``c10/core/AllocatorConfig.h``).

    >>> pinned_bytes(1000), pinned_bytes(1024)
    (1024, 1024)
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def partition_elements(elements: int, ranks: int) -> int:
    """Stages 1 and 2: elements of a flat group that each rank updates; the group is padded to 2 x ranks.

    Source: ``flatten_dense_tensors_aligned`` with ``nccl_start_alignment_factor`` 2 in
    ``deepspeed/runtime/zero/stage_1_and_2.py`` 0.19.8.

    >>> partition_elements(9, 2)
    6
    """
    alignment = _START_ALIGNMENT * ranks
    return -(-elements // alignment) * alignment // ranks


def group_share(elements: Sequence[int], settings: ZeroSettings) -> int:
    """Elements of the flat ``float32`` tensor over which one rank's optimizer steps for a parameter group.

    Args:
        elements: of each parameter of the group.
        settings: stage and ranks.
    """
    if settings.stage == 3:
        return sum(share_of(each, settings.ranks) for each in elements)
    return partition_elements(sum(elements), settings.ranks)


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """Stages 1 and 2: one parameter group in one flat tensor, cut into equal partitions whatever is where it is cut."""

    partition: int
    """Elements of each rank's partition, padding included."""
    pieces: Mapping[int, tuple[tuple[int, int], ...]]
    """By parameter, in the group's order: ``(rank, elements)`` of each piece that the cuts leave."""

    @classmethod
    def of(cls, parameters: Sequence[int], elements: Mapping[int, int], ranks: int) -> FlatGroup:
        """Lay parameters one after the other and cut.

        Args:
            parameters: indices in the group's order.
            elements: of each, by index.
            ranks: equal parts.

        >>> FlatGroup.of([0, 1], {0: 5, 1: 3}, 2).pieces
        {0: ((0, 4), (1, 1)), 1: ((1, 3),)}
        """
        partition = partition_elements(sum(elements[index] for index in parameters), ranks)
        pieces: dict[int, tuple[tuple[int, int], ...]] = {}
        start = 0
        for index in parameters:
            end, found = start + elements[index], []
            for rank in range(start // partition, -(-end // partition)):
                size = min(end, (rank + 1) * partition) - max(start, rank * partition)
                found.append((rank, size))
            pieces[index], start = tuple(found), end
        return cls(partition=partition, pieces=pieces)

    def largest_piece(self, rank: int) -> int:
        """Elements of the largest piece in a rank's partition."""
        return max((size for found in self.pieces.values() for owner, size in found if owner == rank), default=0)

    def parameters_of(self, rank: int) -> tuple[int, ...]:
        """Parameters that lie in a rank's partition, also those of which a piece does."""
        return tuple(index for index, found in self.pieces.items() if rank in dict(found))

    def tensors_of(self, rank: int) -> int:
        """Tensors that a rank's gradients consist of: its pieces, and one of padding where there is any."""
        sizes = [size for found in self.pieces.values() for owner, size in found if owner == rank]
        return len(sizes) + (sum(sizes) < self.partition)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
