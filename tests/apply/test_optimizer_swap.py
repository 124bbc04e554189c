"""A Trainer goes on with another optimizer, everything that held the first follows, and all of it can be taken back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_memfit.apply.optimizer_checkpoints import carry_states
from lightning_memfit.apply.optimizer_swap import swap_optimizer
from lightning_memfit.apply.quantised_states import quantise
from lightning_memfit.errors import UnsupportedError
from lightning_memfit.upstream import NAMESPACES

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which the replacements come from")

# Lightning's own use of torch.utils._pytree
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def as_8bit(old: Any) -> Any:
    names = ("params", "lr", "betas", "eps", "weight_decay")
    return bnb.optim.AdamW8bit([{name: group[name] for name in names} for group in old.param_groups])


def tiny_module(pl: Any, configure: Callable[[Any], Any], *, automatic: bool = True) -> Any:
    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(64, 64)  # 4096 elements: quantised
            self.automatic_optimization = automatic

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = self.layer(batch).float().pow(2).mean()
            if automatic:
                return loss
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            return configure(self)

    return Tiny()


def adamw(module: Any, **settings: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), **{"lr": 0.01} | settings)


def adamw_with_decay(module: Any) -> Any:
    optimizer = adamw(module)
    return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, gamma=0.5), "interval": "step"}]


def batches(count: int = 4) -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randn(4, 64, generator=generator) for _ in range(count)], batch_size=None)


def trainer_for(pl: Any, *, on_connect: Any = None, at_step: Any = None, precision: Any = None, **settings: Any) -> Any:
    """A Trainer whose precision plugin calls ``on_connect(trainer)``, and a callback ``at_step(trainer)``."""
    plugins = importlib.import_module(f"{pl.__name__}.plugins.precision")
    base = type(precision) if precision is not None else plugins.Precision

    class Plugin(base):
        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
            if on_connect is not None:
                on_connect(model.trainer)
            return model, optimizers, lr_schedulers

    class AtStep(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *ignored: Any) -> None:
            if at_step is not None:
                at_step(trainer)

    callbacks = [AtStep(), *settings.pop("callbacks", [])]
    return pl.Trainer(
        accelerator="cpu",
        **{"max_epochs": 1} | settings,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=[Plugin() if precision is None else Plugin("16-mixed", "cpu", precision.scaler)],
    )


def fitted_trainer(pl: Any, module: Any, **settings: Any) -> Any:
    trainer = trainer_for(pl, **settings)
    trainer.fit(module, batches())
    return trainer


def test_a_swap_while_optimizers_are_made_trains_as_the_replacement_does_alone(pl: Any) -> None:
    alone = tiny_module(pl, lambda module: as_8bit(adamw(module)))
    fitted_trainer(pl, alone)
    module = tiny_module(pl, adamw)
    trainer = fitted_trainer(pl, module, on_connect=lambda trainer: swap_optimizer(trainer, as_8bit))
    assert torch.equal(module.layer.weight, alone.layer.weight)
    (optimizer,), (wrapper,) = trainer.optimizers, trainer.strategy._lightning_optimizers
    assert type(optimizer) is bnb.optim.AdamW8bit and wrapper._optimizer is optimizer
    assert optimizer.state[module.layer.weight]["state1"].dtype == torch.uint8


def test_taking_it_back_gives_the_very_same_objects_with_the_learning_rates_of_now(pl: Any) -> None:
    before: dict[str, Any] = {}
    swaps: list[Any] = []

    def at_step(trainer: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step == 1:
            before.update(
                optimizers=strategy.optimizers,
                optimizer=strategy.optimizers[0],
                wrapper=strategy._lightning_optimizers[0],
                attributes=set(vars(strategy.optimizers[0])),
                keys=set(strategy.optimizers[0].param_groups[0]),
            )
            swaps.append(swap_optimizer(trainer, as_8bit, carry=carry_states))
        if trainer.global_step == 3:
            swaps[0]()
            swaps[0]()
            assert strategy.optimizers is before["optimizers"]
            assert strategy.optimizers[0] is before["optimizer"]
            assert strategy._lightning_optimizers[0] is before["wrapper"]
            assert trainer.lr_scheduler_configs[0].scheduler.optimizer is before["optimizer"]
            assert set(vars(before["optimizer"])) == before["attributes"]
            assert set(before["optimizer"].param_groups[0]) == before["keys"]
            assert before["optimizer"].param_groups[0]["lr"] == 0.01 * 0.5**3

    module = tiny_module(pl, adamw_with_decay)
    trainer = fitted_trainer(pl, module, at_step=at_step)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**4
    assert trainer.global_step == 4 and len(swaps) == 1


def test_a_schedule_that_was_made_in_between_drives_the_old_optimizer_afterwards(pl: Any) -> None:
    swaps: list[Any] = []
    swa = importlib.import_module(f"{pl.__name__}.callbacks").StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)
    module = tiny_module(pl, adamw)
    trainer = fitted_trainer(
        pl,
        module,
        on_connect=lambda trainer: swaps.append(swap_optimizer(trainer, as_8bit)),
        callbacks=[swa],
        max_epochs=3,
    )
    (old, new), scheduler = swaps[0].replaced[0], trainer.lr_scheduler_configs[0].scheduler
    assert type(scheduler).__name__ == "SWALR" and scheduler.optimizer is new
    swaps[0]()
    assert scheduler.optimizer is old and trainer.optimizers == [old]
    assert old.param_groups[0]["swa_lr"] == 0.5 and old.param_groups[0]["lr"] == new.param_groups[0]["lr"] != 0.01
    assert hasattr(old.step, "_wrapped_by_lr_sched")


def test_attributes_of_module_submodules_and_callbacks_follow_and_come_back(pl: Any) -> None:
    class Averaging:  # as libraries for moving averages keep it
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.decay = optimizer, 0.9

    def configure(module: Any) -> Any:
        optimizer = adamw(module)
        module.optimizer_of_mine = optimizer
        module.in_a_list, module.in_a_dict = [optimizer, 3], {"main": optimizer}
        module.in_a_tuple = ("main", optimizer)
        module.layer.also_here = optimizer
        module.warmup = lr_scheduler.LinearLR(optimizer)
        module.trainer.callbacks[-1].averaging = Averaging(optimizer)
        return optimizer

    def held(trainer: Any, module: Any) -> list[Any]:
        callback = next(each for each in trainer.callbacks if hasattr(each, "averaging"))
        return [
            module.optimizer_of_mine, module.in_a_list[0], module.in_a_dict["main"], module.in_a_tuple[1],
            module.layer.also_here, module.warmup.optimizer, callback.averaging.optimizer,
        ]  # fmt: skip

    swaps: list[Any] = []

    def at_step(trainer: Any) -> None:
        if trainer.global_step == 0:
            module.wrapped = module.optimizers()
            swaps.append(swap_optimizer(trainer, as_8bit))

    module = tiny_module(pl, configure)
    trainer = fitted_trainer(pl, module, at_step=at_step)
    (old, new) = swaps[0].replaced[0]
    assert all(each is new for each in held(trainer, module))
    assert module.wrapped is trainer.strategy._lightning_optimizers[0] and module.wrapped._optimizer is new
    assert swaps[0].notes == ()
    swaps[0]()
    assert all(each is old for each in held(trainer, module))
    assert module.wrapped is trainer.strategy._lightning_optimizers[0] and module.wrapped._optimizer is old


def test_what_cannot_be_reached_is_named(pl: Any) -> None:
    def configure(module: Any) -> Any:
        optimizer = adamw(module)
        module.read_rate = lambda: optimizer.param_groups[0]["lr"]
        module.clear = optimizer.zero_grad
        return optimizer

    swaps: list[Any] = []
    module = tiny_module(pl, configure)
    fitted_trainer(pl, module, on_connect=lambda trainer: swaps.append(swap_optimizer(trainer, as_8bit)))
    holders = [note.partition(" is also held by ")[2].partition(",")[0] for note in swaps[0].notes]
    assert holders == [
        "the bound method Optimizer.zero_grad",
        f"the function {__name__}.test_what_cannot_be_reached_is_named.<locals>.configure.<locals>.<lambda>",
    ]
    assert swaps[0].notes[0] == (
        "AdamW is also held by the bound method Optimizer.zero_grad, which MemFit cannot reach: what is done to it "
        "there has no effect on training. Ask trainer.optimizers for the optimizer instead."
    )


def bare_trainer(*optimizers: Any, schedules: tuple[Any, ...] = ()) -> Any:
    """The parts of a Trainer that a swap needs."""
    strategy = SimpleNamespace(
        optimizers=[*optimizers],
        _lightning_optimizers=[],
        lightning_module=None,
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule) for schedule in schedules],
    )
    return SimpleNamespace(strategy=strategy, callbacks=[], datamodule=None)


def make_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_states_that_are_not_carried_and_steps_of_the_users_own_are_named() -> None:
    old = adamw(nn.Linear(64, 64))
    make_step(old)
    old.step = old.step.__func__.__get__(old)
    notes = swap_optimizer(bare_trainer(old), as_8bit).notes
    assert "The states of AdamW were not carried over to AdamW8bit, which begins without any." in notes
    assert "The step of this AdamW was replaced on the object; AdamW8bit runs its own step." in notes
    del old.step


def test_states_are_carried_and_an_optimizer_without_any_gets_them_back() -> None:
    layer = nn.Linear(64, 64)
    old = adamw(layer)
    make_step(old)
    kept = {name: value.clone() for name, value in old.state[layer.weight].items()}
    trainer = bare_trainer(old)
    undo = swap_optimizer(trainer, as_8bit, carry=carry_states)
    new = trainer.strategy.optimizers[0]
    assert new.state[layer.weight]["state1"].dtype == torch.uint8 and new.state[layer.weight]["step"] == 1
    make_step(new)
    undo()
    assert all(torch.equal(old.state[layer.weight][name], value) for name, value in kept.items()), "its own are exact"

    old.state.clear()  # as after a resume, where only the new one was restored
    undo = swap_optimizer(trainer, as_8bit, carry=carry_states)
    new = trainer.strategy.optimizers[0]
    make_step(new)
    undo()
    assert old.state[layer.weight]["step"] == 1
    assert torch.equal(old.state[layer.bias]["exp_avg"], new.state[layer.bias]["state1"])
    make_step(old)
    assert old.state[layer.weight]["step"] == 2


def test_states_that_need_not_be_kept_are_dropped_once_they_are_converted() -> None:
    layer = nn.Linear(64, 64)
    old = adamw(layer)
    make_step(old)
    exact = old.state[layer.bias]["exp_avg"].clone()
    trainer = bare_trainer(old)
    undo = swap_optimizer(trainer, as_8bit, carry=carry_states, keep_states=False)
    assert not old.state and trainer.strategy.optimizers[0].state
    undo()
    assert torch.equal(old.state[layer.bias]["exp_avg"], exact)
    assert old.state[layer.weight]["exp_avg"].dtype == torch.float32


def test_swapping_again_and_again_changes_no_trajectory() -> None:
    def trajectory(swap_every: int) -> list[tuple[float, float]]:
        layer = nn.Linear(64, 64)
        old = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        schedule = lr_scheduler.OneCycleLR(old, max_lr=1.0, total_steps=13)
        trainer = bare_trainer(old, schedules=(schedule,))
        undo, seen = (lambda: None), []
        for step in range(12):
            if step % swap_every == 0:
                undo()
                undo = swap_optimizer(trainer, lambda old: quantise(old, layer), carry=carry_states)
            elif step % swap_every == 2:
                undo()
            optimizer = trainer.strategy.optimizers[0]
            group = optimizer.param_groups[0]
            seen.append((group["lr"], group["betas"][0] if "betas" in optimizer.defaults else group["momentum"]))
            make_step(optimizer)
            schedule.step()
            assert type(optimizer.state_dict()["param_groups"][0]) is dict, "groups are saved as plain dictionaries"
        return seen

    assert trajectory(swap_every=3) == trajectory(swap_every=100) == trajectory(swap_every=4)
    assert len(set(trajectory(swap_every=3))) == 12


def test_a_momentum_of_sgd_that_moved_in_between_is_that_of_now() -> None:
    layer = nn.Linear(64, 64)
    old = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, dampening=0.0)
    schedule = lr_scheduler.CyclicLR(old, base_lr=0.1, max_lr=0.2, step_size_up=2)  # momentum 0.9, 0.85, 0.8
    trainer = bare_trainer(old, schedules=(schedule,))
    undo = swap_optimizer(
        trainer, lambda old: bnb.optim.SGD8bit(layer.parameters(), lr=0.1, momentum=old.param_groups[0]["momentum"])
    )
    make_step(trainer.strategy.optimizers[0])
    schedule.step()
    assert trainer.strategy.optimizers[0].param_groups[0]["betas"] == pytest.approx((0.85, 0))
    undo()
    group = old.param_groups[0]
    assert (group["lr"], group["momentum"], group["dampening"]) == pytest.approx((0.15, 0.85, 0.0))
    assert "betas" not in group and not old._optimizer_step_pre_hooks
    make_step(old)
    schedule.step()
    assert (group["lr"], group["momentum"]) == pytest.approx((0.2, 0.8))


def test_groups_that_were_added_in_between_are_there_afterwards() -> None:
    layer, late = nn.Linear(64, 64), nn.Linear(2, 2)
    old = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    trainer = bare_trainer(old)
    undo = swap_optimizer(trainer, lambda old: bnb.optim.SGD8bit(layer.parameters(), lr=0.1, momentum=0.9))
    trainer.strategy.optimizers[0].add_param_group({"params": [*late.parameters()], "lr": 0.3})
    undo()
    group = old.param_groups[1]
    assert group["params"] == [*late.parameters()]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.9, False)
    assert "betas" not in group and "eps" not in group


def test_hooks_of_the_user_run_around_the_step_of_the_replacement_and_can_be_removed() -> None:
    calls = []
    old = adamw(nn.Linear(64, 64))
    handle = old.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(type(optimizer).__name__))
    trainer = bare_trainer(old)
    undo = swap_optimizer(trainer, as_8bit)
    make_step(trainer.strategy.optimizers[0])
    handle.remove()
    make_step(trainer.strategy.optimizers[0])
    undo()
    make_step(old)
    assert calls == ["AdamW8bit"]


def test_what_the_user_keeps_in_a_group_is_in_the_new_one() -> None:
    layer = nn.Linear(64, 64)
    old = torch.optim.AdamW([{"params": [*layer.parameters()], "lr": 0.01, "name": "body", "scale": torch.ones(2)}])
    trainer = bare_trainer(old)
    undo = swap_optimizer(trainer, as_8bit)
    group = trainer.strategy.optimizers[0].param_groups[0]
    assert group["name"] == "body" and torch.equal(group["scale"], torch.ones(2))
    assert "foreach" not in group and "amsgrad" not in group
    group["name"] = "head"
    undo()
    assert old.param_groups[0]["name"] == "head" and old.param_groups[0]["foreach"] is None


def test_a_replacement_that_is_the_same_object_changes_nothing() -> None:
    old = adamw(nn.Linear(64, 64))
    trainer = bare_trainer(old)
    undo = swap_optimizer(trainer, lambda optimizer: optimizer)
    assert trainer.strategy.optimizers == [old] and undo.replaced == () and undo.notes == ()
    undo()


def test_other_parameters_are_refused_with_their_numbers_before_anything_changes() -> None:
    layer = nn.Linear(64, 64)
    old = adamw(layer)
    trainer = bare_trainer(old)
    with pytest.raises(
        UnsupportedError,
        match=r"^AdamW8bit cannot take the place of AdamW: its groups hold 1 \+ 1 parameters, and 2 are needed\. Make "
        r"it with the same groups\.$",
    ):
        swap_optimizer(trainer, lambda old: bnb.optim.AdamW8bit([{"params": [p]} for p in layer.parameters()]))
    with pytest.raises(UnsupportedError, match="its parameters are other tensors, or in another order"):
        swap_optimizer(trainer, lambda old: bnb.optim.AdamW8bit([layer.bias, layer.weight]))
    assert trainer.strategy.optimizers == [old]


def test_a_conversion_that_fails_leaves_the_trainer_as_it_was() -> None:
    olds = [torch.optim.SGD(nn.Linear(64, 64).parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    schedule = lr_scheduler.ExponentialLR(olds[0], gamma=0.9)
    trainer = bare_trainer(*olds, schedules=(schedule,))

    def carry(old: Any, new: Any) -> None:
        if old is olds[1]:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        swap_optimizer(
            trainer,
            lambda old: bnb.optim.SGD8bit(old.param_groups[0]["params"], lr=0.1, momentum=0.9),
            carry=carry,
        )
    assert trainer.strategy.optimizers == olds and schedule.optimizer is olds[0]
    assert all(type(old.param_groups[0]) is dict and not old._optimizer_step_pre_hooks for old in olds)


def test_both_optimizers_of_manual_optimization_are_swapped(pl: Any) -> None:
    def configure(module: Any) -> Any:
        return [torch.optim.AdamW([parameter], lr=0.01) for parameter in module.parameters()]

    module = tiny_module(pl, configure, automatic=False)
    trainer = fitted_trainer(pl, module, on_connect=lambda trainer: swap_optimizer(trainer, as_8bit))
    assert [type(each).__name__ for each in trainer.optimizers] == ["AdamW8bit"] * 2
    assert trainer.optimizers[0].state[module.layer.weight]["step"] == 4
    assert trainer.optimizers[1].state[module.layer.bias]["step"] == 4


def test_after_the_fit_a_checkpoint_holds_the_states_that_were_trained(pl: Any, tmp_path: Path) -> None:
    trainer = fitted_trainer(pl, tiny_module(pl, adamw), on_connect=lambda trainer: swap_optimizer(trainer, as_8bit))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["optimizer_states"][0]
    assert {entry["step"] for entry in saved["state"].values()} == {4}


def test_the_gradient_scaler_of_fp16_unscales_clips_and_skips_steps_on_the_cpu(pl: Any) -> None:
    plugins = importlib.import_module(f"{pl.__name__}.plugins.precision")
    precision = plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    norms, moved = [], []
    module = tiny_module(pl, adamw)

    def spoil(trainer: Any) -> None:
        moved.append(module.layer.weight.detach().clone())

    class Watch(pl.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 1 and not norms[1:]:  # the second step overflows
                module.layer.bias.grad[0] = torch.inf

        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            if grads:
                norms.append(torch.cat([grad.flatten() for grad in grads]).norm().item())

    trainer = fitted_trainer(
        pl,
        module,
        on_connect=lambda trainer: swap_optimizer(trainer, as_8bit),
        at_step=spoil,
        precision=precision,
        callbacks=[Watch()],
        gradient_clip_val=0.01,
    )
    assert trainer.scaler is not None
    states = trainer.optimizers[0].state
    assert [states[p]["step"] for p in module.parameters()] == [3, 3], "one of four steps was skipped"
    assert torch.equal(moved[1], moved[2]) and not torch.equal(moved[2], moved[3])
    assert norms[0] == pytest.approx(0.01, rel=1e-3), "unscaled and clipped"
    assert trainer.scaler.get_scale() == 512.0


def test_lightning_still_keeps_its_wrappers_where_a_swap_expects_them(pl: Any) -> None:
    strategy = importlib.import_module(f"{pl.__name__}.strategies").SingleDeviceStrategy()
    optimizer = adamw(nn.Linear(2, 2))
    strategy.optimizers = [optimizer]
    assert strategy._lightning_optimizers[0]._optimizer is optimizer, "Lightning changed it: adapt optimizer_swap.py"
    trainer = SimpleNamespace(strategy=SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[]))
    with pytest.raises(
        UnsupportedError, match=r"SimpleNamespace has no `_lightning_optimizers`: this release of Light"
    ):
        swap_optimizer(trainer, as_8bit)


def test_torch_still_keeps_hooks_of_steps_where_a_swap_expects_them() -> None:
    optimizer = adamw(nn.Linear(2, 2))
    optimizer.register_step_pre_hook(lambda *ignored: None)
    optimizer.register_step_post_hook(lambda *ignored: None)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert [len(each) for each in hooks] == [1, 1], "torch renamed them: adapt optimizer_swap.py"
