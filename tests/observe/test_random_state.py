"""Random states are given back, also after an error."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_memfit.observe.random_state import random_state_kept


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_the_same_numbers_are_drawn_after_the_context_as_without_it() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    expected = drawn()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    with pytest.raises(ZeroDivisionError), random_state_kept():
        assert drawn() == expected
        raise ZeroDivisionError
    assert drawn() == expected
