"""What a heap gives back and fetches again, worked out by hand. Run: ``pytest tests/predict/test_new_memory.py``."""

from __future__ import annotations

from typing import Any

from lightning_memfit.hardware.rates import AllocatorRates
from lightning_memfit.predict.new_memory import new_bytes
from lightning_memfit.trace.timeline import Event, Free, Operation, Output, Resident, Timeline
from lightning_memfit.units import MIB

GLIBC = AllocatorRates(seconds_per_new_byte=1e-10, largest_kept_block_bytes=32 * MIB)


def allocate(storage: int, mebibytes: int, **values: Any) -> Operation:
    return Operation("aten.add.Tensor", "", "forward", None, (Output(storage, 0, mebibytes * MIB),), **values)


def free(storage: int) -> Free:
    return Free(storage, "backward")


def fetched(*events: Event, allocator: AllocatorRates = GLIBC, times: float = 1.0, resident: int = 0) -> float:
    residents = (Resident(99, resident * MIB, "parameters"),) if resident else ()
    timeline = Timeline(
        residents=residents, events=events, categories={}, signatures=(), num_parameters=0, num_operations=0, flops=0,
        recomputed_flops=0,
    )  # fmt: skip
    return new_bytes(timeline, allocator, lambda micro_step, phase: times if micro_step == 1 else 1.0) / MIB


def test_an_allocator_that_keeps_everything_fetches_nothing_in_the_steady_state() -> None:
    kept = AllocatorRates(seconds_per_new_byte=1e-10, largest_kept_block_bytes=None)
    assert fetched(allocate(1, 100), free(1), allocator=kept) == 0


def test_large_blocks_are_fetched_every_time() -> None:
    assert fetched(allocate(1, 40), free(1), allocate(2, 33), free(2), allocate(3, 32), free(3)) == 73


def test_where_no_block_is_kept_every_block_is_fetched() -> None:
    none = AllocatorRates(seconds_per_new_byte=1e-10, largest_kept_block_bytes=0)
    assert fetched(allocate(1, 3), free(1), allocate(2, 4), free(2), allocator=none) == 7


def test_a_heap_that_stays_below_its_threshold_is_kept() -> None:
    # 60 MiB come and go: less than 64 MiB free at the top.
    assert fetched(allocate(1, 30), allocate(2, 30), free(2), free(1), resident=50) == 0


def test_a_heap_that_grows_beyond_its_threshold_is_cut_back_and_grows_again() -> None:
    # 72 MiB come. When the third goes, 24 are free at the top, then 48, then 72: more than 64, all goes back.
    step = [allocate(1, 24), allocate(2, 24), allocate(3, 24), free(3), free(2), free(1)]
    assert fetched(*step, resident=50) == 72


def test_what_was_alive_while_a_library_computed_is_never_cut_off() -> None:
    # The product runs while 48 MiB are alive: only the 24 above are fetched again.
    step = [allocate(1, 24), allocate(2, 24, flops=1), allocate(3, 24), free(3), free(2), free(1)]
    assert fetched(*step) == 24


def test_a_slice_that_stands_for_others_fetches_as_often_as_they_do() -> None:
    assert fetched(allocate(1, 40), free(1), allocate(2, 40, micro_step=1), free(2), times=3.0) == 160
