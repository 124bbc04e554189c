"""What torch's CUDA caching allocator does with a sequence of requests: its reserved memory, and where it runs out.

The rules are those of one stream, with no private pools, memory pools or free-memory callbacks.

Source: pytorch/pytorch c10/cuda/CUDACachingAllocator.cpp as of mara-werils/pytorch@20c4398 (the stored version nearest
to the one whose headers torch 2.13 installs); functions below carry the names of its functions where they are the same.
Of free blocks of one size the first is that of the oldest segment, and within it that of the lowest address
(pytorch/pytorch#183591). Before 2026 it was that of the lowest address of all (pytorch/pytorch#109863 quotes the
comparison); where ``cudaMalloc`` puts segments is not documented, and they are taken to lie in the order in which they
were made.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

from lightning_memfit.predict.allocator_settings import (
    LARGEST_LARGE_SEGMENT_REQUEST_BYTES,
    MIB,
    MIN_BLOCK_BYTES,
    AllocatorSettings,
    rounded_size,
)

SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
ROUND_LARGE_BYTES = 2 * MIB
# Room for every device; torch takes 9/8 of the device's memory, which one stream fills only with memory it has.
_EXPANDABLE_RANGE_BYTES = 2**50
_UNLIMITED = 2**62


class Allocate(NamedTuple):
    """A tensor's memory is asked for."""

    block: int
    """Number of this allocation, unique in the sequence."""
    requested_bytes: int
    """Bytes asked for; nothing is allocated for 0."""


class Release(NamedTuple):
    """The memory of an earlier :class:`Allocate` is given back."""

    block: int
    """Number of the allocation."""


Request: TypeAlias = Allocate | Release


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What the allocator held; up to the request that failed, if one did."""

    peak_allocated_bytes: int
    """Most bytes in blocks in use, as ``allocated_bytes.all.peak`` of ``torch.cuda.memory_stats``."""
    peak_reserved_bytes: int
    """Most bytes taken from the device, as ``reserved_bytes.all.peak``."""
    peak_requested_bytes: int
    """Most bytes asked for and not yet given back, as ``requested_bytes.all.peak``."""
    ran_out_at: int | None
    """Index of the request that raised ``OutOfMemoryError``; ``None`` if none did."""
    num_retries: int
    """Times all cached memory was given back to try again, as ``num_alloc_retries``."""
    num_device_allocs: int
    """Segments allocated or ranges mapped, as ``num_device_alloc``."""


def replay(
    requests: Sequence[Request],
    settings: AllocatorSettings | None = None,
    *,
    limit_bytes: int | None = None,
    allowed_bytes: int | None = None,
) -> Replayed:
    """What the allocator does with the requests, starting empty.

    Args:
        requests: allocations and releases, in the order of the stream.
        settings: the allocator's options; torch's defaults if left out.
        limit_bytes: what the device has for the allocator's segments; beyond it ``cudaMalloc`` or mapping fails.
        allowed_bytes: the memory fraction times the device's memory (``torch.cuda.set_per_process_memory_fraction``);
            beyond it torch does not ask the device, and only with it does it collect garbage.

    Raises:
        ValueError: if a block is allocated twice, released without being allocated, or of negative size.

    Ignores: other streams and what waits for them, private pools of graphs, and the driver's own rounding of segments
    that are no multiple of 2 MiB (only with such a ``large_segment_bytes``).
    """
    allocator = _Allocator(settings or AllocatorSettings(), limit_bytes, allowed_bytes)
    in_use: dict[int, _Block | None] = {}
    peak_allocated = peak_requested = 0
    ran_out_at = None
    for index, request in enumerate(requests):
        block = request.block
        if isinstance(request, Release):
            if block not in in_use:
                raise ValueError(f"Request {index} releases block {block}, which is not allocated.")
            released = in_use.pop(block)
            if released is not None:
                allocator.free(released)
            continue
        if block in in_use or request.requested_bytes < 0:
            raise ValueError(f"Request {index} is no new block of a size from 0 bytes: {request}.")
        found = allocator.malloc(request.requested_bytes) if request.requested_bytes else None
        if found is None and request.requested_bytes:
            ran_out_at = index
            break
        in_use[block] = found
        peak_allocated = max(peak_allocated, allocator.allocated)
        peak_requested = max(peak_requested, allocator.requested)
    return Replayed(
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=allocator.peak_reserved,
        peak_requested_bytes=peak_requested,
        ran_out_at=ran_out_at,
        num_retries=allocator.num_retries,
        num_device_allocs=allocator.num_device_allocs,
    )


def minimum_feasible_bytes(
    requests: Sequence[Request], settings: AllocatorSettings | None = None, *, unlimited: Replayed | None = None
) -> int:
    """The least limit found under which the requests survive, in the allocator's granularity.

    Bisection between the most bytes in use, which no limit below can hold, and the reserved bytes without a limit,
    which are enough. What is returned was itself replayed and survives, and one granule less does not (or is less than
    what is in use). Survival need not grow with the limit, as more room changes which blocks are split: a smaller limit
    may survive, and a larger one below the unlimited peak may fail.

    Args:
        requests: allocations and releases, in the order of the stream.
        settings: the allocator's options; torch's defaults if left out.
        unlimited: what :func:`replay` said of them without a limit; replayed if left out.

    Raises:
        ValueError: as :func:`replay`.
    """
    settings = settings or AllocatorSettings()
    unlimited = replay(requests, settings) if unlimited is None else unlimited
    granule = math.gcd(SMALL_SEGMENT_BYTES, settings.large_segment_bytes)
    fails = -(-unlimited.peak_allocated_bytes // granule) - 1
    survives = unlimited.peak_reserved_bytes // granule
    while survives - fails > 1:
        middle = (fails + survives) // 2
        if replay(requests, settings, limit_bytes=middle * granule).ran_out_at is None:
            survives = middle
        else:
            fails = middle
    return survives * granule


class _Block:
    """A range of a segment: in use, free, or (in an expandable segment) without memory."""

    __slots__ = ("address", "gc_base", "in_use", "mapped", "next", "pool", "prev", "requested", "segment", "size")

    def __init__(self, pool: _Pool, size: int, address: int, segment: int) -> None:
        self.pool = pool
        self.size = size
        self.address = address
        """Bytes from the beginning of its segment."""
        self.segment = segment
        """How many segments were made before its own."""
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.in_use = False
        self.mapped = True
        self.requested = 0
        self.gc_base = 0

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def splice(self, before: _Block | None, after: _Block | None) -> None:
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class _Pool:
    """The free blocks of one kind of requests: the smallest first, then those of the oldest segment."""

    def __init__(self, *, is_small: bool, granule: int) -> None:
        self.is_small = is_small
        self.granule = granule
        self.free: list[tuple[int, int, int, _Block]] = []
        self.unmapped: list[tuple[int, int, _Block]] = []
        """By address; all of one expandable segment, as its range never ends."""
        self.searches = 0

    def insert(self, block: _Block) -> None:
        if block.mapped:
            block.gc_base = self.searches
            insort(self.free, (block.size, block.segment, block.address, block))
        else:
            insort(self.unmapped, (block.address, block.segment, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.segment, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address, block.segment))]


class _Allocator:
    def __init__(self, settings: AllocatorSettings, limit: int | None, allowed: int | None) -> None:
        self.settings = settings
        self.limit = _UNLIMITED if limit is None else limit
        self.allowed = allowed
        self.collects = allowed is not None and settings.garbage_collection_threshold is not None
        self.max_split = settings.max_split_size_bytes or _UNLIMITED
        self.divisions = settings.divisions_by_interval()
        self.small = _Pool(is_small=True, granule=SMALL_SEGMENT_BYTES)
        self.large = _Pool(is_small=False, granule=settings.large_segment_bytes)
        self.segments: Iterator[int] = count()
        self.allocated = self.requested = self.reserved = self.peak_reserved = 0
        self.num_retries = self.num_device_allocs = 0

    def malloc(self, requested: int) -> _Block | None:
        size = self.round_size(requested)
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self.get_free_block(pool, size)
        if block is None:
            if self.collects:
                self.garbage_collect_cached_blocks()
            block = self.alloc_block(pool, size)
            if block is None and self.release_available_cached_blocks(pool, size):
                block = self.alloc_block(pool, size)
            if block is None:
                self.release_cached_blocks()
                self.num_retries += 1
                block = self.alloc_block(pool, size)
            if block is None:
                return None
        if self.should_split(block, size):
            block = self.split(block, size)
        block.in_use = True
        block.requested = requested
        self.allocated += block.size
        self.requested += requested
        return block

    def free(self, block: _Block) -> None:
        block.in_use = False
        self.allocated -= block.size
        self.requested -= block.requested
        self.merge(block, block.prev)
        self.merge(block, block.next)
        block.pool.insert(block)

    def round_size(self, size: int) -> int:
        return rounded_size(size, self.divisions)

    def segment_size(self, size: int) -> int:
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < LARGEST_LARGE_SEGMENT_REQUEST_BYTES:
            return self.settings.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def should_split(self, block: _Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return size < self.max_split and remaining > SMALL_BYTES

    def split(self, block: _Block, size: int) -> _Block:
        """The new front of a block; its rest stays the older block, and becomes free."""
        front = _Block(block.pool, size, block.address, block.segment)
        front.splice(block.prev, block)
        block.address += size
        block.size -= size
        block.pool.insert(block)
        return front

    def new_segment(self, pool: _Pool, size: int) -> _Block:
        return _Block(pool, size, 0, next(self.segments))

    def merge(self, block: _Block, other: _Block | None) -> None:
        """A neighbour that is free (or unmapped) like the block becomes part of it."""
        if other is None or other.in_use or other.mapped is not block.mapped:
            return
        block.pool.remove(other)
        if block.prev is other:
            block.address = other.address
            block.splice(other.prev, block.next)
        else:
            block.splice(block.prev, other.next)
        block.size += other.size

    def get_free_block(self, pool: _Pool, size: int) -> _Block | None:
        pool.searches += 1
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        block = free[index][-1]
        if self.settings.expandable_segments:
            # A block before unmapped addresses counts as large as it can grow, so that the end is used last.
            while index + 1 < len(free) and _expandable_size(free[index + 1][-1]) < _expandable_size(block):
                index += 1
                block = free[index][-1]
        if size < self.max_split <= block.size:
            return None
        if size >= self.max_split and block.size >= size + self.settings.non_split_rounding_bytes:
            return None
        del free[index]
        return block

    def alloc_block(self, pool: _Pool, size: int) -> _Block | None:
        segment = self.segment_size(size)
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self.try_allocate_expandable_block(pool, size)
        if self.reserved + segment > self.limit:
            return None
        self.reserve(segment)
        return self.new_segment(pool, segment)

    def reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.num_device_allocs += 1

    def try_allocate_expandable_block(self, pool: _Pool, size: int) -> _Block | None:
        block = self.find_expandable_block(pool, size)
        if not block.mapped and not self.map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self.map_block(following, min(size - block.size, following.size)):
                return None
            block = following  # has taken in the free block before it
        pool.remove(block)
        return block

    def find_expandable_block(self, pool: _Pool, size: int) -> _Block:
        """The first unmapped range, with the free block before it, that has addresses enough."""
        for _, _, unmapped in pool.unmapped:
            before = unmapped.prev
            start = before if before is not None and not before.in_use else unmapped
            room, block = 0, start
            while room < size and not block.in_use:
                room += block.size
                if block.next is None:
                    break
                block = block.next
            if room >= size:
                return start
        segment = self.new_segment(pool, _EXPANDABLE_RANGE_BYTES // pool.granule * pool.granule)
        segment.mapped = False
        pool.insert(segment)
        return segment

    def map_block(self, block: _Block, size: int) -> bool:
        pool = block.pool
        mapped = -(-size // pool.granule) * pool.granule
        if self.reserved + mapped > self.limit:
            return False
        pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            remaining = _Block(pool, block.size - mapped, block.address + mapped, block.segment)
            remaining.mapped = False
            remaining.splice(block, block.next)
            pool.insert(remaining)
            block.size = mapped
        self.merge(block, block.prev)
        self.merge(block, block.next)
        pool.insert(block)
        self.reserve(mapped)
        return True

    def unmap_block(self, block: _Block) -> None:
        """Whole granules of a free block go back to the device; its ends stay free blocks."""
        pool = block.pool
        begin = -(-block.address // pool.granule) * pool.granule
        end = (block.address + block.size) // pool.granule * pool.granule
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            before = _Block(pool, begin - block.address, block.address, block.segment)
            before.splice(block.prev, block)
            pool.insert(before)
        if block.address + block.size > end:
            after = _Block(pool, block.address + block.size - end, end, block.segment)
            after.splice(block, block.next)
            pool.insert(after)
        block.address, block.size, block.mapped = begin, end - begin, False
        self.merge(block, block.prev)
        self.merge(block, block.next)
        pool.insert(block)
        self.reserved -= end - begin

    def garbage_collect_cached_blocks(self) -> None:
        """Segments that are wholly free go back to the device, those first that were not used for long."""
        assert self.allowed is not None and self.settings.garbage_collection_threshold is not None
        target = self.reserved - int(self.settings.garbage_collection_threshold * self.allowed)
        if target <= 0 or self.settings.expandable_segments:
            return
        ages = {block: self.large.searches - block.gc_base for *_, block in self.large.free if not block.is_split}
        reclaimed = 0
        while reclaimed < target and ages:
            mean_age = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean_age]:
                del ages[block]
                reclaimed += block.size
                self.release_block(block)

    def release_available_cached_blocks(self, pool: _Pool, size: int) -> bool:
        """Blocks too large to split go back to the device, until the request would fit in their place."""
        if self.settings.max_split_size_bytes is None or self.settings.expandable_segments:
            return False
        size = max(size, self.max_split)
        index = bisect_left(pool.free, (size,))
        if index < len(pool.free):
            self.release_block(pool.free[index][-1])
            return True
        released = 0
        while released < size and pool.free and pool.free[-1][0] >= self.max_split:
            released += pool.free[-1][0]
            self.release_block(pool.free[-1][-1])
        return released >= size

    def release_block(self, block: _Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size

    def release_cached_blocks(self) -> None:
        for pool in (self.large, self.small):
            for *_, block in list(pool.free):
                if self.settings.expandable_segments:
                    self.unmap_block(block)
                    if not block.is_split:  # the whole range is empty: torch drops the segment
                        pool.remove(block)
                elif not block.is_split:
                    self.release_block(block)


def _expandable_size(block: _Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
