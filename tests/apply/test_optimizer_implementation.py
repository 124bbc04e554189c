"""Three implementations, one result. Run: ``pytest tests/apply/test_optimizer_implementation.py``."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memfit.apply.optimizer_implementation import implementations_of, set_implementation
from lightning_memfit.errors import ConfigurationError

O = torch.optim  # noqa: E741
Make = Callable[..., Optimizer]
STEPS = 20
WITH_ALL: dict[str, Make] = {
    "Adam": partial(O.Adam, lr=1e-2, weight_decay=0.1),
    "Adam amsgrad maximize": partial(O.Adam, lr=1e-2, amsgrad=True, maximize=True),
    "AdamW": partial(O.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD": partial(O.SGD, lr=1e-2),
    "SGD momentum": partial(O.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "SGD nesterov": partial(O.SGD, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "Adagrad": partial(O.Adagrad, lr=1e-2, lr_decay=0.1, weight_decay=0.1),
}
WITHOUT_FUSED: dict[str, Make] = {
    "SGD dampening": partial(O.SGD, lr=1e-2, momentum=0.9, dampening=0.3),
    "Adadelta": O.Adadelta,
    "Adamax": partial(O.Adamax, lr=1e-2, weight_decay=0.1),
    "NAdam": partial(O.NAdam, lr=1e-2, weight_decay=0.1),
    "RAdam": partial(O.RAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "RMSprop": partial(O.RMSprop, lr=1e-2),
    "RMSprop centered": partial(O.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": O.Rprop,
    "Adafactor": partial(O.Adafactor, weight_decay=0.1),
}
OPTIMIZERS = {**WITH_ALL, **WITHOUT_FUSED}
WAYS = [
    (name, first, then)
    for name in OPTIMIZERS
    for first, then in itertools.product(("single-tensor", "foreach", "fused"), repeat=2)
    if name in WITH_ALL or "fused" not in (first, then)
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 20), (33,), (), (5, 7, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(weights: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for weight in weights:
        noise = torch.randn(weight.shape, generator=generator)
        weight.grad = (noise + 0.3 * weight.detach().float()).to(weight.dtype)


def run(make: Make, ways: Iterator[Any], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    weights = parameters(dtype)
    start = [weight.detach().clone() for weight in weights]
    optimizer = make(weights)
    for step in range(STEPS):
        set_implementation(optimizer, next(ways))
        give_gradients(weights, step)
        optimizer.step()
    return start, [weight.detach() for weight in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "first", "then"), WAYS)
def test_all_ways_lead_to_the_same_parameters(name: str, first: Any, then: Any, dtype: torch.dtype) -> None:
    # Half of the steps in one way, half in another, states carried over; against single tensors all along.
    make = OPTIMIZERS[name]
    start, expected = run(make, itertools.repeat("single-tensor"), dtype)
    ways = itertools.chain(itertools.repeat(first, STEPS // 2), itertools.repeat(then))
    _, ends = run(make, ways, dtype)
    for a, b, before in zip(expected, ends, start, strict=True):
        assert (a - b).norm() <= (2e-6 if dtype is torch.float32 else 5e-15) * (a - before).norm()


def test_a_switch_is_seen_in_what_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    module = sys.modules["torch.optim.adam"]
    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, _name=name, _run=original, **kwargs: (called.append(_name), _run(*args, **kwargs)),
        )
    weights = parameters()
    optimizer = O.AdamW(weights)
    for way in ("as-configured", "foreach", "fused", "single-tensor"):
        set_implementation(optimizer, way)  # type: ignore[arg-type]
        give_gradients(weights, 0)
        optimizer.step()
    assert called == ["_single_tensor_adam", "_multi_tensor_adam", "_fused_adam", "_single_tensor_adam"]


# What is offered


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_equals_the_present_setting_is_left_out(name: str) -> None:
    optimizer = OPTIMIZERS[name](parameters())
    others = ("foreach", "fused") if name in WITH_ALL else ("foreach",)
    assert implementations_of(optimizer) == others
    for way in others:
        set_implementation(optimizer, way)  # type: ignore[arg-type]
        assert implementations_of(optimizer) == tuple(w for w in ("single-tensor", *others) if w != way)


def gappy() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 8)[:, ::2])]


def transposed() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 8).t())]


def half() -> list[nn.Parameter]:
    return parameters(torch.bfloat16)


def complex_numbers() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, dtype=torch.complex64))]


class Stepping(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "offered"),
    [
        (lambda: O.AdamW(parameters(), fused=True), ("single-tensor", "foreach")),
        (lambda: O.AdamW(parameters(), foreach=False), ("foreach", "fused")),
        (
            lambda: O.AdamW([{"params": parameters()}, {"params": parameters(), "foreach": True}]),
            ("single-tensor", "foreach", "fused"),
        ),
        (lambda: O.AdamW(transposed()), ("foreach", "fused")),
        (lambda: O.AdamW(gappy()), ("foreach",)),
        (lambda: O.SGD(gappy(), lr=1), ("foreach",)),
        (lambda: O.AdamW(half()), ()),
        (lambda: O.SGD([*half(), *parameters()], lr=1), ()),
        (lambda: O.SGD(complex_numbers(), lr=1), ()),
        (lambda: O.AdamW(parameters(), differentiable=True), ()),
        (lambda: O.AdamW(parameters(), capturable=True), ()),
        (lambda: O.AdamW(parameters(), lr=torch.tensor(0.1)), ()),
        (lambda: O.AdamW(parameters(), betas=(torch.tensor(0.9), torch.tensor(0.9))), ()),
        (lambda: O.ASGD(parameters()), ()),
        (lambda: O.ASGD(parameters(), foreach=True), ("single-tensor",)),
        (lambda: O.LBFGS(parameters()), ()),
        (lambda: O.SparseAdam(parameters()), ()),
        (lambda: Stepping(parameters()), ()),
        (lambda: Renamed(parameters()), ("foreach", "fused")),
    ],
)  # fmt: skip
def test_only_what_gives_the_same_result_is_offered(make: Make, offered: tuple[str, ...]) -> None:
    assert implementations_of(make()) == offered


def test_sparse_gradients_are_not_fused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = O.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    assert implementations_of(optimizer) == ("foreach",)


def test_what_cannot_be_had_is_refused_with_what_can() -> None:
    optimizer = O.RMSprop(parameters())
    before = str(optimizer)
    with pytest.raises(ConfigurationError) as raised:
        set_implementation(optimizer, "fused")
    assert str(raised.value) == (
        "optimizer_implementation='fused' cannot be had for RMSprop with these parameters and options. "
        "Choose one of: 'as-configured', 'foreach'."
    )
    assert str(optimizer) == before


def test_an_optimizer_without_the_choice_is_left_alone_and_named() -> None:
    optimizer = Stepping(parameters())
    set_implementation(optimizer, "as-configured")()
    with pytest.raises(ConfigurationError, match=r"'foreach' cannot be had for Stepping .*one of: 'as-configured'\.$"):
        set_implementation(optimizer, "foreach")


# Taking it back


def everything(optimizer: Optimizer) -> dict[str, Any]:
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    attributes |= {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}
    steps = [(s["step"].dtype, s["step"].device) for s in optimizer.state.values() if "step" in s]
    return {
        **attributes,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "steps": steps,
    }


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("way", ["single-tensor", "foreach", "fused"])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("cls", [O.AdamW, partial(O.SGD, lr=0.1, momentum=0.9), O.Adagrad])
def test_taking_it_back_leaves_nothing(cls: Any, flags: dict[str, bool], way: Any, stepped: bool) -> None:
    weights = parameters()
    optimizer = cls(weights, **flags)
    give_gradients(weights, 0)
    optimizer.step()
    before = everything(optimizer)
    undo = set_implementation(optimizer, way)
    if stepped:
        optimizer.step()
    undo()
    undo()
    assert everything(optimizer) == before


def test_step_counters_come_back_in_their_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        weights = parameters(torch.float64)
        optimizer = O.AdamW(weights)
        give_gradients(weights, 0)
        optimizer.step()
        (dtype,) = {state["step"].dtype for state in optimizer.state.values()}
        undo = set_implementation(optimizer, "fused")
        optimizer.step()
        assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
        undo()
        assert {state["step"].dtype for state in optimizer.state.values()} == {dtype} == {torch.float64}
        assert optimizer.state[weights[0]]["step"] == 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_groups_that_come_later_run_in_the_same_way_and_are_taken_back() -> None:
    weights = parameters()
    optimizer = O.AdamW(weights[:2])
    undo = set_implementation(optimizer, "fused")
    optimizer.add_param_group({"params": weights[2:]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    undo()
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]


def test_the_choice_outlasts_loading_a_state() -> None:
    weights = parameters()
    saved = O.AdamW(weights)
    give_gradients(weights, 0)
    saved.step()
    optimizer = O.AdamW(weights)
    undo = set_implementation(optimizer, "fused")
    optimizer.load_state_dict(saved.state_dict())
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, False)
    optimizer.step()
    assert optimizer.state[weights[0]]["step"] == 2
    undo()
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("way", ["single-tensor", "foreach", "fused"])
def test_an_optimizer_is_freed_without_garbage_collection(way: Any) -> None:
    weights = parameters()
    optimizer = O.SGD(weights, lr=0.1, momentum=0.9, fused=way != "fused")
    undo = set_implementation(optimizer, way)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
    undo()


# Gradients that come late, gradient scalers


@pytest.mark.parametrize("name", WITH_ALL)
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_a_parameter_whose_first_gradient_comes_late_starts_as_it_would(way: Any, name: str) -> None:
    def end(way: Any) -> list[Tensor]:
        weights = parameters()
        optimizer = WITH_ALL[name](weights)
        set_implementation(optimizer, way)
        for step in range(4):
            give_gradients(weights, step)
            if step < 2:
                weights[1].grad = None
            optimizer.step()
        return [weight.detach() for weight in weights]

    for a, b in zip(end("single-tensor"), end(way), strict=True):
        torch.testing.assert_close(a, b)


def test_without_help_the_fused_kernel_refuses_late_gradients() -> None:
    # The reason for what the lever does; if this fails, torch may have learnt it.
    weights = parameters()
    optimizer = O.SGD(weights, lr=0.1, momentum=0.9, fused=True)
    give_gradients(weights[1:], 0)
    optimizer.step()
    give_gradients(weights, 1)
    with pytest.raises(TypeError, match="NoneType"):
        optimizer.step()


@pytest.mark.parametrize("configured", [{}, {"fused": True}])
@pytest.mark.parametrize("way", ["single-tensor", "foreach", "fused"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_scaler_works_with_every_implementation(configured: Any, way: Any, clip: bool) -> None:
    def end(configured: dict[str, bool], way: Any) -> list[Tensor]:
        weights = parameters()
        optimizer = O.AdamW(weights, lr=0.1, **configured)
        set_implementation(optimizer, way)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 else 1.0  # this step is left out
            loss = sum(((weight - 3) ** 2).sum() for weight in weights)
            scaler.scale(loss * factor).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(weights, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return [weight.detach() for weight in weights]

    for a, b in zip(end({}, "as-configured"), end(configured, way), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_unscaled_before_the_step_whatever_was_configured() -> None:
    # Lightning refuses to clip gradients for an optimizer that unscales them itself.
    """Reported in Lightning-AI/pytorch-lightning#15501."""
    optimizer = O.AdamW(parameters(), fused=True)
    assert optimizer._step_supports_amp_scaling
    undo = set_implementation(optimizer, "foreach")
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    undo()
    assert optimizer._step_supports_amp_scaling
    optimizer = O.AdamW(parameters())
    set_implementation(optimizer, "fused")
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


# Private names


def test_torch_still_has_what_this_adapter_touches() -> None:
    hint = f"torch {torch.__version__}: change apply/optimizer_implementation.py"
    assert callable(sys.modules["torch.optim.optimizer"]._default_to_fused_or_foreach), hint
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "CPU"), hint
    weights = parameters()
    optimizer = O.SGD(weights, lr=0.1, momentum=0.9, fused=True)
    assert optimizer._step_supports_amp_scaling and optimizer._need_device_dtype_check_for_fused, hint
    give_gradients(weights, 0)
    momenta: list[Any] = []
    assert optimizer._init_group(optimizer.param_groups[0], [], [], momenta) is False, hint
    assert momenta == [None] * len(weights), hint
