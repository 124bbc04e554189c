"""Manual optimization on fakes: how many batches are followed, what is found in them, and that nothing is left behind.

Run: ``pytest tests/trace/test_manual_step.py``. Peaks against real runs are in ``tests/zoo``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning
import pytest
import torch
from torch import nn

from lightning_memfit.errors import TraceError, UnsupportedError
from lightning_memfit.trace.manual_step import MOST_BATCHES, ManualProgram, look_at_optimizers, trace_manual_steps
from lightning_memfit.trace.timeline import Operation, Timeline

WIDTH = 8
WEIGHT = 4 * WIDTH * WIDTH


class Pair(lightning.LightningModule):
    """Two weights, each with an Adam of its own."""

    def __init__(self, step: Callable[[Any, torch.Tensor, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self._step = step

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._step(self, batch, batch_idx)

    def update(self, index: int, batch: torch.Tensor) -> None:
        optimizer, layer = self.optimizers()[index], (self.first, self.second)[index]
        optimizer.zero_grad()
        self.manual_backward(layer(batch).sum())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(each.parameters(), foreach=False) for each in (self.first, self.second)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]


def program(step: Callable[[Any, torch.Tensor, int], None]) -> ManualProgram:
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Pair(step)
    module.trainer = trainer
    return ManualProgram(module=module, trainer=trainer, step_context=nullcontext)


def traced(step: Callable[[Any, torch.Tensor, int], None]) -> Timeline:
    return trace_manual_steps(program(step), torch.ones(4, WIDTH))


def both(module: Any, batch: torch.Tensor, index: int) -> None:
    module.update(0, batch)
    module.update(1, batch)


def test_two_batches_are_followed_where_every_optimizer_steps_in_each() -> None:
    assert traced(both).micro_steps == 2


@pytest.mark.parametrize(("every", "batches"), [(2, 2), (3, 3), (5, 5)])
def test_batches_are_followed_until_the_rarest_optimizer_has_stepped(every: int, batches: int) -> None:
    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        module.update(0, batch)
        if index % every == every - 1:
            module.update(1, batch)

    timeline = traced(step)
    assert (timeline.micro_steps, timeline.followed_micro_steps) == (batches, batches)
    assert timeline.notes == ()


def test_an_optimizer_that_never_steps_is_named_and_not_waited_for_without_end() -> None:
    timeline = traced(lambda module, batch, index: module.update(0, batch))
    assert timeline.micro_steps == MOST_BATCHES
    assert timeline.notes == ("Adam did not step within 32 batches, so that its states are not in the forecast",)


def test_states_and_gradients_of_the_steady_state_are_there_before_the_first_batch() -> None:
    timeline = traced(both)
    found = {name: sum(r.allocated_bytes for r in timeline.residents if r.category == name) for name in ("parameters",
             "gradients", "optimizer_states", "inputs")}  # fmt: skip
    assert found["parameters"] == found["gradients"] == 2 * WEIGHT
    assert found["optimizer_states"] == 2 * (2 * WEIGHT + 4)  # exp_avg, exp_avg_sq and step
    assert found["inputs"] == 4 * 4 * WIDTH


def test_phases_and_gradients_are_told_apart() -> None:
    timeline = traced(both)
    operations = [event for event in timeline.events if isinstance(event, Operation)]
    assert {event.phase for event in operations} == {"forward", "backward", "optimizer_step"}
    assert all(event.phase == "optimizer_step" for event in operations if "sqrt" in event.op)
    made = [sum(o.allocated_bytes for o in e.outputs if timeline.categories[o.storage] == "gradients")
            for e in operations]  # fmt: skip
    assert sum(made) == 4 * WEIGHT  # two batches with two gradients each
    assert [event.micro_step for event in operations] == sorted(event.micro_step for event in operations)


def test_a_closure_runs_forward_and_backward_within_the_step() -> None:
    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        def closure() -> torch.Tensor:
            loss = module.first(batch).sum()
            module.manual_backward(loss)
            return loss

        module.optimizers()[0].step(closure=closure)
        module.update(1, batch)

    operations = [event for event in traced(step).events if isinstance(event, Operation)]
    assert [event.phase for event in operations if event.op == "aten.mm.default"] == ["forward", "backward"] * 4


def test_the_hook_before_a_step_sees_the_gradients_that_the_closure_made() -> None:
    """Lightning runs it after the closure: ``Precision._wrap_closure``."""

    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        module.update(1, batch)

        def closure() -> torch.Tensor:
            module.first.zero_grad()
            loss = module.first(batch).sum()
            module.manual_backward(loss)
            return loss

        module.optimizers()[0].step(closure=closure)

    def look(optimizer: torch.optim.Optimizer) -> None:
        assert all(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])

    described = program(step)
    described.module.on_before_optimizer_step = look
    assert trace_manual_steps(described, torch.ones(4, WIDTH)).micro_steps == 2


def test_states_that_go_on_growing_are_those_of_a_late_step() -> None:
    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        optimizer = module.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module.first(batch).square().mean()
            module.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    described = program(step)
    described.module.configure_optimizers = lambda: torch.optim.LBFGS(
        described.module.first.parameters(), history_size=7
    )
    timeline = trace_manual_steps(described, torch.ones(4, WIDTH))
    states = sum(r.allocated_bytes for r in timeline.residents if r.category == "optimizer_states")
    assert states >= (2 * 7 + 2) * WEIGHT
    operations = [event for event in timeline.events if isinstance(event, Operation)]
    forwards = [event for event in operations if event.op == "aten.mm.default" and event.phase == "forward"]
    assert len(forwards) == 2 * 3  # of each of two batches three iterations
    assert timeline.notes == (
        "LBFGS keeps its last 7 moves and differences of gradients: forecast and proof are those of a late step",
    )


def test_optimizers_that_are_stepped_without_lightnings_wrapper_are_seen_too() -> None:
    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        for optimizer in module.optimizers(use_pl_optimizer=False):
            optimizer.zero_grad()
        (module.first(batch) + module.second(batch)).sum().backward()
        for optimizer in module.optimizers(use_pl_optimizer=False):
            optimizer.step()

    timeline = traced(step)
    assert timeline.micro_steps == 2
    assert "optimizer_step" in {event.phase for event in timeline.events}


def test_schedules_clipping_and_toggling_work_on_fakes() -> None:
    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        first, second = module.optimizers()
        module.toggle_optimizer(first)
        module.update(0, batch)
        module.untoggle_optimizer(first)
        with second.toggle_model():
            module.manual_backward(module.second(batch).sum())
            module.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            second.step()
        for schedule in module.lr_schedulers():
            schedule.step()

    assert traced(step).micro_steps == 2


@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_strategy_and_module_are_as_before_also_after_an_error(fails_at: int | None) -> None:
    calls: list[int] = []

    def step(module: Any, batch: torch.Tensor, index: int) -> None:
        calls.append(index)
        if fails_at is not None and len(calls) > fails_at:
            raise LookupError("no such layer")
        both(module, batch, index)

    described = program(step)
    strategy, module = described.trainer.strategy, described.module
    before, attributes = dict(vars(strategy)), dict(vars(module))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    if fails_at is None:
        trace_manual_steps(described, torch.ones(4, WIDTH))
    else:
        with pytest.raises(TraceError, match="LookupError: no such layer"):
            trace_manual_steps(described, torch.ones(4, WIDTH))
    assert vars(strategy) == before
    assert vars(module).keys() == attributes.keys()
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_each_optimizer_is_looked_at_over_fakes() -> None:
    described = program(both)
    found = look_at_optimizers(described, lambda optimizer: len(optimizer.param_groups[0]["params"]))
    assert found == [1, 1]
    assert described.trainer.strategy.optimizers == []


def test_another_release_of_lightning_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lightning.pytorch.core.optimizer._init_optimizers_and_lr_schedulers")
    with pytest.raises(UnsupportedError, match=r"core.optimizer has no _init_optimizers_and_lr_schedulers"):
        traced(both)
