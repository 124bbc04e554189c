"""Each rule of the caching allocator, on sequences worked out by hand. Sizes are MiB where nothing else is said.

Run: ``pytest tests/predict/test_caching_allocator.py``.
"""

from __future__ import annotations

import pytest

from lightning_memfit.predict.allocator_settings import AllocatorSettings
from lightning_memfit.predict.caching_allocator import (
    Allocate,
    Release,
    Replayed,
    Request,
    minimum_feasible_bytes,
    replay,
)

MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def steps(*sizes_mib: float | str) -> list[Request]:
    """``20`` allocates 20 MiB as the next number from 0; ``"-0"`` releases number 0."""
    requests: list[Request] = []
    number = 0
    for size in sizes_mib:
        if isinstance(size, str):
            requests.append(Release(int(size.removeprefix("-"))))
        else:
            requests.append(Allocate(number, int(size * MIB)))
            number += 1
    return requests


def mib(replayed: Replayed) -> tuple[float, float]:
    return replayed.peak_allocated_bytes / MIB, replayed.peak_reserved_bytes / MIB


def test_one_byte_takes_512_of_a_segment_of_2_mib() -> None:
    replayed = replay([Allocate(7, 1)])
    assert replayed.peak_requested_bytes == 1
    assert replayed.peak_allocated_bytes == 512
    assert replayed.peak_reserved_bytes == 2 * MIB
    assert (replayed.num_device_allocs, replayed.num_retries, replayed.ran_out_at) == (1, 0, None)


def test_nothing_is_allocated_for_no_bytes() -> None:
    replayed = replay([Allocate(0, 0), Release(0)], limit_bytes=0)
    assert (replayed.peak_reserved_bytes, replayed.ran_out_at) == (0, None)


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),  # between 1 and 10 MiB: a segment of 20
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # 10 MiB once rounded to 512 bytes
        (21 * MIB, 22 * MIB, 22 * MIB),  # the 1 MiB left of 22 is not more than 1 MiB, so it is not split off
        (20 * MIB + MIB // 2, 20 * MIB + MIB // 2, 22 * MIB),  # 1.5 MiB left are
    ],
)
def test_the_size_decides_on_the_segment_and_on_what_is_split_off(
    requested: int, allocated: int, reserved: int
) -> None:
    replayed = replay([Allocate(0, requested)])
    assert (replayed.peak_allocated_bytes, replayed.peak_reserved_bytes) == (allocated, reserved)


def test_small_and_large_requests_share_no_segment() -> None:
    # Two of 1 MiB fill a small segment of 2; 5, 5 and 5 share a large one of 20, whose 5 left serve no small request.
    assert mib(replay(steps(1, 1, 5, 5, 5))) == (17, 22)
    assert mib(replay(steps(1, 1, 5, 5, 5, 0.5))) == (17.5, 24)


def test_the_smallest_block_that_fits_is_taken() -> None:
    # 20 goes into the 22 (2 left are split off), so that 30 still finds the 30.
    assert mib(replay(steps(30, 22, "-0", "-1", 20, 30))) == (52, 52)


def test_of_equal_blocks_the_one_made_first_is_taken() -> None:
    # Free are a whole segment of 20 and the last 20 of the 42. The segment is older: the 20 goes there, and once the
    # 22 is released the 42 is whole again for the last request.
    assert replay(steps(20, 42, "-0", "-1", 22, 20, "-2", 42)).peak_reserved_bytes == 62 * MIB
    # With the 42 made first, the 20 goes to its end, and the last request needs another segment.
    assert replay(steps(42, 20, "-0", "-1", 22, 20, "-2", 42)).peak_reserved_bytes == (62 + 42) * MIB


def test_of_equal_blocks_in_one_segment_the_one_of_the_lowest_address_is_taken() -> None:
    # Of a segment of 20 three are in use and the last 5 are free. The first 5 are released and taken again before the
    # last, so that the third, once released, is one block of 10 with them.
    assert mib(replay(steps(5, 5, 5, "-0", 5, "-2", 10))) == (20, 20)


def test_released_neighbours_become_one_block() -> None:
    assert mib(replay(steps(5, 5, 5, "-0", "-2", "-1", 20))) == (20, 20)
    # The one in the middle keeps 5 and 10 apart.
    assert mib(replay(steps(5, 5, 5, "-0", "-2", 14))) == (19, 34)


def test_at_the_limit_whole_segments_are_given_back_before_it_runs_out() -> None:
    # 20 cached and 30 asked for: 50 are more than 40, so the 20 goes back.
    replayed = replay(steps(20, "-0", 30), limit_bytes=40 * MIB)
    assert mib(replayed) == (30, 30)
    assert (replayed.num_retries, replayed.num_device_allocs, replayed.ran_out_at) == (1, 2, None)
    assert replay(steps(20, "-0", 30), limit_bytes=28 * MIB).ran_out_at == 2


def test_a_segment_partly_in_use_cannot_be_given_back() -> None:
    # 15 of the 20 are free, but 20 + 30 is more than 48.
    replayed = replay(steps(5, 30), limit_bytes=48 * MIB)
    assert (replayed.ran_out_at, replayed.num_retries) == (1, 1)
    assert mib(replayed) == (5, 20)


def test_blocks_of_the_largest_split_size_serve_no_smaller_request() -> None:
    options = AllocatorSettings(max_split_size_bytes=40 * MIB)
    assert mib(replay(steps(60, "-0", 30))) == (60, 60)
    assert mib(replay(steps(60, "-0", 30), options)) == (60, 90)


def test_an_unsplit_block_may_be_larger_than_its_request_by_less_than_20_mib() -> None:
    options = AllocatorSettings(max_split_size_bytes=40 * MIB)
    # 60 is less than 45 + 20: the whole block is taken, and 50 more are as many again.
    assert mib(replay(steps(60, "-0", 45, 50), options)) == (110, 110)
    # 60 is not less than 40 + 20.
    assert mib(replay(steps(60, "-0", 40), options)) == (60, 100)
    wider = AllocatorSettings(max_split_size_bytes=40 * MIB, max_non_split_rounding_bytes=30 * MIB)
    assert mib(replay(steps(60, "-0", 40), wider)) == (60, 60)


def test_with_a_largest_split_size_just_enough_oversize_blocks_are_given_back_first() -> None:
    options = AllocatorSettings(max_split_size_bytes=40 * MIB)
    # 60 + 40 is more than 90: the 60 goes back, without the retry that gives everything back.
    replayed = replay(steps(60, "-0", 40), options, limit_bytes=90 * MIB)
    assert (mib(replayed), replayed.num_retries, replayed.ran_out_at) == ((60, 60), 0, None)
    # No block is as large as 100: first 60, then 50 go back; the 20 stays cached for the last request.
    replayed = replay(steps(60, 50, 20, "-0", "-1", "-2", 100, 20), options, limit_bytes=130 * MIB)
    assert (mib(replayed), replayed.num_retries, replayed.num_device_allocs) == ((130, 130), 0, 4)


def test_sizes_are_rounded_up_to_a_part_of_the_power_of_two_below() -> None:
    # 84 lies between 64 and 128: in 4 parts of 16 up to 96, in 8 parts of 8 up to 88.
    # Source of the case: pytorch/pytorch test/test_cuda.py, test_allocator_settings.
    for parts, rounded in ((4, 96), (8, 88), (1, 84)):
        options = AllocatorSettings(roundup_power2_divisions=parts)
        assert mib(replay(steps(84), options)) == (rounded, rounded)
    by_size = AllocatorSettings(roundup_power2_divisions=((64, 8), (128, 2), (256, 2), (512, 2), (1024, 1), (None, 1)))
    assert mib(replay(steps(84), by_size)) == (88, 88)
    assert mib(replay(steps(400), by_size)) == (512, 512)  # between 256 and 512 in 2 parts of 128
    # Not more than 512 bytes for each part: only to 512.
    assert replay([Allocate(0, 1500)], AllocatorSettings(roundup_power2_divisions=8)).peak_allocated_bytes == 1536


def test_garbage_is_collected_above_the_threshold_oldest_first() -> None:
    requests = steps(20, "-0", 40, "-1", 50)
    options = AllocatorSettings(garbage_collection_threshold=0.5)
    # At the 50, 60 are reserved and 50 is the threshold. The 20 waits for 2 searches, the 40 for 1, on average 1.5:
    # only the 20 goes back, and 40 + 50 fit in 100.
    replayed = replay(requests, options, allowed_bytes=100 * MIB)
    assert (mib(replayed), replayed.num_retries) == ((50, 90), 0)
    # Without collection 60 + 50 do not fit: everything goes back.
    replayed = replay(requests, allowed_bytes=100 * MIB)
    assert (mib(replayed), replayed.num_retries) == ((50, 60), 1)
    # Without a memory fraction the threshold changes nothing.
    assert mib(replay(requests, options)) == (50, 110)


def test_a_memory_fraction_is_checked_before_the_device_is_asked() -> None:
    assert replay(steps(30), allowed_bytes=28 * MIB).ran_out_at == 0
    # An expandable segment is checked for the 26 that a segment of its own would take, and maps 40.
    replayed = replay(steps(25), EXPANDABLE, allowed_bytes=30 * MIB)
    assert (mib(replayed), replayed.ran_out_at) == ((25, 40), None)


def test_an_expandable_segment_grows_by_what_its_free_end_lacks() -> None:
    # 5 of 20; the 30 takes the 15 left and 15 of another 20. Without expandable segments: 20 + 30.
    assert mib(replay(steps(5, 30))) == (35, 50)
    assert mib(replay(steps(5, 30), EXPANDABLE)) == (35, 40)
    # Small requests have a segment of their own, in steps of 2.
    assert mib(replay(steps(1, 1, 1, 5), EXPANDABLE)) == (8, 24)
    assert mib(replay(steps(5), AllocatorSettings(expandable_segments=True, large_segment_bytes=12 * MIB))) == (5, 12)


def test_blocks_of_expandable_segments_are_split_to_512_bytes() -> None:
    assert mib(replay(steps(21), EXPANDABLE)) == (21, 40)


def test_free_granules_of_an_expandable_segment_are_unmapped_at_the_limit() -> None:
    # 40 are mapped and free when a small segment needs 2.
    replayed = replay([*steps(30, "-0"), Allocate(1, 1)], EXPANDABLE, limit_bytes=40 * MIB)
    assert (mib(replayed)[1], replayed.num_retries, replayed.ran_out_at) == (40, 1, None)


def test_only_whole_granules_are_unmapped() -> None:
    # 25 and 15 fill 40; of the released 25 only the first 20 go back for the small segment of 2, which makes 22.
    # Then 25 need those 20 again: 42.
    requests = steps(25, 15, "-0", 1, 25)
    replayed = replay(requests, EXPANDABLE, limit_bytes=40 * MIB)
    assert (replayed.ran_out_at, replayed.num_retries, mib(replayed)[1]) == (4, 2, 40)
    replayed = replay(requests, EXPANDABLE, limit_bytes=42 * MIB)
    assert (replayed.ran_out_at, replayed.num_retries, mib(replayed)) == (None, 0, (41, 42))


def test_the_least_limit_is_found_below_the_unlimited_peak() -> None:
    # 50 are reserved without a limit; with 30 the cached 20 is given back in time.
    requests = steps(20, "-0", 30)
    assert replay(requests).peak_reserved_bytes == 50 * MIB
    assert minimum_feasible_bytes(requests) == 30 * MIB
    assert minimum_feasible_bytes([]) == 0
    # 5 of 20 stay in use, so that 20 + 30 are needed; expandable segments need 40.
    assert minimum_feasible_bytes(steps(5, 30)) == 50 * MIB
    assert minimum_feasible_bytes(steps(5, 30), EXPANDABLE) == 40 * MIB


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([Release(3)], "Request 0 releases block 3, which is not allocated."),
        (
            [Allocate(3, 1), Allocate(3, 2)],
            "Request 1 is no new block of a size from 0 bytes: Allocate(block=3, requested_bytes=2).",
        ),
        (
            [Allocate(3, -1)],
            "Request 0 is no new block of a size from 0 bytes: Allocate(block=3, requested_bytes=-1).",
        ),
    ],
)
def test_requests_that_no_program_makes_are_refused(requests: list[Request], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        replay(requests)
    assert str(refusal.value) == message
