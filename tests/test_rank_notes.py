"""Notes in a store that two ranks share: which one is read, and when all get over an error."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_memfit.rank_notes import RankNotes

SOON, LONG = datetime.timedelta(milliseconds=20), datetime.timedelta(seconds=60)


@pytest.fixture
def ranks() -> list[RankNotes]:
    store = dist.HashStore()
    return [RankNotes(lambda: store, number=3, index=index, count=2) for index in range(2)]


def places(ranks: list[RankNotes], *said: str) -> list[bool]:
    """Where the ranks failed, at the same time, to whether they go on."""
    with ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(rank.all_failed_at, place, within=LONG) for rank, place in zip(ranks, said, strict=True)
        ]
        return [each.result() for each in asked]


def test_the_note_of_one_is_read_by_all(ranks: list[RankNotes]) -> None:
    assert ranks[0].read() is None
    ranks[1].leave("ValueError: no")
    assert ranks[0].read() == ranks[1].read() == (1, "ValueError: no")


def test_a_note_is_not_read_behind_an_error_that_all_got_over(ranks: list[RankNotes]) -> None:
    ranks[1].leave("KeyError: of all")
    assert places(ranks, "block 3", "block 3") == [True, True]
    assert ranks[0].read() is None
    ranks[0].leave("ValueError: the next")
    assert ranks[1].read() == (0, "ValueError: the next")


def test_ranks_that_failed_at_other_places_do_not_go_on_and_the_note_stays(ranks: list[RankNotes]) -> None:
    ranks[1].leave("KeyError: no")
    assert places(ranks, "block 3", "block 4") == [False, False]
    assert ranks[0].read() == (1, "KeyError: no")
    assert places(ranks, "block 3", "block 3") == [True, True]  # the next error is asked about anew


def test_a_rank_that_comes_when_the_other_has_given_up_does_not_go_on_alone(ranks: list[RankNotes]) -> None:
    assert not ranks[0].all_failed_at("block 3", within=SOON)
    ranks[0].leave("KeyError: alone")
    assert not ranks[1].all_failed_at("block 3", within=LONG)
    assert ranks[1].read() == (0, "KeyError: alone")


def test_without_a_store_nothing_is_said_and_nobody_goes_on() -> None:
    def gone() -> dist.Store:
        raise RuntimeError("the store ended with rank 0")

    notes = RankNotes(gone, number=0, index=1, count=2)
    notes.leave("ValueError: no")
    assert notes.read() is None and not notes.all_failed_at("block 3", within=SOON)
