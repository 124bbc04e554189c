"""Random generators are read, written back, and moved once more as a call moved them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_memfit.apply.random_sources import RandomSources, is_generator


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_states_are_given_back_also_after_an_exception() -> None:
    own = np.random.default_rng(3)
    sources = RandomSources(own, "no generator", own)
    expected = [draw(), own.random()]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    own = np.random.default_rng(3)
    sources = RandomSources(own)
    with pytest.raises(LookupError), sources.kept():
        draw(), own.random()
        raise LookupError
    assert [draw(), own.random()] == expected


@pytest.mark.parametrize(
    "own", [torch.Generator(), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)], ids=type
)
def test_a_move_is_replayed_where_it_was_made_and_nowhere_else(own: object) -> None:
    assert is_generator(own)
    sources = RandomSources(own)
    before = sources.read()
    number, move = sources.record(random.random)
    assert move.of_global_generators
    sources.write(before)
    assert move.replay()
    assert random.random() != number
    assert not move.replay()  # python's generator stands elsewhere now


def test_a_move_of_a_generator_of_ones_own_is_none_of_those_that_training_draws_from() -> None:
    own = random.Random(2)
    _, move = RandomSources(own).record(own.random)
    assert not move.of_global_generators
    _, nothing = RandomSources(own).record(lambda: None)
    assert not nothing.of_global_generators
    assert nothing.replay()
