"""A second, slow model of the caching allocator: lists of cells, every search a scan. Only for tests.

Each segment is a list of cells in the order of their addresses; a cell's ``order`` is when it came to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from lightning_memfit.predict.allocator_settings import AllocatorSettings
from lightning_memfit.predict.caching_allocator import Release, Request

MIB = 2**20
ENDLESS = 2**50


@dataclass(eq=False)
class Cell:
    size: int
    order: int
    state: str = "free"  # or "used", "unmapped"
    wanted: int = 0
    since: int = 0


@dataclass(eq=False)
class Segment:
    small: bool
    cells: list[Cell] = field(default_factory=list)

    def offset(self, cell: Cell) -> int:
        return sum(each.size for each in self.cells[: self.cells.index(cell)])

    def join(self, cell: Cell) -> None:
        for step in (-1, 1):
            at = self.cells.index(cell) + step
            if 0 <= at < len(self.cells) and self.cells[at].state == cell.state:
                cell.size += self.cells[at].size
                del self.cells[at]


class SlowAllocator:
    def __init__(self, settings: AllocatorSettings, limit: int | None, allowed: int | None) -> None:
        self.settings, self.limit, self.allowed = settings, limit, allowed
        self.segments: list[Segment] = []
        self.orders = count()
        self.searches = {True: 0, False: 0}
        self.max_split = settings.max_split_size_bytes or ENDLESS
        self.retries = 0
        self.device_allocs = 0
        self.peaks = [0, 0, 0]

    def all_cells(self, state: str, small: bool | None = None) -> list[tuple[Segment, Cell]]:
        found = [
            (segment, cell)
            for segment in self.segments
            for cell in segment.cells
            if cell.state == state and small in (None, segment.small)
        ]
        return sorted(found, key=lambda pair: (pair[1].size, pair[1].order))

    def reserved(self) -> int:
        return sum(cell.size for segment in self.segments for cell in segment.cells if cell.state != "unmapped")

    def note(self) -> None:
        used = [cell for _, cell in self.all_cells("used")]
        now = (sum(cell.size for cell in used), self.reserved(), sum(cell.wanted for cell in used))
        self.peaks = [max(pair) for pair in zip(self.peaks, now, strict=True)]

    def rounded(self, wanted: int) -> int:
        interval = 0
        while interval < 15 and wanted >= 2 * MIB << interval:
            interval += 1
        parts = self.settings.divisions_by_interval()[interval]
        if parts > 1 and wanted > 512 * parts:
            power = 512
            while power * 2 <= wanted:
                power *= 2
            size = power
            while size < wanted:
                size += power // parts
            return size
        return max(512, (wanted + 511) // 512 * 512)

    def fits_device(self, more: int) -> bool:
        return self.limit is None or self.reserved() + more <= self.limit

    def search(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        self.searches[small] += 1
        fitting = [pair for pair in self.all_cells("free", small) if pair[1].size >= size]
        if not fitting:
            return None
        segment, cell = fitting[0]
        if self.settings.expandable_segments:
            for other_segment, other in fitting[1:]:
                if self.grown(other_segment, other) >= self.grown(segment, cell):
                    break
                segment, cell = other_segment, other
        if size < self.max_split and cell.size >= self.max_split:
            return None
        if size >= self.max_split and cell.size >= size + self.settings.non_split_rounding_bytes:
            return None
        return segment, cell

    def grown(self, segment: Segment, cell: Cell) -> int:
        after = segment.cells[segment.cells.index(cell) + 1 :][:1]
        return cell.size + sum(each.size for each in after if each.state == "unmapped")

    def from_device(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        if small:
            segment_size = 2 * MIB
        elif size < 10 * MIB:
            segment_size = self.settings.large_segment_bytes
        else:
            segment_size = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.allowed is not None and self.reserved() + segment_size > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self.grow(small, size)
        if not self.fits_device(segment_size):
            return None
        cell = Cell(segment_size, next(self.orders))
        segment = Segment(small, [cell])
        self.segments.append(segment)
        self.device_allocs += 1
        self.note()
        return segment, cell

    def grow(self, small: bool, size: int) -> tuple[Segment, Cell] | None:
        segment = next((each for each in self.segments if each.small == small), None)
        if segment is None:
            segment = Segment(small, [Cell(ENDLESS, next(self.orders), "unmapped")])
            self.segments.append(segment)
        cell = self.place(segment, size)
        if cell.state == "unmapped" and not self.map(segment, cell, min(size, cell.size)):
            return None
        while cell.size < size:
            following = segment.cells[segment.cells.index(cell) + 1]
            if not self.map(segment, following, min(size - cell.size, following.size)):
                return None
            cell = following
        return segment, cell

    def place(self, segment: Segment, size: int) -> Cell:
        for at, cell in enumerate(segment.cells):
            if cell.state != "unmapped":
                continue
            start = at - 1 if at and segment.cells[at - 1].state == "free" else at
            room = 0
            for each in segment.cells[start:]:
                if each.state == "used" or room >= size:
                    break
                room += each.size
            if room >= size:
                return segment.cells[start]
        raise AssertionError("the range never ends")

    def map(self, segment: Segment, cell: Cell, size: int) -> bool:
        granule = 2 * MIB if segment.small else self.settings.large_segment_bytes
        size = (size + granule - 1) // granule * granule
        if not self.fits_device(size):
            return False
        if size < cell.size:
            rest = Cell(cell.size - size, next(self.orders), "unmapped")
            segment.cells.insert(segment.cells.index(cell) + 1, rest)
            cell.size = size
        cell.state, cell.since = "free", self.searches[segment.small]
        segment.join(cell)
        self.device_allocs += 1
        self.note()
        return True

    def collect(self) -> None:
        threshold = self.settings.garbage_collection_threshold
        if self.allowed is None or threshold is None:
            return
        goal = self.reserved() - int(threshold * self.allowed)
        got = 0
        while got < goal:
            whole = [(s, c) for s, c in self.all_cells("free", False) if len(s.cells) == 1]
            if not whole:
                return
            ages = [self.searches[False] - cell.since for _, cell in whole]
            for (segment, cell), age in zip(whole, ages, strict=True):
                if age >= sum(ages) / len(ages):
                    got += cell.size
                    self.segments.remove(segment)

    def give_back_oversize(self, small: bool, size: int) -> bool:
        if self.settings.max_split_size_bytes is None or self.settings.expandable_segments:
            return False
        size = max(size, self.max_split)
        free = self.all_cells("free", small)
        for segment, cell in free:
            if cell.size >= size:
                self.segments.remove(segment)
                return True
        got = 0
        for segment, cell in reversed(free):
            if got >= size or cell.size < self.max_split:
                break
            got += cell.size
            self.segments.remove(segment)
        return got >= size

    def give_back_all(self) -> None:
        for small in (False, True):
            for segment, cell in self.all_cells("free", small):
                if self.settings.expandable_segments:
                    self.unmap(segment, cell)
                elif len(segment.cells) == 1:
                    self.segments.remove(segment)
        if self.settings.expandable_segments:
            self.segments = [each for each in self.segments if len(each.cells) > 1]

    def unmap(self, segment: Segment, cell: Cell) -> None:
        granule = 2 * MIB if segment.small else self.settings.large_segment_bytes
        start = segment.offset(cell)
        end = start + cell.size
        first, last = (start + granule - 1) // granule * granule, end // granule * granule
        if first >= last:
            return
        at, now = segment.cells.index(cell), self.searches[segment.small]
        before = [Cell(first - start, next(self.orders), since=now)] if first > start else []
        after = [Cell(end - last, next(self.orders), since=now)] if last < end else []
        cell.size, cell.state = last - first, "unmapped"
        segment.cells[at : at + 1] = [*before, cell, *after]
        segment.join(cell)

    def allocate(self, wanted: int) -> tuple[Segment, Cell] | None:
        size = self.rounded(wanted)
        small = size <= MIB
        found = self.search(small, size)
        if found is None:
            self.collect()
            found = self.from_device(small, size)
        if found is None and self.give_back_oversize(small, size):
            found = self.from_device(small, size)
        if found is None:
            self.give_back_all()
            self.retries += 1
            found = self.from_device(small, size)
        if found is None:
            return None
        segment, cell = found
        left = cell.size - size
        to_the_last_byte = small or self.settings.expandable_segments
        if (to_the_last_byte and left >= 512) or (left > MIB and size < self.max_split):
            front = Cell(size, next(self.orders))
            segment.cells.insert(segment.cells.index(cell), front)
            cell.size, cell.since = left, self.searches[small]
            cell = front
        cell.state, cell.wanted = "used", wanted
        self.note()
        return segment, cell

    def release(self, segment: Segment, cell: Cell) -> None:
        cell.state, cell.since = "free", self.searches[segment.small]
        segment.join(cell)


def slow_replay(
    requests: Sequence[Request], settings: AllocatorSettings, limit: int | None, allowed: int | None
) -> tuple[int, int, int, int | None, int, int]:
    """Peaks of allocated, reserved and requested bytes, where it ran out, retries, device allocations."""
    allocator = SlowAllocator(settings, limit, allowed)
    held: dict[int, tuple[Segment, Cell]] = {}
    failed = None
    for index, request in enumerate(requests):
        if isinstance(request, Release):
            if request.block in held:
                allocator.release(*held.pop(request.block))
        elif request.requested_bytes:
            found = allocator.allocate(request.requested_bytes)
            if found is None:
                failed = index
                break
            held[request.block] = found
    allocated, reserved, requested = allocator.peaks
    return allocated, reserved, requested, failed, allocator.retries, allocator.device_allocs
