"""``memfit plan`` of a Hydra application: composed and made as its training script does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memfit.cli import main
from lightning_memfit.cli.arguments import BAD_REQUEST, FITS

ROOT = Path(__file__).parents[2]
Memfit = Callable[..., Any]


def test_overrides_and_options_may_be_mixed_and_the_first_batch_is_planned(memfit: Memfit) -> None:
    ran = memfit("plan", "data.batch_size=2", "--device", "a100-40gb", "model.width=32", "--json")
    assert ran.code == FITS, ran.err
    assert ran.document["subject"] == "data.batch_size=2 model.width=32"
    (found,) = ran.document["devices"]
    # 8 x 32 + 32 x 8 weights.
    assert found["predicted"]["num_parameters"] == 512
    split = found["plan"]["forecast"]["candidate"]["split"]
    # memfit.effective_batch_size is 8 in the config.
    assert (split["effective_batch_size"], split["accumulate_grad_batches"], split["loader_batch_size"]) == (8, 4, 2)


def test_options_outweigh_the_config(memfit: Memfit) -> None:
    ran = memfit("plan", "memfit.precision=bf16-mixed", "--precision", "32-true", "--device", "t4", "--json")
    (found,) = ran.document["devices"]
    assert found["plan"]["forecast"]["candidate"]["precision"] == "32-true"


def test_a_trainers_own_precision_and_accumulation_are_kept(memfit: Memfit) -> None:
    ran = memfit(
        "plan", "+trainer.precision=bf16", "+trainer.accumulate_grad_batches=3", "memfit.effective_batch_size=null",
        "--device", "a100-40gb", "--json",
    )  # fmt: skip
    candidate = ran.document["devices"][0]["plan"]["forecast"]["candidate"]
    assert candidate["precision"] == "bf16-mixed"
    assert candidate["split"]["effective_batch_size"] == 12


def test_a_loader_whose_batch_does_not_divide_is_planned_as_it_would_be_rebuilt(memfit: Memfit) -> None:
    ran = memfit("plan", "memfit.effective_batch_size=6", "--device", "t4", "--json")
    split = ran.document["devices"][0]["plan"]["forecast"]["candidate"]["split"]
    # The largest divisor of 6 that is at most 4.
    assert (split["loader_batch_size"], split["accumulate_grad_batches"]) == (3, 2)


def test_an_effective_batch_given_as_an_option_cuts_the_loaders_batch_too(memfit: Memfit) -> None:
    ran = memfit("plan", "--effective-batch-size", "6", "memfit.effective_batch_size=8", "--device", "t4", "--json")
    split = ran.document["devices"][0]["plan"]["forecast"]["candidate"]["split"]
    assert (split["effective_batch_size"], split["loader_batch_size"], split["accumulate_grad_batches"]) == (6, 3, 2)


def test_what_a_forecast_leaves_out_is_said(memfit: Memfit) -> None:
    ran = memfit(
        "plan", "memfit.max_length=512", "+trainer.gradient_clip_val=1.0", "+trainer.devices=2", "--device", "t4",
        "--json",
    )  # fmt: skip
    notes = " ".join(ran.document["notes"])
    assert "memfit.max_length=512 is left out of this forecast" in notes
    assert "gradient clipping is left out" in notes and "planned for one device" not in notes
    assert ran.document["devices"][0]["plan"]["forecast"]["candidate"]["split"]["ranks"] == 2


def test_nothing_is_left_behind(memfit: Memfit, tmp_path: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    before, state = sorted(tmp_path.iterdir()), torch.get_rng_state()
    assert memfit("plan", "+seed=3", "--device", "t4").code == FITS
    new = {path.name for path in set(tmp_path.iterdir()) - set(before)}
    assert new <= {"__pycache__", "cache"}
    assert not GlobalHydra.instance().is_initialized() and not HydraConfig.initialized()
    assert torch.equal(torch.get_rng_state(), state)


BAD = {
    "unknown key": (("modle=x",), "modle"),
    "wrong type": (("memfit.effective_batch_size=many",), "effective_batch_size"),
    "bad syntax": (("model.width=[1",), "no viable alternative at input"),
    "unknown setting": (("+memfit.bugdet=1GiB",), "bugdet"),
    "wrong choice": (("memfit.precision=fp8",), "fp8"),
    "no folder": (("--config-dir", "nowhere"), "There is no folder"),
    "no such config": (("--config-name", "other"), "other"),
    "no data": (("~data",), "has no 'data'"),
    "needed value": (("model.width=???",), "model.width has no default. Add model.width="),
    "model that raises": (("model.width=-1",), "model raised RuntimeError: Trying to create tensor with negative"),
    "class that is not there": (("model._target_=models_of_a_user.Missing",), "Missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_cannot_be_used_is_two_and_says_why(memfit: Memfit, name: str) -> None:
    words, message = BAD[name]
    ran = memfit("plan", *words, "--device", "t4")
    assert ran.code == BAD_REQUEST
    assert message in ran.err and "Traceback" not in ran.err


def test_without_hydra_the_way_to_install_it_is_named(memfit: Memfit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)
    ran = memfit("plan", "model=x", "--device", "t4")
    assert ran.code == BAD_REQUEST
    assert "pip install 'lightning-memfit[cli]'" in ran.err


def test_this_projects_own_config_can_be_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["model=vit", "data=digits", "trainer=cpu_short", "memfit.budget=auto", "model.num_layers=2"]
    assert main(["plan", *words, "--device", "t4"]) == FITS
    assert "fits: " in capsys.readouterr().out
