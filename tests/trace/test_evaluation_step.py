"""Evaluation steps on fakes. Run: ``pytest tests/trace/test_evaluation_step.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.errors import TraceError
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.evaluation_step import trace_evaluation_steps
from lightning_memfit.trace.timeline import Operation, Timeline

WEIGHT, BATCH, OUTPUT = 4 * 64 * 32, 4 * 8 * 32, 4 * 8 * 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 64, bias=False)
        self.kept: list[torch.Tensor] = []
        self.prepared = 0

    def evaluate(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled()
        output: torch.Tensor = self.layer(batch)
        return output

    def keep(self, batch: torch.Tensor, index: int) -> None:
        self.kept.append(self.evaluate(batch, index))


def traced(module: Net, evaluate: Any, **settings: Any) -> Timeline:
    return trace_evaluation_steps(module, evaluate, torch.ones(8, 32), **settings)


def test_the_peak_is_weights_batch_and_one_output() -> None:
    module = Net()
    module.layer.weight.grad = torch.ones(64, 32)  # gone while evaluating
    timeline = traced(module, module.evaluate, num_steps=2)
    memory = predict_memory(timeline)
    assert memory.peak_allocated_bytes == WEIGHT + BATCH + OUTPUT
    assert memory.by_category == {"parameters": WEIGHT, "inputs": BATCH, "temporaries": OUTPUT}
    assert memory.peak_phase == "evaluation"
    assert sum(isinstance(event, Operation) for event in timeline.events) == 2


def test_what_is_kept_adds_up_over_the_steps() -> None:
    module = Net()
    peaks = [predict_memory(traced(module, module.keep, num_steps=steps)).peak_allocated_bytes for steps in (1, 2, 3)]
    assert peaks == [WEIGHT + BATCH + steps * OUTPUT for steps in (1, 2, 3)]
    assert module.kept == [] and module.training


def test_what_prepares_runs_first_and_is_undone() -> None:
    module = Net()

    def prepare() -> None:
        module.prepared += 1

    def evaluate(batch: torch.Tensor, index: int) -> None:
        assert module.prepared == 1
        module.evaluate(batch, index)

    traced(module, evaluate, num_steps=2, prepare=prepare)
    assert module.prepared == 0


def test_an_error_of_the_step_is_a_trace_error_with_its_words() -> None:
    module = Net()
    with pytest.raises(TraceError, match="ZeroDivisionError"):
        traced(module, lambda batch, index: 1 / 0, num_steps=1)
    assert module.training
