"""The levers in real fits: precision and implementation chosen by speed, 8-bit states, worst batch, plans used again.

Run: ``pytest tests/e2e/test_levers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memfit import MemFit, Plan, fit_session, forecast, preparation
from lightning_memfit.apply.batch_scan import ScanLimits
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.hardware.rates import CallSeconds, DeviceRates, RateCurve
from lightning_memfit.report.record import FILE_NAME

MakeTrainer = Callable[..., Any]

pytestmark = [pytest.mark.usefixtures("no_probing")]


class Wide(lightning.LightningModule):
    """States dominate: 8 x 128 x 128 weights, few samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(count: int = 32, size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, 128, generator=generator)), size)


def peak_of_32_bits() -> int:
    """The smallest peak with states in 32 bits: fused has no temporaries, and slices would be summed."""
    return forecast(
        Wide(), torch.zeros(8, 128), optimizer_implementation="fused", probe_operators=False
    ).peak_allocated_bytes


class Rates(lightning.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["betas"][0]))


# 8-bit states


def test_quantised_states_are_taken_where_only_they_fit_and_drive_the_same_schedule(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("bitsandbytes")
    plugin, rates, plain = MemFit(budget=peak_of_32_bits() - 100_000, verbose=False), Rates(), Rates()
    trainer = make_trainer(plugin, callbacks=[rates], max_epochs=2, gradient_clip_val=1.0)
    trainer.fit(Wide(), loader())
    make_trainer(callbacks=[plain], max_epochs=2, gradient_clip_val=1.0).fit(Wide(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.candidate.harm_tier == 1
    assert type(trainer.optimizers[0]).__name__ == "AdamW8bit"
    assert rates.seen == plain.seen and len(rates.seen) == 8
    (reason,) = (choice.reason for choice in plugin.plan.choices if choice.lever == "optimizer_states")
    assert reason.startswith("nothing fits with the states as configured; tier 1")
    states = plugin.measured.optimizer_states
    assert states is not None
    # Eight matrices of 16,384 elements: two moments of one byte each, and a scale of 4 bytes for 256 elements of each.
    assert (states.quantised_parameters, states.quantised_bytes) == (8 * 16_384, 8 * 2 * (16_384 + 4 * 64))
    assert (states.kept_parameters, states.kept_bytes) == (8 * 128, 8 * 128 * 8)


def test_a_warm_up_with_quantised_states_leaves_no_trace(make_trainer: MakeTrainer) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    class Quantised(Wide):
        def configure_optimizers(self) -> Any:
            optimizer = bitsandbytes.optim.AdamW8bit(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    plugin = MemFit(optimizer_states="8bit", precision="32-true", verbose=False)
    by_memfit, by_hand = Wide(), Quantised()
    make_trainer(plugin, max_epochs=2).fit(by_memfit, loader())
    make_trainer(max_epochs=2).fit(by_hand, loader())
    for mine, theirs in zip(by_memfit.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("writes", "reads"), [("8bit", "8bit"), ("as-configured", "8bit"), ("8bit", "as-configured")])
def test_a_run_is_resumed_in_either_format(writes: Any, reads: Any, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")

    def plugin(states: str) -> MemFit:
        return MemFit(optimizer_states=states, precision="32-true", verbose=False)

    first, whole = make_trainer(plugin(writes), max_epochs=1), Wide()
    first.fit(Wide(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, module = make_trainer(plugin(reads), max_epochs=2), Wide()
    resumed.fit(module, loader(), ckpt_path=tmp_path / "first.ckpt")
    assert resumed.global_step == 8
    make_trainer(plugin(reads), max_epochs=2).fit(whole, loader())
    largest = max((a - b).abs().max().item() for a, b in zip(module.parameters(), whole.parameters(), strict=True))
    if writes == reads:
        assert largest == 0.0
    else:  # states rounded to 8 bits move weights that have taken 8 steps of at most 1e-2 by a small share of that
        assert 0.0 < largest < 0.02


def test_an_implementation_does_not_travel_to_a_plain_trainer(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = MemFit(optimizer_implementation="fused", precision="32-true", verbose=False)
    trainer = make_trainer(plugin, max_epochs=1)
    trainer.fit(Wide(), loader())
    assert plugin.plan is not None and plugin.plan.candidate.optimizer_implementation == "fused"
    during = make_trainer(
        MemFit(optimizer_implementation="fused", precision="32-true", verbose=False),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="during")],
    )
    during.fit(Wide(), loader())
    saved = torch.load(tmp_path / "during.ckpt", weights_only=True)
    assert not saved["optimizer_states"][0]["param_groups"][0]["fused"]


# Chosen by speed


@pytest.mark.contest
def test_the_fastest_implementation_by_prediction_is_timed_against_those_nearly_as_fast(
    make_trainer: MakeTrainer, known_rates: DeviceRates, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where calls and moving memory cost nothing, all implementations are predicted to be equally fast.
    free = CallSeconds(**dict.fromkeys((field.name for field in fields(CallSeconds)), 0.0))
    moving = {"float32": RateCurve(work=(1e3, 1e9), seconds=(1e-12, 1e-6))}
    rates = replace(known_rates, calls=free, curves={**known_rates.curves, "elementwise": moving})
    monkeypatch.setattr(preparation, "measure_rates", lambda **settings: rates)
    plugin = MemFit(verbose=False)
    make_trainer(plugin).fit(Wide(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.candidate.precision == "32-true", "bf16 is slower by the rates of these tests"
    timed = plugin.measured.timed_plans
    assert plugin.plan.candidate in [one.candidate for one in timed]
    stood = [one for one in timed if one.measured_step_seconds is not None]
    assert len(stood) >= 2 and all(one.predicted_step_seconds is not None for one in stood)
    assert plugin.plan.forecast.predicted_step_seconds is not None
    assert any(choice.lever == "speed" for choice in plugin.plan.choices)


def test_planning_time_that_is_up_ends_comparisons_but_not_the_proof(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(planning_seconds=1e-6, verbose=False)
    make_trainer(plugin).fit(Wide(), loader())
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.measured.profiled_steps == 2 and plugin.measured.timed_plans == ()
    assert any(note.startswith("planning time was up") for note in plugin.plan.notes)


@pytest.mark.parametrize("fused", [True, False])
def test_where_lightning_refuses_to_mix_precisions_that_is_said(fused: bool, make_trainer: MakeTrainer) -> None:
    """Reported in Lightning-AI/pytorch-lightning#15501."""

    class Fused(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    plugin = MemFit(verbose=False)
    make_trainer(plugin, gradient_clip_val=1.0).fit(Fused(), loader())
    assert plugin.plan is not None and plugin.plan.candidate.precision == "32-true"
    (found,) = (choice.reason for choice in plugin.plan.choices if choice.lever == "precision")
    refused = "in mixed precision Lightning refuses to clip the gradients of a fused optimizer"
    assert (found == refused) == fused


# The scaler skips the first step, as it does without MemFit, so that the schedule is ahead of the optimizer.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_other_precisions_train_when_asked_for(precision: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = MemFit(precision=precision, micro_batch_size=4, verbose=False)
    trainer, module = make_trainer(plugin, gradient_clip_val=1.0), Wide()
    trainer.fit(module, loader() if precision == "16-mixed" else DataLoader(torch.randn(32, 128).bfloat16(), 8))
    assert plugin.plan is not None and plugin.plan.candidate.precision == precision
    assert plugin.plan.candidate.harm_tier == (2 if precision == "bf16-true" else 0)
    assert trainer.global_step == 4
    if precision == "16-mixed":
        trainer.save_checkpoint(tmp_path / "scaled.ckpt")
        saved = torch.load(tmp_path / "scaled.ckpt", weights_only=True)
        assert saved["MixedPrecision"]["scale"] == plugin.scaler.get_scale()


# Worst batch


class Padded(Dataset[torch.Tensor]):
    """The 18th batch of 4 is four times as long as the first."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(64 if index // 4 == 17 else 16, 8)


class Sequences(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.shapes.append(tuple(batch.shape))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_largest_batch_of_the_epoch_is_planned_and_proven_and_named(make_trainer: MakeTrainer) -> None:
    """Reported in ultralytics/ultralytics#4679."""
    plugin, module = MemFit(verbose=False, precision="32-true"), Sequences()
    make_trainer(plugin).fit(module, DataLoader(Padded(), 4))
    assert plugin.plan is not None
    assert plugin.plan.planned_batch == "batch_idx 17 of 20 batches (all looked at): (4, 64, 8) float32"
    assert plugin.plan.forecast.memory.by_category["inputs"] == 4 * 64 * 8 * 4
    assert module.shapes == [(4, 64 if index == 17 else 16, 8) for index in range(20)]


def test_the_largest_validation_batch_is_evaluated_in_the_proof(make_trainer: MakeTrainer) -> None:
    """Reported in catalyst-team/catalyst#143, and by others.

    huggingface/transformers#7926, keras-team/keras#6217, unslothai/unsloth#1147, roboflow/rf-detr#814.
    """
    plugin = MemFit(verbose=False, budget="64KiB", precision="32-true")
    with pytest.raises(NoFeasiblePlanError, match="one evaluation step needs"):
        make_trainer(plugin).fit(
            Sequences(), DataLoader(torch.ones(8, 16, 8), 4), DataLoader([torch.ones(8, 8)] * 3 + [torch.ones(9000, 8)])
        )


def test_the_evaluation_in_the_proof_is_told_which_loader_the_largest_batch_is_from(make_trainer: MakeTrainer) -> None:
    seen: list[tuple[int, ...]] = []

    class Several(Sequences):
        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            if not isinstance(batch, FakeTensor):
                seen.append((len(batch), dataloader_idx))
            self.log("size", float(len(batch)))

    small, large = DataLoader(torch.ones(2, 16, 8), 2), DataLoader(torch.ones(5, 16, 8), 5)
    for validation in ([small, large], [large, small], large):
        plugin = MemFit(verbose=False, precision="32-true", optimizer_implementation="as-configured")
        trainer = make_trainer(plugin, num_sanity_val_steps=0)
        trainer.fit(Several(), DataLoader(torch.ones(8, 16, 8), 4), validation)
    # In each run first the largest in the proof, twice if there is more than one, then all of them after the epoch.
    assert seen == [
        *[(5, 1), (5, 1), (2, 0), (5, 1)],
        *[(5, 0), (5, 0), (5, 0), (2, 1)],
        *[(5, 0), (5, 0)],
    ]


def test_of_two_batches_the_notes_name_the_one_that_is_planned(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Attending(Sequences):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return (batch @ batch.mT).softmax(-1).square().mean() * self.layer(batch).square().mean()

    # 64 x 16 x 8 numbers are more than 1 x 400 x 8, but 64 x 16 x 16 products are fewer than 400 x 400.
    batches = [torch.ones(64, 16, 8), *[torch.ones(1, 400, 8)] * 9]
    monkeypatch.setattr(preparation, "SCAN_LIMITS", ScanLimits(max_batches=4))
    plugin = MemFit(verbose=False, precision="32-true")
    make_trainer(plugin).fit(Attending(), DataLoader(batches, batch_size=None))
    assert plugin.plan is not None and plugin.plan.planned_batch is not None
    assert "(1, 400, 8) float32" in plugin.plan.planned_batch
    assert f"forecast and proof are those of {plugin.plan.planned_batch}; a larger batch would need more" in (
        plugin.plan.notes
    )
    assert not any("(64, 16, 8)" in note for note in plugin.plan.notes)


def test_a_worst_batch_and_a_length_cap_take_the_place_of_the_scan(make_trainer: MakeTrainer) -> None:
    """Reported in ultralytics/ultralytics#17514."""
    data = DataLoader(torch.ones(8, 16, 8), 4)
    given = MemFit(worst_batch=lambda batch: batch.repeat(1, 3, 1), verbose=False, precision="32-true")
    make_trainer(given).fit(Sequences(), data)
    assert given.plan is not None
    assert given.plan.planned_batch == "the batch given as worst_batch=: (4, 48, 8) float32"


# Plans used again


def test_a_plan_that_was_written_is_used_again_without_a_search_and_proven(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MemFit(micro_batch_size=3, verbose=False, precision="32-true")
    make_trainer(first).fit(Wide(), loader())
    path = tmp_path / FILE_NAME
    assert Plan.load(path) == first.plan

    monkeypatch.setattr("lightning_memfit.planning.search_plan", None)  # would raise
    second = MemFit(plan=path, verbose=False)
    make_trainer(second).fit(Wide(), loader())
    assert first.plan is not None and second.plan is not None and second.measured is not None
    assert second.plan.candidate == first.plan.candidate
    assert second.measured.profiled_steps == 2
    assert "the plan was given, so that nothing was searched" in second.plan.notes


def test_a_plan_for_another_model_or_batch_is_refused_by_what_changed(make_trainer: MakeTrainer) -> None:
    first = MemFit(verbose=False)
    make_trainer(first).fit(Wide(), loader())
    with pytest.raises(ValueError, match="was not made for this run") as caught:
        make_trainer(MemFit(plan=first.plan, verbose=False)).fit(Sequences(), DataLoader(torch.ones(8, 16, 8), 4))
    assert "model" in str(caught.value) and "Sequences" in str(caught.value)
    with pytest.raises(ValueError, match="effective_batch_size: planned for 8, now 16"):
        make_trainer(MemFit(16, plan=first.plan, verbose=False)).fit(Wide(), loader())


def test_a_resumed_run_uses_the_plan_of_its_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_trainer(MemFit(verbose=False), max_epochs=1)
    first.fit(Wide(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    monkeypatch.setattr("lightning_memfit.planning.search_plan", None)
    plugin = MemFit(verbose=False)
    make_trainer(plugin, max_epochs=2).fit(Wide(), loader(), ckpt_path=tmp_path / "first.ckpt")
    assert plugin.plan is not None
    assert "the plan came with the checkpoint, so that nothing was searched" in plugin.plan.notes


def test_a_resumed_run_that_changed_plans_anew_and_says_why(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    first = make_trainer(MemFit(verbose=False), max_epochs=1)
    first.fit(Wide(), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    plugin = MemFit(verbose=False)
    make_trainer(plugin, max_epochs=2).fit(Wide(), loader(size=16), ckpt_path=tmp_path / "first.ckpt")
    assert plugin.plan is not None
    assert any(note.startswith("the checkpoint's plan is not used again: ") for note in plugin.plan.notes)


@pytest.mark.parametrize("mode", ["apply", "report"])
def test_a_bare_generator_loses_no_batch(mode: str, make_trainer: MakeTrainer) -> None:
    class Seen(lightning.Callback):
        def __init__(self) -> None:
            self.firsts: list[float] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.firsts.append(batch[0, 0].item())

    seen = Seen()
    plugin = MemFit(mode=mode, precision="32-true", optimizer_implementation="as-configured", verbose=False)
    make_trainer(plugin, callbacks=[seen]).fit(Wide(), (torch.full((8, 128), float(number)) for number in range(6)))
    assert seen.firsts == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_worst_batch_below_the_first_one_is_refused(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(worst_batch=[torch.zeros(2, 128)], verbose=False)
    with pytest.raises(
        ConfigurationError, match=r"worst_batch= gives a batch of 1\.000 KiB, and the first .* 4\.000 KiB"
    ):
        make_trainer(plugin).fit(Wide(), loader())


def test_a_plan_that_was_given_is_not_exchanged_for_a_faster_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    made = MemFit(micro_batch_size=2, precision="32-true", optimizer_states="as-configured", verbose=False)
    make_trainer(made).fit(Wide(), loader())
    assert made.plan is not None and made.plan.split.num_slices == 4
    # A prediction far above what will be measured, which would let a search try what is faster.
    memory = replace(
        made.plan.forecast.memory,
        peak_allocated_bytes=2 * made.plan.forecast.memory.peak_allocated_bytes,
        by_category={"activations": 2 * made.plan.forecast.memory.peak_allocated_bytes},
    )
    given = replace(made.plan, forecast=replace(made.plan.forecast, memory=memory, correction_bytes=0))
    plugin = MemFit(plan=given, precision="32-true", optimizer_states="as-configured", verbose=False)
    make_trainer(plugin).fit(Wide(), loader())
    assert plugin.plan is not None and plugin.plan.split.num_slices == 4


@pytest.mark.parametrize("slower", [1e4, 1.0])
def test_rates_that_the_warm_up_disproves_are_forgotten_and_the_plan_says_so(
    slower: float, make_trainer: MakeTrainer, known_rates: DeviceRates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowed(curve: RateCurve) -> RateCurve:
        return replace(curve, seconds=tuple(slower * seconds for seconds in curve.seconds))

    curves = {
        kind: {dtype: slowed(curve) for dtype, curve in by_dtype.items()}
        for kind, by_dtype in known_rates.curves.items()
    }
    forgotten: list[Path] = []
    monkeypatch.setattr(preparation, "measure_rates", lambda **settings: replace(known_rates, curves=curves))
    monkeypatch.setattr(fit_session, "forget_rates", forgotten.append)
    plugin = MemFit(precision="32-true", verbose=False)
    make_trainer(plugin).fit(Wide(), loader())
    assert plugin.plan is not None
    said = [note for note in plugin.plan.notes if "times as long as it does" in note]
    assert (len(forgotten), len(said)) == ((1, 1) if slower > 1 else (0, 0))


def test_the_report_names_the_validation_batch(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    class Validating(Wide):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    plugin = MemFit(precision="32-true")
    make_trainer(plugin).fit(Validating(), loader(), loader(count=20, size=16))
    assert plugin.measured is not None
    assert plugin.measured.evaluation_batch is not None
    assert "batch_idx 0" in plugin.measured.evaluation_batch and "(16, 128)" in plugin.measured.evaluation_batch
    assert "evaluation measured with batch_idx 0" in " ".join(capsys.readouterr().out.split())
