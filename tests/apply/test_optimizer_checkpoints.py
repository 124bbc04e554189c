"""Saved optimizer states go on in 8 bits, in 32, and back; what cannot go on is refused before anything is lost."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_memfit.apply.optimizer_checkpoints import (
    adapt_optimizer_states,
    adapt_saved_state,
    as_configured_groups,
    carry_states,
    implementation_flags,
    without_linked_momentum,
)
from lightning_memfit.apply.optimizer_formats import QUANTISED, Moment, dequantised, quantised
from lightning_memfit.apply.optimizer_swap import swap_optimizer
from lightning_memfit.apply.quantised_states import quantise
from lightning_memfit.errors import CheckpointFormatError
from lightning_memfit.upstream import NAMESPACES

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, whose states these are")

# Lightning's own use of torch.utils._pytree
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")

# Half the widest gap between the 256 values that codes stand for: of the largest of a block.
SIGNED_ERROR, UNSIGNED_ERROR = 0.0071, 0.0036


class Small(nn.Module):
    """An embedding (kept in 32 bits), a quantised weight of 65 x 70 = 4550 elements (18 blocks), a small bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 70)
        self.layer = nn.Linear(70, 65)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(tokens))


def train(module: nn.Module, optimizer: Any, *, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randint(0, 100, (8,), generator=generator)).pow(2).mean().backward()
        optimizer.step()


Make = Callable[[Any], Any]
SOURCES: dict[str, Make] = {
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1),
    "Adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.8, 0.99)),
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01),
    "RMSprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=0.001, alpha=0.95),
    "bitsandbytes AdamW": lambda module: bnb.optim.AdamW(module.parameters(), lr=0.01),
    "Lion": lambda module: bnb.optim.Lion(module.parameters(), lr=0.001),
    "AdEMAMix": lambda module: bnb.optim.AdEMAMix(module.parameters(), lr=0.001, t_alpha=10, t_beta3=10),
}
MOMENTS = {
    "AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg",), "bitsandbytes AdamW": ("state1", "state2"), "Lion": ("state1",),
    "AdEMAMix": ("state1", "state2"),
}  # fmt: skip


def trained(name: str, *, in_8bit: bool = False) -> tuple[Small, Any]:
    module = Small()
    optimizer = SOURCES[name](module)
    if in_8bit:
        optimizer = quantise(optimizer, module)
    train(module, optimizer)
    return module, optimizer


def fresh(name: str, module: Small, *, in_8bit: bool) -> Any:
    """The optimizer of a run that resumes: the parameters are restored already."""
    again = copy.deepcopy(module)
    optimizer = SOURCES[name](again)
    return again, quantise(optimizer, again) if in_8bit else optimizer


def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(state, folder / "state.pt")
    loaded: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    return loaded


def relative_error(state: dict[str, Any], number: int, exact: torch.Tensor) -> float:
    """The largest error of a running average, in shares of the largest of each block of 256."""
    moment = Moment(values=state[f"state{number}"], absmax=state[f"absmax{number}"], qmap=state[f"qmap{number}"])
    difference = (dequantised(moment) - exact).abs().reshape(-1, exact.numel() // (2 if exact.ndim == 3 else 1))
    scales = moment.absmax.reshape(len(difference), -1).repeat_interleave(256, dim=1)[:, : difference.shape[1]]
    return float((difference / scales.clamp_min(1e-30)).max())


@pytest.mark.parametrize("shape", [(4096,), (64, 65), (3, 5000), (2, 4, 700), (1024 * 1024 + 300,)])
def test_what_is_dequantised_equals_bitsandbytes_own_bit_for_bit(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for signed in (True, False):
        qmap = bnb.functional.create_dynamic_map(signed=signed)
        moment = quantised(values if signed else values.abs(), qmap)
        own = bnb.functional.dequantize_blockwise(moment.values, absmax=moment.absmax, code=qmap, blocksize=256)
        assert torch.equal(dequantised(moment), own)
        assert moment.values.shape == shape and moment.block_size == 256


def test_the_two_halves_of_ademamix_are_quantised_one_by_one() -> None:
    qmap = bnb.functional.create_dynamic_map(signed=True)
    values = torch.stack([torch.randn(65, 70), 1e-3 * torch.randn(65, 70)])
    both = quantised(values, qmap, halves=True)
    assert both.values.shape == (2, 65, 70) and both.absmax is not None and both.absmax.shape == (2, 18)
    for half in range(2):
        alone = quantised(values[half], qmap)
        assert torch.equal(both.values[half], alone.values)
        assert torch.equal(dequantised(both)[half], dequantised(alone))


@pytest.mark.parametrize("name", SOURCES)
def test_states_in_32_bits_go_on_in_8(name: str, tmp_path: Path) -> None:
    module, source = trained(name)
    again, target = fresh(name, module, in_8bit=True)
    target.load_state_dict(adapt_saved_state(through_a_file(source.state_dict(), tmp_path), target))

    weight = target.state[again.layer.weight]
    assert weight["step"] == (1 if name == "SGD" else 3)  # SGD counts none: any but the first will do
    for number, moment in enumerate(MOMENTS[name], start=1):
        exact = source.state[module.layer.weight][moment]
        assert weight[f"state{number}"].dtype == torch.uint8
        assert relative_error(weight, number, exact) <= (SIGNED_ERROR if number == 1 else UNSIGNED_ERROR)
        for kept, original in (
            (again.embedding.weight, module.embedding.weight),
            (again.layer.bias, module.layer.bias),
        ):
            assert torch.equal(target.state[kept][f"state{number}"], source.state[original][moment])
            assert "qmap1" not in target.state[kept]

    before = again.layer.weight.detach().clone()
    train(again, target, steps=1, first=3)
    train(module, source, steps=1, first=3)
    moved = (module.layer.weight - before).norm()
    assert (again.layer.weight - module.layer.weight).norm() < 0.15 * moved, "goes on as the exact states would"
    assert torch.allclose(again.embedding.weight, module.embedding.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOURCES)
def test_states_in_8_bits_go_on_in_32(name: str, tmp_path: Path) -> None:
    module, source = trained(name, in_8bit=True)
    again, target = fresh(name, module, in_8bit=False)
    target.load_state_dict(adapt_saved_state(through_a_file(source.state_dict(), tmp_path), target))

    quantised_state, entry = source.state[module.layer.weight], target.state[again.layer.weight]
    assert entry.keys() == keys_of_the_original(name)
    for number, moment in enumerate(MOMENTS[name], start=1):
        assert relative_error(quantised_state, number, entry[moment]) == 0.0, "dequantising is exact"
        assert torch.equal(target.state[again.layer.bias][moment], source.state[module.layer.bias][f"state{number}"])
    if "step" in entry:
        assert entry["step"] == 3
    before = again.layer.weight.detach().clone()
    train(again, target, steps=1, first=3)
    train(module, source, steps=1, first=3)
    assert (again.layer.weight - module.layer.weight).norm() < 1e-3 * (module.layer.weight - before).norm()


def keys_of_the_original(name: str) -> set[str]:
    """What the 32-bit optimizer itself keeps for a parameter."""
    module, optimizer = trained(name)
    return set(optimizer.state[module.layer.weight])


@pytest.mark.parametrize("in_8bit", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_the_same_format_is_the_same_object_and_resumes_bit_for_bit(name: str, in_8bit: bool, tmp_path: Path) -> None:
    module, source = trained(name, in_8bit=in_8bit)
    again, target = fresh(name, module, in_8bit=in_8bit)
    saved = through_a_file(source.state_dict(), tmp_path)
    assert adapt_saved_state(saved, target) is saved
    target.load_state_dict(saved)
    train(module, source, first=3)
    train(again, target, first=3)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_an_embedding_that_was_quantised_elsewhere_gets_32_bits_and_the_other_way_round() -> None:
    module = Small()
    users_own = bnb.optim.AdamW8bit(module.parameters(), lr=0.01)
    train(module, users_own)
    assert users_own.state[module.embedding.weight]["state1"].dtype == torch.uint8
    again, target = fresh("AdamW", module, in_8bit=True)
    target.load_state_dict(adapt_saved_state(users_own.state_dict(), target))
    assert target.state[again.embedding.weight]["state1"].dtype == torch.float32
    assert torch.equal(target.state[again.layer.weight]["state1"], users_own.state[module.layer.weight]["state1"])
    back = bnb.optim.AdamW8bit(again.parameters(), lr=0.01)
    back.load_state_dict(adapt_saved_state(target.state_dict(), back))
    assert back.state[again.embedding.weight]["state1"].dtype == torch.uint8


def test_hyperparameters_are_the_saved_ones_under_the_names_of_the_run() -> None:
    module = Small()
    saved = torch.optim.SGD(
        [{"params": [*module.parameters()], "name": "all", "initial_lr": 0.5}], lr=0.1, momentum=0.7, weight_decay=0.2
    )
    target = bnb.optim.SGD8bit(module.parameters(), lr=1.0, momentum=0.9)
    target.load_state_dict(adapt_saved_state(saved.state_dict(), target))
    group = {name: value for name, value in target.param_groups[0].items() if name != "params"}
    assert group == {
        "lr": 0.1, "betas": (0.7, 0), "eps": 0.0, "weight_decay": 0.2, "name": "all", "initial_lr": 0.5
    }  # fmt: skip

    back = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, foreach=True)
    keys = set(back.param_groups[0])
    back.load_state_dict(adapt_saved_state(target.state_dict(), back))
    group = back.param_groups[0]
    assert (group["lr"], group["momentum"], group["dampening"], group["weight_decay"]) == (0.1, 0.7, 0, 0.2)
    assert group["foreach"] is True and set(group) == keys | {"name", "initial_lr"}

    rms = torch.optim.RMSprop(module.parameters(), lr=0.3, alpha=0.9, eps=1e-5)
    target = bnb.optim.RMSprop8bit(module.parameters(), lr=1.0)
    target.load_state_dict(adapt_saved_state(rms.state_dict(), target))
    assert (target.param_groups[0]["betas"], target.param_groups[0]["eps"]) == ((0.9, 0), 1e-5)
    target = quantise(torch.optim.RMSprop(module.parameters(), lr=1.0), module)
    target.load_state_dict(adapt_saved_state(rms.state_dict(), target))
    assert (target.param_groups[0]["betas"], target.param_groups[0]["alpha"]) == ((0.9, 0), 0.9)


def test_a_learning_rate_in_a_tensor_becomes_a_number_and_a_tensor_again() -> None:
    module = Small()
    source = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.5))
    target = bnb.optim.AdamW8bit(module.parameters(), lr=1.0)
    target.load_state_dict(adapt_saved_state(source.state_dict(), target))
    assert type(target.param_groups[0]["lr"]) is float and target.param_groups[0]["lr"] == 0.5
    train(module, target)
    back = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1.0))
    back.load_state_dict(adapt_saved_state(target.state_dict(), back))
    assert torch.equal(back.param_groups[0]["lr"], torch.tensor(0.5))


def test_the_momentum_of_sgd_goes_on_after_a_conversion_instead_of_starting_anew() -> None:
    layer = nn.Linear(64, 64, bias=False)
    source = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5)
    layer.weight.grad = torch.ones_like(layer.weight)
    source.step()
    target = bnb.optim.SGD8bit(layer.parameters(), lr=1.0, momentum=0.5)
    target.load_state_dict(adapt_saved_state(source.state_dict(), target))
    before = layer.weight.detach().clone()
    target.step()
    # 0.5 x 1 + 1; a first step would have moved by 1
    assert torch.allclose(before - layer.weight, torch.full_like(before, 1.5))


@pytest.mark.parametrize("in_8bit", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_a_checkpoint_from_before_the_first_step_goes_on(name: str, in_8bit: bool) -> None:
    module = Small()
    source = SOURCES[name](module)
    if in_8bit:
        source = quantise(source, module)
    again, target = fresh(name, module, in_8bit=not in_8bit)
    target.load_state_dict(adapt_saved_state(source.state_dict(), target))
    assert not target.state
    assert set(target.param_groups[0]) == set(fresh(name, module, in_8bit=not in_8bit)[1].param_groups[0])
    train(again, target)


def test_parameters_without_a_gradient_so_far_have_no_states_afterwards() -> None:
    module = Small()
    source = SOURCES["SGD"](module)
    train(module, source)
    saved = source.state_dict()
    saved["state"][2]["momentum_buffer"] = None  # as torch saves a parameter that was frozen
    again, target = fresh("SGD", module, in_8bit=True)
    target.load_state_dict(adapt_saved_state(saved, target))
    assert again.layer.bias not in target.state and again.layer.weight in target.state
    train(again, target)


def test_states_of_earlier_releases_of_bitsandbytes_are_read() -> None:
    """Blocks of 2048 elements, and tensors that are not nested."""
    module, source = trained("AdamW", in_8bit=True)
    exact = torch.randn(65, 70)
    saved = source.state_dict()
    entry = saved["state"][1]
    tensors = entry.pop(QUANTISED)
    codes, state = bnb.functional.quantize_blockwise(exact, code=tensors["qmap1"], blocksize=2048)
    entry |= tensors | {"state1": codes, "absmax1": state.absmax}
    again, target = fresh("AdamW", module, in_8bit=True)
    target.load_state_dict(adapt_saved_state(saved, target))
    loaded = target.state[again.layer.weight]
    assert loaded["absmax1"].shape == (18,)
    assert relative_error(loaded, 1, exact) <= 4 * SIGNED_ERROR  # rounded twice, the first time in larger blocks
    assert torch.equal(loaded["state2"], source.state[module.layer.weight]["state2"])


def test_bitsandbytes_still_keeps_states_in_the_form_that_is_written_here() -> None:
    saved = trained("AdamW", in_8bit=True)[1].state_dict()["state"]
    message = "bitsandbytes changed its states: adapt optimizer_formats.py"
    assert set(saved[1]) == {"step", QUANTISED}, message
    assert {name: (tuple(t.shape), t.dtype) for name, t in saved[1][QUANTISED].items()} == {
        "state1": ((65, 70), torch.uint8), "qmap1": ((256,), torch.float32), "absmax1": ((18,), torch.float32),
        "state2": ((65, 70), torch.uint8), "qmap2": ((256,), torch.float32), "absmax2": ((18,), torch.float32),
    }, message  # fmt: skip
    assert saved[0][QUANTISED].keys() == {"state1", "state2"}, message
    assert type(saved[1]["step"]) is int, message


# What is refused


def error_for(saved: dict[str, Any], target: Any) -> str:
    before = copy.deepcopy(saved)
    with pytest.raises(CheckpointFormatError) as caught:
        adapt_saved_state(saved, target)
    assert str(before) == str(saved), "what was saved is not changed"
    assert not target.state
    return str(caught.value)


def test_other_numbers_of_parameters_and_groups_are_refused_with_the_numbers() -> None:
    module, source = trained("AdamW")
    target = quantise(torch.optim.AdamW(module.layer.parameters()), module)
    assert error_for(source.state_dict(), target) == (
        "The checkpoint's optimizer states are for 1 parameter groups of [3] parameters, and this run's AdamW8bit has "
        "1 of [2]. Resume with the model and the groups that the checkpoint was made with."
    )
    _, quantised_source = trained("AdamW", in_8bit=True)
    groups = torch.optim.AdamW([{"params": [parameter]} for parameter in module.parameters()])
    assert "for 1 parameter groups of [3] parameters, and this run's AdamW has 3 of [1, 1, 1]" in error_for(
        quantised_source.state_dict(), groups
    )


def test_other_numbers_of_parameters_are_torchs_to_refuse_where_nothing_is_converted() -> None:
    # load_state_dict compares them itself, and an optimizer of the user's own may load other numbers.
    module, source = trained("AdamW")
    saved = source.state_dict()
    assert adapt_saved_state(saved, torch.optim.AdamW(module.layer.parameters())) is saved


@pytest.mark.parametrize(("from_8bit", "to_8bit"), [(False, True), (True, False), (True, True)])
def test_other_shapes_are_refused_with_the_numbers(from_8bit: bool, to_8bit: bool) -> None:
    _, source = trained("AdamW", in_8bit=from_8bit)
    other = Small()
    other.layer = nn.Linear(70, 64)
    target: Any = torch.optim.AdamW(other.parameters())
    target = quantise(target, other) if to_8bit else target
    assert error_for(source.state_dict(), target) == (
        f"The checkpoint's optimizer states cannot go on in {'AdamW8bit' if to_8bit else 'AdamW'}: parameter 1 of "
        "group 0 has shape (64, 70), and its states were saved with shape (65, 70). Resume with the model that the "
        "checkpoint was made with."
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight_decay=0.1 that is not decoupled"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "momentum=0.9"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered=True"),
    ],
)
def test_what_bitsandbytes_has_no_form_of_is_refused_by_name(make: Any, reason: str) -> None:
    module = Small()
    source = make(module.parameters())
    train(module, source)
    name = {"SGD": "SGD", "RMSprop": "RMSprop"}.get(type(source).__name__, "AdamW")
    _, target = fresh(name, module, in_8bit=True)
    assert error_for(source.state_dict(), target) == (
        f"The checkpoint cannot go on in {name}8bit: group 0 was saved with {reason}, which bitsandbytes does not "
        "have. Resume with optimizer_states='as-configured'."
    )


def test_states_beside_those_that_have_a_form_are_refused_by_name() -> None:
    module, source = trained("AdamW")
    saved = source.state_dict()
    saved["state"][1]["max_exp_avg_sq"] = torch.zeros(65, 70)
    _, target = fresh("AdamW", module, in_8bit=True)
    assert error_for(saved, target) == (
        "The checkpoint's optimizer states cannot go on in AdamW8bit: parameter 1 of group 0 was saved with exp_avg, "
        "exp_avg_sq, max_exp_avg_sq, and only exp_avg, exp_avg_sq can go on in 8 bits. Resume with "
        "optimizer_states='as-configured'."
    )


@pytest.mark.parametrize(("saved_by", "resumed_by"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("RMSprop", "AdamW")])
@pytest.mark.parametrize("from_8bit", [False, True])
def test_states_of_another_optimizer_are_refused(saved_by: str, resumed_by: str, from_8bit: bool) -> None:
    module, source = trained(saved_by, in_8bit=from_8bit)
    _, target = fresh(resumed_by, module, in_8bit=not from_8bit)
    message = error_for(source.state_dict(), target)
    assert message.startswith("The checkpoint's optimizer states cannot go on in " + type(target).__qualname__)


def test_an_optimizer_without_a_known_rule_is_refused_for_states_of_bitsandbytes_only() -> None:
    module, source = trained("AdamW", in_8bit=True)
    target = torch.optim.NAdam(module.parameters())
    assert error_for(source.state_dict(), target) == (
        "The checkpoint's optimizer states have another form than those of this run's NAdam, and no conversion between "
        "them is known. Resume with the optimizer that the checkpoint was made with."
    )
    saved = torch.optim.NAdam(module.parameters()).state_dict()
    assert adapt_saved_state(saved, target) is saved
    saved = trained("AdEMAMix", in_8bit=True)[1].state_dict()
    lion = bnb.optim.Lion(module.parameters())
    assert "was saved with 2 running averages, and 1 are needed: it comes from another optimizer" in error_for(
        saved, lion
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered=True"),
    ],
)
def test_a_run_that_needs_states_which_were_not_saved_is_refused(make: Any, reason: str) -> None:
    module = Small()
    target = make(module.parameters())
    name = type(target).__qualname__
    _, source = trained(name, in_8bit=True)
    saved = source.state_dict()
    assert error_for(saved, target) == (
        f"The checkpoint cannot go on in {name}: group 0 is configured with {reason}, and the states for it are not "
        f"among those that bitsandbytes saved. Resume without {reason.partition('=')[0]}."
    )


def test_damaged_and_infinite_states_are_refused() -> None:
    module, source = trained("AdamW", in_8bit=True)
    for damage in ({"absmax1": torch.ones(7)}, {"absmax1": None}, {"qmap1": None}):
        saved = source.state_dict()
        saved["state"][1][QUANTISED] |= damage
        for in_8bit in (False, True):
            message = error_for(saved, fresh("AdamW", module, in_8bit=in_8bit)[1])
            assert "was saved with 4550 codes in state1 and scales that do not belong to them" in message
            assert message.endswith("The file is damaged: resume from another one.")
    module, source = trained("AdamW")
    saved = source.state_dict()
    saved["state"][1]["exp_avg"] = torch.full((65, 70), torch.inf)
    message = error_for(saved, fresh("AdamW", module, in_8bit=True)[1])
    assert "cannot be converted: values that are not finite cannot be quantised" in message


def test_of_two_optimizers_none_is_adapted_if_one_cannot_be() -> None:
    (first, a), (second, b) = trained("AdamW"), trained("SGD")
    targets = [fresh("AdamW", first, in_8bit=True)[1], fresh("AdamW", second, in_8bit=True)[1]]
    checkpoint = {"optimizer_states": [a.state_dict(), b.state_dict()]}
    states = checkpoint["optimizer_states"]
    with pytest.raises(CheckpointFormatError):
        adapt_optimizer_states(checkpoint, targets)
    assert checkpoint["optimizer_states"] is states and QUANTISED not in states[0]["state"][0]
    checkpoint["optimizer_states"][1] = trained("AdamW")[1].state_dict()
    adapt_optimizer_states(checkpoint, targets)
    assert all(QUANTISED in state["state"][1] for state in checkpoint["optimizer_states"])
    adapt_optimizer_states({}, targets)


def test_a_form_that_is_no_dictionary_of_groups_and_states_is_left_alone() -> None:
    saved: dict[str, Any] = {}
    assert adapt_saved_state(saved, SOURCES["AdamW"](Small())) is saved


# Flags, and states that are carried


def test_flags_of_the_implementation_are_written_as_they_were_configured() -> None:
    module = Small()
    optimizer = torch.optim.AdamW(
        [{"params": [module.layer.weight], "foreach": False}, {"params": [module.layer.bias], "name": "bias"}]
    )
    flags = implementation_flags(optimizer)
    assert flags == ({"foreach": False, "fused": None}, {"foreach": None, "fused": None})
    saved = optimizer.state_dict()
    assert as_configured_groups(saved, flags) is saved
    for group in optimizer.param_groups:
        group["foreach"], group["fused"] = False, True
    saved = optimizer.state_dict()
    written = as_configured_groups(saved, flags)
    assert [(group["foreach"], group["fused"]) for group in written["param_groups"]] == [(False, None), (None, None)]
    assert written["param_groups"][1]["name"] == "bias" and written["state"] is saved["state"]
    assert saved["param_groups"][0]["fused"] is True, "the optimizer's own groups are not changed"
    optimizer.add_param_group({"params": [module.embedding.weight]})
    assert len(as_configured_groups(optimizer.state_dict(), flags)["param_groups"]) == 3
    assert as_configured_groups({}, flags) == {}


@pytest.mark.parametrize("to_8bit", [False, True])
def test_carried_states_are_tensors_of_their_own_and_flags_stay(to_8bit: bool) -> None:
    module, source = trained("AdamW")
    kept = {name: value.clone() for name, value in source.state[module.layer.bias].items()}
    target: Any = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1, fused=not to_8bit or None)
    target = quantise(target, module) if to_8bit else target
    carry_states(source, target)
    train(module, target, steps=1, first=3)
    assert all(torch.equal(source.state[module.layer.bias][name], value) for name, value in kept.items())
    assert target.state[module.layer.bias]["step"] == 4
    if not to_8bit:
        assert target.param_groups[0]["fused"] is True
    untouched = torch.optim.AdamW(module.parameters())
    carry_states(torch.optim.AdamW(module.parameters()), untouched)
    assert not untouched.state


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_states_in_8_bits_are_not_taken_for_torchs_own_in_silence(name: str, tmp_path: Path) -> None:
    module, optimizer = trained(name, in_8bit=True)
    saved = through_a_file(without_linked_momentum(optimizer.state_dict()), tmp_path)
    again, plain = fresh(name, module, in_8bit=False)
    plain.load_state_dict(saved)
    with pytest.raises(KeyError, match={"SGD": "momentum", "AdamW": "exp_avg", "RMSprop": "square_avg"}[name]):
        train(again, plain, steps=1)
    for in_8bit in (True, False):  # while the plugin goes on from them in either form
        again, optimizer = fresh(name, module, in_8bit=in_8bit)
        optimizer.load_state_dict(adapt_saved_state(saved, optimizer))
        train(again, optimizer, steps=1, first=3)
        if name == "SGD":
            group = optimizer.param_groups[0]
            assert (group["betas"][0] if in_8bit else group["momentum"]) == 0.8


def test_groups_of_other_optimizers_are_written_as_they_are() -> None:
    for name, in_8bit in (("SGD", False), ("AdamW", True), ("RMSprop", True)):
        _, optimizer = trained(name, in_8bit=in_8bit)
        saved = optimizer.state_dict()
        assert without_linked_momentum(saved) is saved
    form_of_its_own = {"weights": 1}
    assert without_linked_momentum(form_of_its_own) is form_of_its_own


# In a Trainer


class Watched:
    """What the hooks of the precision plugin saw."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.saved: list[int] = []


def run(
    pl: Any,
    folder: Path,
    *,
    in_8bit: bool,
    epochs: int,
    resume: Path | None = None,
    watched: Watched | None = None,
    cycled: list[Any] | None = None,
) -> tuple[Any, Any]:
    """Fit AdamW under a falling learning rate; with ``cycled`` SGD under one cycle, noting its rates step by step."""
    plugins = importlib.import_module(f"{pl.__name__}.plugins.precision")

    class Plugin(plugins.Precision):
        trainer: Any = None

        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
            self.trainer = model.trainer
            if in_8bit:
                swap_optimizer(model.trainer, lambda old: quantise(old, model))
            return model, optimizers, lr_schedulers

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if watched is not None:
                watched.loaded.append(
                    (type(self.trainer.optimizers[0]).__name__, len(self.trainer.optimizers[0].state))
                )
            adapt_optimizer_states(checkpoint, self.trainer.optimizers)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if watched is not None:
                watched.saved.append(len(checkpoint["optimizer_states"][0]["state"]))

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Small()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(batch).pow(2).mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if cycled is not None:
                group, named = optimizer.param_groups[0], "betas" in optimizer.defaults
                cycled.append((group["lr"], group["betas"][0] if named else group["momentum"]))

        def configure_optimizers(self) -> Any:
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule: Any = lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
            if cycled is not None:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
                schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 100, (8,), generator=generator) for _ in range(4)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.01,
        plugins=[Plugin()],
        default_root_dir=folder,
    )
    module = Tiny()
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=resume)
    return trainer, module


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.mark.parametrize("to_8bit", [False, True])
@pytest.mark.parametrize("from_8bit", [False, True])
def test_a_trainer_resumes_from_either_format_in_either_format(
    pl: Any, tmp_path: Path, from_8bit: bool, to_8bit: bool
) -> None:
    first, watched = tmp_path / "first.ckpt", Watched()
    trainer, _ = run(pl, tmp_path, in_8bit=from_8bit, epochs=1, watched=watched)
    trainer.save_checkpoint(first)
    assert watched.saved == [3], "optimizers were written before on_save_checkpoint"
    resumed, module = run(pl, tmp_path, in_8bit=to_8bit, epochs=2, resume=first, watched=watched)
    assert watched.loaded == [("AdamW8bit" if to_8bit else "AdamW", 0)], "before optimizers are restored"

    whole, uninterrupted = run(pl, tmp_path, in_8bit=to_8bit, epochs=2)
    optimizer = resumed.optimizers[0]
    assert {int(state["step"]) for state in optimizer.state.values()} == {8}
    assert optimizer.param_groups[0]["lr"] == whole.optimizers[0].param_groups[0]["lr"]
    name = "state1" if to_8bit else "exp_avg"
    assert optimizer.state[module.model.layer.weight][name].dtype == (torch.uint8 if to_8bit else torch.float32)
    assert optimizer.state[module.model.embedding.weight][name].dtype == torch.float32
    pairs = list(zip(module.parameters(), uninterrupted.parameters(), strict=True))
    if from_8bit == to_8bit:
        assert all(torch.equal(a, b) for a, b in pairs)
    else:
        start = Small().state_dict()["layer.weight"]
        distance = (module.model.layer.weight - uninterrupted.model.layer.weight).norm()
        assert 0 < distance < 0.05 * (uninterrupted.model.layer.weight - start).norm()


@pytest.mark.parametrize("to_8bit", [False, True])
@pytest.mark.parametrize("from_8bit", [False, True])
def test_learning_rate_and_cycled_momentum_go_on_after_a_resume(tmp_path: Path, from_8bit: bool, to_8bit: bool) -> None:
    pl = importlib.import_module("lightning.pytorch")
    whole: list[Any] = []
    run(pl, tmp_path, in_8bit=False, epochs=2, cycled=whole)
    assert len(set(whole)) == 8
    parts: list[Any] = []
    trainer, _ = run(pl, tmp_path, in_8bit=from_8bit, epochs=1, cycled=parts)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    run(pl, tmp_path, in_8bit=to_8bit, epochs=2, resume=tmp_path / "first.ckpt", cycled=parts)
    assert parts == whole


def test_a_trainer_refuses_what_cannot_go_on_before_optimizers_are_restored(pl: Any, tmp_path: Path) -> None:
    trainer, _ = run(pl, tmp_path, in_8bit=False, epochs=1)
    for state in trainer.optimizers[0].state.values():
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    trainer.save_checkpoint(tmp_path / "amsgrad.ckpt")
    watched = Watched()
    with pytest.raises(CheckpointFormatError, match="max_exp_avg_sq, and only exp_avg, exp_avg_sq can go on in 8 bits"):
        run(pl, tmp_path, in_8bit=True, epochs=2, resume=tmp_path / "amsgrad.ckpt", watched=watched)
    assert watched.loaded == [("AdamW8bit", 0)]


def test_a_plain_trainer_resumes_from_a_checkpoint_that_was_trained_in_32_bits_beside_the_plugin(
    pl: Any, tmp_path: Path
) -> None:
    trainer, _ = run(pl, tmp_path, in_8bit=False, epochs=1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    saved = torch.load(tmp_path / "first.ckpt", weights_only=True)
    plain = torch.optim.AdamW(Small().parameters())
    plain.load_state_dict(saved["optimizer_states"][0])
    assert len(plain.state) == 3
