"""Every schedule drives the optimizer in the place of its own with the same learning rates and the same momentum."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.optimization
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader

from lightning_memfit.apply.optimizer_swap import swap_optimizer
from lightning_memfit.apply.scheduler_binding import (
    Exchange,
    MomentumGroup,
    check_momentum,
    count_steps,
    link_momentum,
    rebind,
)
from lightning_memfit.errors import UnsupportedError

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which the replacements come from")

# Lightning's own use of torch.utils._pytree
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")

STEPS_PER_EPOCH, EPOCHS = 4, 3
STEPS = STEPS_PER_EPOCH * EPOCHS
# Better, then worse for long: ReduceLROnPlateau reduces twice, GreedyLR moves in both directions.
METRICS = [1.0, 0.5, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]

Make = Callable[[torch.optim.Optimizer], Any]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    """A chain, then another schedule; torch itself fails where a nested one comes second."""
    chain = lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3),
            lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        ]
    )
    with warnings.catch_warnings():
        # torch steps the chain once more while it is made, and warns of that
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        return lr_scheduler.SequentialLR(optimizer, [chain, lr_scheduler.ExponentialLR(optimizer, 0.8)], milestones=[4])


def chained_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        ]
    )


def doubly_nested(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer, factor=0.5), sequential(optimizer)])


def falling(step: int) -> float:
    return 0.9**step


SCHEDULES: dict[str, list[Make]] = {
    "LambdaLR": [lambda o: lr_scheduler.LambdaLR(o, [falling, lambda step: 1 / (1 + step)])],
    "MultiplicativeLR": [lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9)],
    "StepLR": [lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5)],
    "MultiStepLR": [lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5], gamma=0.3)],
    "ConstantLR": [lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4)],
    "LinearLR": [lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=6)],
    "ExponentialLR": [lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9)],
    "PolynomialLR": [lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0)],
    "CosineAnnealingLR": [lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=1e-4)],
    "CosineAnnealingWarmRestarts": [lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2)],
    "CyclicLR": [
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3, cycle_momentum=False),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    ],
    "OneCycleLR": [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=STEPS + 1),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1, three_phase=True, base_momentum=0.7),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=False),
    ],
    "ReduceLROnPlateau": [lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0)],
    "SequentialLR": [sequential],
    "ChainedScheduler": [chained_cycle, doubly_nested],
    "SWALR": [lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3)],
}

TRANSFORMERS: dict[str, Make] = {
    "get_constant_schedule": transformers.optimization.get_constant_schedule,
    "get_constant_schedule_with_warmup": lambda o: transformers.optimization.get_constant_schedule_with_warmup(o, 3),
    "get_linear_schedule_with_warmup": lambda o: transformers.optimization.get_linear_schedule_with_warmup(o, 3, 12),
    "get_cosine_schedule_with_warmup": lambda o: transformers.optimization.get_cosine_schedule_with_warmup(o, 3, 12),
    "get_cosine_with_hard_restarts_schedule_with_warmup": (
        lambda o: transformers.optimization.get_cosine_with_hard_restarts_schedule_with_warmup(o, 2, 12, 2)
    ),
    "get_cosine_with_min_lr_schedule_with_warmup": (
        lambda o: transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup(o, 2, 12, min_lr_rate=0.1)
    ),
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate": (
        lambda o: transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
            o, 2, 12, min_lr_rate=0.1
        )
    ),
    "get_polynomial_decay_schedule_with_warmup": (
        lambda o: transformers.optimization.get_polynomial_decay_schedule_with_warmup(o, 2, 12, lr_end=1e-5)
    ),
    "get_inverse_sqrt_schedule": lambda o: transformers.optimization.get_inverse_sqrt_schedule(o, 2),
    "get_wsd_schedule": lambda o: transformers.optimization.get_wsd_schedule(o, 2, 4, num_training_steps=12),
    "get_reduce_on_plateau_schedule": (
        lambda o: transformers.optimization.get_reduce_on_plateau_schedule(o, factor=0.5, patience=1)
    ),
    "get_greedy_schedule": lambda o: transformers.optimization.get_greedy_schedule(o, factor=0.5, patience=1),
}
NOT_OF_THESE = {
    "get_scheduler",  # calls one of the others by name
    "get_adafactor_schedule",  # reads the internals of transformers' Adafactor, which has no 8-bit form
}

CASES = {
    **{
        f"{name}-{index}": make
        for name, makes in SCHEDULES.items()
        for index, make in enumerate(makes)
    },
    **TRANSFORMERS,
}  # fmt: skip


def test_no_schedule_that_torch_ships_is_missing_here() -> None:
    shipped = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, lr_scheduler.LRScheduler)
    }
    assert shipped - {"LRScheduler", "_LRScheduler"} == set(SCHEDULES)


def test_no_schedule_of_transformers_is_missing_here() -> None:
    shipped = {name for name in dir(transformers.optimization) if name.startswith("get_") and "schedule" in name}
    assert shipped - NOT_OF_THESE == set(TRANSFORMERS)


def as_8bit(old: torch.optim.Optimizer) -> torch.optim.Optimizer:
    sgd = isinstance(old, torch.optim.SGD)
    groups = [
        {
            "params": group["params"],
            "lr": group["lr"],
            "betas": (group["momentum"], group["dampening"]) if sgd else group["betas"],
            "weight_decay": group["weight_decay"],
        }
        for group in old.param_groups
    ]
    return bnb.optim.SGD8bit(groups, lr=0.1, momentum=0.9) if sgd else bnb.optim.AdamW8bit(groups)


def optimizer_for(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    weight, bias = module.parameters()
    groups = [{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.02, "weight_decay": 0.0}]
    if kind == "SGD":
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.AdamW(groups, weight_decay=0.01)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    name: str
    kind: str
    interval: str = "step"
    frequency: int = 1


def in_trainer(schedule: Schedule, swap_at: int | None, namespace: str = "lightning.pytorch") -> list[Any]:
    """(learning rate, momentum) of each group in each step of a Trainer; ``swap_at=-1``: when optimizers were made."""
    pl = importlib.import_module(namespace)

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(64, 64)  # 4096 elements: quantised

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.log("metric", METRICS[self.trainer.global_step])
            return self.layer(batch).pow(2).mean()

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            # as Lightning does, which does not know transformers' own class
            scheduler.step() if metric is None else scheduler.step(metric)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_for(self, schedule.kind)
            scheduler = CASES[schedule.name](optimizer)
            plateau = type(scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR")
            config = {"scheduler": scheduler, "interval": schedule.interval, "frequency": schedule.frequency}
            config |= {"monitor": "metric", "reduce_on_plateau": True} if plateau else {}
            return {"optimizer": optimizer, "lr_scheduler": config}

    seen = []

    class Swap(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == swap_at:
                assert not swap_optimizer(trainer, as_8bit, carry=lambda old, new: None).notes

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            swapped = swap_at is not None and trainer.global_step >= swap_at
            assert type(trainer.optimizers[0]).__module__.startswith("bitsandbytes") == swapped
            assert trainer.lr_scheduler_configs[0].scheduler.optimizer is trainer.optimizers[0]
            seen.append(rates(optimizer))

    class Plugin(importlib.import_module(f"{namespace}.plugins.precision").Precision):
        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
            if swap_at == -1:
                swap_optimizer(model.trainer, as_8bit)
            return model, optimizers, lr_schedulers

    data = DataLoader([torch.ones(2, 64)] * STEPS_PER_EPOCH, batch_size=None)
    pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Swap()],
        plugins=[Plugin()],
    ).fit(Tiny(), data)
    assert len(seen) == STEPS
    return seen


def by_hand(name: str, kind: str, swap_at: int | None) -> list[Any]:
    """The same, with the calls that Lightning makes and no Trainer."""
    optimizer = optimizer_for(nn.Linear(64, 64), kind)
    scheduler = CASES[name](optimizer)
    seen = []
    for step in range(STEPS):
        if step == swap_at:
            optimizer, _ = swapped(optimizer, scheduler)
        seen.append(rates(optimizer))
        make_step(optimizer, scheduler, METRICS[step])
    return seen


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", CASES)
def test_a_swap_at_the_start_or_in_the_middle_changes_no_learning_rate_and_no_momentum(name: str, kind: str) -> None:
    without = by_hand(name, kind, swap_at=None)
    for swap_at in (0, 5):
        assert by_hand(name, kind, swap_at) == without
    moved = {step[0] for step in without}
    assert len(moved) > 1 or name == "get_constant_schedule", "the schedule must move for this to prove anything"
    cycled = name in ("CyclicLR-0", "CyclicLR-2", "OneCycleLR-0", "OneCycleLR-1", "ChainedScheduler-0")
    assert (len({momentum for _, momentum in moved}) > 1) == cycled


@pytest.mark.parametrize(
    ("name", "interval", "frequency", "namespace"),
    [
        ("OneCycleLR-0", "step", 1, "lightning.pytorch"),
        ("CyclicLR-0", "step", 2, "pytorch_lightning"),
        ("ReduceLROnPlateau-0", "epoch", 1, "lightning.pytorch"),
        ("ReduceLROnPlateau-0", "step", 1, "pytorch_lightning"),
        ("ExponentialLR-0", "epoch", 2, "lightning.pytorch"),
        ("SequentialLR-0", "epoch", 1, "pytorch_lightning"),
        ("get_linear_schedule_with_warmup", "step", 1, "lightning.pytorch"),
    ],
)
def test_intervals_frequencies_and_monitors_of_a_trainer_are_kept(
    name: str, interval: str, frequency: int, namespace: str
) -> None:
    schedule = Schedule(name=name, kind="SGD", interval=interval, frequency=frequency)
    without = in_trainer(schedule, None, namespace)
    assert len({tuple(step) for step in without}) > 1
    for swap_at in (-1, 5):
        assert in_trainer(schedule, swap_at, namespace) == without


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_kept_in_a_trainer(name: str, kind: str) -> None:
    schedule = Schedule(name=name, kind=kind)
    without = in_trainer(schedule, None)
    for swap_at in (-1, 5):
        assert in_trainer(schedule, swap_at) == without


def pair(kind: str = "SGD") -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    old = optimizer_for(nn.Linear(64, 64), kind)
    return old, as_8bit(old)


def make_step(optimizer: torch.optim.Optimizer, scheduler: Any, metric: float = 0.0) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    by_metric = type(scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR")
    scheduler.step(metric) if by_metric else scheduler.step()


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """What the optimizer itself reads in its step: (learning rate, momentum) of each group."""
    momentum = [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]
    return [(float(group["lr"]), now) for group, now in zip(optimizer.param_groups, momentum, strict=True)]


def step_both(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[tuple[float, float]]:
    make_step(optimizer, scheduler)
    return rates(optimizer)


def swapped(old: Any, scheduler: Any) -> tuple[Any, Any]:
    """The parts of a Trainer that a swap needs, without the Trainer."""
    strategy = SimpleNamespace(
        optimizers=[old], _lightning_optimizers=[], lightning_module=None,
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
    )  # fmt: skip
    trainer = SimpleNamespace(strategy=strategy, callbacks=[], datamodule=None)
    undo = swap_optimizer(trainer, as_8bit)
    return strategy.optimizers[0], undo


@pytest.mark.parametrize("name", CASES)
def test_state_dicts_of_schedules_load_before_and_after_a_swap(name: str) -> None:
    make = CASES[name]
    old, _ = pair()
    plain = make(old)
    expected = [step_both(old, plain) for _ in range(8)]

    # Saved without a swap, loaded with one; and saved there, loaded without one.
    first, _ = pair()
    scheduler = make(first)
    assert [step_both(first, scheduler) for _ in range(3)] == expected[:3]
    saved, groups = scheduler.state_dict(), [dict(group) for group in first.param_groups]

    second, _ = pair()
    scheduler = make(second)
    new, _ = swapped(second, scheduler)
    for group, values in zip(new.param_groups, groups, strict=True):
        group["lr"], group["momentum"] = values["lr"], values["momentum"]
    scheduler.load_state_dict(saved)
    assert [step_both(new, scheduler) for _ in range(3)] == expected[3:6]
    assert not any(callable(value) and "memfit" in repr(value) for value in scheduler.state_dict().values())
    saved, groups = scheduler.state_dict(), [dict(group) for group in new.param_groups]

    third, _ = pair()
    scheduler = make(third)
    for group, values in zip(third.param_groups, groups, strict=True):
        group["lr"], group["momentum"] = values["lr"], values["betas"][0]
    scheduler.load_state_dict(saved)
    assert [step_both(third, scheduler) for _ in range(2)] == expected[6:]


def test_a_learning_rate_that_is_a_tensor_follows_the_same_trajectory() -> None:
    runs = []
    for swap in (False, True):
        layer = nn.Linear(64, 64)
        optimizer: Any = torch.optim.AdamW(layer.parameters(), lr=torch.tensor(0.1))
        scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        if swap:
            optimizer, undo = swapped(optimizer, scheduler)
        runs.append([[float(lr) for lr, _ in step_both(optimizer, scheduler)] for _ in range(4)])
    assert runs[0] == runs[1]
    undo()
    assert scheduler.optimizer.param_groups[0]["lr"].item() == pytest.approx(runs[0][-1][0])
    assert isinstance(scheduler.optimizer.param_groups[0]["lr"], torch.Tensor)


def test_a_schedule_that_has_not_stepped_yet_does_not_warn_that_the_optimizer_was_overridden() -> None:
    """Reported in Lightning-AI/pytorch-lightning#16228."""
    old, new = pair()
    scheduler = lr_scheduler.ExponentialLR(old, gamma=0.9)
    before = [{name: value for name, value in group.items() if name != "params"} for group in new.param_groups]
    count_steps(old, new)
    assert before == [{n: v for n, v in group.items() if n != "params"} for group in new.param_groups]
    rebind(scheduler, Exchange([(old, new)], {}))
    step_both(new, scheduler)  # any warning is an error here

    fresh, other = pair()
    unbound = lr_scheduler.ExponentialLR(fresh, gamma=0.9)
    rebind(unbound, Exchange([(fresh, other)], {}))
    with pytest.warns(UserWarning, match="has been overridden after learning rate scheduler"):
        step_both(other, unbound)


def test_the_name_torch_gives_to_counted_steps_is_still_the_same() -> None:
    old, _ = pair()
    lr_scheduler.ExponentialLR(old, gamma=0.9)
    assert hasattr(old.step, "_wrapped_by_lr_sched"), "torch renamed the mark on step: adapt scheduler_binding.py"
    old.step()
    assert old._opt_called, "torch renamed Optimizer._opt_called: adapt scheduler_binding.py"
    cycle = lr_scheduler.OneCycleLR(old, max_lr=0.1, total_steps=5)
    assert cycle.cycle_momentum is True and cycle.use_beta1 is False, "torch renamed them: adapt scheduler_binding.py"


def test_momentum_and_the_first_beta_are_one_value_whoever_writes_it() -> None:
    group = MomentumGroup(betas=(0.9, 0.0), momentum=0.9)
    group["momentum"] = 0.8
    assert group["betas"] == (0.8, 0.0)
    group["betas"] = (0.7, 0.1)
    assert group["momentum"] == 0.7
    group.update(momentum=0.6)
    assert group["betas"] == (0.6, 0.1)


def test_the_link_survives_loading_and_reaches_groups_that_are_added_later() -> None:
    _, new = pair()
    handle = link_momentum(new)
    new.load_state_dict(new.state_dict())
    new.param_groups[0]["momentum"] = 0.5  # by a schedule, before the next step
    late = nn.Parameter(torch.ones(3))
    new.add_param_group({"params": [late], "momentum": 0.25})
    new.step()
    assert [group["betas"][0] for group in new.param_groups] == [0.5, 0.9, 0.25]
    handle.remove()
    assert not new._optimizer_step_pre_hooks


def test_a_momentum_that_nobody_would_read_is_refused_before_anything_changes() -> None:
    layer = nn.Linear(64, 64)
    old = torch.optim.RMSprop(layer.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.SequentialLR(
        old, [lr_scheduler.OneCycleLR(old, max_lr=0.1, total_steps=5), lr_scheduler.ConstantLR(old)], milestones=[3]
    )
    new = bnb.optim.RMSprop8bit(layer.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedError,
        match=r"^OneCycleLR moves 'momentum' of RMSprop, and RMSprop8bit has none that works in the same way\. Use "
        r"cycle_momentum=False, or keep the optimizer with optimizer_states='as-configured'\.$",
    ):
        check_momentum([scheduler], old, new)
    check_momentum([lr_scheduler.OneCycleLR(old, max_lr=0.1, total_steps=5, cycle_momentum=False)], old, new)


def test_schedules_of_other_makers_that_keep_the_groups_or_wrap_a_schedule_follow() -> None:
    old, new = pair()

    class Warmup:
        def __init__(self) -> None:
            self.groups = old.param_groups
            self.inner = {"after": lr_scheduler.ExponentialLR(old, gamma=0.9)}
            self.pair = (old, "name")

    warmup = Warmup()
    rebind(warmup, Exchange([(old, new)], {}))
    assert warmup.groups is new.param_groups
    assert warmup.inner["after"].optimizer is new
    assert warmup.pair == (new, "name")


class Data(list[int]):
    """Tells whether someone walked through it."""

    walked = False

    def __iter__(self) -> Any:
        self.walked = True
        return super().__iter__()


def test_long_lists_hold_data_and_are_not_walked() -> None:
    old, new = pair()
    holder = SimpleNamespace(
        tokens=Data(range(10_000)), few=[old], table=dict.fromkeys(range(10_000), old), row=(old,) * 10_000
    )
    table, row = holder.table, holder.row
    rebind(holder, Exchange([(old, new)], {}))
    assert not holder.tokens.walked
    assert holder.few == [new]
    assert holder.table is table and holder.table[0] is old and holder.row is row and row[0] is old
