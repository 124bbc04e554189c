"""Plans made before: given in every form, held against the settings, and carried in checkpoints anyone can load."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError, PlanFileError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.measurement import Measurement
from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, MemoryBreakdown, Plan, PlanRequest
from lightning_memfit.plan_reuse import (
    CHECKPOINT_KEY,
    check_conflicts,
    conflicts,
    given_plan,
    plan_from_checkpoint,
    plan_into_checkpoint,
)
from lightning_memfit.units import MIB

CANDIDATE = Candidate(
    precision="bf16-mixed",
    activation_checkpointing="blocks",
    checkpointed_modules=("blocks.0",),
    split=BatchSplit(effective_batch_size=32, loader_batch_size=16, accumulate_grad_batches=2, slice_sizes=(6, 5, 5)),
    optimizer_implementation="foreach",
)
PLAN = Plan(
    request=PlanRequest(effective_batch_size=32),
    device=DeviceSpec(name="Example 9000", kind="cpu", capacity_bytes=9, available_bytes=8, process_bytes=1, cores=2),
    budget=Budget(budget_bytes=700 * MIB, capacity_bytes=9, headroom_bytes=0, non_torch_bytes=0, reason="as given"),
    forecast=Forecast(
        candidate=CANDIDATE,
        memory=MemoryBreakdown(peak_allocated_bytes=590 * MIB, peak_phase="forward", num_parameters=1),
        correction_bytes=10 * MIB,
    ),
    choices=(),
    fingerprint={"model": "Net"},
)
MEASURED = Measurement(
    measured_peak_allocated_bytes=600 * MIB,
    measured_evaluation_peak_bytes=None,
    measured_peak_rss_bytes=None,
    measured_step_seconds=0.5,
    profiled_steps=2,
)


def plan_with(request: PlanRequest | None = None, **levers: Any) -> Plan:
    forecast = dataclasses.replace(PLAN.forecast, candidate=dataclasses.replace(CANDIDATE, **levers))
    return dataclasses.replace(PLAN, forecast=forecast, request=request or PLAN.request)


# --- plan=


def test_a_plan_is_given_as_itself_as_a_file_or_as_data(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "plan.yaml")
    assert given_plan(PLAN) is PLAN
    assert given_plan(path) == given_plan(str(path)) == given_plan(PLAN.to_dict()) == PLAN


def test_a_plan_is_given_as_a_config_of_hydra() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    assert given_plan(omegaconf.OmegaConf.create(PLAN.to_dict())) == PLAN


def test_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    PLAN.save(tmp_path / "plan.yaml")
    assert given_plan("~/plan.yaml") == PLAN
    with pytest.raises(PlanFileError, match=r"^~nobody-of-that-name/plan\.yaml cannot be read"):
        given_plan("~nobody-of-that-name/plan.yaml")


@pytest.mark.parametrize(("value", "shown"), [(3, "3"), (b"plan.yaml", "b'plan.yaml'"), ("", "''"), ([1], "[1]")])
def test_what_is_no_plan_is_refused(value: Any, shown: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        given_plan(value)
    assert str(caught.value) == (
        f"plan={shown} is no plan. Pass the path of a plan.yaml, a Plan, or its plain data (Plan.to_dict()), or leave "
        "plan= out to plan anew."
    )


def test_a_path_whose_text_is_bytes_is_refused() -> None:
    class BytesPath:
        def __fspath__(self) -> bytes:
            return b"plan.yaml"

    with pytest.raises(ConfigurationError, match="is no plan"):
        given_plan(BytesPath())  # type: ignore[arg-type]


def test_broken_data_is_refused_as_the_mapping_that_was_given() -> None:
    with pytest.raises(PlanFileError) as caught:
        given_plan({**PLAN.to_dict(), "notes": 3})
    assert str(caught.value) == (
        "The mapping given as plan= cannot be used as a plan: notes is 3, but must be a list of which each entry is "
        "text. Plan again: leave plan= out."
    )


# --- settings


@pytest.mark.parametrize(
    "request_now",
    [
        PlanRequest(),
        PLAN.request,
        PlanRequest(precision="bf16-mixed", activation_checkpointing="blocks", optimizer_implementation="foreach"),
        PlanRequest(micro_batch_size=6),
        PlanRequest(micro_batch_size=7),  # 16 samples in slices of at most 7 are 3 slices too
        PlanRequest(budget=600 * MIB),
        PlanRequest(budget=610 * MIB, headroom=10 * MIB),
        PlanRequest(max_length=512, num_profiled_steps=4, mode="report", loss_weight="tokens"),
    ],
)
def test_settings_that_the_plan_answers_are_no_conflict(request_now: PlanRequest) -> None:
    assert conflicts(PLAN, request_now) == ()
    check_conflicts(PLAN, request_now, source="x")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"precision": "32-true"}, "precision='32-true' is set, and the plan has 'bf16-mixed'"),
        ({"effective_batch_size": 64}, "effective_batch_size=64 is set, and the plan has 32"),
        ({"optimizer_states": "8bit"}, "optimizer_states='8bit' is set, and the plan has 'as-configured'"),
        ({"optimizer_implementation": "fused"}, "optimizer_implementation='fused' is set, and the plan has 'foreach'"),
        ({"offload": "optimizer"}, "offload='optimizer' is set, and the plan has 'never'"),
        ({"activation_checkpointing": "none"}, "activation_checkpointing='none' is set, and the plan has 'blocks'"),
        (
            {"activation_checkpointing": ("blocks.*",)},
            "activation_checkpointing=['blocks.*'] is set, and the plan was made with 'auto'",
        ),
        (
            {"micro_batch_size": 5},
            "micro_batch_size=5 is set, and the plan has 6 (3 slices of the loader's 16 samples)",
        ),
        (
            {"micro_batch_size": 8},
            "micro_batch_size=8 is set, and the plan has 6 (3 slices of the loader's 16 samples)",
        ),
        (
            {"budget": 599 * MIB},
            "the budget is 599.0 MiB, and the plan's predicted peak is 600.0 MiB, 1.000 MiB more",
        ),
        (
            {"budget": 609 * MIB, "headroom": 10 * MIB},
            "the budget is 599.0 MiB, and the plan's predicted peak is 600.0 MiB, 1.000 MiB more",
        ),
    ],
)
def test_a_pinned_setting_that_the_plan_does_otherwise_is_named(settings: dict[str, Any], line: str) -> None:
    assert conflicts(PLAN, PlanRequest(**settings)) == (line,)


def test_offload_that_is_not_allowed_is_a_conflict_where_memfit_and_not_the_strategy_moved_it() -> None:
    moved = plan_with(offload="optimizer")
    assert conflicts(moved, PlanRequest()) == ()
    moved = dataclasses.replace(moved, request=PlanRequest(offload="auto"))
    assert conflicts(moved, PlanRequest(offload="optimizer")) == ()
    assert conflicts(moved, PlanRequest()) == ("offload='never' is set, and the plan has 'optimizer'",)


def test_quantised_states_have_an_implementation_of_their_own() -> None:
    plan = plan_with(optimizer_states="8bit", optimizer_implementation="as-configured")
    assert conflicts(plan, PlanRequest(optimizer_implementation="fused")) == ()
    assert conflicts(plan, PlanRequest(optimizer_states="as-configured")) == (
        "optimizer_states='as-configured' is set, and the plan has '8bit'",
    )


def test_a_plan_made_with_the_same_setting_answers_it() -> None:
    asked = PlanRequest(activation_checkpointing=("blocks.*", "head"))
    made = plan_with(request=asked, activation_checkpointing="patterns")
    assert conflicts(made, asked) == ()
    assert conflicts(made, PlanRequest(activation_checkpointing=("head",))) == (
        "activation_checkpointing=['head'] is set, and the plan was made with ['blocks.*', 'head']",
    )


def test_inexact_slices_need_to_be_allowed_again() -> None:
    made = plan_with(request=PlanRequest(allow_inexact_slicing=True))
    assert conflicts(made, PlanRequest(allow_inexact_slicing=True)) == ()
    assert conflicts(made, PlanRequest()) == (
        "allow_inexact_slicing is False, and the plan's 3 slices were not compared with the undivided batch: it was "
        "made with allow_inexact_slicing=True",
    )
    undivided = dataclasses.replace(CANDIDATE.split, slice_sizes=(16,))
    assert conflicts(plan_with(request=PlanRequest(allow_inexact_slicing=True), split=undivided), PlanRequest()) == ()


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (None, "max_length is left out, and the plan is for sequences of at most 512 tokens"),
        (513, "max_length is 513 tokens, and the plan is for sequences of at most 512 tokens"),
        (512, None),
        (100, None),
    ],
)
def test_longer_sequences_than_planned_are_a_conflict(now: int | None, line: str | None) -> None:
    made = plan_with(request=PlanRequest(max_length=512))
    assert conflicts(made, PlanRequest(max_length=now)) == ((line,) if line else ())


def test_the_budget_of_this_run_counts_where_it_is_known() -> None:
    small = dataclasses.replace(PLAN.budget, budget_bytes=500 * MIB)
    assert conflicts(PLAN, PlanRequest(), budget=PLAN.budget) == ()
    assert conflicts(PLAN, PlanRequest(budget=10**12), budget=small) == (
        "the budget is 500.0 MiB, and the plan's predicted peak is 600.0 MiB, 100.0 MiB more",
    )


def test_a_contradiction_is_refused_with_every_setting_and_the_way_out() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_conflicts(PLAN, PlanRequest(precision="32-true", effective_batch_size=64), source="plan='plan.yaml'")
    assert str(caught.value) == (
        "plan='plan.yaml' and the settings contradict each other:\n"
        "  - effective_batch_size=64 is set, and the plan has 32\n"
        "  - precision='32-true' is set, and the plan has 'bf16-mixed'\n"
        "Change the settings, or plan again: leave plan= out."
    )


# --- checkpoints


def test_a_checkpoint_without_a_plan_gives_none_and_says_nothing() -> None:
    assert plan_from_checkpoint({"state_dict": {}}, source="last.ckpt") == (None, None)


@pytest.mark.parametrize("measurement", [MEASURED, None])
def test_a_plan_travels_in_a_checkpoint_as_plain_data(tmp_path: Path, measurement: Measurement | None) -> None:
    checkpoint: dict[str, Any] = {"epoch": 1}
    plan_into_checkpoint(checkpoint, PLAN, measurement)
    torch.save(checkpoint, tmp_path / "last.ckpt")
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert plan_from_checkpoint(loaded, source="last.ckpt") == (PLAN, None)
    measured = loaded[CHECKPOINT_KEY]["measured"]
    assert measured is None if measurement is None else measured["measured_peak_allocated_bytes"] == 600 * MIB


class Hostile(dict[str, Any]):
    def __contains__(self, key: object) -> bool:
        raise RuntimeError("boo")


def without_budget() -> dict[str, Any]:
    return {name: value for name, value in PLAN.to_dict().items() if name != "budget"}


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"plan": without_budget()}, "the entry cannot be used as a plan: the field budget is missing"),
        (
            {"plan": {**PLAN.to_dict(), "schema_version": 7}},
            "the entry cannot be used as a plan: schema_version is 7, and this release reads 1",
        ),
        ({"plan": None}, "the entry cannot be used as a plan: it is null, but must be a mapping of the plan's fields"),
        ({"plans": []}, "the entry 'MemFit' is {'plans': []}, no mapping with a plan"),
        (None, "the entry 'MemFit' is None, no mapping with a plan"),
        ([1, 2], "the entry 'MemFit' is [1, 2], no mapping with a plan"),
        (Hostile(), "RuntimeError: boo"),
    ],
)
def test_a_damaged_entry_is_a_note_and_never_a_failed_resume(entry: Any, why: str) -> None:
    assert plan_from_checkpoint({CHECKPOINT_KEY: entry}, source="last.ckpt") == (
        None,
        f"the plan in the checkpoint last.ckpt is not used, and the run plans again: {why}",
    )


def model_of(namespace: str, on_save: Callable[[dict[str, Any]], None]) -> Any:
    package: Any = importlib.import_module(namespace)

    class Model(package.LightningModule):  # type: ignore[misc]  # the class is chosen at run time
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            on_save(checkpoint)

    return Model


def weights_only(function: Callable[..., Any]) -> dict[str, bool]:
    """The strictest way to load that this Lightning has; before 2.6 there was none."""
    return {"weights_only": True} if "weights_only" in inspect.signature(function).parameters else {}


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_plain_trainer_resumes_strictly_from_a_checkpoint_that_carries_a_plan(
    tmp_path: Path, namespace: str, precision: Any
) -> None:
    pytest.importorskip(namespace)

    def trainer(epochs: int) -> Any:
        return importlib.import_module(namespace).Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )

    def put(checkpoint: dict[str, Any]) -> None:
        plan_into_checkpoint(checkpoint, PLAN, MEASURED)

    writing, path = model_of(namespace, put), tmp_path / "last.ckpt"
    first = trainer(1)
    first.fit(writing())
    first.save_checkpoint(path)

    plain_class, plain = model_of(namespace, lambda checkpoint: None), trainer(2)
    resumed = plain_class()
    plain.fit(resumed, ckpt_path=path, **weights_only(plain.fit))
    assert (plain.current_epoch, plain.global_step) == (2, 4)  # two batches an epoch
    loaded = plain_class.load_from_checkpoint(path, strict=True, **weights_only(plain_class.load_from_checkpoint))
    saved = torch.load(path, weights_only=True)
    assert torch.equal(loaded.layer.weight, saved["state_dict"]["layer.weight"])
    assert plan_from_checkpoint(saved, source=str(path)) == (PLAN, None)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "plain.ckpt", weights_only=True)
