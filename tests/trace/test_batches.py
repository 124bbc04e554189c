"""What a batch holds is counted whatever it is made of."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.trace.training_step import program_of, trace_window


class OwnBatch:
    """A class that neither torch nor this project knows."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs
        self.names = ["a", "b"]


def inputs_of(batch: Any) -> torch.Tensor:
    return batch.inputs if isinstance(batch, OwnBatch) else batch["inputs"]


@pytest.mark.parametrize("kind", [dict, UserDict, OwnBatch])
def test_inputs_are_counted_in_mappings_and_classes_of_the_users_own(kind: type) -> None:
    inputs = torch.zeros(8, 16)  # 512 bytes
    batch = OwnBatch(inputs) if kind is OwnBatch else kind(inputs=inputs)
    program = program_of(
        nn.Linear(16, 1),
        loss=lambda module, batch: module(inputs_of(batch)).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    timeline = trace_window(program, batch)
    assert sum(r.allocated_bytes for r in timeline.residents if r.category == "inputs") == 512
    assert inputs_of(batch) is inputs  # the user's own batch is untouched
