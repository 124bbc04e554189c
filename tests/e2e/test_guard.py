"""Programs that a first look at four samples would have let through, or that could not be looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import ConfigurationError, MemFit, Plan, make_plan, planning, proving
from lightning_memfit.plan import Forecast
from lightning_memfit.search.planner import Found

pytestmark = pytest.mark.usefixtures("no_probing")
MakeTrainer = Callable[..., Any]

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


class Classifier(lightning.LightningModule):
    def __init__(self, **loss: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], **self.loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rare_class() -> DataLoader[Any]:
    """Class 2 is rare, and not among the first four samples."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(256, generator=generator) < 0.05).long() * 2
    labels[:4] = 0
    assert labels.any()
    return DataLoader(TensorDataset(torch.randn(256, 16, generator=generator), labels), batch_size=128)


@pytest.mark.parametrize(
    "loss", [{"weight": torch.tensor([0.05, 1.0, 5.0, 1.0])}, {"ignore_index": 2}], ids=["weights", "ignored"]
)
def test_a_loss_that_is_no_mean_over_samples_is_found_beyond_the_first_four(
    loss: Any, make_trainer: MakeTrainer
) -> None:
    plugin = MemFit(micro_batch_size=32, verbose=False, **AS_IT_IS)
    # The size is given, so that there is no way round.
    with pytest.raises(ConfigurationError, match="loss is no mean over samples"):
        make_trainer(plugin).fit(Classifier(**loss), rare_class())


def test_a_batch_that_can_neither_be_traced_nor_divided_trains_undivided(make_trainer: MakeTrainer) -> None:
    class Packed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16)
            self.head = nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.head(self.lstm(batch[0])[1][0][-1]), batch[1])

    data = [(torch.randn(3 + index % 5, 8), index % 4) for index in range(32)]

    def collate(items: Any) -> Any:
        return pack_sequence([x for x, _ in items], enforce_sorted=False), torch.tensor([y for _, y in items])

    plugin = MemFit(verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin)
    trainer.fit(Packed(), DataLoader(data, batch_size=16, collate_fn=collate))  # type: ignore[arg-type]
    assert trainer.global_step == 2
    assert plugin.plan is not None and plugin.plan.split.num_slices == 1
    assert plugin.plan.forecast.method == "floor"


def test_loaders_of_unequal_batches_train_undivided(make_trainer: MakeTrainer) -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(F.cross_entropy(self.net(x), y) for x, y in batch.values())

    def loader(batch_size: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(64, 16), torch.arange(64) % 4), batch_size=batch_size)

    plugin = MemFit(verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin)
    trainer.fit(Two(), CombinedLoader({"a": loader(32), "b": loader(16)}, "max_size_cycle"))
    assert trainer.global_step == 4
    assert plugin.plan is not None and plugin.plan.split.num_slices == 1


NO_MEANS: list[Any] = [{"weight": torch.tensor([0.05, 1.0, 5.0, 1.0])}, {"ignore_index": 2}]


def in_two_slices(found: Found, evaluate: Any) -> Forecast:
    """The plan that was found, but in two slices, and predicted to be by far the fastest."""
    split = replace(found.plan.split, slice_sizes=(64, 64))
    return replace(evaluate(replace(found.plan.candidate, split=split)), predicted_step_seconds=1e-9)


@pytest.mark.parametrize("loss", [{}, *NO_MEANS], ids=["plain", "weights", "ignored"])
def test_slices_of_a_contender_are_compared_before_it_is_timed(
    loss: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = planning.search_plan

    def search_plan(request: Any, device: Any, budget: Any, space: Any, evaluate: Any, **settings: Any) -> Found:
        found = real(request, device, budget, space, evaluate, **settings)
        if len(space.num_slices) == 1:
            return found
        return replace(found, contenders=(*found.contenders, in_two_slices(found, evaluate)))

    monkeypatch.setattr(planning, "search_plan", search_plan)
    plugin = MemFit(verbose=False, **AS_IT_IS)
    make_trainer(plugin).fit(Classifier(**loss), rare_class())
    assert plugin.plan is not None and plugin.measured is not None
    timed = [one.candidate.split.num_slices for one in plugin.measured.timed_plans]
    if loss:
        assert plugin.plan.split.num_slices == 1 and not timed
        (reason,) = (choice.reason for choice in plugin.plan.choices if choice.lever == "micro_batch_size")
        assert "loss is no mean over samples" in reason
    else:
        assert timed == [1, 2]


@pytest.mark.parametrize("loss", [{}, *NO_MEANS], ids=["plain", "weights", "ignored"])
def test_slices_of_what_a_measurement_frees_are_compared_before_it_is_timed(
    loss: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, searches = planning.search_plan, []

    def search_plan(request: Any, device: Any, budget: Any, space: Any, evaluate: Any, **settings: Any) -> Found:
        found = real(request, device, budget, space, evaluate, **settings)
        searches.append(len(space.num_slices))
        if len(searches) == 1 or len(space.num_slices) == 1:
            return found
        faster = in_two_slices(found, evaluate)
        return replace(found, plan=replace(found.plan, forecast=faster), contenders=(faster,))

    monkeypatch.setattr(planning, "search_plan", search_plan)
    monkeypatch.setattr(proving, "far_below", lambda *_: True)
    plugin = MemFit(verbose=False, **AS_IT_IS)
    make_trainer(plugin).fit(Classifier(**loss), rare_class())
    assert len(searches) > 1
    assert plugin.plan is not None and plugin.measured is not None
    timed = [one.candidate.split.num_slices for one in plugin.measured.timed_plans]
    assert timed == ([] if loss else [1, 2])
    assert plugin.plan.split.num_slices == 1 or not loss


# A plan of make_plan's was not compared with anything.


def sliced_plan(module: Any) -> Plan:
    return make_plan(
        module,
        next(iter(rare_class())),
        effective_batch_size=128,
        micro_batch_size=32,
        probe_operators=False,
        **AS_IT_IS,
    )


@pytest.mark.parametrize("loss", NO_MEANS, ids=["weights", "ignored"])
def test_a_given_plan_must_not_slice_a_loss_that_is_no_mean_over_samples(loss: Any, make_trainer: MakeTrainer) -> None:
    plan = sliced_plan(Classifier(**loss))
    assert plan.split.num_slices == 4
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(MemFit(plan=plan, verbose=False)).fit(Classifier(**loss), rare_class())
    message = str(caught.value)
    assert message.startswith(
        "The plan given as plan= divides the batch into 4 slices, but here it is not sliced: The loss of "
    )
    assert "loss is no mean over samples" in message and message.endswith(" Leave plan= out to plan anew.")


def test_a_given_plan_whose_slices_are_exact_is_used(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(plan=sliced_plan(Classifier()), verbose=False)
    trainer = make_trainer(plugin)
    trainer.fit(Classifier(), rare_class())
    assert trainer.global_step == 2
    assert plugin.plan is not None and plugin.plan.split.num_slices == 4
    assert not any("were not compared" in note for note in plugin.plan.notes)


class Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))


def test_a_given_plan_must_not_slice_what_is_normalised_over_the_batch(make_trainer: MakeTrainer) -> None:
    plan = sliced_plan(Normalised().eval())  # as if make_plan had not seen it
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(MemFit(plan=plan, verbose=False)).fit(Normalised().train(), rare_class())
    assert str(caught.value) == (
        "The plan given as plan= divides the batch into 4 slices, but here it is not sliced: net.1 normalises over the "
        "batch in train mode, so that slices would change the result. allow_inexact_slicing=True slices it all the "
        "same. Leave plan= out to plan anew."
    )


@pytest.mark.parametrize("kind", ["weights", "normalised"])
def test_a_checkpoints_plan_that_must_not_slice_is_a_note_and_the_run_plans_anew(
    kind: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make: Any = Normalised if kind == "normalised" else lambda: Classifier(**NO_MEANS[0])
    inexact = MemFit(micro_batch_size=32, allow_inexact_slicing=True, verbose=False, **AS_IT_IS)
    trainer = make_trainer(inexact)
    trainer.fit(make(), rare_class())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    saved = torch.load(tmp_path / "first.ckpt", weights_only=True)
    # As if the plan had come from make_plan, which compares nothing.
    saved["MemFit"]["plan"]["request"]["allow_inexact_slicing"] = False
    torch.save(saved, tmp_path / "first.ckpt")
    plugin = MemFit(verbose=False, **AS_IT_IS)
    make_trainer(plugin, max_epochs=2).fit(make(), rare_class(), ckpt_path=tmp_path / "first.ckpt")
    assert plugin.plan is not None and plugin.plan.split.num_slices == 1
    (note,) = (note for note in plugin.plan.notes if note.startswith("the checkpoint's plan is not used again: "))
    assert ("normalises over the batch" if kind == "normalised" else "loss is no mean over samples") in note


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("states", ["as-configured", "8bit"])
def test_a_first_batch_without_a_loss_proves_nothing_and_that_is_said(
    states: str, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    if states == "8bit":
        pytest.importorskip("bitsandbytes")

    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 4))  # 16 x 512 are quantised

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    plugin = MemFit(**{**AS_IT_IS, "optimizer_states": states})
    make_trainer(plugin).fit(Late(), rare_class())
    assert plugin.measured is not None and plugin.measured.profiled_steps == 0
    assert plugin.plan is not None and plugin.plan.notes[-1].startswith("NOT PROVEN")
    assert "gave no loss for the first batch" in capsys.readouterr().out


class Hooked(Classifier):
    """Clamps each gradient as it comes: of a slice that is another number than of the whole."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def test_hooks_on_gradients_keep_batches_undivided(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigurationError, match=r"the parameter net\.0\.weight has a hook on its gradient"):
        make_trainer(MemFit(micro_batch_size=32, verbose=False, **AS_IT_IS)).fit(Hooked(), rare_class())
    allowed = MemFit(micro_batch_size=32, allow_inexact_slicing=True, verbose=False, **AS_IT_IS)
    make_trainer(allowed).fit(Hooked(), rare_class())
    assert allowed.plan is not None and allowed.plan.split.num_slices == 4


class Exhausting(Classifier):
    """Four samples run out of memory as soon as gradients are wanted, or whatever is wanted."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) == 4 and not self.training and (self.always or torch.is_grad_enabled()):
            raise torch.OutOfMemoryError("no room for it")
        return super().training_step(batch, batch_idx)


def test_a_comparison_with_gradients_that_runs_out_of_memory_is_made_without(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(micro_batch_size=32, verbose=False, **AS_IT_IS)
    make_trainer(plugin).fit(Exhausting(always=False), rare_class())
    assert plugin.plan is not None and plugin.plan.split.num_slices == 4


def test_slices_whose_comparison_runs_out_of_memory_are_refused(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(micro_batch_size=32, verbose=False, **AS_IT_IS)
    with pytest.raises(ConfigurationError, match="comparison of four samples with their slices ran out of memory"):
        make_trainer(plugin).fit(Exhausting(always=True), rare_class())


def test_where_two_slices_do_not_fit_together_one_is_compared_with_its_halves(make_trainer: MakeTrainer) -> None:
    class Crowded(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) == 64 and not self.training:
                raise torch.OutOfMemoryError("no room for it")
            return super().training_step(batch, batch_idx)

    plugin = MemFit(micro_batch_size=32, verbose=False, **AS_IT_IS)
    with pytest.raises(ConfigurationError, match=r"loss of 32 samples .* the loss is no mean over samples"):
        make_trainer(plugin).fit(Crowded(ignore_index=2), rare_class())
