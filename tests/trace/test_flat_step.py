"""The optimizer's step over flat shares is what the real optimizer takes over such a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.flat_step import trace_flat_steps
from lightning_memfit.trace.step_program import StepProgram
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import program_of


def module() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10), nn.Linear(10, 3))
    made[2].bias.requires_grad_(False)
    return made


def program(optimizer: Any) -> StepProgram:
    return program_of(module(), loss=lambda inner, batch: inner(batch).sum(), optimizer=optimizer)


def half(elements: Sequence[int]) -> int:
    return sum(elements) // 2


def bytes_of(step: Timeline, category: str) -> int:
    return sum(each.allocated_bytes for each in step.residents if each.category == category)


def test_all_that_is_trained_is_one_tensor_in_32_bits_whatever_the_module_is_in() -> None:
    (found,) = trace_flat_steps(program(torch.optim.AdamW), half)
    # 100 + 10 + 10 + 10 + 30 elements are trained, 3 are frozen
    assert found.parameters == (0, 1, 2, 3, 4) and found.elements == 80
    assert bytes_of(found.step, "parameters") == bytes_of(found.step, "gradients") == 320
    assert bytes_of(found.step, "optimizer_states") == 2 * 320 + 4  # and the counter of steps
    # the optimizer alone, one tensor after the other: the square root, and what it is divided into
    assert predict_memory(found.step).peak_allocated_bytes == 4 * 320 + 4 + 2 * 320


def test_every_group_is_a_tensor_of_its_own_and_groups_of_nothing_are_none() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        weights, rest = [], []
        for each in parameters:
            (weights if each.dim() > 1 else rest).append(each)
        groups = [{"params": weights}, {"params": [rest.pop()]}, {"params": rest, "momentum": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    first, second = trace_flat_steps(program(optimizer), half)
    assert (first.parameters, first.elements) == ((0, 4), 65)
    assert (second.parameters, second.elements) == ((1, 2, 3), 15)
    # settings of a group are its own: without momentum it has no state
    assert bytes_of(first.step, "optimizer_states") == 260 and bytes_of(second.step, "optimizer_states") == 0


def test_states_in_8_bits_are_those_of_the_flat_tensor() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    (found,) = trace_flat_steps(program(partial(bitsandbytes.optim.AdamW8bit, lr=1e-3)), lambda elements: 8192)
    # two states of a byte, their maps of 256 floats, and a largest value for each of 32 blocks
    assert bytes_of(found.step, "optimizer_states") == 2 * (8192 + 1024 + 32 * 4)


def test_the_module_and_its_gradients_are_left_as_they_were() -> None:
    traced = program(torch.optim.AdamW)
    before = [parameter.clone() for parameter in traced.module.parameters()]
    trace_flat_steps(traced, half)
    for parameter, kept in zip(traced.module.parameters(), before, strict=True):
        assert torch.equal(parameter, kept) and parameter.grad is None
