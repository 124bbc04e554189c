"""Batches of several loaders at once that cannot be divided. Run: ``pytest tests/apply/test_side_by_side.py``."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit.apply.side_by_side import uneven_batches


def loader(samples: int, batch_size: int = 4, *, drop_last: bool = False) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(samples)), batch_size=batch_size, drop_last=drop_last)


@pytest.mark.parametrize(
    ("members", "num_batches", "cycled", "uneven"),
    [
        ([loader(12), loader(8)], 3, True, None),
        ([loader(10), loader(10)], 3, True, None),  # both end with 2
        ([loader(10, drop_last=True), loader(9, drop_last=True)], 2, True, None),
        ([loader(12), loader(6)], 3, True, "batch_idx 1 has 4 and 2 samples"),
        ([loader(10), loader(8)], 3, True, "batch_idx 2 has 2 and 4 samples"),  # the second begins anew
        ([loader(10), loader(8)], 3, False, None),  # nothing of the second is left
        ([loader(10), loader(8)], 2, True, None),  # the short batch is never read
        ([loader(8), loader(6, 3)], 2, True, "batch_idx 1 has 4 and 3 samples"),
        ([loader(12), [torch.zeros(3)]], 3, True, None),  # a list of batches tells nothing
    ],
)
def test_a_batch_of_which_loaders_give_different_numbers_is_named(
    members: list[object], num_batches: int, cycled: bool, uneven: str | None
) -> None:
    found = uneven_batches(members, num_batches, cycled=cycled)
    assert found is uneven if uneven is None else (found is not None and found.startswith(uneven))


def test_the_way_out_is_named() -> None:
    assert uneven_batches([loader(12), loader(6)], None, cycled=True) == (
        "batch_idx 1 has 4 and 2 samples of the loaders that are read side by side: give them drop_last=True, or pass "
        "MemFit(split_batch=...), a function (batch, micro_batch_size) -> pairs of (slice, samples)."
    )
