"""Autograd holds nothing while it is watched, and says when it would.

Run: ``pytest tests/trace/test_saved_tensors.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.trace.fake_module import FakeTensors, faked, new_fake_mode
from lightning_memfit.trace.saved_tensors import SavedTensorTracer
from lightning_memfit.trace.timeline import Free, Operation


def watched(
    module: nn.Module, batch: Tensor, forward: Callable[[nn.Module, Tensor], Tensor], *, hooks: bool = True
) -> SavedTensorTracer:
    """One forward and backward on fakes."""
    gc.collect()
    mode = new_fake_mode()
    fakes = FakeTensors(mode)
    tracer = SavedTensorTracer({}, collect_signatures=False)
    try:
        with faked(module, fakes), mode, tracer:
            with tracer.not_recording():
                fake = fakes.of(batch)
            tracer.add_residents(module.parameters(), "parameters")
            tracer.add_residents([fake], "inputs")
            with tracer.hooks() if hooks else nullcontext():
                loss = forward(module, fake)
            tracer.phase = "backward"
            loss.backward()
            del loss, fake
    finally:
        tracer.stop_following()
    return tracer


def in_order(tracer: SavedTensorTracer) -> list[str]:
    """Operators, frees with the operator that allocated, and marks with the operator that made what was saved."""
    makers: dict[int, str] = {resident.storage: resident.category for resident in tracer.residents}
    told: list[str] = []
    marks = list(tracer.marks)
    for index in range(len(tracer.events) + 1):
        while marks and marks[0].event == index:
            mark = marks.pop(0)
            told.append(f"{mark.kind} {makers[tracer.saved[mark.saved].storage]}")
        if index < len(tracer.events):
            event = tracer.events[index]
            if isinstance(event, Free):
                told.append(f"free {makers[event.storage]}")
            else:
                name = event.op.removeprefix("aten.").split(".")[0]
                makers.update({output.storage: name for output in event.outputs})
                told.append(name)
    return told


def test_what_is_saved_dies_with_the_programs_last_reference_and_is_marked() -> None:
    tracer = watched(nn.Linear(4, 4, bias=False), torch.zeros(2, 4), lambda m, x: m(x).tanh().sum())
    told = in_order(tracer)
    forward = told[: told.index("ones_like")]
    # The product is not saved; tanh saves its result, which the program drops before the loss is known.
    assert forward == ["saved inputs", "mm", "tanh", "saved tanh", "free mm", "sum", "free tanh"]
    backward = told[told.index("ones_like") :]
    assert backward.index("unpacked tanh") < backward.index("tanh_backward") < backward.index("used tanh")
    assert backward.index("used tanh") < backward.index("released tanh") < backward.index("unpacked inputs")
    assert "free tanh" not in backward
    assert backward.index("unpacked inputs") < backward.index("mm") < backward.index("released inputs")


def test_stand_ins_count_as_the_original() -> None:
    tracer = watched(nn.Linear(4, 4, bias=False), torch.zeros(2, 4), lambda m, x: m(x).tanh().sum())
    made = {e.op: e.outputs[0].storage for e in tracer.events if isinstance(e, Operation) and e.outputs}
    backward = next(e for e in tracer.events if isinstance(e, Operation) and "tanh_backward" in e.op)
    assert made["aten.tanh.default"] in backward.reads
    assert "aten.empty_strided.default" not in made


def test_a_result_that_is_saved_and_never_differentiated_is_released_with_its_graph() -> None:
    def forward(module: nn.Module, batch: Tensor) -> Tensor:
        hidden = module(batch)
        hidden.exp()  # saves its result, in a cycle if anything held it
        return hidden.sum()

    told = in_order(watched(nn.Linear(4, 4), torch.zeros(2, 4), forward))
    assert told.index("saved exp") < told.index("released exp") < told.index("ones_like")
    assert "unpacked exp" not in told and "free exp" in told


def test_a_gradient_that_is_the_saved_tensor_itself_keeps_it() -> None:
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, other: Tensor) -> Tensor:
            ctx.save_for_backward(other)
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (other,) = ctx.saved_tensors
            return other, None

    tracer = watched(
        nn.Linear(4, 4, bias=False), torch.zeros(2, 4), lambda m, x: Keep.apply(m.weight, m.weight.detach() * 2)
    )
    kinds = [(mark.kind, tracer.saved[mark.saved].storage) for mark in tracer.marks]
    storage = next(e.outputs[0].storage for e in tracer.events if isinstance(e, Operation) and ".mul." in e.op)
    assert [kind for kind, number in kinds if number == storage] == ["saved", "unpacked", "released"]  # never used up


def test_the_backward_runs_the_same_operators_and_views_as_without_hooks() -> None:
    def forward(module: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.gelu(module(batch)).t().cos().sum()

    def backward(tracer: SavedTensorTracer) -> list[tuple[str, int, int, int]]:
        operations = [e for e in tracer.events if isinstance(e, Operation) and e.phase == "backward"]
        return [(e.op, e.views, e.moved_bytes, len(e.outputs)) for e in operations]

    watched_one = watched(nn.Linear(4, 4), torch.zeros(2, 4), forward)
    plain = watched(nn.Linear(4, 4), torch.zeros(2, 4), forward, hooks=False)
    assert len(watched_one.saved) == 3 and not plain.saved
    assert backward(watched_one) == backward(plain)


def test_constants_and_complex_tensors_are_left_to_autograd() -> None:
    def forward(module: nn.Module, batch: Tensor) -> Tensor:
        spectrum = torch.view_as_real(torch.fft.fft(module(batch)) * torch.full((4,), 2.0 + 0j))
        return (spectrum * torch.tensor(3.0)).sum()

    tracer = watched(nn.Linear(4, 4), torch.zeros(2, 4), forward)
    made = {e.outputs[0].storage: e.op for e in tracer.events if isinstance(e, Operation) and e.outputs}
    assert not [made[saved.storage] for saved in tracer.saved if "fft" in made.get(saved.storage, "")]
    assert any("aten.mm" in e.op and e.phase == "backward" for e in tracer.events if isinstance(e, Operation))


def test_hooks_are_gone_when_the_forward_raises() -> None:
    with pytest.raises(ValueError, match="no"):
        watched(nn.Linear(4, 4), torch.zeros(2, 4), lambda m, x: (_ for _ in ()).throw(ValueError("no")))
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert y.grad_fn is not None and type(y.grad_fn._saved_result) is Tensor  # type: ignore[attr-defined]
