"""Stand-ins share what originals share, and everything is put back. ``pytest tests/trace/test_fake_module.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memfit.errors import ConfigurationError, TraceError
from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.fake_module import FakeTensors, faked, new_fake_mode


def test_ties_stay_ties_and_parameters_stay_parameters() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    original = module[0].weight
    with faked(module, FakeTensors(new_fake_mode())):
        assert module[0].weight is module[1].weight
        assert isinstance(module[0].weight, nn.Parameter)
        assert isinstance(module[0].weight, FakeTensor)
        assert module[0].weight.requires_grad and not module[0].bias.requires_grad
    assert module[0].weight is original is module[1].weight


def test_the_module_is_put_back_when_the_body_raises() -> None:
    module = nn.LSTM(4, 4)
    parameters, flat = dict(module._parameters), list(module._flat_weights)
    with pytest.raises(KeyError), faked(module, FakeTensors(new_fake_mode())):
        module.register_parameter("new", nn.Parameter(torch.zeros(1)))
        raise KeyError
    assert list(module._parameters) == list(parameters)
    assert all(module._parameters[name] is value for name, value in parameters.items())
    assert all(now is before for now, before in zip(module._flat_weights, flat, strict=True))


def test_the_flat_weights_of_an_rnn_are_its_parameters() -> None:
    module = nn.GRU(4, 4, num_layers=2)
    with faked(module, FakeTensors(new_fake_mode())):
        named = [module._parameters[name] for name in module._flat_weights_names]
        assert all(a is b for a, b in zip(module._flat_weights, named, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(3, 4)[:, 1:],
        torch.zeros(1).expand(5),
        torch.zeros(0, 3),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.zeros(8, dtype=torch.bool)[3:],
        torch.zeros(8, dtype=torch.bfloat16)[3:],
    ],
)
def test_a_fake_has_the_shape_strides_and_storage_size_of_its_original(tensor: torch.Tensor) -> None:
    fake = FakeTensors(new_fake_mode()).of(tensor)
    assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert fake.storage_offset() == tensor.storage_offset()
    assert fake.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_views_of_one_storage_share_one_fake_storage() -> None:
    base = torch.zeros(10)
    fakes = FakeTensors(new_fake_mode())
    storages = {fakes.of(t).untyped_storage()._cdata for t in (base[:5], base[5:], base, base.view(2, 5), base[2:4])}
    assert len(storages) == 1


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TraceError, match=r"shape \(3, 3\) has layout torch.sparse_coo, only strided is traced"):
        FakeTensors(new_fake_mode()).of(torch.eye(3).to_sparse())


def test_torch_still_has_the_private_names_that_fakes_need() -> None:
    assert isinstance(nn.Linear(1, 1)._parameters, dict), "Module._parameters: change trace/fake_module.py"
    assert isinstance(nn.Linear(1, 1)._buffers, dict), "Module._buffers: change trace/fake_module.py"
    assert isinstance(nn.LSTM(1, 1)._flat_weights, list), "RNNBase._flat_weights: change trace/fake_module.py"
    assert isinstance(torch.zeros(1).untyped_storage()._cdata, int), (
        "UntypedStorage._cdata: change trace/fake_module.py"
    )


def test_a_parameter_that_deepspeed_divided_when_it_was_made_is_whole() -> None:
    module = nn.Linear(3, 4)
    module.weight.ds_shape = torch.Size((4, 3))  # type: ignore[assignment]  # as deepspeed.zero.Init leaves it
    module.weight.data = torch.empty(0)
    for floating in (None, torch.bfloat16):
        with faked(module, fakes_in(new_fake_mode(), floating)):
            assert module.weight.shape == (4, 3) and module.weight.dtype == (floating or torch.float32)
            assert isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
    assert module.weight.shape == (0,)


class _Scripted(torch.jit.ScriptModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def test_a_scripted_module_is_refused_and_keeps_its_tensors() -> None:
    module = nn.Sequential(nn.Linear(1, 1), _Scripted())
    before = [id(parameter) for parameter in module[0].parameters()]
    with pytest.raises(TraceError, match="module 1 is a scripted one"), faked(module, FakeTensors(new_fake_mode())):
        pytest.fail("not refused")
    assert [id(parameter) for parameter in module[0].parameters()] == before
    assert not any(isinstance(parameter, FakeTensor) for parameter in module.parameters())


def test_a_lazy_module_is_refused_with_a_way_out() -> None:
    lazy = faked(nn.LazyLinear(3), FakeTensors(new_fake_mode()))
    with pytest.raises(ConfigurationError, match=r"the module is lazy and has no shapes yet\. Run it once"), lazy:
        pytest.fail("not refused")
