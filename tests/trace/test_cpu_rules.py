"""Fakes behave as the CPU's own kernels. Run: ``pytest tests/trace/test_cpu_rules.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _foreach_utils

from lightning_memfit.trace.cpu_rules import _FORMAT_OF_INPUT, as_on_cpu, real_cpu_behaviour
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


def test_every_rule_has_a_check() -> None:
    assert set(CALLS) == set(_FORMAT_OF_INPUT)


def test_other_operators_are_left_alone() -> None:
    out = torch.zeros(3, 4).t()
    assert as_on_cpu(_aten.cos.default, (out,), out) is out


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
