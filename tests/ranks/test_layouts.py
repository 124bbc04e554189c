"""A run goes on under another layout or on other devices, states exact, or is refused before anything is planned."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.conftest import Once
from tests.ranks.launch import results, run_on_ranks
from tests.ranks.layout_programs import (
    ALL_EPOCHS,
    CASE,
    FOLDER,
    IN_BFLOAT16,
    ON_ONE,
    ON_TWO,
    REFUSED_ON_ONE,
    REFUSED_ON_TWO,
    Ran,
    go_on_on_one,
    save_and_go_on_on_two,
    save_on_one,
)
from tests.ranks.trainer_programs import one_process

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")
pytestmark = pytest.mark.slow

CONVERT = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1"]


@pytest.fixture(scope="module")
def ran(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once("layouts", lambda: _run_all(tmp_path_factory.mktemp("layouts")))


def _run_all(folder: Path) -> dict[str, Any]:
    environment = {"DS_ACCELERATOR": "cpu", FOLDER: str(folder)}
    first = results(run_on_ranks(save_on_one, count=1, environment=environment))
    on_two = results(run_on_ranks(save_and_go_on_on_two, environment=environment))
    converted = ["--input_folder", folder / "zero 2/checkpoint", "--output_folder", folder / "universal/checkpoint"]
    subprocess.run([sys.executable, *CONVERT, *converted], check=True, capture_output=True, timeout=120)
    on_one = results(run_on_ranks(go_on_on_one, count=1, environment=environment))
    saved = {name: [each] for rank in first for name, each in rank.items()}
    saved |= {name: [rank["saved"][name] for rank in on_two] for name in on_two[0]["saved"]}
    moved = {name: [rank["moved"][name] for rank in on_two] for name in ON_TWO}
    moved |= {name: [rank["moved"][name] for rank in on_one] for name in ON_ONE}
    refused = {name: [rank["refused"].get(name) for rank in on_two] for name in REFUSED_ON_TWO}
    refused |= {name: [rank["refused"].get(name) for rank in on_one] for name in REFUSED_ON_ONE}
    return {"saved": saved, "moved": moved, "refused": refused, "folder": str(folder)}


@pytest.mark.parametrize("name", [*ON_TWO, *ON_ONE])
def test_weights_and_states_of_the_optimizer_go_on_as_they_were_saved(ran: dict[str, Any], name: str) -> None:
    move = (ON_TWO | ON_ONE)[name]
    saved = ran["saved"].get(move.saved, ran["saved"]["zero 2"])
    for rank, moved in enumerate(ran["moved"][name]):
        before = saved[min(rank, len(saved) - 1)].ended
        if move.layout.universal:  # each rank had half of the optimizer's flat states
            before = {key: value for key, value in before.items() if key in dict(_weights(moved))}
        assert before.keys() <= moved.began.keys() and len(before) >= 10
        assert [key for key, value in before.items() if not torch.equal(value, moved.began[key])] == []


@pytest.mark.parametrize("name", [name for name in (*ON_TWO, *ON_ONE) if name != IN_BFLOAT16])
def test_training_ends_where_that_of_one_process_does_with_the_same_effective_batch(
    ran: dict[str, Any], name: str
) -> None:
    expected = one_process(dataclasses.replace(CASE, epochs=ALL_EPOCHS, loader_batch_size=16))
    for moved in ran["moved"][name]:
        assert moved.steps == expected["steps"] == 6
        assert moved.plan.split.effective_batch_size == 32
        assert moved.plan.split.accumulate_grad_batches == (4 if name in ON_ONE else 2)
        for parameter, weight in _weights(moved):
            torch.testing.assert_close(weight, expected["weights"][parameter], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fsdp2", "zero 3"])
def test_the_plan_in_a_folder_is_used_again_by_the_same_run(ran: dict[str, Any], name: str) -> None:
    move = ON_TWO[name]
    for moved, saved in zip(ran["moved"][name], ran["saved"][move.saved], strict=True):
        assert "the plan came with the checkpoint, so that nothing was searched" in moved.plan.notes
        assert moved.plan.candidate == saved.plan.candidate


@pytest.mark.parametrize(
    "name", ["fsdp2, 1 to 2", "fsdp2, 2 to 1", "ddp to fsdp2", "zero 2 to zero 1", "zero 2 offloaded to not"]
)
def test_a_run_that_is_another_one_plans_again_and_says_why(ran: dict[str, Any], name: str) -> None:
    for moved in ran["moved"][name]:
        (note,) = (note for note in moved.plan.notes if "checkpoint" in note)
        assert note.startswith("the checkpoint's plan is not used again: ")


def test_under_deepspeed_a_run_keeps_the_precision_of_its_checkpoint_where_the_user_sets_none(
    ran: dict[str, Any],
) -> None:
    for moved in ran["moved"][IN_BFLOAT16]:
        assert moved.plan.candidate.precision == "bf16-mixed"
        (reason,) = (each.reason for each in moved.plan.choices if each.lever == "precision")
        assert reason == "that of the checkpoint: DeepSpeed opens its optimizer states in no other"


@pytest.mark.parametrize("name", [*REFUSED_ON_TWO, *REFUSED_ON_ONE])
def test_what_cannot_go_on_is_refused_alike_on_every_rank(ran: dict[str, Any], name: str) -> None:
    """Other numbers of devices: reported in Lightning-AI/pytorch-lightning#19585, deepspeedai/DeepSpeed#3810."""
    messages = ran["refused"][name]
    move = (REFUSED_ON_TWO | REFUSED_ON_ONE)[name]
    assert len(set(messages)) == 1
    assert str(Path(ran["folder"], move.saved)) in messages[0]
    assert messages[0].endswith("Nothing was planned or trained.")


def _weights(ran: Ran) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in ran.ended.items() if ": " not in name]
