"""Fakes behave as the CPU's own kernels. Run: ``pytest tests/trace/test_cpu_rules.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memfit.trace.cpu_rules import (
    _FORMAT_OF_INPUT,
    ResultsInPlace,
    as_on_cpu,
    called_as_on_cpu,
    real_cpu_behaviour,
)
from lightning_memfit.trace.fake_module import new_fake_mode

_aten = torch.ops.aten

CALLS: dict[Any, Callable[[Tensor], tuple[Any, ...]]] = {
    _aten.glu_backward.default: lambda x: (torch.zeros(x[:, ::2].shape), x, 1),
    _aten.huber_loss_backward.default: lambda x: (torch.ones(()), x, x, 1, 1.0),
    _aten.log_sigmoid_forward.default: lambda x: (x,),
    _aten.mse_loss_backward.default: lambda x: (torch.ones(()), x, x, 1),
    _aten.rrelu_with_noise.default: lambda x: (x, torch.zeros_like(x), 0.1, 0.3, True),
    _aten.smooth_l1_loss_backward.default: lambda x: (torch.ones(()), x, x, 1, 1.0),
    _aten.native_batch_norm.default: lambda x: (x, *norm(x), None, None, True, 0.1, 1e-5),
    _aten.native_batch_norm_backward.default: lambda x: (
        x, x, norm(x)[0], None, None, *norm(x), True, 1e-5, [True, True, True],
    ),
    _aten.roll.default: lambda x: (x, [1], [1]),
}  # fmt: skip
INPUTS = {
    "plain": lambda: torch.zeros(4, 8, 6, 6),
    "channels last": lambda: torch.zeros(4, 8, 6, 6).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(8, 4, 6, 6).transpose(0, 1),
    "three dimensions": lambda: torch.zeros(4, 6, 8).transpose(1, 2),
}


def norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(x.shape[1]), torch.zeros(x.shape[1])


def strides(out: Any) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in (out if isinstance(out, (tuple, list)) else [out])]


@pytest.mark.parametrize("input_", INPUTS)
@pytest.mark.parametrize("func", CALLS, ids=str)
def test_outputs_have_the_strides_of_real_ones(func: Any, input_: str) -> None:
    real = func(*CALLS[func](INPUTS[input_]()))
    with new_fake_mode():
        args = CALLS[func](INPUTS[input_]())
        assert strides(as_on_cpu(func, args, func(*args))) == strides(real)


@pytest.mark.parametrize("input_", INPUTS)
@pytest.mark.parametrize(
    ("shifts", "dims"),
    [([1, -2], [0, 1]), ([3], []), ([0], [1]), ([8], [0]), ([0, 1], [1, 2])],
    ids=["two dimensions", "flat", "by nothing", "all the way round", "by nothing in one dimension"],
)
def test_a_roll_has_the_strides_of_a_real_one(shifts: list[int], dims: list[int], input_: str) -> None:
    real = _aten.roll.default(INPUTS[input_](), shifts, dims)
    with new_fake_mode():
        args = (INPUTS[input_](), shifts, dims)
        assert strides(as_on_cpu(_aten.roll.default, args, _aten.roll.default(*args))) == strides(real)


def test_every_rule_has_a_check() -> None:
    assert set(CALLS) == set(_FORMAT_OF_INPUT)


def test_other_operators_are_left_alone() -> None:
    out = torch.zeros(3, 4).t()
    assert as_on_cpu(_aten.cos.default, (out,), out) is out


class Watched(TorchDispatchMode):
    """Notes the operators that a real run would have applied in place."""

    def __init__(self) -> None:
        super().__init__()
        self.results = ResultsInPlace()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        if self.results.argument(func, args, in_backward=in_backward) is not None:
            self.found.append(str(func))
        out = func(*args, **(kwargs or {}))
        self.results.note(func, out)
        return out


def in_place(step: Callable[[], Tensor]) -> list[str]:
    with Watched() as watched:
        step().sum().backward()
    return watched.found


def allocated(step: Callable[[], Tensor], nbytes: int) -> int:
    """Allocations of exactly so many bytes in a real forward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() == nbytes for event in events)


def test_a_linear_layer_adds_its_bias_in_place_where_input_and_bias_do_not_fit_into_one_operator() -> None:
    layer, images = nn.Linear(8, 16), torch.zeros(2, 8, 5, 3)
    moved = images.permute(0, 2, 3, 1)
    assert in_place(lambda: layer(moved)) == ["aten.add.Tensor"]
    # As measured: one tensor of the output's 2 x 5 x 3 x 16 x 4 = 1920 bytes, not a product and a sum.
    assert allocated(lambda: layer(moved), 1920) == 1
    assert in_place(lambda: layer(moved.contiguous().flatten(0, 2))) == []
    recurrent = nn.GRU(8, 4, batch_first=True)
    assert in_place(lambda: recurrent(torch.zeros(2, 6, 8))[0]) == ["aten.add.Tensor"]


def test_a_bias_that_the_user_adds_is_a_tensor_of_its_own() -> None:
    weight, bias = nn.Parameter(torch.zeros(8, 16)), nn.Parameter(torch.zeros(16))
    rows = torch.zeros(5, 8)
    assert in_place(lambda: rows @ weight + bias) == []
    call = {"product": torch.mm, "sum": torch.add}
    # The same line of code for both, but not the same call of it.
    apply = lambda name, *tensors: call[name](*tensors)  # noqa: E731
    assert in_place(lambda: apply("sum", apply("product", rows, weight), bias)) == []
    assert allocated(lambda: rows @ weight + bias, 5 * 16 * 4) == 2


INDEX = torch.tensor([[0, 2]])
SELECTIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "gather": (lambda x: x.gather(0, INDEX), ["aten.scatter_add.default"]),
    "rows": (lambda x: x[INDEX[0]], ["aten.index_put.default"]),
    "index_select": (lambda x: x.index_select(0, INDEX[0]), ["aten.index_add.default"]),
    "max": (lambda x: x.max(dim=0).values, ["aten.scatter.src"]),
    "topk": (lambda x: x.topk(2, dim=0).values, ["aten.scatter.src"]),
    "a slice": (lambda x: x[:2], []),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_gradients_of_selections_are_written_into_their_zeros(selection: str) -> None:
    select, expected = SELECTIONS[selection]
    leaf = torch.zeros(3, 4, requires_grad=True)
    assert in_place(lambda: select(leaf)) == expected


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.gather(0, INDEX)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros(3, 4).scatter_add(0, INDEX, grad)


def test_a_gradient_that_the_user_computes_is_computed_as_written() -> None:
    leaf = torch.zeros(3, 4, requires_grad=True)
    assert in_place(lambda: Gathered.apply(leaf)) == []


def test_everything_is_put_back_when_the_body_raises() -> None:
    before = torch.get_rng_state, torch.set_rng_state, _foreach_utils._foreach_supported_types
    state = torch.get_rng_state()
    with pytest.raises(KeyError), real_cpu_behaviour():
        assert torch.get_rng_state is not before[0]
        torch.set_rng_state(torch.get_rng_state())
        raise KeyError
    assert (torch.get_rng_state, torch.set_rng_state) == before[:2]
    assert _foreach_utils._foreach_supported_types is before[2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [((12, 8), (3, 8, 16)), ((8, 16), (16, 24)), ((3, 12, 8), (3, 8, 16)), ((3, 8, 16), (16, 24))],
    ids=["rows", "inner", "batch", "columns"],
)
def test_products_of_grouped_experts_are_made_on_fakes_as_on_the_cpu(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> None:
    ends = sizes[1][-1] if len(sizes[0]) == 3 else sizes[0][-1 if len(sizes[1]) == 2 else 0]
    offsets = None if sizes[0] == (3, 12, 8) else torch.tensor([4, 8, ends])
    offsets = None if offsets is None else offsets.int()
    args = (torch.ones(sizes[0], dtype=dtype), torch.ones(sizes[1], dtype=dtype), offsets)
    real = _aten._grouped_mm.default(*args)
    mode = new_fake_mode()
    fakes = tuple(None if each is None else mode.from_tensor(each) for each in args)
    with mode:
        fake = called_as_on_cpu(_aten._grouped_mm.default, fakes, {})
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_torch_still_makes_the_outputs_of_grouped_products_in_one_place() -> None:
    from torch import _meta_registrations

    assert hasattr(_meta_registrations, "_create_grouped_mm_output_tensor"), "change trace/cpu_rules.py"


def test_transformers_takes_a_fake_for_a_real_tensor() -> None:
    imports = pytest.importorskip("transformers.utils.import_utils")
    assert hasattr(imports, "is_fake_tensor"), "transformers has no is_fake_tensor: change trace/cpu_rules.py"
    with new_fake_mode():
        fake = torch.zeros(2)
        assert imports.is_fake_tensor(fake)
        with real_cpu_behaviour():
            assert not imports.is_fake_tensor(fake)
            assert not imports.is_tracing(fake)


def test_torch_still_has_the_private_list_of_types() -> None:
    assert isinstance(_foreach_utils._foreach_supported_types, list), "change trace/cpu_rules.py"
