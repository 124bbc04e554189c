"""What an evaluation holds beside its step. Run: ``pytest tests/test_evaluation_forecast.py``.

Forecasts against real runs are in ``tests/e2e/test_evaluation.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memfit.evaluation_forecast import replaced_bytes

FLOATS, LABELS = torch.ones(8, 32), torch.zeros(8, dtype=torch.int64)
BATCH = {"x": FLOATS, "y": LABELS}


@pytest.mark.parametrize(
    ("arrived", "floating", "expected"),
    [
        (BATCH, None, 0),  # the loader's own batch is what the step gets
        ({"x": FLOATS[:, :16], "y": LABELS}, None, 0),  # a view of it
        ({"x": FLOATS.double(), "y": LABELS}, None, 4 * 8 * 32),  # the loader's floats stay beside the doubles
        (BATCH, torch.bfloat16, 4 * 8 * 32),  # floats are converted, labels are not
        ({"x": FLOATS.bfloat16(), "y": LABELS}, torch.bfloat16, 4 * 8 * 32),
    ],
    ids=["the same", "a view", "another dtype by a hook", "converted", "converted by a hook"],
)
def test_what_the_step_does_not_get_of_the_loaders_batch_is_held_all_the_same(
    arrived: Any, floating: torch.dtype | None, expected: int
) -> None:
    assert replaced_bytes(BATCH, arrived, floating) == expected
