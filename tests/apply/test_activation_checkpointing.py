"""Recomputed blocks give the gradients, buffers and random numbers of a plain run, and leave no trace when undone."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.apply.activation_checkpointing import CheckpointedForward, checkpoint_modules
from lightning_memfit.errors import ConfigurationError, UnsupportedError


class Block(nn.Module):
    """Linear, optional extra layer, dropout; counts its passes."""

    def __init__(self, extra: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extra = nn.Identity() if extra is None else extra
        self.dropout = nn.Dropout(dropout)
        self.passes = 0

    def forward(self, inputs: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        self.passes += 1
        hidden = self.dropout(torch.tanh(self.extra(self.linear(inputs)))) * scale
        return hidden if shift is None else hidden + shift


def _model(make_extra: Callable[[], nn.Module | None] = lambda: None, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(make_extra(), dropout), Block(make_extra(), dropout), nn.Linear(8, 1))


def _batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def _steps(model: nn.Module, count: int = 3) -> list[Tensor]:
    """Train ``count`` steps; the gradients of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    gradients = []
    for _ in range(count):
        optimizer.zero_grad()
        model(_batch()).square().mean().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return gradients


def _assert_same(plain: list[Tensor], recomputed: list[Tensor]) -> None:
    assert len(plain) == len(recomputed) > 0
    for left, right in zip(plain, recomputed, strict=True):
        assert torch.equal(left, right)


def _compare(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Train a plain and a recomputing copy, compare gradients, buffers and random state bit by bit."""
    plain, recomputing = copy.deepcopy(model), copy.deepcopy(model)
    plain_gradients = _steps(plain)
    state_of_plain = torch.get_rng_state()
    checkpoint_modules(recomputing, names)
    _assert_same(plain_gradients, _steps(recomputing))
    assert torch.equal(state_of_plain, torch.get_rng_state())
    for (name, left), (_, right) in zip(plain.named_buffers(), recomputing.named_buffers(), strict=True):
        assert torch.equal(left, right), name
    return recomputing


def test_gradients_are_bit_equal_with_dropout_and_the_block_runs_twice() -> None:
    recomputing = _compare(_model(dropout=0.5), ("0", "1"))
    # Three steps, each with a first pass and a recomputed one.
    assert [recomputing[0].passes, recomputing[1].passes] == [6, 6]


def test_gradients_are_bit_equal_under_bf16_autocast() -> None:
    model = _model(dropout=0.5)
    recomputing = copy.deepcopy(model)
    checkpoint_modules(recomputing, ("0", "1"))
    with torch.autocast("cpu", torch.bfloat16):
        _assert_same(_steps(model), _steps(recomputing))


def test_less_is_saved_for_the_backward() -> None:
    """Reported in pytorch/pytorch#161650."""

    def saved(model: nn.Module) -> int:
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(_batch())
        return count

    plain, recomputing = _model(), _model()
    checkpoint_modules(recomputing, ("0", "1"))
    assert saved(recomputing) < saved(plain)


class Codebook(nn.Module):
    """Updates a buffer through ``.data`` and uses the result, as vector quantisers do: no version counter moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.ones(8), persistent=False)
        self.register_buffer("constant", torch.full((8,), 2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.code.data.mul_(0.5).add_(inputs.detach().mean(0), alpha=0.5)
        return inputs * self.code * self.constant


class Replaced(nn.Module):
    """Binds a new tensor to its buffer in every pass, and reads the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs + self.level
        self.level = self.level + 1
        return outputs


@pytest.mark.parametrize(
    "make_extra",
    [
        lambda: nn.BatchNorm1d(8),
        lambda: nn.BatchNorm1d(8, momentum=None),
        lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        Codebook,
        Replaced,
    ],
    ids=["batch-norm", "batch-norm-cumulative", "instance-norm", "spectral-norm", "codebook", "replaced-buffer"],
)
def test_buffers_that_the_forward_changes_are_changed_once(make_extra: Callable[[], nn.Module]) -> None:
    _compare(_model(make_extra), ("0", "1"))


def test_batch_norm_counts_each_batch_once() -> None:
    model = _model(lambda: nn.BatchNorm1d(8))
    checkpoint_modules(model, ("0",))
    _steps(model, count=3)
    assert int(model[0].extra.num_batches_tracked) == 3


def test_the_buffer_objects_stay_the_same_ones() -> None:
    model = _model(lambda: nn.BatchNorm1d(8))
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    checkpoint_modules(model, ("0", "1"))
    _steps(model)
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == before


def test_a_second_backward_through_the_same_graph_recomputes_from_the_same_buffers() -> None:
    model = _model(Codebook)
    checkpoint_modules(model, ("0", "1"))
    loss = model(_batch()).square().mean()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss.backward()
    _assert_same(first, [parameter.grad for parameter in model.parameters()])


def test_buffers_are_given_back_when_recomputation_raises() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.armed = False

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.norm(inputs)
            if self.armed:
                raise torch.OutOfMemoryError("out of memory")
            return outputs.exp()

    model = _model(Fails)
    checkpoint_modules(model, ("0",))
    loss = model(_batch()).mean()
    before = dict(model.named_buffers())
    model[0].extra.armed = True
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def test_nested_blocks_are_recomputed_and_bit_equal() -> None:
    model = nn.Sequential(_model(lambda: nn.BatchNorm1d(8), dropout=0.5))
    _compare(model, ("0", "0.0", "0.1"))


def test_a_block_used_twice_is_recomputed_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(nn.BatchNorm1d(8), dropout=0.5)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.block(self.block(inputs))

    torch.manual_seed(0)
    _compare(Twice(), ("block",))


def test_without_gradients_the_block_runs_straight_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    checkpoint_modules(model, ("0",))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("recomputation was set up")

    monkeypatch.setattr("lightning_memfit.apply.activation_checkpointing.checkpoint", refuse)
    with torch.no_grad():
        model(_batch())
    model[0].requires_grad_(False)
    model(_batch())
    with pytest.raises(AssertionError, match="recomputation was set up"):
        model(_batch().requires_grad_())


def test_a_frozen_block_passes_gradients_to_an_input_inside_a_dict() -> None:
    class FromDict(Block):
        def forward(self, inputs: dict[str, Any]) -> Tensor:
            return super().forward(inputs["deep"][0])

    block = FromDict().requires_grad_(False)
    root = nn.ModuleList([block])
    checkpoint_modules(root, ("0",))
    leaf = _batch().requires_grad_()
    block({"deep": (leaf,)}).sum().backward()
    assert leaf.grad is not None
    assert block.passes == 2


def test_keywords_other_values_and_tuples_pass_through() -> None:
    class Talkative(Block):
        def forward(
            self, inputs: Tensor, *rest: Any, use_reentrant: str = "", debug: Tensor | None = None, **more: Any
        ) -> Any:
            return super().forward(inputs), {"rest": rest, "word": use_reentrant, "debug": debug, "more": more}, None

    root = nn.ModuleList([Talkative()])
    checkpoint_modules(root, ("0",))
    flag = torch.ones(1)
    hidden, seen, nothing = root[0](_batch(), 3, "three", use_reentrant="mine", debug=flag, function=len, x=[flag])
    hidden.sum().backward()
    assert seen["rest"] == (3, "three")
    assert seen["word"] == "mine"
    assert seen["debug"] is flag
    assert seen["more"] == {"function": len, "x": [flag]}
    assert nothing is None
    assert root[0].linear.weight.grad is not None


def test_gradients_flow_to_keyword_arguments() -> None:
    model = _model()
    checkpoint_modules(model, ("0",))
    shift = torch.zeros(8, requires_grad=True)
    model[0](_batch(), scale=2.0, shift=shift).sum().backward()
    # The derivative of a sum over 6 rows.
    assert torch.equal(shift.grad, torch.full((8,), 6.0))


def test_state_dict_classes_and_signature_stay_as_they_are() -> None:
    model = _model()
    keys, kinds = list(model.state_dict()), [type(inner) for inner in model.modules()]
    signature = inspect.signature(model[0].forward)
    checkpoint_modules(model, ("0", "1"))
    assert list(model.state_dict()) == keys
    assert [type(inner) for inner in model.modules()] == kinds
    assert inspect.signature(model[0].forward) == signature
    _model().load_state_dict(model.state_dict(), strict=True)


def test_hooks_on_the_block_run_once_per_step() -> None:
    model = _model()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpoint_modules(model, ("0",))
    model(_batch().requires_grad_()).sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_recomputing_module_runs_its_own_weights(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = _model(lambda: nn.BatchNorm1d(8))
    checkpoint_modules(model, ("0", "1"))
    twin = duplicate(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin(_batch()).sum().backward()
    # All weights and biases of the copy are zero; the original's are not.
    assert torch.equal(twin(_batch()), torch.zeros(6, 1))
    assert not torch.equal(model(_batch()), torch.zeros(6, 1))
    assert twin[0].forward.block is twin[0]
    assert twin[0].passes == model[0].passes + 2  # three passes of the copy, one of the original


def test_undo_gives_every_dict_back_and_twice_is_harmless() -> None:
    model = _model(lambda: nn.BatchNorm1d(8))
    before = [(inner.__dict__, dict(inner.__dict__)) for inner in model.modules()]
    undo = checkpoint_modules(model, ("0", "1"))
    assert isinstance(model[0].__dict__["forward"], CheckpointedForward)
    undo()
    undo()
    for now, then in before:
        assert list(now) == list(then)
        assert all(now[key] is then[key] for key in then)


def test_an_undo_called_again_does_not_take_back_a_later_change() -> None:
    model = _model()
    undo = checkpoint_modules(model, ("0",))
    undo()
    checkpoint_modules(model, ("0",))
    undo()
    assert "forward" in model[0].__dict__


def test_a_forward_set_on_the_instance_is_kept_and_given_back() -> None:
    def doubled(self: Block, inputs: Tensor) -> Tensor:
        return type(self).forward(self, inputs) * 2

    model = _model()
    expected = model[0](_batch()) * 2
    own = types.MethodType(doubled, model[0])
    model[0].forward = own
    undo = checkpoint_modules(model, ("0",))
    assert torch.equal(model[0](_batch()), expected)
    undo()
    assert model[0].__dict__["forward"] is own


def test_applying_twice_changes_nothing_more() -> None:
    model = _model()
    undo = checkpoint_modules(model, ("0", "0"))
    first = model[0].__dict__["forward"]
    checkpoint_modules(model, ("0",))()
    assert model[0].__dict__["forward"] is first
    undo()
    assert "forward" not in model[0].__dict__


def test_modules_that_recompute_already_are_left_alone() -> None:
    model = _model()
    model[0].gradient_checkpointing = True
    checkpoint_modules(model, ("0", "1"))
    assert "forward" not in model[0].__dict__
    assert "forward" in model[1].__dict__


def test_an_unknown_name_is_an_error_before_anything_is_changed() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block()])})
    with pytest.raises(ConfigurationError) as error:
        checkpoint_modules(model, ("blocks.0", "block.0"))
    assert str(error.value) == (
        "activation_checkpointing: 'block.0' is none of the 6 modules of ModuleDict. "
        "Close names: 'blocks.0', 'blocks', 'blocks.0.extra'."
    )
    assert "forward" not in model["blocks"][0].__dict__


def test_a_compiled_module_is_refused_before_anything_is_changed() -> None:
    """Reported in Modalities/modalities#361, pytorch/pytorch#144637."""
    model = nn.Sequential(Block(), torch.compile(Block(), backend="eager"))
    with pytest.raises(UnsupportedError) as error:
        checkpoint_modules(model, ("0", "1"))
    assert str(error.value) == (
        "activation_checkpointing of '1' cannot be switched on: it is compiled (torch.compile), and was compiled "
        "without recomputation. Leave it out of activation_checkpointing, or compile after MemFit has been applied."
    )
    assert "forward" not in model[0].__dict__


def test_a_block_inside_a_compiled_module_is_refused() -> None:
    model = nn.ModuleList([torch.compile(_model(), backend="eager")])
    with pytest.raises(UnsupportedError, match="lies inside a compiled or scripted module"):
        checkpoint_modules(model, ("0._orig_mod.0",))


class Cache:
    """As the key/value caches of transformers: every call of a layer appends."""

    def __init__(self, held: int) -> None:
        self.held = held

    def get_seq_length(self) -> int:
        return self.held


class WithCache(Block):
    def forward(self, inputs: Tensor, past_key_values: Cache | None = None) -> Tensor:
        if past_key_values is not None:
            past_key_values.held += len(inputs)
        return super().forward(inputs)


def test_an_empty_cache_is_left_out_so_that_recomputing_cannot_append_again() -> None:
    root = nn.ModuleList([WithCache()])
    checkpoint_modules(root, ("0",))
    cache = Cache(0)
    root[0](_batch(), past_key_values=cache).sum().backward()
    assert cache.held == 0


def test_a_filled_cache_is_refused() -> None:
    root = nn.ModuleList([WithCache()])
    checkpoint_modules(root, ("0",))
    with pytest.raises(UnsupportedError, match=r"holds 5 tokens.*use_cache=False"):
        root[0](_batch(), past_key_values=Cache(5))


def test_a_transformers_llama_trains_with_its_default_cache() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    recomputing = copy.deepcopy(plain)
    checkpoint_modules(recomputing, ("model.layers.0", "model.layers.1"))
    ids = torch.arange(12).reshape(2, 6)
    for model in (plain, recomputing):
        model(input_ids=ids, labels=ids).loss.backward()
    _assert_same([p.grad for p in plain.parameters()], [p.grad for p in recomputing.parameters()])


def test_fake_tensors_pass_through_a_recomputing_block_with_buffers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = _model(lambda: nn.BatchNorm1d(8))
        checkpoint_modules(model, ("0", "1"))
        for _ in range(2):
            model(torch.randn(6, 8)).sum().backward()
    assert model[0].forward.changing_buffers == {
        (True, False): frozenset({"extra.running_mean", "extra.running_var", "extra.num_batches_tracked"})
    }


def test_the_names_of_torch_and_python_that_the_adapter_touches_exist() -> None:
    block = nn.BatchNorm1d(2)
    assert isinstance(block._buffers, dict), "torch changed Module._buffers"
    assert isinstance(block.running_mean._version, int), "torch changed Tensor._version"
    block.__dict__["forward"] = lambda inputs: "patched"
    assert block(torch.ones(1)) == "patched", "torch no longer looks forward up on the instance"
