"""Manual optimization in real fits: every lever but slicing, for several optimizers, proven and without a trace.

Run: ``pytest tests/e2e/test_manual_optimization.py``. Weights and peaks of such programs are in ``tests/zoo``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import ConfigurationError, MemFit
from lightning_memfit.trace.manual_step import MOST_BATCHES

MakeTrainer = Callable[..., Any]

pytestmark = [pytest.mark.usefixtures("no_probing")]

WIDTH = 128
AS_IT_IS: Any = {
    "precision": "32-true",
    "activation_checkpointing": "none",
    "optimizer_implementation": "as-configured",
    "verbose": False,
}


class Adversarial(lightning.LightningModule):
    """A generator of blocks that steps every third batch, and a judge that steps in each."""

    def __init__(self, judged_by: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.judged_by = judged_by
        self.indices: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.indices.append(batch_idx)
        make, judge = self.optimizers()
        judge.zero_grad()
        self.manual_backward(self.judge(self.blocks(batch[0]).detach()).mean() - self.judge(batch[0]).mean())
        judge.step()
        if batch_idx % 3 == 2:
            make.zero_grad()
            self.manual_backward(-self.judge(self.blocks(batch[0])).mean())
            make.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.blocks.parameters(), lr=1e-3), self.judged_by(self.judge.parameters(), lr=1e-3)


def loader(batch_size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(96, WIDTH, generator=generator)), batch_size)


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def largest_difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    return max((one[name] - two[name]).abs().max().item() for name in two)


@pytest.mark.parametrize("asked", [8, 32])
def test_another_effective_batch_than_the_loaders_is_refused(asked: int, make_trainer: MakeTrainer) -> None:
    """Nothing is accumulated behind the user's back: ayutaz/piper-plus#165, threestudio-project/threestudio#59."""
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(MemFit(effective_batch_size=asked)).fit(Adversarial(), loader())
    assert str(caught.value) == (
        f"effective_batch_size={asked}, and the loader's batches have 16 samples: under manual optimization "
        "training_step itself decides when its optimizers step, so that MemFit neither accumulates batches nor changes "
        f"their size. Set the loader's batch_size to {asked}, or leave effective_batch_size out."
    )


def test_the_loaders_own_effective_batch_is_planned_and_why_it_is_not_divided_is_said(
    make_trainer: MakeTrainer,
) -> None:
    plugin, module = MemFit(effective_batch_size=16, verbose=False), Adversarial()
    make_trainer(plugin, max_epochs=1).fit(module, loader())
    assert plugin.plan is not None and plugin.measured is not None
    reasons = {choice.lever: choice for choice in plugin.plan.choices}
    assert reasons["micro_batch_size"].reason == (
        "not sliced: manual optimization: training_step runs backward and steps itself"
    )
    assert reasons["zero_gradients_early"].value == "as in training_step"
    assert plugin.plan.notes[0] == (
        "manual optimization: 3 batches were followed one after the other, until every optimizer has stepped or 32 are "
        "done; seconds and FLOPs are those of one batch, on average"
    )
    # The warm-up ran batches 0 to 2 as often as it liked, and the run saw none of it.
    assert module.indices == [0, 1, 2, 3, 4, 5]


def test_where_states_do_not_fit_those_of_both_optimizers_are_quantised(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("bitsandbytes")
    settings = {"precision": "32-true", "activation_checkpointing": "none", "verbose": False}
    free = MemFit(**settings)
    make_trainer(free, max_epochs=1).fit(Adversarial(), loader())
    assert free.measured is not None
    tight = MemFit(budget=free.measured.measured_peak_allocated_bytes - 200_000, **settings)
    trainer = make_trainer(tight, max_epochs=1)
    trainer.fit(Adversarial(), loader())
    assert tight.plan is not None and tight.measured is not None and tight.measured.optimizer_states is not None
    assert [type(optimizer).__name__ for optimizer in trainer.optimizers] == ["AdamW8bit", "AdamW8bit"]
    # Five matrices of 16,384 elements; four biases of 128 and the judge's three small tensors of 128, 128 and 1.
    assert tight.measured.optimizer_states.quantised_parameters == 5 * 16_384
    assert tight.measured.optimizer_states.kept_parameters == 6 * 128 + 1
    assert tight.measured.measured_peak_allocated_bytes <= tight.plan.budget.budget_bytes


def test_one_of_two_optimizers_that_cannot_be_quantised_is_named_and_left(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("bitsandbytes")
    plugin = MemFit(optimizer_states="8bit", verbose=False)
    trainer = make_trainer(plugin, max_epochs=1)
    trainer.fit(Adversarial(judged_by=torch.optim.Adagrad), loader())
    assert [type(optimizer).__name__ for optimizer in trainer.optimizers] == ["AdamW8bit", "Adagrad"]
    assert plugin.plan is not None and plugin.measured is not None and plugin.measured.optimizer_states is not None
    (reason,) = (choice.reason for choice in plugin.plan.choices if choice.lever == "optimizer_states")
    assert reason.endswith(
        "left as configured: torch.optim.Adagrad cannot be quantised: no 8-bit form is known to follow its update rule"
    )
    assert plugin.measured.optimizer_states.quantised_parameters == 4 * 16_384


def test_optimizers_none_of_which_can_be_quantised_are_refused_by_name(make_trainer: MakeTrainer) -> None:
    class Neither(Adversarial):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.blocks.parameters()), torch.optim.ASGD(self.judge.parameters())

    with pytest.raises(ConfigurationError, match=r"torch\.optim\.Adagrad cannot.*torch\.optim\.ASGD cannot"):
        make_trainer(MemFit(optimizer_states="8bit")).fit(Neither(), loader())


@pytest.mark.parametrize(("writes", "reads"), [("8bit", "8bit"), ("as-configured", "8bit"), ("8bit", "as-configured")])
def test_checkpoints_of_both_optimizers_resume_in_either_format(
    writes: str, reads: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")

    def plugin(states: str) -> MemFit:
        return MemFit(optimizer_states=states, precision="32-true", verbose=False)

    first = make_trainer(plugin(writes), max_epochs=1)
    first.fit(Adversarial(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    whole, module = Adversarial(), Adversarial()
    make_trainer(plugin(reads), max_epochs=2).fit(whole, loader())
    resumed = make_trainer(plugin(reads), max_epochs=2)
    resumed.fit(module, loader(), ckpt_path=tmp_path / "first.ckpt")
    assert resumed.global_step == 2 * (6 + 2)
    largest = largest_difference(weights_of(module), weights_of(whole))
    assert largest == 0.0 if writes == reads else 0.0 < largest < 0.005


def test_an_implementation_of_two_optimizers_is_saved_as_configured(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, filename="during")
    plugin = MemFit(optimizer_implementation="fused", precision="32-true", verbose=False)
    trainer = make_trainer(plugin, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    fused: list[Any] = []

    class Watching(Adversarial):
        def on_train_batch_end(self, *_: Any) -> None:
            fused.append([optimizer.param_groups[0]["fused"] for optimizer in self.trainer.optimizers])

    trainer.fit(Watching(), loader())
    assert fused[-1] == [True, True]
    saved = torch.load(tmp_path / "during.ckpt", weights_only=True)
    assert [state["param_groups"][0]["fused"] for state in saved["optimizer_states"]] == [None, None]
    assert [optimizer.param_groups[0]["fused"] for optimizer in trainer.optimizers] == [None, None]


def test_an_optimizer_that_does_not_step_makes_the_proof_none_and_that_is_said(make_trainer: MakeTrainer) -> None:
    class Lazy(Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            _, judge = self.optimizers()
            judge.zero_grad()
            self.manual_backward(self.judge(batch[0]).mean())
            judge.step()

    plugin = MemFit(verbose=False)
    make_trainer(plugin, max_epochs=1).fit(Lazy(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.measured.profiled_steps == 0
    assert any(f"did not step within {MOST_BATCHES} batches" in note for note in plugin.plan.notes)
    assert any(note.startswith("NOT PROVEN") for note in plugin.plan.notes)


class Newtonian(Adversarial):
    """One optimizer that runs its closure itself, and keeps a history."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.judge(self.blocks(batch[0])).square().mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=10)


def test_a_history_is_in_forecast_and_proof_and_no_seconds_are_predicted(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(precision="32-true", verbose=False)
    make_trainer(plugin, max_epochs=1).fit(Newtonian(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    predicted, measured = plugin.plan.forecast.memory, plugin.measured.measured_peak_allocated_bytes
    assert predicted.by_category["optimizer_states"] >= 20 * predicted.by_category["parameters"]
    assert predicted.peak_allocated_bytes == pytest.approx(measured, rel=1e-4)
    assert plugin.plan.forecast.predicted_step_seconds is None and plugin.plan.forecast.flops is None


def test_a_schedule_that_knows_its_number_of_steps_takes_those_of_the_run_only(make_trainer: MakeTrainer) -> None:
    class Scheduled(Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            make, judge = super().configure_optimizers()
            return [make, judge], [torch.optim.lr_scheduler.OneCycleLR(judge, 1e-3, total_steps=6)]

    plugin = MemFit(precision="32-true", optimizer_implementation="as-configured", verbose=False)
    ours, theirs = Scheduled(), Scheduled()
    trainer = make_trainer(plugin, max_epochs=1)
    trainer.fit(ours, loader())
    make_trainer(max_epochs=1).fit(theirs, loader())
    assert plugin.plan is not None and plugin.plan.forecast.method == "traced"
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [6]
    assert "step" not in vars(trainer.lr_scheduler_configs[0].scheduler)
    assert largest_difference(weights_of(ours), weights_of(theirs)) == 0.0


def test_without_any_optimizer_the_run_is_planned_all_the_same(make_trainer: MakeTrainer) -> None:
    class Unoptimized(Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.judge(self.blocks(batch[0])).mean())

        def configure_optimizers(self) -> Any:
            return []

    plugin = MemFit(precision="32-true", verbose=False)
    make_trainer(plugin, max_epochs=1).fit(Unoptimized(), loader())
    assert plugin.plan is not None
    (states,) = (choice for choice in plugin.plan.choices if choice.lever == "optimizer_states")
    assert states.reason == "fits; could not be quantised: configure_optimizers returned no optimizer"


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_gives_what_lightning_alone_gives(precision: str, make_trainer: MakeTrainer) -> None:
    ours, theirs = Adversarial(), Adversarial()
    plugin = MemFit(precision=precision, optimizer_implementation="as-configured", verbose=False)
    make_trainer(plugin, max_epochs=1).fit(ours, loader())
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    lightnings = MixedPrecision(precision, "cpu", scaler=scaler)
    make_trainer(lightnings, max_epochs=1).fit(theirs, loader())
    assert largest_difference(weights_of(ours), weights_of(theirs)) == 0.0


class OwnAttributes(Adversarial):
    """Steps the optimizers that it keeps itself."""

    def configure_optimizers(self) -> Any:
        self.make, self.judged = super().configure_optimizers()
        return self.make, self.judged

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.make, self.judged


def test_8_bit_states_of_optimizers_that_the_module_keeps_itself_are_forecast(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("bitsandbytes")
    forecasts = []
    for module in (Adversarial(), OwnAttributes()):
        plugin = MemFit(optimizer_states="8bit", precision="32-true", activation_checkpointing="none", verbose=False)
        make_trainer(plugin).fit(module, loader())
        assert plugin.plan is not None and plugin.measured is not None and plugin.measured.profiled_steps >= 2
        forecasts.append(plugin.plan.forecast.memory)
    assert forecasts[0].by_category["optimizer_states"] == forecasts[1].by_category["optimizer_states"] > 0
    assert forecasts[0].peak_allocated_bytes == forecasts[1].peak_allocated_bytes


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize("configured", [None, []])
def test_optimizers_that_the_step_makes_itself(configured: Any, make_trainer: MakeTrainer) -> None:
    class Lazy(Adversarial):
        def configure_optimizers(self) -> Any:
            return configured

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if not hasattr(self, "own"):
                self.own = torch.optim.AdamW(self.parameters(), lr=1e-3)
            self.own.zero_grad()
            self.judge(self.blocks(batch[0])).mean().backward()
            self.own.step()

    plain = Lazy()
    make_trainer().fit(plain, loader())
    module = Lazy()
    plugin = MemFit(**AS_IT_IS)
    make_trainer(plugin).fit(module, loader())
    assert largest_difference(weights_of(module), weights_of(plain)) == 0
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.measured.profiled_steps >= 2
    assert not any("NOT PROVEN" in note or "did not step" in note for note in plugin.plan.notes)


def test_batches_are_followed_within_epochs_of_the_runs_length(make_trainer: MakeTrainer) -> None:
    class ByPosition(Adversarial):
        """Steps at the end of an epoch, and knows nothing of a seventh batch."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            weight = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5][batch_idx]
            self.manual_backward(weight * self.judge(self.blocks(batch[0])).mean())
            if self.trainer.is_last_batch:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()

    plain, module = ByPosition(), ByPosition()
    make_trainer().fit(plain, loader())
    plugin = MemFit(**AS_IT_IS)
    make_trainer(plugin).fit(module, loader())
    assert largest_difference(weights_of(module), weights_of(plain)) == 0
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.method == "traced" and plugin.measured.profiled_steps >= 2
    assert plugin.plan.forecast.memory.peak_allocated_bytes == pytest.approx(
        plugin.measured.measured_peak_allocated_bytes, rel=0.005
    )


def test_hooks_around_backward_run_on_fakes_as_in_training(make_trainer: MakeTrainer) -> None:
    class Hooked(Adversarial):
        scale: Any = None

        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.scale = torch.ones(1000)

        def on_after_backward(self) -> None:
            self.norm = self.scale.sum()

    plugin = MemFit(precision="32-true", activation_checkpointing="none", verbose=False)
    make_trainer(plugin, max_epochs=1).fit(Hooked(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.method == "traced"
    measured = plugin.measured.measured_peak_allocated_bytes
    assert plugin.plan.forecast.memory.peak_allocated_bytes == pytest.approx(measured, rel=0.005)


def test_a_step_that_cannot_be_traced_is_tried_once_and_proven_all_the_same(make_trainer: MakeTrainer) -> None:
    tried: list[int] = []

    class Masked(Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if isinstance(batch[0], FakeTensor):
                tried.append(batch_idx)
            super().training_step([batch[0][batch[0].sum(1) > -1e9]], batch_idx)

    plugin = MemFit(verbose=False)
    make_trainer(plugin, max_epochs=1).fit(Masked(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.method == "floor"
    assert plugin.measured.profiled_steps == 2
    assert tried == [0]
