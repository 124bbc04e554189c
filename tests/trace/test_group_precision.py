"""A step on one device in the dtypes of a policy of ``fully_shard``: what is cast where, and what is kept in what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.sharding import GroupPrecision
from lightning_memfit.trace.group_precision import fakes_under
from lightning_memfit.trace.step_program import StepProgram, program_of
from lightning_memfit.trace.timeline import Operation, Timeline
from lightning_memfit.trace.training_step import trace_window


class Net(nn.Module):
    """Two groups, one inside the other, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.block(x).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BOTH = GroupPrecision(groups=("", "block"), param_dtype="bfloat16", output_dtype="float32")


def by_forward() -> StepProgram:
    return program_of(Net(), loss=lambda net, x: net(x).sum(), optimizer=torch.optim.SGD)


def by_step() -> StepProgram:
    return program_of(Net())


def traced(program: StepProgram, precision: GroupPrecision | None = BOTH) -> Timeline:
    given = replace(program, group_precision=precision)
    return trace_window(given, torch.zeros(2, 8), steps=False, collect_signatures=False)


def casts(timeline: Timeline) -> list[tuple[str, bool]]:
    """Module of every cast of a forward, and whether it is outside of all."""
    return [
        (event.module, event.outside)
        for event in timeline.events
        if isinstance(event, Operation) and event.op.startswith("aten._to_copy") and event.phase == "forward"
    ]


@pytest.mark.parametrize("program", [by_forward, by_step])
def test_what_is_cast_at_the_edge_of_a_group_belongs_to_its_caller(program: Any) -> None:
    # The batch in front of the root, which is cast to 16 bits, so that the block gets those; what the block returns, to
    # 32, within the root. What the root returns is of 32 bits already.
    assert casts(traced(program())) == [("", True), ("", False)]
    of_block = GroupPrecision(groups=("block",), param_dtype="bfloat16", output_dtype="float32")
    assert [module for module, _ in casts(traced(program(), of_block))] == ["", ""]
    assert not casts(traced(program(), None))


def test_a_step_that_is_no_forward_is_a_call_of_the_root_under_a_policy() -> None:
    assert traced(by_step()).calls_root and not traced(by_step(), None).calls_root


def test_parameters_are_told_in_the_dtype_they_are_kept_in_and_held_in_the_computing_one() -> None:
    timeline = traced(by_forward())
    assert [(each.name, each.dtype) for each in timeline.parameters] == [
        ("block.0.weight", "float32"), ("block.0.bias", "float32"),
    ]  # fmt: skip
    held = {each.storage: each.allocated_bytes for each in timeline.residents}
    assert [held[each.storage] for each in timeline.parameters] == [2 * 64, 2 * 8]
    buffers = [each.allocated_bytes for each in timeline.residents if each.category == "buffers"]
    assert buffers == [4 * 8]


def test_parameters_outside_of_every_group_and_the_module_afterwards_are_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fakes = fakes_under(module, GroupPrecision(groups=("1",), param_dtype="bfloat16"))
    assert [fakes.of(each).dtype for each in module.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    program = by_step()
    before = dict(vars(program.module))
    traced(program)
    assert vars(program.module) == before and not program.module.block._forward_pre_hooks  # type: ignore[union-attr]
