"""The memory of evaluation: what it keeps, what it needs beside optimizer states, and that it is known before training.

Run: ``pytest tests/e2e/test_evaluation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit, NoFeasiblePlanError

MakeTrainer = Callable[..., Any]

pytestmark = [pytest.mark.usefixtures("no_probing")]

WIDTH = 128
# The levers that this file is not about.
AS_IT_IS: Any = {"precision": "32-true", "activation_checkpointing": "none", "verbose": False}


class Wide(lightning.LightningModule):
    """States dominate: 8 matrices of 128 x 128."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Keeping(Wide):
    """Predictions are kept until the evaluation ends: 16 x 128 floats of each batch."""

    def __init__(self, *, on_the_host_as_numbers: bool = False) -> None:
        super().__init__()
        self.predictions: list[Any] = []
        self.as_numbers = on_the_host_as_numbers
        self.kept: list[int] = []

    def on_validation_epoch_start(self) -> None:
        self.predictions.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        predictions = self(batch[0])
        self.predictions.append(predictions.tolist() if self.as_numbers else predictions)

    def on_validation_epoch_end(self) -> None:
        self.kept.append(len(self.predictions))


class Transferred(Wide):
    """A transfer hook makes another batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0]]


KEPT = 16 * WIDTH * 4


def loader(count: int, size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, WIDTH, generator=generator)), size)


def measured(make_trainer: MakeTrainer, module: Any, validation: DataLoader[Any], **settings: Any) -> MemFit:
    plugin = MemFit(**AS_IT_IS, **settings)
    make_trainer(plugin, max_epochs=1).fit(module, loader(32), validation)
    return plugin


def test_what_evaluation_keeps_of_each_batch_is_measured_and_counts_for_all(make_trainer: MakeTrainer) -> None:
    """Reported in huggingface/transformers#7926, MIC-DKFZ/nnUNet#2912."""
    module = Keeping()
    found = measured(make_trainer, module, loader(16 * 40)).measured
    assert found is not None and found.measured_evaluation_peak_bytes is not None
    assert (found.evaluation_kept_bytes, found.evaluation_batches) == (KEPT, 40)
    # The measured peak holds what two batches keep.
    assert found.predicted_evaluation_peak_bytes == found.measured_evaluation_peak_bytes + 38 * KEPT
    assert module.kept[-1] == 40, "the run itself evaluates all of them"


def test_predictions_that_would_not_fit_are_an_error_before_the_first_epoch(make_trainer: MakeTrainer) -> None:
    free = measured(make_trainer, Keeping(), loader(16 * 40), optimizer_states="as-configured").measured
    assert free is not None and free.predicted_evaluation_peak_bytes is not None
    budget, module = free.measured_peak_bytes + 10 * KEPT, Keeping()
    assert free.predicted_evaluation_peak_bytes < budget
    many = loader(16 * 4000)
    with pytest.raises(NoFeasiblePlanError) as caught:
        measured(make_trainer, module, many, budget=budget, optimizer_states="as-configured")
    message = str(caught.value)
    assert "but an evaluation needs " in message
    assert "and the module keeps 8.000 KiB of each of 4000 batches, such as predictions" in message
    assert "keep less of each batch until the end of the evaluation, such as running sums" in message
    assert module.steps == 0, "no step of the run was spent"


def test_what_is_kept_as_plain_numbers_is_not_in_torchs_allocator(make_trainer: MakeTrainer) -> None:
    found = measured(make_trainer, Keeping(on_the_host_as_numbers=True), loader(16 * 40)).measured
    assert found is not None and found.evaluation_kept_bytes == 0


@pytest.mark.parametrize(("limit", "batches"), [(1, 1), (0.5, 2), (1.0, 4)])
def test_limited_evaluations_have_that_many_batches(limit: Any, batches: int, make_trainer: MakeTrainer) -> None:
    plugin = MemFit(**AS_IT_IS)
    trainer = make_trainer(plugin, max_epochs=1, limit_val_batches=limit)
    trainer.fit(Keeping(), loader(32), loader(64))
    assert plugin.measured is not None
    assert plugin.measured.evaluation_batches == batches
    # With one batch there is no second step, which would show what the first one keeps.
    assert plugin.measured.evaluation_kept_bytes == (0 if batches == 1 else KEPT)


def test_batches_of_several_loaders_add_up(make_trainer: MakeTrainer) -> None:
    class Several(Keeping):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    plugin = MemFit(**AS_IT_IS)
    make_trainer(plugin, max_epochs=1).fit(Several(), loader(32), [loader(64), loader(96)])
    assert plugin.measured is not None
    assert (plugin.measured.evaluation_batches, plugin.measured.evaluation_kept_bytes) == (4 + 6, KEPT)


def test_states_in_8_bits_are_taken_where_only_they_leave_room_for_evaluation(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("bitsandbytes")
    large = loader(1600, 800)
    free = measured(make_trainer, Wide(), large, optimizer_states="as-configured").measured
    assert free is not None and free.measured_evaluation_peak_bytes is not None
    budget = free.measured_evaluation_peak_bytes - 100_000
    assert free.measured_peak_allocated_bytes < budget, "training fits as it is"
    plugin = measured(make_trainer, Wide(), large, budget=budget)
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.candidate.optimizer_states == "8bit"
    assert (plugin.measured.measured_evaluation_peak_bytes or 0) <= budget
    reasons = [passed.reason for passed in plugin.plan.passed_over]
    assert any(reason.startswith("warm-up: one evaluation step needs ") for reason in reasons)
    with pytest.raises(NoFeasiblePlanError, match="but one evaluation step needs"):
        measured(make_trainer, Wide(), large, budget=budget, optimizer_states="as-configured")


def test_an_evaluation_step_that_runs_out_of_memory_is_named_as_such(make_trainer: MakeTrainer) -> None:
    """Reported in unslothai/unsloth#1147."""

    class Exhausting(Wide):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise torch.OutOfMemoryError("no room for it")

    module = Exhausting()
    with pytest.raises(NoFeasiblePlanError) as caught:
        measured(make_trainer, module, loader(64))
    message = str(caught.value)
    assert "but an evaluation step ran out of memory, for batch_idx 0" in message
    assert message.endswith("MemFit does not divide evaluation batches: make the validation loader's batch smaller.")
    assert module.steps == 0


@pytest.mark.parametrize(
    ("module", "validation", "settings"),
    [
        (Wide, (1600, 800), {"precision": "32-true"}),
        (Keeping, (640, 16), {"precision": "32-true"}),
        (Wide, (800, 800), {"precision": "bf16-mixed", "activation_checkpointing": ["layers.*"]}),
        (Transferred, (1600, 800), {"precision": "32-true"}),
    ],
    ids=["two batches", "kept predictions", "one batch, recomputed blocks", "a transfer hook"],
)
def test_the_peak_of_evaluation_is_predicted(
    module: Any, validation: tuple[int, int], settings: Any, make_trainer: MakeTrainer
) -> None:
    plugin = MemFit(verbose=False, **settings)
    make_trainer(plugin, max_epochs=1).fit(module(), loader(32), loader(*validation))
    assert plugin.plan is not None and plugin.measured is not None
    predicted = plugin.plan.forecast.predicted_evaluation_peak_bytes
    assert predicted == pytest.approx(plugin.measured.measured_evaluation_peak_bytes, rel=0.001)


def test_an_evaluation_that_cannot_be_traced_is_measured_all_the_same(make_trainer: MakeTrainer) -> None:
    class Masked(Wide):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", batch[0][batch[0] > 0].mean())

    plugin = MemFit(**AS_IT_IS)
    make_trainer(plugin, max_epochs=1).fit(Masked(), loader(32), loader(64))
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.predicted_evaluation_peak_bytes is None
    assert plugin.measured.measured_evaluation_peak_bytes is not None


def test_a_run_that_does_not_validate_has_no_evaluation(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(**AS_IT_IS)
    make_trainer(plugin, max_epochs=1).fit(Wide(), loader(32))
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.predicted_evaluation_peak_bytes is None
    assert plugin.measured.measured_evaluation_peak_bytes is None


def test_what_is_kept_counts_by_the_mean_batch_and_not_by_the_largest(make_trainer: MakeTrainer) -> None:
    # One batch of 400 samples, and 39 of one.
    batches = [torch.randn(400 if index == 7 else 1, WIDTH) for index in range(40)]
    plugin = MemFit(**AS_IT_IS)
    module = Keeping()
    make_trainer(plugin, max_epochs=1).fit(module, loader(32), DataLoader([[one] for one in batches], batch_size=None))
    found = plugin.measured
    assert found is not None and found.measured_evaluation_peak_bytes is not None
    whole = (400 + 39) * WIDTH * 4
    assert found.evaluation_batches == 40
    assert found.evaluation_kept_bytes == pytest.approx(whole / 40, abs=1)


def test_loaders_of_unequal_batches_count_by_their_mean(make_trainer: MakeTrainer) -> None:
    class Several(Keeping):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    plugin = MemFit(**AS_IT_IS)
    make_trainer(plugin, max_epochs=1).fit(Several(), loader(32), [loader(64, 32), loader(16, 2)])
    assert plugin.measured is not None
    # Two batches of 32 samples and eight of 2.
    assert plugin.measured.evaluation_kept_bytes == pytest.approx((64 + 16) * WIDTH * 4 / 10, abs=1)
