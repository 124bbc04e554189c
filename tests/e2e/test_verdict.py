"""Promise 2 through the Trainer: a plan that does not stand in its warm-up is corrected, planned again, and proven.

Run with ``pytest tests/e2e/test_verdict.py``. Predictions are made wrong on purpose; measurements are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit, planning, proving, real_steps
from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.plan import Candidate, Forecast

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]
STEPS: list[int] = []
"""Samples of each real training step, outside of the module, so that nothing restores it."""

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


class Model(lightning.LightningModule):
    """Linear in the samples: 64 hidden floats of 4 bytes for each, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(64, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not isinstance(batch[0], FakeTensor):
            STEPS.append(len(batch[0]))
        return nn.functional.cross_entropy(self.head(self.hidden(batch[0])), batch[1])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.head(self.layers(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def no_steps_yet() -> None:
    STEPS.clear()


def loader(size: int = 64, count: int = 128) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 64), torch.arange(count) % 2), size)


def quiet(**settings: Any) -> MemFit:
    return MemFit(verbose=False, activation_checkpointing="none", **{**AS_IT_IS, **settings})


def predicted(make_trainer: MakeTrainer, module: Any, **settings: Any) -> int:
    """The peak that is predicted, in a run that plans only."""
    plugin = quiet(mode="report", **settings)
    make_trainer(plugin, max_steps=1).fit(module, loader())
    assert plugin.plan is not None
    return plugin.plan.forecast.predicted_peak_bytes


class Hungry(Model):
    """Takes memory that a trace cannot see: only real tensors make it allocate."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return super().hidden(x)
        unseen = x.repeat(1, 40)  # 40 x 64 x 4 = 10 KiB for each sample
        return super().hidden(x + 0 * unseen[:, :64])


def test_a_peak_above_the_budget_is_corrected_planned_again_and_proven(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Reported in microsoft/WSL#11050, pytorch/pytorch#197838."""
    undivided = predicted(make_trainer, Hungry())
    budget = undivided + 64 * 1024  # the prediction fits; the 640 KiB that it misses do not
    STEPS.clear()
    plugin, module = quiet(budget=budget), Hungry()
    trainer = make_trainer(plugin)
    trainer.fit(module, loader())
    plan, measured = plugin.plan, plugin.measured
    assert plan is not None and measured is not None
    assert plan.split.num_slices > 1
    assert measured.measured_peak_bytes <= budget
    assert plan.forecast.correction_bytes > 0
    assert plan.forecast.predicted_peak_bytes == measured.measured_peak_bytes
    assert plan.passed_over[0].candidate.split.num_slices == 1
    assert plan.passed_over[0].reason.startswith("warm-up: measured ")
    assert plan.passed_over[0].reason.endswith(" over the budget")
    assert trainer.global_step == 2
    assert STEPS[:2] == [64, 64], "two profiled steps of the first plan"
    assert STEPS[-1] <= plan.split.micro_batch_size, "training runs the proven plan"
    record = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert record["measured"]["measured_peak_bytes"] == measured.measured_peak_bytes


def test_a_replanned_run_trains_as_an_undivided_one(make_trainer: MakeTrainer) -> None:
    budget = predicted(make_trainer, Hungry()) + 64 * 1024
    weights = []
    for plugin in (quiet(budget=budget), None):
        lightning.seed_everything(3, verbose=False)
        module = Hungry()
        make_trainer(plugin).fit(module, loader())
        weights.append(list(module.parameters()))
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def make_wrong(monkeypatch: pytest.MonkeyPatch, extra: int) -> None:
    """Let every forecast and estimate be off by so many bytes."""

    def wrong(real: Callable[[Forecaster, Candidate], Forecast]) -> Callable[[Forecaster, Candidate], Forecast]:
        def call(self: Forecaster, candidate: Candidate) -> Forecast:
            forecast = real(self, candidate)
            peak = max(forecast.memory.peak_allocated_bytes + extra, 1)
            return replace(forecast, memory=replace(forecast.memory, peak_allocated_bytes=peak))

        return call

    for name in ("__call__", "estimate"):
        monkeypatch.setattr(Forecaster, name, wrong(getattr(Forecaster, name)))


def test_the_search_for_a_plan_that_stands_is_bounded(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forecaster that learns nothing from measurements is asked a bounded number of times.

    Reported in ludwig-ai/ludwig#2034.
    """
    warm_ups: list[int] = []
    real = real_steps.run_warmup

    def counted(**settings: Any) -> Any:
        warm_ups.append(1)
        measurement = real(**settings)
        return replace(measurement, measured_peak_allocated_bytes=10 * 2**20 + len(warm_ups))

    monkeypatch.setattr(real_steps, "run_warmup", counted)
    monkeypatch.setattr(planning, "expected_correction", lambda candidate, known: 0)
    module = Model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(quiet(budget="10MiB"))
    with pytest.raises(NoFeasiblePlanError) as caught:
        trainer.fit(module, loader())
    assert len(warm_ups) == proving.MAX_ATTEMPTS
    assert str(caught.value).startswith(
        "No plan fits the budget of 10.00 MiB: the smallest one found needs 10.00 MiB (measured, allocated), 1 B too "
        "much."
    )
    assert (caught.value.budget_bytes, caught.value.best_peak_bytes) == (10 * 2**20, 10 * 2**20 + 1)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert not list(tmp_path.glob("plan.yaml"))
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


def test_nothing_that_stands_is_an_error_with_the_measured_peak(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = predicted(make_trainer, Model(), micro_batch_size=1)
    make_wrong(monkeypatch, -50_000)
    budget = smallest - 40_000  # the prediction says yes, down to one sample; every measurement says no
    with pytest.raises(NoFeasiblePlanError) as caught:
        make_trainer(quiet(budget=budget)).fit(Model(), loader())
    first = str(caught.value).splitlines()[0]
    assert first.startswith("No plan fits the budget of ") and "(measured, allocated)" in first
    assert caught.value.missing_bytes > 0
    assert "micro_batch_size" in str(caught.value) and "What would help:" in str(caught.value)


def test_slices_that_a_correction_asks_for_are_compared_first(make_trainer: MakeTrainer) -> None:
    """The first plan is undivided, so that nothing was compared; the second must not divide what is coupled."""

    class Contrastive(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features = nn.functional.normalize(self.hidden(batch[0]), dim=1)
            return nn.functional.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))

    budget = predicted(make_trainer, Contrastive()) + 64 * 1024
    with pytest.raises(NoFeasiblePlanError, match="the batch is not sliced: The loss of 4 samples is "):
        make_trainer(quiet(budget=budget)).fit(Contrastive(), loader())


class Throwing(Model):
    """Runs out of memory above 24 samples, as a device would: the trace, which allocates nothing, does not."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor) and len(x) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().hidden(x)


def test_an_out_of_memory_error_in_the_warm_up_leads_to_a_smaller_plan(make_trainer: MakeTrainer) -> None:
    undivided = predicted(make_trainer, Model())
    plugin = quiet(budget=undivided + 1024)
    trainer = make_trainer(plugin)
    trainer.fit(Throwing(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.split.micro_batch_size <= 24
    assert plugin.plan.passed_over[0].reason == "warm-up: the warm-up ran out of memory"
    assert trainer.global_step == 2


def test_warm_ups_that_all_run_out_of_memory_are_not_said_to_be_measured(make_trainer: MakeTrainer) -> None:
    class Never(Model):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, FakeTensor) and len(x) > 4:  # slices of two are compared with four
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().hidden(x)

    with pytest.raises(NoFeasiblePlanError) as caught:
        make_trainer(quiet(budget="300KiB", micro_batch_size=32)).fit(Never(), loader())
    message = str(caught.value)
    assert "(predicted, allocated)" in message and "measured" not in message
    assert message.endswith("\nWarm-ups that ran out of memory, so that their peaks are not known: 2 slices of <= 32.")


def test_any_other_error_of_a_step_passes_through(make_trainer: MakeTrainer) -> None:
    """Reported in deepspeedai/DeepSpeed#4759, deepspeedai/DeepSpeed#7269."""

    class Broken(Model):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, FakeTensor):
                raise RuntimeError("a bug of the user's own")
            return super().hidden(x)

    with pytest.raises(RuntimeError, match=r"^a bug of the user's own$"):
        make_trainer(quiet()).fit(Broken(), loader())
    assert STEPS == [64]


def test_an_evaluation_step_above_the_budget_is_said_before_the_first_epoch(make_trainer: MakeTrainer) -> None:
    """Reported in catalyst-team/catalyst#143, and by others.

    huggingface/transformers#7926, keras-team/keras#6217, unslothai/unsloth#1147, roboflow/rf-detr#814.
    """
    budget = predicted(make_trainer, Model()) + 32 * 1024
    STEPS.clear()
    trainer = make_trainer(quiet(budget=budget))
    with pytest.raises(NoFeasiblePlanError) as caught:
        trainer.fit(Model(), loader(), loader(size=4096, count=4096))
    message = str(caught.value)
    assert message.startswith("Training fits the budget of ")
    assert "but one evaluation step needs " in message and "(measured, allocated)" in message
    assert "make the validation loader's batch smaller, or set budget=" in message
    assert trainer.global_step == 0 and STEPS == [64, 64, 64], "only the profiled steps and the timed one ran"


@pytest.mark.parametrize("kind", ["mask", "numpy"])
def test_a_step_that_cannot_be_traced_is_measured_small_and_trains(kind: str, make_trainer: MakeTrainer) -> None:
    class Untraceable(Model):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "mask":
                kept = x[x[:, 0] > -100]
                return super().hidden(kept)
            return super().hidden(x + float(x.detach().numpy().sum()) * 0)

    plugin = quiet(micro_batch_size=24)
    trainer = make_trainer(plugin)
    trainer.fit(Untraceable(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.method == "extrapolated"
    assert plugin.plan.split.slice_sizes == (22, 21, 21)
    note = next(note for note in plugin.plan.notes if "could not be traced" in note)
    assert "real steps of 2 and 4 samples" in note
    assert trainer.global_step == 2
    difference = plugin.plan.forecast.memory.peak_allocated_bytes / plugin.measured.measured_peak_allocated_bytes
    assert 0.9 < difference < 1.1, "the line through two small steps is near"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_untraceable_step_trains_at_any_batch_size(size: int, make_trainer: MakeTrainer) -> None:
    class Untraceable(Model):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            return super().hidden(x[x[:, 0] > -100])

    plugin = quiet()
    trainer = make_trainer(plugin)
    trainer.fit(Untraceable(), loader(size=size, count=6))
    assert trainer.global_step == 6 // size
    assert plugin.plan is not None
    # Of a single sample there is no line through two sizes.
    assert plugin.plan.forecast.method == ("floor" if size == 1 else "extrapolated")


def test_a_step_that_needs_a_later_hook_is_planned_without_a_forecast_and_trains(make_trainer: MakeTrainer) -> None:
    class Late(Model):
        def on_train_start(self) -> None:
            self.scale = 1.0

        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            return super().hidden(x * self.scale)

    plugin = quiet()
    trainer = make_trainer(plugin)
    trainer.fit(Late(), loader())
    assert trainer.global_step == 2
    assert plugin.plan is not None and plugin.measured is not None
    assert any("'Late' object has no attribute 'scale'" in note for note in plugin.plan.notes)
