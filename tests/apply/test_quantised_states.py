"""States in 8 bits on real optimizers, counted in bytes. Run: ``pytest tests/apply/test_quantised_states.py``."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_memfit.apply.quantised_states import quantisation_obstacle, quantise, verify_quantised
from lightning_memfit.errors import ConfigurationError, MemFitError

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes", exc_type=ImportError)
PACKAGE = Path(__file__).parents[2] / "lightning_memfit"
Make = Callable[..., Optimizer]
SOURCES: dict[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.8, weight_decay=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4, alpha=0.95, weight_decay=0.01),
    "bitsandbytes Lion": partial(bnb.optim.Lion, lr=1e-4, weight_decay=0.1),
    "bitsandbytes AdEMAMix": partial(bnb.optim.AdEMAMix, lr=1e-4, t_alpha=10, t_beta3=10),
    "bitsandbytes AdamW": partial(bnb.optim.AdamW, lr=1e-3),
}
MOMENTS = {"AdamW": 2, "Adam": 2, "bitsandbytes AdamW": 2, "bitsandbytes AdEMAMix": 3}


class Text(nn.Module):
    """An embedding of 6400 elements tied to the head, a matrix of 16,500 elements, one of 4095, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.large = nn.Linear(64, 220, bias=False)
        self.medium = nn.Linear(220, 64, bias=False)
        self.small = nn.Parameter(torch.ones(4095))
        self.head = nn.Linear(64, 100)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.medium(F.gelu(self.large(self.embedding(tokens))))
        out: Tensor = self.head(hidden + self.small.mean())
        return out


LARGE = 64 * 220  # twice: 14,080 elements are 55 blocks of 256
KEPT = 6400 + 4095 + 100


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    yield
    left = (manager.pid2config, manager.index2config, manager.module_weight_config_triple)
    manager.initialize()
    assert left == ({}, {}, [])


def train(module: nn.Module, optimizer: Optimizer, steps: int = 2) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 100, (8, 6), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(tokens).flatten(0, 1), ((3 * tokens + 1) % 100).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# What becomes of the states


@pytest.mark.parametrize("name", SOURCES)
def test_states_are_quantised_and_counted(name: str) -> None:
    """Reported in huggingface/transformers#14819."""
    module = Text()
    optimizer = quantise(SOURCES[name](module.parameters()), module)
    assert not optimizer.state
    train(module, optimizer)
    moments = MOMENTS.get(name, 1)
    found = verify_quantised(optimizer, module)
    assert found.optimizer == f"bitsandbytes.optim.{type(optimizer).__name__}"
    assert type(optimizer).__name__ == f"{name.split()[-1]}8bit"
    # Each moment: one byte per element, four per block of 256.
    assert (found.quantised_parameters, found.quantised_bytes) == (2 * LARGE, moments * 2 * (LARGE + 4 * 55))
    assert (found.kept_parameters, found.kept_bytes) == (KEPT, moments * 4 * KEPT)
    assert found.saved_bytes == moments * 2 * (4 * LARGE - LARGE - 4 * 55)
    assert found.kept_reason == "1 embedding, 2 tensors below 4096 elements"
    kept = optimizer.state[module.embedding.weight]
    assert all(value.dtype is torch.float32 for value in kept.values() if isinstance(value, Tensor))
    assert optimizer.state[module.large.weight]["state1"].dtype is torch.uint8


def test_two_moments_take_203_bytes_per_hundred_parameters() -> None:
    module = nn.Linear(512, 512, bias=False)
    optimizer = quantise(torch.optim.AdamW(module.parameters()), module)
    module.weight.grad = torch.ones(512, 512)
    optimizer.step()
    found = verify_quantised(optimizer, module)
    assert found.quantised_bytes / found.quantised_parameters == 2.03125  # 2 x (1 + 4/256)
    assert found.kept_reason == ""


@pytest.mark.parametrize("name", SOURCES)
def test_training_in_8_bits_goes_where_training_in_32_bits_goes(name: str) -> None:
    torch.manual_seed(0)
    module = Text()
    twin = copy.deepcopy(module)
    full = train(module, SOURCES[name](module.parameters()), steps=40)
    quantised = train(twin, quantise(SOURCES[name](twin.parameters()), twin), steps=40)
    assert quantised[-1] < quantised[0] - 0.02
    assert abs(quantised[-1] - full[-1]) < 0.1 * (full[0] - full[-1])


@pytest.mark.parametrize("name", SOURCES)
def test_where_quantising_loses_nothing_the_steps_are_those_of_the_source(name: str) -> None:
    # In a block of equal positive numbers each is 1.0 times the largest, and 1.0 is one of the 256 values.
    def end(quantised: bool) -> Tensor:
        module = nn.Linear(64, 64, bias=False)
        nn.init.constant_(module.weight, 2.0)
        optimizer = SOURCES[name](module.parameters())
        optimizer = quantise(optimizer, module) if quantised else optimizer
        for step in range(24):
            optimizer.param_groups[0]["lr"] *= 0.95
            module.weight.grad = 0.1 * module.weight.detach() + 0.5 / (1 + step % 5)
            optimizer.step()
        if quantised:
            assert verify_quantised(optimizer, module).quantised_parameters == 4096
        return module.weight.detach()

    quantised, source = end(True), end(False)
    assert (quantised - source).abs().max() < 1e-5 * (source - 2.0).abs().max()


# What is kept


def test_groups_parameters_and_hyperparameters_are_the_same() -> None:
    module = Text()
    groups = [
        {"params": [module.medium.weight, module.small], "lr": 0.5, "name": "first"},
        {"params": [module.large.weight], "weight_decay": 0.3, "betas": (0.5, 0.6), "initial_lr": 7.0, "scale": [1, 2]},
    ]
    source = torch.optim.AdamW(groups, lr=0.1, foreach=True)
    optimizer = quantise(source, module)
    for before, after in zip(source.param_groups, optimizer.param_groups, strict=True):
        assert before.items() <= {**after, "params": before["params"]}.items()
        assert all(a is b for a, b in zip(before["params"], after["params"], strict=True))
        assert before["params"] is not after["params"]
    assert source.defaults.items() <= optimizer.defaults.items()
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)


def test_names_of_parameters_are_kept() -> None:
    module = Text()
    optimizer = quantise(torch.optim.AdamW(module.named_parameters()), module)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in module.named_parameters()]
    train(module, optimizer)


def test_momentum_is_found_under_both_names_in_groups_and_under_one_in_defaults() -> None:
    module = Text()
    groups = [{"params": [module.large.weight]}, {"params": [module.medium.weight], "momentum": 0.5}]
    optimizer = quantise(torch.optim.SGD(groups, lr=1, momentum=0.8, foreach=True), module)
    assert [(group["momentum"], group["betas"]) for group in optimizer.param_groups] == [
        (0.8, (0.8, 0.0)),
        (0.5, (0.5, 0.0)),
    ]
    assert "momentum" not in optimizer.defaults and optimizer.defaults["betas"] == (0.8, 0.0)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, base_momentum=0.6, max_momentum=0.7)
    assert schedule.use_beta1 and optimizer.param_groups[0]["betas"][0] == 0.7


def test_groups_added_later_get_the_defaults_of_the_source() -> None:
    module = Text()
    source = torch.optim.AdamW([module.large.weight], lr=0.25, weight_decay=0.125)
    optimizer = quantise(source, module)
    optimizer.add_param_group({"params": [module.embedding.weight, module.medium.weight]})
    assert (optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]) == (0.25, 0.125)
    train(module, optimizer)
    assert verify_quantised(optimizer, module).kept_reason == "1 embedding"


def test_schedules_drive_it() -> None:
    module = Text()
    rates = []
    for make in (lambda o: o, lambda o: quantise(o, module)):
        optimizer = make(torch.optim.AdamW(module.parameters(), lr=0.1))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=5)
        rates.append([])
        for _ in range(4):
            train(module, optimizer, steps=1)
            schedule.step()
            rates[-1].append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
    assert rates[0] == rates[1]


def test_hooks_go_on_being_called_until_their_handles_remove_them() -> None:
    module = Text()
    source = torch.optim.AdamW(module.parameters())
    called: list[str] = []
    handles = [
        source.register_step_pre_hook(lambda *_: called.append("before")),
        source.register_step_post_hook(lambda *_: called.append("after")),
        source.register_state_dict_post_hook(lambda *_: called.append("saved")),
    ]
    optimizer = quantise(source, module)
    train(module, optimizer, steps=1)
    optimizer.state_dict()
    assert called == ["before", "after", "saved"]
    for handle in handles:
        handle.remove()
    train(module, optimizer, steps=1)
    optimizer.state_dict()
    assert len(called) == 3


def test_a_closure_is_called_with_gradients_enabled() -> None:
    module = Text()
    optimizer = quantise(torch.optim.AdamW(module.parameters()), module)

    def closure() -> Tensor:
        loss: Tensor = module(torch.tensor([1, 2])).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert verify_quantised(optimizer, module).quantised_parameters == 2 * LARGE


@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_scaler_skips_and_takes_the_same_steps(clip: bool) -> None:
    module = Text()
    optimizer = quantise(torch.optim.AdamW(module.parameters()), module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steps = []
    for step in range(4):
        optimizer.zero_grad()
        loss = module(torch.tensor([1, 2])).square().mean() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        before = module.large.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        steps.append(not torch.equal(before, module.large.weight))
    assert steps == [True, False, True, True]
    assert optimizer.state[module.large.weight]["step"] == 3
    assert module.large.weight.isfinite().all()


def test_states_are_saved_and_loaded_and_training_goes_on_to_the_bit() -> None:
    module = Text()
    optimizer = quantise(torch.optim.AdamW(module.parameters()), module)
    train(module, optimizer)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    twin = copy.deepcopy(module)
    resumed = quantise(torch.optim.AdamW(twin.parameters()), twin)
    stream.seek(0)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    assert train(module, optimizer) == train(twin, resumed)
    assert verify_quantised(resumed, twin) == verify_quantised(optimizer, module)
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


# What bitsandbytes shares between optimizers


def test_exceptions_of_other_optimizers_do_not_reach_it_and_its_own_reach_no_other() -> None:
    module = Text()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.index2config[(0, 1)] = {"optim_bits": 32}  # left over: the second parameter, which is module.large
    source = torch.optim.AdamW([module.embedding.weight, module.large.weight])
    optimizer = quantise(source, module)
    train(module, optimizer)
    assert verify_quantised(optimizer, module).quantised_parameters == LARGE
    manager.initialize()
    other = bnb.optim.AdamW8bit([module.embedding.weight])
    other.step()
    assert other.state[module.embedding.weight]["state1"].dtype is torch.uint8


def test_exceptions_that_the_user_made_for_bitsandbytes_go_along() -> None:
    module = Text()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.override_config(module.large.weight, "optim_bits", 32)
    optimizer = quantise(bnb.optim.AdamW(module.parameters()), module)
    train(module, optimizer)
    found = verify_quantised(optimizer, module)
    assert found.quantised_parameters == LARGE
    assert found.kept_reason == "1 embedding, 2 tensors below 4096 elements, 1 tensor with a setting of its own"
    assert manager.pid2config == {id(module.large.weight): {"optim_bits": 32}}
    manager.initialize()


def test_settings_of_a_source_from_bitsandbytes_go_along() -> None:
    module = Text()
    source = bnb.optim.AdamW(module.parameters(), min_8bit_size=14_081)
    optimizer: Any = quantise(bnb.optim.AdamW(module.parameters(), min_8bit_size=16), module)
    assert optimizer.args.min_8bit_size == 4096
    optimizer = quantise(source, module)
    assert optimizer.args.min_8bit_size == 14_081
    train(module, optimizer)
    with_none = verify_quantised(optimizer, module)
    assert with_none.quantised_parameters == 0
    assert with_none.kept_reason == "1 embedding, 4 tensors below 14081 elements"


def test_a_paged_optimizer_stays_paged() -> None:
    """Reported in bitsandbytes-foundation/bitsandbytes#962."""
    module = Text()
    optimizer = quantise(bnb.optim.PagedAdamW32bit(module.parameters()), module)
    assert type(optimizer) is bnb.optim.PagedAdamW8bit
    with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
        train(module, optimizer, steps=1)


# What is refused


def obstacle(optimizer: Optimizer, module: nn.Module) -> str:
    return quantisation_obstacle(optimizer, module) or "no obstacle"


def test_an_optimizer_that_can_be_quantised_has_no_obstacle() -> None:
    module = Text()
    assert quantisation_obstacle(torch.optim.AdamW(module.parameters()), module) is None


def test_another_rule_is_an_obstacle_and_nothing_is_made() -> None:
    module = Text()
    optimizer = torch.optim.Adam(module.parameters(), weight_decay=0.5)
    assert obstacle(optimizer, module).startswith("torch.optim.Adam with weight_decay=0.5 cannot be quantised")
    with pytest.raises(ConfigurationError) as raised:
        quantise(optimizer, module)
    assert str(raised.value) == (
        "optimizer_states='8bit' cannot be had: torch.optim.Adam with weight_decay=0.5 cannot be quantised: "
        "bitsandbytes decouples weight decay from the gradient (measured: 15 % off after 24 steps). "
        "Use optimizer_states='as-configured'."
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_numbers_that_bitsandbytes_would_round_are_refused(dtype: torch.dtype) -> None:
    module = nn.Linear(64, 64)
    module.weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    assert obstacle(torch.optim.AdamW(module.parameters()), module) == (
        f"torch.optim.AdamW cannot be quantised: a parameter is {name}, and bitsandbytes computes in float32"
    )


def test_parameters_that_bitsandbytes_would_lay_out_anew_are_refused() -> None:
    module = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert obstacle(torch.optim.AdamW(module.parameters()), module) == (
        "torch.optim.AdamW cannot be quantised: a parameter of shape (32, 16, 3, 3) is not contiguous (strides "
        "(144, 1, 48, 16)), and bitsandbytes would lay it out anew"
    )


def test_sparse_gradients_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(64, 64))
    words = "an embedding has sparse gradients, which bitsandbytes cannot step"
    assert words in obstacle(torch.optim.SGD(module.parameters(), lr=1, momentum=0.9), module)
    module[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    assert obstacle(torch.optim.SGD(module.parameters(), lr=1, momentum=0.9), module) == "no obstacle"


def test_sharded_parameters_are_refused() -> None:
    module = nn.Linear(64, 64)
    module.weight.device_mesh = "a mesh"  # type: ignore[attr-defined]
    assert "its parameters are sharded (DTensor)" in obstacle(torch.optim.AdamW(module.parameters()), module)


def test_where_nothing_is_large_enough_there_is_nothing_to_do() -> None:
    module = nn.Sequential(nn.Embedding(100, 64), nn.Linear(63, 65), nn.Linear(64, 64))
    module[2].weight.requires_grad_(False)  # type: ignore[union-attr]
    assert obstacle(torch.optim.AdamW(module.parameters()), module) == (
        "torch.optim.AdamW cannot be quantised: none of its 4 trainable tensors has 4096 elements or more, embeddings "
        "left out"
    )


def test_hooks_that_bitsandbytes_would_not_run_are_refused() -> None:
    module = Text()
    optimizer = torch.optim.AdamW(module.parameters())
    handle = optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    assert obstacle(optimizer, module).endswith("it has hooks on load_state_dict, which bitsandbytes does not run")
    handle.remove()
    assert obstacle(optimizer, module) == "no obstacle"


def test_without_bitsandbytes_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Text()
    optimizer = torch.optim.AdamW(module.parameters())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert obstacle(optimizer, module) == (
        "torch.optim.AdamW cannot be quantised: bitsandbytes is not installed. Install it: "
        "pip install 'lightning-memfit[bitsandbytes]'"
    )


@pytest.mark.parametrize(("version", "is_too_old"), [("0.49.3", True), ("0.50.0.dev1", False), ("1.0", False)])
def test_a_release_that_cannot_step_on_a_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, is_too_old: bool
) -> None:
    module = Text()
    optimizer = torch.optim.AdamW(module.parameters())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    words = f"bitsandbytes {version} is too old, 0.50 or newer is needed"
    assert (words in obstacle(optimizer, module)) == is_too_old


def test_a_broken_installation_is_an_error_of_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported in deepspeedai/DeepSpeed#483, deepspeedai/DeepSpeed#1846, deepspeedai/DeepSpeed#3488."""
    module = Text()

    def fail(name: str) -> None:
        raise OSError(f"lib{name}_cpu.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigurationError, match=r"import fails with OSError: lib.* Install it again \(pip "):
        quantise(torch.optim.AdamW(module.parameters()), module)


# Verifying


def test_states_in_32_bits_do_not_pass_for_quantised() -> None:
    module = Text()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer)
    # 2 x 14,080 elements x 4 bytes
    with pytest.raises(MemFitError, match=r"no effect on 2 tensors of torch.optim.AdamW: .* takes 110.0 KiB in 32"):
        verify_quantised(optimizer, module)


def test_without_a_step_there_is_nothing_to_verify() -> None:
    module = Text()
    with pytest.raises(MemFitError, match=r"AdamW8bit has no states for any parameter.* Make a step with gradients"):
        verify_quantised(quantise(torch.optim.AdamW(module.parameters()), module), module)


# The library


ALONE = """
# Without Lightning and without compilers, which take longer to import than everything else here.
import sys, types, torch
torch.compile = lambda function=None, **options: function or (lambda same: same)
package = types.ModuleType("lightning_memfit")
package.__path__ = sys.argv[1:]
sys.modules["lightning_memfit"] = package
import logging
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch import nn
from lightning_memfit.apply.quantised_states import quantise
assert "bitsandbytes" not in sys.modules
module = nn.Linear(64, 64)
with FakeTensorMode(allow_non_fake_inputs=True):
    optimizer = quantise(torch.optim.AdamW(module.parameters()), module)
tables = sys.modules["bitsandbytes.backends.utils"].CODE.values()
assert tables and not any(isinstance(table, FakeTensor) for table in tables)
assert not logging.getLogger("bitsandbytes.backends.cpu.ops").disabled
"""


def test_the_library_is_imported_quietly_and_never_under_fakes() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ALONE, str(PACKAGE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_bitsandbytes_still_has_what_this_adapter_touches() -> None:
    hint = f"bitsandbytes {bnb.__version__}: change apply/quantised_states.py"
    optimizer = bnb.optim.SGD8bit([nn.Parameter(torch.ones(4096))], lr=1, momentum=0.9)
    assert isinstance(optimizer, bnb.optim.optimizer.Optimizer1State), hint
    assert vars(optimizer.args).keys() >= {"optim_bits", "min_8bit_size", "skip_zeros"}, hint
    assert optimizer.mng is bnb.optim.GlobalOptimManager.get_instance(), hint
    assert vars(optimizer.mng).keys() >= {"pid2config", "index2config", "module_weight_config_triple"}, hint
    assert optimizer.name2qmap.keys() == {"dynamic", "udynamic"} and optimizer.is_paged is False, hint
