"""Optimizer states late in training: how large they get, and that the moves which make them so change nothing.

Run: ``pytest tests/observe/test_grown_states.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memfit.observe.grown_states import grows, let_states_grow
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.observe.snapshot import reachable_tensors

ELEMENTS = 12


def problem(history_size: int = 5) -> tuple[torch.nn.Parameter, torch.optim.LBFGS]:
    weights = torch.nn.Parameter(torch.linspace(1, 2, ELEMENTS, dtype=torch.float64))
    return weights, torch.optim.LBFGS([weights], lr=0.1, max_iter=1, history_size=history_size)


def step(weights: torch.nn.Parameter, optimizer: torch.optim.LBFGS) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = (weights**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_the_history_of_lbfgs_is_as_large_as_it_will_become() -> None:
    weights, optimizer = problem()
    step(weights, optimizer)
    let_states_grow(optimizer)
    grown = storage_bytes(reachable_tensors([optimizer.state]))
    late, late_optimizer = problem()
    for _ in range(12):
        step(late, late_optimizer)
    vectors = (2 * 5 + 2) * ELEMENTS * 8  # moves, differences, the direction and the gradient before
    assert grown >= vectors
    assert grown - storage_bytes([weights]) == pytest.approx(
        storage_bytes(reachable_tensors([late_optimizer.state])) - storage_bytes([late]), abs=10 * 8
    )  # but for scalars of 8 bytes


def test_moves_of_zero_leave_the_next_direction_as_it_is() -> None:
    (plain, plain_optimizer), (grown, grown_optimizer) = problem(), problem()
    for weights, optimizer in ((plain, plain_optimizer), (grown, grown_optimizer)):
        step(weights, optimizer)
        step(weights, optimizer)
    for state in (plain_optimizer.state[plain], grown_optimizer.state[grown]):
        state["d"].zero_()
    let_states_grow(grown_optimizer)
    for weights, optimizer in ((plain, plain_optimizer), (grown, grown_optimizer)):
        step(weights, optimizer)
        step(weights, optimizer)
    assert torch.equal(plain, grown)


def test_the_next_iteration_holds_a_move_and_a_difference_beside_the_whole_history() -> None:
    weights, optimizer = problem()
    step(weights, optimizer)
    step(weights, optimizer)
    let_states_grow(optimizer)
    state = optimizer.state[weights]
    before = list(state["old_dirs"])
    step(weights, optimizer)
    # Taken into the history, they would have taken the place of its first entry.
    assert len(before) == 5 and all(a is b for a, b in zip(state["old_dirs"], before, strict=True))


def test_a_history_that_is_full_or_an_optimizer_that_has_not_stepped_is_left_alone() -> None:
    weights, optimizer = problem(history_size=2)
    let_states_grow(optimizer)
    assert not optimizer.state
    for _ in range(6):
        step(weights, optimizer)
    before = list(optimizer.state[weights]["old_dirs"])
    let_states_grow(optimizer)
    assert all(a is b for a, b in zip(optimizer.state[weights]["old_dirs"], before, strict=True))


def test_other_optimizers_do_not_grow() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    assert grows(optimizer) is None
    let_states_grow(optimizer)
    assert grows(problem()[1]) == "LBFGS keeps its last 5 moves and differences of gradients"
