"""Which storage is which parameter, and whose gradient a storage holds."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memfit.trace.recording import record_window
from lightning_memfit.trace.step_program import StepProgram, program_of
from lightning_memfit.trace.timeline import Operation, ParameterLayout, Timeline
from lightning_memfit.trace.training_step import trace_window


class TwoLayers(nn.Module):
    """A frozen layer, one that is trained, and a second name for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 16, bias=False).requires_grad_(False)
        self.trained = nn.Linear(16, 4)
        self.again = self.trained.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(batch))


def program() -> StepProgram:
    return program_of(TwoLayers(), loss=lambda module, batch: module(batch).sum(), optimizer=torch.optim.SGD)


def traced(slices: int) -> Timeline:
    return trace_window(program(), torch.zeros(6, 8), divide=lambda batch: batch.chunk(slices))


def test_parameters_are_told_once_each_with_name_shape_and_storage() -> None:
    timeline = traced(1)
    assert [parameter._replace(storage=0) for parameter in timeline.parameters] == [
        ParameterLayout("again", 0, "float32", (4, 16), True),  # the first of its two names
        ParameterLayout("frozen.weight", 0, "float32", (16, 8), False),
        ParameterLayout("trained.bias", 0, "float32", (4,), True),
    ]
    sizes = {resident.storage: resident.allocated_bytes for resident in timeline.residents}
    assert [sizes[parameter.storage] for parameter in timeline.parameters] == [4 * 64, 4 * 128, 4 * 4]


def test_old_and_new_gradients_are_told_apart_by_their_parameter() -> None:
    timeline = traced(2)
    old = {resident.storage for resident in timeline.residents if resident.category == "gradients"}
    assert {timeline.gradient_of[storage] for storage in old} == {0, 2}
    new = {
        output.storage: output.allocated_bytes
        for event in timeline.events
        if isinstance(event, Operation) and event.phase == "backward"
        for output in event.outputs
        if output.storage in timeline.gradient_of
    }
    # The first of two slices makes a gradient of the weight (256 bytes) and of the bias (16 bytes); those of the second
    # are temporaries that are added to them in place.
    sizes = sorted((timeline.gradient_of[storage], size) for storage, size in new.items())
    assert sizes == [(0, 256), (2, 16)]


def test_a_record_tells_the_same_as_a_trace() -> None:
    record, timeline = record_window(program(), torch.zeros(6, 8), samples=(6,)), traced(1)
    assert record.parameters == timeline.parameters
    assert sorted(record.gradient_of.values()) == sorted(timeline.gradient_of.values()) == [0, 0, 2, 2]
