"""DeepSpeed's Adam in the place of torch's. Run: ``pytest -m '' tests/apply/test_host_optimizer.py``."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lightning_memfit.apply.cpu_adam import find_cpu_adam
from lightning_memfit.apply.host_optimizer import cpu_adam_like, step_on_host_with_cpu_adam, why_not_cpu_adam
from lightning_memfit.errors import UnsupportedError

STEPS = 24


def weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(seed)))


class _Derived(AdamW):
    """One of the user's own."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: SGD(p, lr=0.1), "this is SGD"),
        (lambda p: _Derived(p), "this is _Derived"),
        (lambda p: AdamW(p, amsgrad=True), "no amsgrad"),
        (lambda p: Adam(p, maximize=True), "no maximize"),
        (lambda p: AdamW(p, lr=torch.tensor(0.1)), "is a tensor"),
    ],
)
def test_what_follows_another_rule_is_not_exchanged(make: Any, words: str) -> None:
    optimizer = make([weight()])
    assert words in (why_not_cpu_adam(optimizer) or "")
    with pytest.raises(UnsupportedError, match=r"Use optimizer_implementation='as-configured'"):
        cpu_adam_like(optimizer)


def test_a_step_that_was_replaced_is_not_exchanged() -> None:
    optimizer = AdamW([weight()])
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    assert "replaced on the object" in (why_not_cpu_adam(optimizer) or "")


def test_torchs_adam_and_adamw_are_exchanged() -> None:
    assert why_not_cpu_adam(Adam([weight()])) is None
    assert why_not_cpu_adam(AdamW([weight()], foreach=True)) is None


def test_a_release_of_lightning_that_asks_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"has no _init_optimizers.*Use Lightning 2\.5 or 2\.6"):
        step_on_host_with_cpu_adam(types.SimpleNamespace())


@pytest.fixture(scope="module")
def extension() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")
    found = find_cpu_adam(seconds=900)
    assert found.works, found.reason


def train(optimizer: Optimizer, steps: int = STEPS, schedule: Any = None) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for step in range(steps):
        for place, parameter in enumerate(parameters):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + place))
            parameter.grad = parameter.detach() * 0.1 + noise
        optimizer.step()
        if schedule is not None:
            schedule.step()


@pytest.mark.slow
@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_it_moves_weights_as_torchs_does_with_decay_groups_and_a_schedule(kind: type[Adam]) -> None:
    moved = []
    for exchanged in (False, True):
        first, second = weight(1), weight(2)
        optimizer: Optimizer = kind(
            [{"params": [first], "lr": 0.05, "weight_decay": 0.1}, {"params": [second], "betas": (0.5, 0.9)}], eps=1e-6
        )
        if exchanged:
            optimizer = cpu_adam_like(optimizer)
        train(optimizer, schedule=OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=STEPS + 1))
        moved.append((first.detach(), second.detach()))
    for plain, exchanged_weight, seed in zip(*moved, (1, 2), strict=True):
        # float32 adds up in another order: 24 steps of at most 0.1 each
        torch.testing.assert_close(exchanged_weight, plain, rtol=0, atol=1e-5)
        assert (plain - weight(seed)).abs().max() > 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("extension")
def test_hooks_of_the_users_optimizer_run_with_the_new_one() -> None:
    optimizer = AdamW([weight()])
    seen: list[str] = []
    handle = optimizer.register_step_pre_hook(lambda *ignored: seen.append("step"))
    new = cpu_adam_like(optimizer)
    train(new, 2)
    handle.remove()
    train(new, 1)
    assert seen == ["step", "step"]


@pytest.mark.slow
@pytest.mark.usefixtures("extension")
def test_each_goes_on_from_what_the_other_saved() -> None:
    here, there = AdamW([weight()], lr=0.05), cpu_adam_like(AdamW([weight()], lr=0.05))
    for first, second in ((here, there), (there, here)):
        train(first, 4)
        copied = second.param_groups[0]["params"][0]
        copied.data.copy_(first.param_groups[0]["params"][0].data)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(first, 3)
        train(second, 3)
        # Rounding of weights of up to 4; without the moments it would be 0.04.
        torch.testing.assert_close(copied, first.param_groups[0]["params"][0], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("extension")
def test_a_strategy_hands_it_to_the_engine_and_the_users_schedule_drives_it() -> None:
    module = nn.Linear(3, 3)
    optimizer = AdamW(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    module.held = optimizer  # type: ignore[assignment]
    module.trainer = types.SimpleNamespace(callbacks=[])  # type: ignore[assignment]
    strategy = types.SimpleNamespace(
        _init_optimizers=lambda: (optimizer, types.SimpleNamespace(scheduler=schedule)), lightning_module=module
    )
    undo = step_on_host_with_cpu_adam(strategy)
    new, _ = strategy._init_optimizers()
    assert type(new).__name__ == "DeepSpeedCPUAdam" and schedule.optimizer is new and module.held is new
    train(new, 1)
    schedule.step()
    assert [group["lr"] for group in new.param_groups] == [0.05]
    undo()
    assert strategy._init_optimizers()[0] is optimizer
