"""The setting in which a step is followed leaves nothing behind. Run: ``pytest tests/trace/test_faked_step.py``."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lightning_memfit.errors import TraceError
from lightning_memfit.trace.fake_module import FakeTensors, new_fake_mode
from lightning_memfit.trace.faked_step import faked_step, layouts_of, make_optimizer, names_of
from lightning_memfit.trace.step_program import program_of
from lightning_memfit.trace.tracer import StepTracer


def test_the_module_is_fake_within_and_itself_again_when_the_body_raises(capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    weight, attributes = module[0].weight, dict(vars(module))
    tracer = StepTracer(names_of(module))
    with pytest.raises(KeyError), faked_step(module, FakeTensors(new_fake_mode()), tracer):
        assert module[0].weight is not weight
        assert gc.get_freeze_count() > 0  # what was there before is no garbage of the trace
        module.left_behind = 1
        print("not shown")
        module(torch.zeros(2, 4))
        raise KeyError
    assert module[0].weight is weight and dict(vars(module)) == attributes
    assert capsys.readouterr().out == ""
    assert [event.op for event in tracer.events if hasattr(event, "op")][-1] == "aten.addmm.default"
    events = len(tracer.events)
    gc.collect()
    assert len(tracer.events) == events  # what dies afterwards is not followed


def test_gradients_are_described_without_their_data() -> None:
    one, two = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
    one.grad = torch.zeros(2, 3).t()
    layout, none = layouts_of([one, two])
    assert none is None
    assert layout is not None
    assert (layout.dtype, layout.size, layout.stride) == ("float32", (3, 2), (1, 3))


def test_an_optimizer_of_strangers_is_refused() -> None:
    module = nn.Linear(4, 4)
    program = program_of(
        module, loss=lambda m, x: m(x).sum(), optimizer=lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    )
    with pytest.raises(TraceError, match=r"given 1 tensors that are not parameters of the module now .*shape \(3,\)"):
        make_optimizer(program, list(module.parameters()))
