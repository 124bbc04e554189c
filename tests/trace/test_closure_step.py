"""Optimizers that run forward and backward themselves, followed on fakes.

Run: ``pytest tests/trace/test_closure_step.py``. Peaks against real runs are in ``tests/zoo``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.errors import TraceError
from lightning_memfit.forecasting import forecast
from lightning_memfit.trace.closure_step import needs_closure, trace_closure_step
from lightning_memfit.trace.step_program import StepProgram, program_of
from lightning_memfit.trace.timeline import Operation

WEIGHT = 4 * 64 * 32


def loss(module: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = module(batch).square().mean()
    return value


def program(history_size: int = 7, **settings: Any) -> StepProgram:
    return program_of(
        nn.Linear(32, 64, bias=False),
        loss=loss,
        optimizer=lambda p: torch.optim.LBFGS(list(p), history_size=history_size, **settings),
    )


def forwards(timeline: Any) -> int:
    operations = [event for event in timeline.events if isinstance(event, Operation)]
    return sum(event.op == "aten.mm.default" and event.phase == "forward" for event in operations)


@pytest.mark.parametrize(
    ("optimizer", "needs"), [(torch.optim.LBFGS, True), (torch.optim.AdamW, False), (torch.optim.SGD, False)]
)
def test_which_optimizers_run_the_step_themselves(optimizer: Any, needs: bool) -> None:
    assert needs_closure(optimizer([nn.Parameter(torch.ones(2))])) is needs


@pytest.mark.parametrize(("max_iter", "evaluations"), [(1, 1), (2, 2), (20, 3)])
def test_three_iterations_are_followed_at_most(max_iter: int, evaluations: int) -> None:
    assert forwards(trace_closure_step(program(max_iter=max_iter), torch.ones(4, 32))) == evaluations


def test_the_whole_history_is_there_before_the_step() -> None:
    timeline = trace_closure_step(program(history_size=7), torch.ones(4, 32))
    states = sum(r.allocated_bytes for r in timeline.residents if r.category == "optimizer_states")
    assert states >= (2 * 7 + 2) * WEIGHT
    assert timeline.notes == (
        "LBFGS keeps its last 7 moves and differences of gradients: forecast and proof are those of a late step",
    )


def test_slices_run_within_each_evaluation() -> None:
    halves = trace_closure_step(program(), torch.ones(4, 32), divide=lambda batch: batch.split(2))
    assert forwards(halves) == 6


class ClosureFirst(torch.optim.SGD):
    """Calls its closure as it is, without gradients."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        value = closure()
        super().step()
        return value


def test_a_closure_has_gradients_whatever_calls_it() -> None:
    """Lightning's closure enables them itself: ``Closure.closure`` of its loop."""
    made = program_of(nn.Linear(32, 64, bias=False), loss=loss, optimizer=lambda p: ClosureFirst(list(p), lr=0.1))
    timeline = trace_closure_step(made, torch.ones(4, 32))
    assert forwards(timeline) == 1
    assert "backward" in {event.phase for event in timeline.events}


def test_a_forecast_without_a_trainer_follows_the_closure() -> None:
    module = nn.Linear(32, 64, bias=False)
    memory = forecast(
        module, torch.ones(4, 32), loss=loss, optimizer=lambda p: torch.optim.LBFGS(list(p)), probe_operators=False
    )
    assert memory.by_category["optimizer_states"] >= 202 * WEIGHT


def test_what_the_step_raises_is_a_trace_error_and_the_module_is_as_before() -> None:
    module = nn.Linear(32, 64, bias=False)
    groups = program_of(
        module, loss=loss, optimizer=lambda p: torch.optim.LBFGS(list(p), line_search_fn="golden section")
    )
    with pytest.raises(TraceError, match="strong_wolfe"):
        trace_closure_step(groups, torch.ones(4, 32))
    assert module.weight.grad is None and type(module.weight) is nn.Parameter
