"""The delegate does the work, rescaling comes at the right moment, and checkpoints keep the delegate's key."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memfit.apply.precision import (
    BackwardHooks,
    DelegatingPrecision,
    install_rescale,
    make_delegate,
)
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.upstream import NAMESPACES

# Lightning's own use of torch.utils._pytree
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def plugin_for(pl: Any, delegate: Any) -> Any:
    base = importlib.import_module(f"{pl.__name__}.plugins.precision").Precision
    return type("Plugin", (DelegatingPrecision, base), {})(delegate)


def tiny_module(pl: Any, events: list[str] | None = None) -> Any:
    events = [] if events is None else events

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            output = self.layer(batch)
            events.append(f"forward {output.dtype}")
            return output.float().pow(2).mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            events.append(f"hook {self.layer.bias.grad.abs().sum().item():.6g}")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Tiny()


def trainer_for(pl: Any, plugins: Any, **settings: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=plugins,
        **settings,
    )


def batches(count: int = 2) -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randn(4, 3, generator=generator) for _ in range(count)], batch_size=None)


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("32-true", "Precision"),
        ("bf16-mixed", "MixedPrecision"),
        ("16-mixed", "MixedPrecision"),
        ("bf16-true", "HalfPrecision"),
    ],
)
def test_the_delegate_is_lightnings_own_plugin_of_the_users_package(pl: Any, precision: str, name: str) -> None:
    delegate = make_delegate(precision, device_type="cpu", namespace=pl.__name__)
    assert type(delegate) is getattr(importlib.import_module(f"{pl.__name__}.plugins.precision"), name)
    assert delegate.precision == precision
    assert (getattr(delegate, "scaler", None) is not None) == (precision == "16-mixed")


def test_unknown_precisions_and_packages_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='64-true' is not known. Choose one of: '32-true'"):
        make_delegate("64-true", device_type="cpu", namespace="lightning.pytorch")
    with pytest.raises(UnsupportedError, match=r"comes from 'os'. MemFit works with: lightning.pytorch, pytorch_li"):
        make_delegate("32-true", device_type="cpu", namespace="os")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_training_through_the_delegate_equals_training_with_it(pl: Any, precision: str) -> None:
    weights = []
    for forwarded in (False, True):
        events: list[str] = []
        module = tiny_module(pl, events)
        delegate = make_delegate(precision, device_type="cpu", namespace=pl.__name__)
        plugin = plugin_for(pl, delegate) if forwarded else delegate
        if precision == "bf16-true":
            module.to(torch.bfloat16)
        trainer = trainer_for(pl, plugin, gradient_clip_val=0.05)
        trainer.fit(module, batches())
        assert trainer.precision == precision and trainer.scaler is getattr(delegate, "scaler", None)
        weights.append((module.layer.weight.detach().clone(), events))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_rescaling_sees_unscaled_gradients_before_hook_and_clipping(pl: Any, precision: str) -> None:
    events: list[str] = []
    module = tiny_module(pl, events)
    delegate = make_delegate(precision, device_type="cpu", namespace=pl.__name__)

    def rescale(optimizer: Any) -> None:
        events.append(f"rescale {module.layer.bias.grad.abs().sum().item():.6g}")
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(2.0)

    install_rescale(delegate, rescale)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer_for(pl, plugin_for(pl, delegate), gradient_clip_val=1e-3).fit(module, batches(1))

    forward, rescaled, hook = (event.split() for event in events)
    assert (forward[0], rescaled[0], hook[0]) == ("forward", "rescale", "hook")
    assert float(rescaled[1]) < 10, "the gradients are unscaled: the fp16 scaler multiplies by 65536"
    assert float(hook[1]) == pytest.approx(2 * float(rescaled[1]), rel=1e-4)
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, module.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3), "clipped to 1e-3 after rescaling, lr 0.1"


def test_undoing_the_rescale_leaves_no_trace(pl: Any) -> None:
    delegate = make_delegate("16-mixed", device_type="cpu", namespace=pl.__name__)
    before = dict(vars(delegate))
    undo = install_rescale(delegate, lambda optimizer: None)
    assert "_after_closure" in vars(delegate)
    undo()
    undo()
    assert vars(delegate) == before


def test_lightning_still_has_the_moment_between_unscaling_and_the_hook(pl: Any) -> None:
    precision = importlib.import_module(f"{pl.__name__}.plugins.precision").Precision
    assert callable(precision._after_closure), "Lightning renamed Precision._after_closure: adapt apply/precision.py"
    with pytest.raises(UnsupportedError, match=r"types.SimpleNamespace has no method `_after_closure`"):
        install_rescale(SimpleNamespace(), lambda optimizer: None)


def test_the_loss_is_scaled_for_every_slice_although_hooks_fire_once() -> None:
    calls: list[str] = []

    class Delegate:
        scaler = SimpleNamespace(scale=lambda tensor: tensor * 8)

        def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
            calls.append("before")
            return self.scaler.scale(tensor)

        def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
            calls.append("after")
            return tensor.detach()

    plugin = DelegatingPrecision(Delegate())
    loss = torch.ones((), requires_grad=True)
    with plugin.backward_hooks.firing(before=True, after=False):
        assert plugin.pre_backward(loss, None).item() == 8
        assert not plugin.post_backward(loss, None).requires_grad
    with plugin.backward_hooks.firing(before=False, after=True):
        assert plugin.pre_backward(loss, None).item() == 8
        plugin.post_backward(loss, None)
    assert calls == ["before", "after"]


def test_hooks_fire_again_after_an_exception() -> None:
    hooks = BackwardHooks()
    with pytest.raises(ValueError, match="boom"), hooks.firing(before=False, after=False):
        raise ValueError("boom")
    assert hooks.before and hooks.after


@pytest.mark.parametrize("forwarded_first", [True, False])
def test_checkpoints_move_between_a_plain_trainer_and_the_forwarding_plugin(
    pl: Any, tmp_path: Path, forwarded_first: bool
) -> None:
    delegates = [make_delegate("16-mixed", device_type="cpu", namespace=pl.__name__) for _ in range(2)]
    delegates[0].scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugins = [
        plugin_for(pl, delegate) if forwarded_first == (index == 0) else delegate
        for index, delegate in enumerate(delegates)
    ]
    module = tiny_module(pl)
    trainer = trainer_for(pl, plugins[0])
    trainer.fit(module, batches())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 128.0 and "Plugin" not in saved

    resumed = trainer_for(pl, plugins[1])
    resumed.fit_loop.max_epochs = 2
    resumed.fit(tiny_module(pl), batches(), ckpt_path=tmp_path / "last.ckpt")
    assert delegates[1].scaler.get_scale() == 128.0
