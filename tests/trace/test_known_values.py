"""Branches on the batch's integers and flags are those of the real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import program_of, trace_window

Batch = tuple[torch.Tensor, torch.Tensor]


class Masked(nn.Module):
    """Copies its input where the mask has a hole: 100 x 4 bytes more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 1, bias=False)
        self.register_buffer("table", torch.arange(5))

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not bool((mask == 1).all()):
            inputs = inputs * 2
        return self.layer(inputs).sum()


def traced(batch: Batch, module: nn.Module | None = None, **settings: Any) -> Timeline:
    program = program_of(
        module or Masked(),
        loss=lambda m, b: m(*b),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return trace_window(program, batch, **settings)


def test_a_branch_on_a_mask_without_holes_is_the_real_one() -> None:
    inputs = torch.zeros(10, 10)
    whole = traced((inputs, torch.ones(10, dtype=torch.long)))
    holes = traced((inputs, torch.tensor([1] * 9 + [0])))
    assert not whole.notes  # nothing was guessed
    assert not holes.notes
    # The copy of (10, 10) floats is saved for the weight's gradient in place of the batch, which is there anyway.
    assert predict_memory(holes).peak_allocated_bytes - predict_memory(whole).peak_allocated_bytes == 400


def test_slices_know_their_own_part_of_the_mask() -> None:
    mask = torch.tensor([1] * 5 + [0] * 5)
    batch = (torch.zeros(10, 10), mask)
    halves = traced(batch, divide=lambda b: [tuple(t[:5] for t in b), tuple(t[5:] for t in b)])
    multiplied = [event for event in halves.events if getattr(event, "op", "") == "aten.mul.Tensor"]
    assert len(multiplied) == 1  # in the second half only


def test_a_value_that_was_changed_in_place_is_no_longer_known() -> None:
    class Changing(Masked):
        def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            mask = mask.clone()
            mask[0] = 0
            return super().forward(inputs, mask)

    timeline = traced((torch.zeros(10, 10), torch.ones(10, dtype=torch.long)), Changing())
    assert timeline.notes and "reads 1 values" in timeline.notes[0]


def test_values_on_meta_are_not_known() -> None:
    timeline = traced((torch.zeros(10, 10), torch.ones(10, dtype=torch.long, device="meta")))
    assert timeline.notes


@pytest.mark.parametrize("value", [3, True])
def test_numbers_are_read_as_they_are(value: int) -> None:
    seen: list[object] = []

    class Reading(Masked):
        def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            seen.append(mask.max().item())
            return self.layer(inputs).sum()

    traced((torch.zeros(10, 10), torch.full((10,), value)), Reading())
    assert seen == [value] and type(seen[0]) is type(value)
