"""The order in which gradients arrive is that of torch's own hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.predict.gradient_arrivals import backward_ends, gradient_arrivals
from lightning_memfit.predict.module_visits import module_visits
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.training_step import program_of, trace_window


class Tied(nn.Module):
    """A table that is read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 12)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.table(ids)))
        return out


def traced(module: nn.Module, batch: torch.Tensor, *, slices: int = 1) -> Timeline:
    program = program_of(module, loss=lambda inner, part: inner(part).sum(), optimizer=torch.optim.SGD)
    return trace_window(program, batch, divide=lambda whole: whole.chunk(slices), micro_steps=slices, steps=False)


def hooked(module: nn.Module, batch: torch.Tensor) -> list[str]:
    order: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[misc]
    module(batch).sum().backward()
    return order


CASES: dict[str, Any] = {
    "linear layers and norms": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
        lambda: torch.randn(4, 8),
    ),
    "a tied table": (Tied, lambda: torch.randint(12, (4, 3))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slices", [1, 2])
def test_gradients_arrive_in_the_order_of_hooks(name: str, slices: int) -> None:
    make, batch = CASES[name]
    timeline = traced(make(), batch(), slices=slices)
    names = [parameter.name for parameter in timeline.parameters]
    found = gradient_arrivals(timeline)
    order = [names[each.parameter] for index in sorted(found) for each in found[index]]
    assert order == hooked(make(), batch()) * slices
    accumulates = [each.accumulates for index in sorted(found) for each in found[index]]
    assert accumulates == [False] * len(names) + [True] * len(names) * (slices - 1)


def test_one_function_for_a_whole_layer_gives_its_weight_first() -> None:
    make, batch = CASES["linear layers and norms"]
    timeline = traced(make(), batch())
    found = gradient_arrivals(timeline, weights_last=False)
    order = [timeline.parameters[each.parameter].name for index in sorted(found) for each in found[index]]
    assert order == ["2.weight", "2.bias", "1.weight", "1.bias", "0.weight", "0.bias"]


def test_a_backward_ends_with_its_last_event() -> None:
    make, batch = CASES["linear layers and norms"]
    timeline = traced(make(), batch(), slices=2)
    ends = backward_ends(timeline)
    assert list(ends.values()) == [0, 1]
    first, second = ends
    assert timeline.events[first].phase == "backward" and timeline.events[first + 1].phase == "forward"
    assert all(event.phase != "backward" for event in timeline.events[second + 1 :])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_modules_are_reached_as_hooks_of_modules_tell_and_a_tied_parameter_is_of_both() -> None:
    module, batch = CASES["a tied table"][0](), CASES["a tied table"][1]()
    timeline = traced(module, batch)
    names = [parameter.name for parameter in timeline.parameters]
    told: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: told.append(name))
        part.register_full_backward_pre_hook(lambda *_, name=name: told.append(name))
    module(batch).sum().backward()
    visits = module_visits(timeline)[0]
    assert [name for name, _ in visits.order] == told
    own = {name: {names[index] for index in parameters} for name, parameters in visits.order}
    assert own["head"] == {"table.weight", "head.bias"} and own["table"] == {"table.weight"}
    assert own["inner"] == set() and own["inner.1"] == {"inner.1.weight", "inner.1.bias"}


def test_a_module_whose_inputs_have_no_gradient_is_left_late() -> None:
    timeline = traced(CASES["a tied table"][0](), CASES["a tied table"][1]())
    late = {each.module for found in module_visits(timeline)[0].after.values() for each in found if each.leaves_late}
    assert late == {"", "table"}


def test_every_visit_that_begins_ends() -> None:
    timeline = traced(CASES["a tied table"][0](), CASES["a tied table"][1](), slices=2)
    for visits in module_visits(timeline).values():
        moments = [each for found in (visits.before, visits.after) for place in found.values() for each in place]
        for module in {each.module for each in moments}:
            begins = [each.enters for each in moments if each.module == module]
            assert begins.count(True) == begins.count(False)
