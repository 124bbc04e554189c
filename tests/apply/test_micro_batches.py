"""A batch in slices trains, logs, returns and calls hooks as the undivided batch does; windows are exact."""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memfit.apply.micro_batches import Slicer, unsliceable_reason
from lightning_memfit.apply.precision import DelegatingPrecision, make_delegate
from lightning_memfit.errors import BatchStructureError, ConfigurationError, UnsupportedError
from lightning_memfit.plan import BatchSplit, balanced_slices
from lightning_memfit.upstream import NAMESPACES

# Lightning's own use of torch.utils._pytree, and its advice to have a logger or more workers
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:You called `self.log\('.*', ..., logger=True\)` but have no logger"),
]


@pytest.fixture(params=NAMESPACES)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


@pytest.fixture
def lightning() -> Any:
    return importlib.import_module("lightning.pytorch")


def make_module(pl: Any, **methods: Any) -> Any:
    """A LightningModule around a small network in fp64; ``methods`` replace or add to its own."""

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)).double()
            self.gradients: list[list[Tensor]] = []
            self.accuracy = torchmetrics.MeanMetric()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return functional.mse_loss(self.net(batch["x"]), batch["y"])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.gradients.append([parameter.grad.clone() for parameter in self.net.parameters()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return type("Tiny", (Tiny,), methods)()


def make_samples(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(5, generator=generator, dtype=torch.float64),
            "y": torch.randn(3, generator=generator, dtype=torch.float64),
        }
        for _ in range(count)
    ]


def make_trainer(pl: Any, *, precision: str = "32-true", **settings: Any) -> Any:
    base = importlib.import_module(f"{pl.__name__}.plugins.precision").Precision
    plugin = type("Plugin", (DelegatingPrecision, base), {})(
        make_delegate(precision, device_type="cpu", namespace=pl.__name__)
    )
    return plain_trainer(pl, plugins=plugin, **settings)


def plain_trainer(pl: Any, **settings: Any) -> Any:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


def make_split(loader_batch_size: int, num_slices: int, accumulate: int = 1) -> BatchSplit:
    return BatchSplit(
        effective_batch_size=loader_batch_size * accumulate,
        loader_batch_size=loader_batch_size,
        accumulate_grad_batches=accumulate,
        slice_sizes=balanced_slices(loader_batch_size, num_slices),
    )


def fit_sliced(
    pl: Any,
    module: Any,
    loader: Any,
    *,
    num_slices: int,
    accumulate: int = 1,
    slicing: dict[str, Any] | None = None,
    batch_size: int | None = None,
    **settings: Any,
) -> Any:
    trainer = make_trainer(pl, accumulate_grad_batches=accumulate, **settings)
    split = make_split(batch_size or loader.batch_size, num_slices, accumulate)
    undo = Slicer(trainer=trainer, module=module, split=split, **(slicing or {})).apply()
    try:
        trainer.fit(module, loader)
    finally:
        undo()
    return trainer


def relative_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest error of a tensor, over the larger of its norm and 1e-3 of the norm of the whole gradient."""
    whole = torch.cat([gradient.flatten() for gradient in wanted]).norm()
    return max(
        float((a - b).norm() / torch.maximum(b.norm(), 1e-3 * whole)) for a, b in zip(found, wanted, strict=True)
    )


def reference_gradients(
    module: Any, windows: list[list[Any]], loss: Callable[[Any, Any], Tensor]
) -> list[list[Tensor]]:
    """Gradients of the undivided window, with the module's own optimizer stepping in between."""
    optimizer = module.configure_optimizers()
    steps = []
    for window in windows:
        optimizer.zero_grad()
        batch = {name: torch.cat([part[name] for part in window]) for name in window[0]}
        loss(module, batch).backward()
        steps.append([parameter.grad.clone() for parameter in module.net.parameters()])
        optimizer.step()
    return steps


def mse(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(module.net(batch["x"]), batch["y"])


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
@pytest.mark.parametrize("early", [False, True])
def test_gradients_equal_those_of_the_undivided_window_in_fp64(
    lightning: Any, num_slices: int, accumulate: int, early: bool
) -> None:
    # 67 samples in batches of 7: ten batches, the last one of 4; with accumulation 4 the last window has 2 batches
    loader = DataLoader(make_samples(67), batch_size=7)
    batches = list(loader)
    windows = [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
    module = make_module(lightning)
    slicing = {"zero_gradients_early": early}
    fit_sliced(lightning, module, loader, num_slices=num_slices, accumulate=accumulate, slicing=slicing)
    wanted = reference_gradients(make_module(lightning), windows, mse)
    assert len(module.gradients) == len(wanted) == (10 if accumulate == 1 else 3)
    for found, reference in zip(module.gradients, wanted, strict=True):
        assert relative_error(found, reference) <= 1e-12


@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
def test_gradients_are_within_rounding_in_fp32(pl: Any, num_slices: int) -> None:
    samples = [{key: value.float() for key, value in sample.items()} for sample in make_samples(30)]
    loader = DataLoader(samples, batch_size=7)
    module, reference = make_module(pl).float(), make_module(pl).float()
    fit_sliced(pl, module, loader, num_slices=num_slices, accumulate=2)
    batches = list(loader)
    wanted = reference_gradients(reference, [batches[0:2], batches[2:4], batches[4:5]], mse)
    for found, undivided in zip(module.gradients, wanted, strict=True):
        assert relative_error(found, undivided) <= 1e-5


def test_weights_equal_the_undivided_run_with_gradient_clipping(lightning: Any) -> None:
    loader = DataLoader(make_samples(28), batch_size=7)
    plain, sliced = make_module(lightning), make_module(lightning)
    plain_trainer(lightning, gradient_clip_val=0.1, accumulate_grad_batches=2).fit(plain, loader)
    fit_sliced(lightning, sliced, loader, num_slices=3, accumulate=2, gradient_clip_val=0.1)
    torch.testing.assert_close(list(sliced.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-13)
    assert torch.cat([gradient.flatten() for gradient in sliced.gradients[0]]).norm() > 0.1, "clipping did something"


def test_a_constant_gradient_stays_constant_in_a_short_window(pl: Any) -> None:
    """Reported in ml-explore/mlx-lm#1413."""

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        return self.slope * batch.mean()

    class Slope(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(()))
            self.steps: list[float] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.steps.append(self.slope.grad.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    Slope.training_step = training_step
    loader = DataLoader(torch.ones(40), batch_size=4)  # ten batches
    plain = Slope()
    plain_trainer(pl, accumulate_grad_batches=4).fit(plain, loader)
    assert plain.steps == [1.0, 1.0, 0.5], "what Lightning does by itself"
    for num_slices in (1, 2):
        exact = Slope()
        fit_sliced(pl, exact, loader, num_slices=num_slices, accumulate=4)
        assert exact.steps == [1.0, 1.0, 1.0]


def make_texts(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    texts = []
    for index in range(count):
        labels = torch.randint(0, 3, (6,), generator=generator)
        labels[index % 7 :] = -100  # texts of 0 to 6 tokens
        texts.append({"x": torch.randn(6, 5, generator=generator, dtype=torch.float64), "labels": labels})
    return texts


def cross_entropy(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean over the tokens with a mask, as many write it: without any token, ``nan`` in the loss and in gradients."""
    labels = batch["labels"].flatten()
    mask = labels != -100
    losses = functional.cross_entropy(module.net(batch["x"]).flatten(0, 1), labels.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("num_slices", [1, 3, 7])
@pytest.mark.parametrize("loss_weight", ["tokens", lambda batch: 0.1 * int((batch["labels"] >= 0).sum())])
def test_weighting_by_tokens_gives_the_mean_over_the_tokens_of_the_window(
    lightning: Any, num_slices: int, loss_weight: Any
) -> None:
    loader = DataLoader(make_texts(32), batch_size=7)  # five batches, the last of 4; one text in seven has no token
    module = make_module(lightning, training_step=lambda self, batch, batch_idx: cross_entropy(self, batch))
    slicing = {"loss_weight": loss_weight}
    fit_sliced(lightning, module, loader, num_slices=num_slices, accumulate=2, slicing=slicing)
    batches = list(loader)
    wanted = reference_gradients(make_module(lightning), [batches[0:2], batches[2:4], batches[4:5]], cross_entropy)
    for found, reference in zip(module.gradients, wanted, strict=True):
        assert relative_error(found, reference) <= 1e-12


@pytest.mark.parametrize("size_given", [False, True])
def test_a_user_function_divides_batches_of_unknown_structure(lightning: Any, size_given: bool) -> None:
    class Bag:
        def __init__(self, samples: list[dict[str, Tensor]]) -> None:
            self.samples = samples

    def split_batch(bag: Bag, micro_batch_size: int) -> list[tuple[Bag, int]]:
        starts = range(0, len(bag.samples), micro_batch_size)
        parts = [bag.samples[start : start + micro_batch_size] for start in starts]
        return [(Bag(part), len(part)) for part in parts]

    def step(self: Any, bag: Bag, batch_idx: int) -> Tensor:
        return mse(self, {key: torch.stack([sample[key] for sample in bag.samples]) for key in ("x", "y")})

    loader = DataLoader(make_samples(14), batch_size=7, collate_fn=Bag)
    module = make_module(lightning, training_step=step)
    if size_given:
        fit_sliced(lightning, module, loader, num_slices=3, slicing={"split_batch": split_batch})
        batches = list(DataLoader(make_samples(14), batch_size=7))
        wanted = reference_gradients(make_module(lightning), [batches[:1], batches[1:]], mse)
        assert max(map(relative_error, module.gradients, wanted)) <= 1e-12
    else:
        with pytest.raises(BatchStructureError, match=r"split_batch="):
            fit_sliced(lightning, module, loader, num_slices=3)
        with pytest.warns(UserWarning, match=r"Every batch counts as 7 samples of its accumulation window"):
            fit_sliced(lightning, make_module(lightning, training_step=step), loader, num_slices=1, accumulate=2)


@pytest.mark.parametrize(
    ("slicing", "message"),
    [
        ({"loss_weight": "words"}, r"loss_weight='words' is not known. Choose 'samples', 'tokens'"),
        ({"loss_weight": "tokens"}, r"the batch has keys \['x', 'y'\] and no tensor 'labels'.*Pass loss_weight="),
        ({"loss_weight": lambda batch: float("nan")}, r"loss_weight= returned nan for a slice of 4 samples"),
        ({"split_batch": lambda batch, micro: [(batch, 7)]}, r"slices of \[7\] samples, more than micro_batch_size=4"),
        ({"split_batch": lambda batch, micro: batch["x"]}, r"split_batch= returned Tensor, not pairs"),
        ({"split_batch": lambda batch, micro: []}, r"split_batch= returned slices of \[\] samples"),
    ],
)
def test_settings_that_cannot_be_used_are_named(lightning: Any, slicing: dict[str, Any], message: str) -> None:
    loader = DataLoader(make_samples(7), batch_size=7)
    with pytest.raises(ConfigurationError, match=message):
        fit_sliced(lightning, make_module(lightning), loader, num_slices=2, slicing=slicing)


def logging_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Any:
    prediction = self.net(batch["x"])
    error = (prediction - batch["y"]).pow(2)
    size = len(batch["x"])
    self.log("both", error.mean(), on_step=True, on_epoch=True, prog_bar=True)
    self.log("sized", error.mean(), on_step=True, on_epoch=True, batch_size=size)
    self.log("total", error.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
    self.log_dict({"low": error.min()}, on_step=True, on_epoch=True, reduce_fx="min")
    self.log("high", error.max(), on_step=True, on_epoch=True, reduce_fx=torch.max)
    self.log("epoch_only", error.mean(), on_step=False, on_epoch=True)
    self.log("constant", 0.1)
    self.log("graph", error.mean(), enable_graph=True)
    self.accuracy.update(error.detach().mean(), weight=size)
    self.log("metric", self.accuracy, on_step=False, on_epoch=True)
    names = [f"sample {int(value * 1e6)}" for value in batch["x"][:, 0]]
    return {"loss": error.mean(), "prediction": prediction, "names": names, "mean": error.mean(), "mode": "train"}


class Witness:
    """What a callback sees: outputs and metrics after every batch, and hooks as they fire."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.epochs: list[dict[str, float]] = []
        self.hooks: Counter[str] = Counter()
        self.order: list[str] = []

    def callback(self, pl: Any) -> Any:
        witness = self

        class Seen(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                metrics = (trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics)
                seen = [{key: float(value) for key, value in part.items()} for part in metrics]
                witness.batches.append((outputs, *seen))

            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                witness.epochs.append({key: float(value) for key, value in trainer.callback_metrics.items()})

        def counted(name: str) -> Callable[..., None]:
            def hook(self: Any, *args: Any) -> None:
                witness.hooks[name] += 1
                witness.order.append(name)

            return hook

        for name in (
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
        ):
            setattr(Seen, name, counted(name))
        return Seen()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_logs_outputs_and_hooks_equal_those_of_the_undivided_run(pl: Any, accumulate: int) -> None:
    # drop nothing: batches of 7, 7, 7, 5 and epochs twice; only full windows of equal weight where 2 accumulate
    loader = DataLoader(make_samples(26 if accumulate == 1 else 28), batch_size=7)
    plain, sliced = Witness(), Witness()
    settings: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1}
    plain_trainer(pl, callbacks=plain.callback(pl), accumulate_grad_batches=accumulate, **settings).fit(
        make_module(pl, training_step=logging_step), loader
    )
    module = make_module(pl, training_step=logging_step)
    fit_sliced(pl, module, loader, num_slices=3, accumulate=accumulate, callbacks=sliced.callback(pl), **settings)
    assert sliced.hooks == plain.hooks and sliced.order == plain.order
    assert sliced.hooks["on_before_backward"] == sliced.hooks["on_after_backward"] == 8
    assert len(sliced.batches) == len(plain.batches) == 8
    for found, wanted in zip(sliced.batches, plain.batches, strict=True):
        assert list(found[0]) == list(wanted[0])
        assert found[0]["names"] == wanted[0]["names"] and found[0]["mode"] == "train"
        assert found[0]["prediction"].shape == wanted[0]["prediction"].shape
        for name in ("loss", "prediction", "mean"):
            torch.testing.assert_close(found[0][name], wanted[0][name].detach(), rtol=1e-10, atol=1e-12)
        for part in (1, 2, 3):
            assert found[part] == pytest.approx(wanted[part], rel=1e-6)
        assert found[1]["constant"] == wanted[1]["constant"]
    assert [set(epoch) for epoch in sliced.epochs] == [set(epoch) for epoch in plain.epochs]
    for found_epoch, wanted_epoch in zip(sliced.epochs, plain.epochs, strict=True):
        assert {"both_epoch", "total_epoch", "low_epoch", "high_epoch", "metric", "epoch_only"} <= set(found_epoch)
        assert found_epoch == pytest.approx(wanted_epoch, rel=1e-6)


def test_a_name_logged_in_some_slices_only_is_merged_over_those(lightning: Any) -> None:
    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if len(batch["x"]) == 2:  # slices of 3, 2, 2
            self.log("rare", batch["x"].mean())
        return mse(self, batch)

    loader = DataLoader(make_samples(7), batch_size=7)
    trainer = fit_sliced(lightning, make_module(lightning, training_step=step), loader, num_slices=3)
    wanted = next(iter(loader))["x"][3:].mean()
    assert trainer.callback_metrics["rare"].item() == pytest.approx(wanted.item(), rel=1e-12)


def test_logs_are_weighted_by_tokens_where_losses_are(lightning: Any) -> None:
    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self, batch)
        self.log("loss", loss)
        return loss

    loader, witness = DataLoader(make_texts(7), batch_size=7), Witness()
    module = make_module(lightning, training_step=step)
    slicing = {"loss_weight": "tokens"}
    callback = witness.callback(lightning)
    fit_sliced(lightning, module, loader, num_slices=7, slicing=slicing, callbacks=callback)
    wanted = cross_entropy(make_module(lightning), next(iter(loader))).item()
    assert witness.batches[0][1]["loss"] == pytest.approx(wanted, rel=1e-12)
    assert witness.batches[0][0]["loss"].item() == pytest.approx(wanted, rel=1e-12)


def test_lightnings_refusal_of_a_custom_reduction_passes_through(lightning: Any) -> None:
    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("x", batch["x"].mean(), reduce_fx=torch.median)
        return mse(self, batch)

    loader = DataLoader(make_samples(7), batch_size=7)
    with pytest.raises(Exception, match=r"Only `self.log\(..., reduce_fx=\{min,max,mean,sum\}\)` are supported"):
        fit_sliced(lightning, make_module(lightning, training_step=step), loader, num_slices=2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("early", [False, True])
def test_one_slice_trains_bit_for_bit_as_a_plain_trainer(pl: Any, accumulate: int, early: bool) -> None:
    def make() -> Any:
        module = make_module(pl, training_step=logging_step)
        module.net.insert(2, nn.Dropout(0.3))
        return module

    loader = DataLoader(make_samples(28), batch_size=7)
    plain, same = make(), make()
    first, second = Witness(), Witness()
    torch.manual_seed(11)
    plain_trainer(pl, callbacks=first.callback(pl), accumulate_grad_batches=accumulate, max_epochs=2).fit(plain, loader)
    torch.manual_seed(11)
    slicing = {"zero_gradients_early": early}
    callbacks = second.callback(pl)
    fit_sliced(
        pl, same, loader, num_slices=1, accumulate=accumulate, slicing=slicing, callbacks=callbacks, max_epochs=2
    )
    for found, wanted in zip(same.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert first.hooks == second.hooks and first.epochs == second.epochs
    assert [batch[1:] for batch in first.batches] == [batch[1:] for batch in second.batches]


def test_a_plan_that_changes_nothing_runs_lightnings_own_closure(pl: Any) -> None:
    trainer, module = make_trainer(pl), make_module(pl)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    undo = Slicer(trainer=trainer, module=module, split=make_split(7, 1)).apply()
    trainer.strategy.connect(module)
    closure = loop._make_closure({"batch": None}, None, 0)
    assert type(closure).__module__ == f"{pl.__name__}.loops.optimization.automatic"
    assert type(closure).__name__ == "Closure"
    undo()


def test_the_mixed_precision_scaler_scales_every_slice_and_short_windows_are_exact(lightning: Any) -> None:
    scale = 1024.0
    samples = [{key: value.float() for key, value in sample.items()} for sample in make_samples(21)]
    loader = DataLoader(samples, batch_size=7)

    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return mse(self, batch)

    module = make_module(lightning, training_step=step).float()
    trainer = make_trainer(lightning, precision="16-mixed", accumulate_grad_batches=2)
    trainer.precision_plugin.delegate.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    Slicer(trainer=trainer, module=module, split=make_split(7, 3, 2)).apply()
    trainer.fit(module, loader)
    batches = list(loader)
    wanted = reference_gradients(make_module(lightning).float(), [batches[0:2], batches[2:3]], mse)
    for found, reference in zip(module.gradients, wanted, strict=True):
        assert relative_error(found, reference) <= 1e-5


@pytest.mark.parametrize("none_for", ["all", "some"])
def test_a_step_that_returns_none_adds_nothing(lightning: Any, none_for: str) -> None:
    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        skipped = batch_idx == 1 if none_for == "all" else len(batch["x"]) == 3
        return None if skipped else mse(self, batch)

    loader = DataLoader(make_samples(14), batch_size=7)  # slices of 3, 2, 2
    module = make_module(lightning, training_step=step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        witness = Witness()
        fit_sliced(
            lightning,
            module,
            loader,
            num_slices=3,
            accumulate=2,
            callbacks=witness.callback(lightning),
            barebones=False,
        )
    said = [str(warning.message) for warning in caught if "None" in str(warning.message)]
    batches = list(loader)
    if none_for == "all":
        window = batches[:1]
        assert witness.batches[1][0] == {}
        assert len([text for text in said if "returned `None`" in text]) <= 1
    else:
        window = [{key: value[3:] for key, value in batch.items()} for batch in batches]
        assert said == [
            "training_step returned None for 1 of 3 slices of batch 0: they add nothing, and the mean is taken over "
            "the others. This is said once."
        ]
        assert witness.hooks["on_before_backward"] == witness.hooks["on_after_backward"] == 2
    (wanted,) = reference_gradients(make_module(lightning), [window], mse)
    assert len(module.gradients) == 1
    assert relative_error(module.gradients[0], wanted) <= 1e-12


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_window_that_lost_its_first_batch_starts_from_zero_gradients(lightning: Any) -> None:
    # the second window begins with a batch that is None: plain Lightning keeps the first window's gradients there
    batches: list[Any] = list(DataLoader(make_samples(28), batch_size=7))
    batches[2] = None
    loader = DataLoader(batches, batch_size=None)
    module = make_module(lightning)
    fit_sliced(lightning, module, loader, num_slices=2, accumulate=2, batch_size=7)
    wanted = reference_gradients(make_module(lightning), [batches[:2], batches[3:]], mse)
    assert max(map(relative_error, module.gradients, wanted)) <= 1e-12


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_resumed_within_a_window_steps_with_the_mean_of_what_is_left_of_it(
    lightning: Any, tmp_path: Path
) -> None:
    class SaveWithinTheWindow(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    loader = DataLoader(make_samples(56), batch_size=7)
    fit_sliced(lightning, make_module(lightning), loader, num_slices=2, accumulate=4, callbacks=SaveWithinTheWindow())
    resumed = make_module(lightning)
    trainer = make_trainer(lightning, accumulate_grad_batches=4)
    Slicer(trainer=trainer, module=resumed, split=make_split(7, 2, 4)).apply()
    trainer.fit(resumed, loader, ckpt_path=tmp_path / "middle.ckpt")
    # batches 2 and 3 of the epoch are the loader's first two, since it cannot resume; gradients before are gone
    batches = list(loader)
    wanted = reference_gradients(make_module(lightning), [batches[:2], batches[2:6]], mse)
    assert len(resumed.gradients) == 2
    assert max(map(relative_error, resumed.gradients, wanted)) <= 1e-12


def test_an_optimizer_that_runs_the_closure_again_counts_the_window_once(lightning: Any) -> None:
    """Reported in Lightning-AI/pytorch-lightning#4083, NeuroDiffGym/neurodiffeq#159."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)

    loader = DataLoader(make_samples(14), batch_size=7)
    plain = make_module(lightning, configure_optimizers=configure_optimizers)
    sliced = make_module(lightning, configure_optimizers=configure_optimizers)
    plain_trainer(lightning).fit(plain, loader)
    fit_sliced(lightning, sliced, loader, num_slices=3)
    torch.testing.assert_close(list(sliced.parameters()), list(plain.parameters()), rtol=1e-9, atol=1e-10)
    assert len(sliced.gradients) == len(plain.gradients) > 2


@pytest.mark.parametrize("num_slices", [1, 3])
def test_exceptions_pass_through_and_everything_is_restored(pl: Any, num_slices: int) -> None:
    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("seen", 1.0)
        if len(batch["x"]) == 2 or num_slices == 1:
            raise ZeroDivisionError("from the user's step")
        return mse(self, batch)

    trainer = make_trainer(pl)
    epoch_loop, plugin = trainer.fit_loop.epoch_loop, trainer.precision_plugin
    touched = [epoch_loop.automatic_optimization, plugin.delegate, plugin]
    before = [dict(vars(target)) for target in touched]
    module = make_module(pl, training_step=step)
    undo = Slicer(trainer=trainer, module=module, split=make_split(7, num_slices)).apply()
    assert "_make_closure" in vars(touched[0])
    with pytest.raises(ZeroDivisionError, match="from the user's step"):
        trainer.fit(module, DataLoader(make_samples(7), batch_size=7))
    assert "log" not in vars(epoch_loop._results)
    assert plugin.backward_hooks.before and plugin.backward_hooks.after
    undo()
    undo()
    assert [dict(vars(target)) for target in touched] == before


def test_no_graph_of_a_slice_lives_through_the_next_forward(lightning: Any) -> None:
    """Reported in meta-pytorch/torchtune#1917."""

    class Mark:
        """Lives as long as the node of the graph it is attached to."""

    alive: list[weakref.ref[Mark]] = []
    seen: list[int] = []

    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Any:
        seen.append(sum(reference() is not None for reference in alive))
        prediction = self.net(batch["x"])
        loss = functional.mse_loss(prediction, batch["y"])
        self.log("loss", loss, enable_graph=True)
        for tensor in (prediction, loss):
            mark = tensor.grad_fn.metadata["mark"] = Mark()
            alive.append(weakref.ref(mark))
        return {"loss": loss, "prediction": prediction}

    module = make_module(lightning, training_step=step)
    fit_sliced(lightning, module, DataLoader(make_samples(14), batch_size=7), num_slices=7)
    assert seen == [0] * 14


def test_gradients_are_zeroed_before_the_forward_only_if_asked(lightning: Any) -> None:
    held: dict[bool, list[bool]] = {}
    for early in (False, True):
        seen: list[bool] = []

        def step(self: Any, batch: dict[str, Tensor], batch_idx: int, seen: list[bool] = seen) -> Tensor:
            seen.append(self.net[0].weight.grad is not None)
            return mse(self, batch)

        module = make_module(lightning, training_step=step)
        loader = DataLoader(make_samples(14), batch_size=7)
        fit_sliced(lightning, module, loader, num_slices=2, slicing={"zero_gradients_early": early})
        held[early] = seen
    # two batches of two slices: Lightning's order keeps the first batch's gradients through the second's forward
    assert held == {False: [False, True, True, True], True: [False, True, False, True]}


def _manual(module: Any) -> None:
    module.automatic_optimization = False


def _training_step_of_iterator(self: Any, dataloader_iter: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("change", "methods", "reason"),
    [
        (None, {}, None),
        (_manual, {}, "manual optimization: training_step runs backward and steps itself"),
        (None, {"training_step": _training_step_of_iterator}, "training_step(dataloader_iter) fetches its own batches"),
        (
            None,
            {"optimizer_step": lambda self, *args, **kwargs: None},
            "Tiny overrides optimizer_step, which could depend on how often it runs",
        ),
        (
            None,
            {"backward": lambda self, loss: loss.backward()},
            "Tiny overrides backward, which could depend on how often it runs",
        ),
    ],
)
def test_what_cannot_be_divided_is_said(pl: Any, change: Any, methods: dict[str, Any], reason: str | None) -> None:
    module = make_module(pl, **methods)
    if change is not None:
        change(module)
    assert unsliceable_reason(make_trainer(pl), module) == reason


def test_several_optimizers_are_not_divided(pl: Any) -> None:
    trainer, module = make_trainer(pl), make_module(pl)
    trainer.strategy.optimizers = [module.configure_optimizers(), module.configure_optimizers()]
    assert unsliceable_reason(trainer, module) == "2 optimizers: automatic optimization drives one"


@pytest.mark.parametrize("name", ["_make_closure", "_make_step_fn", "_make_zero_grad_fn", "_make_backward_fn"])
def test_lightning_still_has_the_names_that_slicing_goes_through(
    pl: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(pl)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    automatic = importlib.import_module(f"{pl.__name__}.loops.optimization.automatic")
    assert type(loop) is automatic._AutomaticOptimization
    assert callable(getattr(loop, name)), f"Lightning renamed _AutomaticOptimization.{name}: adapt micro_batches.py"
    assert loop.output_result_cls is automatic.ClosureResult
    assert callable(trainer.fit_loop.epoch_loop._results.log)
    assert callable(automatic.Closure.warning_cache.warn) and isinstance(automatic.AbstractClosure, type)

    monkeypatch.delattr(automatic._AutomaticOptimization, name)
    with pytest.raises(UnsupportedError, match=rf"has no _AutomaticOptimization.{name}, through which MemFit divides"):
        Slicer(trainer=trainer, module=make_module(pl), split=make_split(7, 2)).apply()
