"""The optimizer's step traced alone is the one in a whole step. Run: ``pytest tests/trace/test_optimizer_step.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.errors import TraceError
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.optimizer_step import with_optimizer_step
from lightning_memfit.trace.optimizer_step import look_at_optimizer, trace_optimizer_step
from lightning_memfit.trace.step_program import program_of
from lightning_memfit.trace.timeline import Operation, Timeline
from lightning_memfit.trace.training_step import trace_window

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW single-tensor": partial(torch.optim.AdamW, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "SGD foreach": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
}


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    module.unused = nn.Linear(100, 100)
    module[0].bias.requires_grad_(False)
    return module


def loss(module: Any, batch: Tensor) -> Tensor:
    for layer in list(module)[:4]:
        batch = layer(batch)
    return batch.square().sum()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_traced_alone_takes_what_it_takes_at_the_end_of_a_whole_step(name: str) -> None:
    """Reported in verl-project/verl#1349."""
    program = program_of(network(), loss=loss, optimizer=OPTIMIZERS[name])
    whole = trace_window(program, torch.zeros(4, 32))
    window = trace_window(program, torch.zeros(4, 32), steps=False)
    assert not [event for event in window.events if event.phase == "optimizer_step"]
    states = [resident for resident in window.residents if resident.category == "optimizer_states"]
    assert not states or name == "Adagrad"  # which creates them when it is made
    composed = with_optimizer_step(window, trace_optimizer_step(program, gradients=window.gradients))
    assert predict_memory(composed) == predict_memory(whole)
    assert Counter(operations(composed)) == Counter(operations(whole))
    assert Counter(map(repr, (s.op for s in composed.signatures))) == Counter(
        map(repr, (s.op for s in whole.signatures))
    )


def operations(timeline: Timeline) -> list[Any]:
    steps = [e for e in timeline.events if isinstance(e, Operation) and e.phase == "optimizer_step"]
    return [
        (e.op, e.moved_bytes, e.flops, e.dtype, e.inner_calls, sum(o.allocated_bytes for o in e.outputs)) for e in steps
    ]


def test_parameters_without_a_gradient_have_no_states() -> None:
    program = program_of(network(), loss=loss, optimizer=OPTIMIZERS["AdamW foreach"])
    window = trace_window(program, torch.zeros(4, 32), steps=False)
    # weight, (frozen) bias, norm's two, head's two, the unused layer's two
    assert [layout is None for layout in window.gradients] == [False, True, False, False, False, False, True, True]
    states = trace_optimizer_step(program, gradients=window.gradients).residents
    used = 32 * 64 + 64 + 64 + 64 * 8 + 8
    assert sum(r.allocated_bytes for r in states if r.category == "optimizer_states") == 2 * 4 * used + 5 * 4  # steps
    assert sum(r.allocated_bytes for r in states if r.category == "gradients") == 4 * used
    everything = trace_optimizer_step(program).residents
    assert sum(r.allocated_bytes for r in everything if r.category == "gradients") == 4 * (used + 100 * 101)


def test_a_step_in_another_dtype_has_gradients_and_states_of_it() -> None:
    program = program_of(nn.Linear(10, 10, bias=False), loss=loss, optimizer=OPTIMIZERS["SGD foreach"])
    step = trace_optimizer_step(program, floating=torch.bfloat16)
    assert [r.allocated_bytes for r in step.residents] == [200, 200, 200]


def test_the_module_and_the_random_state_are_left_as_they_were() -> None:
    module = network()
    before, random_state = dict(module.named_parameters()), torch.get_rng_state()
    trace_optimizer_step(program_of(module, loss=loss, optimizer=torch.optim.AdamW))
    assert all(now is before[name] and now.grad is None for name, now in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_what_the_optimizer_raises_is_a_trace_error_with_its_words() -> None:
    program = program_of(network(), loss=loss, optimizer=lambda p: torch.optim.LBFGS(list(p)))
    with pytest.raises(TraceError, match="closure"):
        trace_optimizer_step(program)


def test_an_optimizer_can_be_looked_at_without_being_made_for_real() -> None:
    module = network()
    program = program_of(module, loss=loss, optimizer=torch.optim.AdamW)
    seen = look_at_optimizer(program, lambda optimizer: (type(optimizer), optimizer.param_groups[0]["params"][0].shape))
    assert seen == (torch.optim.AdamW, (64, 32))
    foreign = program_of(module, loss=loss, optimizer=lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(3))]))
    with pytest.raises(TraceError, match=r"1 tensors that are not parameters .* shape \(3,\)"):
        look_at_optimizer(foreign, type)
