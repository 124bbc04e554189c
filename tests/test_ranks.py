"""Exchanges of one rank with itself, and which errors say that another one is gone. Real ranks: ``tests/ranks``."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from lightning_memfit.errors import RankFailedError
from lightning_memfit.ranks import OneRank, is_broken_collective


def test_one_rank_exchanges_with_itself() -> None:
    rank = OneRank()
    told = rank.each(lambda: "ab", doing="nothing", tell=len)
    assert (told.own, told.all) == ("ab", [2])
    assert rank.led(lambda: 3, doing="nothing") == rank.share(3) == rank.from_rank(0, 3) == 3
    assert rank.mean(0.5) == 0.5
    rank.alike(ValueError("no"), "here", doing="nothing")
    with pytest.raises(ValueError, match="no"), rank.failing("nothing"), rank.alone():
        raise ValueError("no")


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv"), True),
        (RuntimeError("NCCL Error 6: remote process exited"), True),
        (dist.DistBackendError("watchdog"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_collective_that_broke_is_told_from_other_errors(error: Exception, broken: bool) -> None:
    assert is_broken_collective(error) is broken


def test_the_error_of_another_rank_keeps_its_number_between_processes() -> None:
    again = pickle.loads(pickle.dumps(RankFailedError("rank 1 failed", rank=1)))
    assert (str(again), again.rank) == ("rank 1 failed", 1)
