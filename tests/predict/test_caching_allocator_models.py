"""The replay against a second, slow model of the allocator, and what holds for every sequence of requests.

Run: ``pytest tests/predict/test_caching_allocator_models.py``.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memfit.predict.allocator_settings import AllocatorSettings
from lightning_memfit.predict.caching_allocator import (
    Allocate,
    Release,
    Replayed,
    Request,
    minimum_feasible_bytes,
    replay,
)
from tests.predict.slow_allocator import slow_replay

KIB, MIB = 2**10, 2**20

SIZES = st.one_of(
    st.sampled_from([0, 1, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 30 * MIB, 41 * MIB]),
    st.integers(1, MIB),
    st.integers(MIB, 60 * MIB),
    st.integers(1, 60).map(lambda mib: mib * MIB),
    st.integers(1, 20).map(lambda part: part * 100 * KIB),
)


@st.composite
def sequences(draw: st.DrawFn) -> list[Request]:
    """Allocations, and releases of what is held, in any order."""
    requests: list[Request] = []
    held: list[int] = []
    for block, (size, releases) in enumerate(
        draw(st.lists(st.tuples(SIZES, st.lists(st.integers(0, 99), max_size=3)), max_size=40))
    ):
        requests.append(Allocate(block, size))
        held.append(block)
        for pick in releases:
            if held:
                requests.append(Release(held.pop(pick % len(held))))
    return requests


DIVISIONS = st.sampled_from([0, 1, 2, 8, ((1, 4), (16, 2), (None, 8)), ((4, 0), (32, 16))])
OPTIONS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 25 * MIB, 40 * MIB]),
    max_non_split_rounding_bytes=st.sampled_from([None, 40 * MIB]),
    roundup_power2_divisions=DIVISIONS,
    garbage_collection_threshold=st.sampled_from([None, 0.1, 0.5, 0.9]),
    large_segment_bytes=st.sampled_from([12 * MIB, 20 * MIB]),
)
LIMITS = st.one_of(st.none(), st.integers(0, 200).map(lambda mib: mib * MIB))


def as_numbers(replayed: Replayed) -> tuple[int, int, int, int | None, int, int]:
    return (
        replayed.peak_allocated_bytes,
        replayed.peak_reserved_bytes,
        replayed.peak_requested_bytes,
        replayed.ran_out_at,
        replayed.num_retries,
        replayed.num_device_allocs,
    )


@settings(max_examples=400)
@given(sequences(), OPTIONS, LIMITS, LIMITS)
def test_the_replay_does_what_a_slow_model_written_for_itself_does(
    requests: list[Request], options: AllocatorSettings, limit: int | None, allowed: int | None
) -> None:
    replayed = replay(requests, options, limit_bytes=limit, allowed_bytes=allowed)
    assert as_numbers(replayed) == slow_replay(requests, options, limit, allowed)


@given(sequences(), OPTIONS)
def test_reserved_is_at_least_allocated_which_is_at_least_requested_and_nothing_fails_without_a_limit(
    requests: list[Request], options: AllocatorSettings
) -> None:
    replayed = replay(requests, options)
    assert replayed.ran_out_at is None
    assert replayed.num_retries == 0
    assert replayed.peak_reserved_bytes >= replayed.peak_allocated_bytes >= replayed.peak_requested_bytes


@given(sequences(), OPTIONS)
def test_the_reserved_peak_without_a_limit_is_a_limit_that_changes_nothing(
    requests: list[Request], options: AllocatorSettings
) -> None:
    unlimited = replay(requests, options)
    assert replay(requests, options, limit_bytes=unlimited.peak_reserved_bytes) == unlimited


@given(sequences(), OPTIONS)
def test_the_minimum_survives_holds_what_is_in_use_and_one_granule_less_does_not_survive(
    requests: list[Request], options: AllocatorSettings
) -> None:
    least = minimum_feasible_bytes(requests, options)
    unlimited = replay(requests, options)
    assert unlimited.peak_allocated_bytes <= least <= unlimited.peak_reserved_bytes
    assert replay(requests, options, limit_bytes=least).ran_out_at is None
    if least:
        assert replay(requests, options, limit_bytes=least - 2 * MIB).ran_out_at is not None


@given(sequences(), OPTIONS, st.integers(0, 200))
def test_under_a_limit_no_more_is_reserved_than_it(
    requests: list[Request], options: AllocatorSettings, mib: int
) -> None:
    assert replay(requests, options, limit_bytes=mib * MIB).peak_reserved_bytes <= mib * MIB
