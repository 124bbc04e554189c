"""How much memory a step fetches from the system: what the allocator gave back before, and must ask for again."""

from __future__ import annotations

from collections.abc import Callable

from lightning_memfit.hardware.rates import AllocatorRates
from lightning_memfit.trace.timeline import Free, Timeline

_KEPT_AT_THE_TOP_BYTES = 64 * 2**20
"""Free bytes at the top of the heap from which on it is cut back. Source: glibc ``malloc/malloc.c``: its threshold is
twice the largest mapped block that was freed so far, of at most 32 MiB, and building a model frees large ones."""


def new_bytes(timeline: Timeline, allocator: AllocatorRates, repeats: Callable[[int, str], float]) -> float:
    """Bytes of one optimizer step that are touched for the first time since the system gave them.

    Blocks above the allocator's limit are fetched every time. The others lie in a heap without holes, which grows as
    far as it must and is cut back when much is free at its top; but not below what was alive when a matrix product,
    convolution or the like ran, since the libraries that compute them keep blocks of their own from the first call on.

    Measured against page faults of 28 real steps of 60 to 1,400 MiB (glibc 2.36): between 0 and 60 MiB too low.

    Args:
        timeline: one optimizer step in the steady state.
        allocator: what is kept.
        repeats: times that something of a slice and phase happens in the whole window.

    Ignores: holes in the heap, its other users, memory that operators take inside.
    """
    limit = allocator.largest_kept_block_bytes
    if limit is None:
        return 0.0
    sizes = {resident.storage: resident.allocated_bytes for resident in timeline.residents}
    base = sum(size for size in sizes.values() if size <= limit)
    top, pinned, fetched = base, 0, 0.0
    for _ in range(2):  # the first pass brings the heap into the state that the end of a step leaves it in
        held, live, fetched = dict(sizes), base, 0.0
        for event in timeline.events:
            if isinstance(event, Free):
                size = held.pop(event.storage, 0)
                live -= size if size <= limit else 0
                if top - live > _KEPT_AT_THE_TOP_BYTES:
                    top = max(live, min(pinned, top))
                continue
            for output in event.outputs:
                size = held[output.storage] = output.allocated_bytes
                grown = size
                if size <= limit:
                    live += size
                    grown = max(0, live - top)
                    top = max(top, live)
                if grown:
                    fetched += grown * repeats(event.micro_step, event.phase)
            if event.flops:
                pinned = max(pinned, live)
    return fetched
