"""Where ZeRO puts each element."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.predict.zero_layout import FlatGroup, ZeroSettings, lightning_sharding, partition_elements
from lightning_memfit.sharding import Sharding


def test_a_flat_group_is_cut_into_equal_partitions_whatever_is_where_it_is_cut() -> None:
    # 7 + 6 + 8 = 21 elements, padded to 24 (multiples of 2 x 3), 8 to each of 3 ranks
    group = FlatGroup.of([0, 1, 2], {0: 7, 1: 6, 2: 8}, 3)
    assert group.partition == 8
    assert group.pieces == {0: ((0, 7),), 1: ((0, 1), (1, 5)), 2: ((1, 3), (2, 5))}
    assert [group.parameters_of(rank) for rank in range(3)] == [(0, 1), (1, 2), (2,)]
    assert [group.largest_piece(rank) for rank in range(3)] == [7, 5, 5]
    assert [group.tensors_of(rank) for rank in range(3)] == [2, 2, 2]  # the last one's second is padding


def test_a_parameter_larger_than_a_partition_has_a_piece_on_every_rank_it_reaches() -> None:
    assert FlatGroup.of([0], {0: 10}, 2).pieces == {0: ((0, 6), (1, 4))}  # padded to 12


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(1, 8))
def test_pieces_add_up_to_their_parameters_and_fit_their_partitions(sizes: list[int], ranks: int) -> None:
    group = FlatGroup.of(range(len(sizes)), dict(enumerate(sizes)), ranks)
    assert [sum(size for _, size in group.pieces[index]) for index in range(len(sizes))] == sizes
    for rank in range(ranks):
        held = sum(size for found in group.pieces.values() for owner, size in found if owner == rank)
        assert held <= group.partition == partition_elements(sum(sizes), ranks)
    assert 0 <= group.partition * ranks - sum(sizes) < 2 * ranks


def test_what_a_sharding_leaves_open_is_deepspeeds_own_default() -> None:
    third = ZeroSettings.of(Sharding(engine="deepspeed", ranks=4, zero_stage=3))
    assert (third.bucket_elements, third.prefetch_elements, third.persistent_elements) == (5 * 10**8, 5 * 10**7, 10**5)
    assert (third.reuse_elements, third.live_elements) == (10**9, 10**9)
    assert third.overlaps and third.buckets == 1  # stage 3 has one bucket in any case
    second = ZeroSettings.of(Sharding(engine="deepspeed", ranks=4, zero_stage=2))
    assert not second.overlaps and second.buckets == 1


def test_lightning_sets_smaller_buckets_and_two_of_them() -> None:
    settings = ZeroSettings.of(lightning_sharding(2, 4))
    assert (settings.bucket_elements, settings.buckets) == (2 * 10**8, 2)


def test_another_engine_has_no_such_settings() -> None:
    with pytest.raises(UnsupportedError, match="FSDP2 over 2 is none of DeepSpeed's stages"):
        ZeroSettings.of(Sharding(engine="fsdp2", ranks=2))
