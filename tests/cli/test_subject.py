"""What the options for a user's own code make, and what they say where it cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lightning_memfit.cli.arguments import BAD_REQUEST, FITS

Plan = Callable[..., Any]


def devices_of_models() -> list[str]:
    found: list[str] = sys.modules["models_of_a_user"].factories
    return found


def test_a_module_is_made_on_meta_unless_it_shall_be_real(plan: Plan) -> None:
    assert plan("lit", "--device", "t4").code == FITS
    assert plan("lit", "--device", "t4", "--real").code == FITS
    assert devices_of_models() == ["meta", "cpu"]


def test_a_module_that_cannot_be_made_on_meta_is_made_for_real_and_that_is_said(plan: Plan) -> None:
    ran = plan("needs_values", "--device", "t4", "--json", batch="4x8")
    assert ran.code == FITS, ran.err
    (note,) = ran.document["notes"]
    assert note.startswith("the module was made for real: on the meta device RuntimeError: ")


def test_a_class_and_one_that_makes_its_layers_late_will_do(plan: Plan) -> None:
    for name in ("Lit", "Late"):
        (found,) = plan(name, "--device", "t4", "--json").document["devices"]
        assert found["predicted"]["num_parameters"] == 1024


def test_a_loader_gives_its_first_batch_and_shapes_are_a_batch_too(plan: Plan) -> None:
    shapes = "inputs=4x8,targets=4:int64[0..8]"
    for batch in ("models_of_a_user:loader", shapes):
        (found,) = plan("lit", "--device", "t4", "--json", batch=batch).document["devices"]
        assert found["plan"]["request"]["effective_batch_size"] == 4


def test_a_plain_module_goes_with_a_loss_and_an_optimizer(plan: Plan) -> None:
    functions = ("--loss", "models_of_a_user:summed", "--optimizer", "models_of_a_user:sgd")
    assert plan("plain", *functions, "--device", "t4", batch="4x8").code == FITS


BAD = {
    "plain": "Linear of --model=models_of_a_user:plain has no training_step. Add --loss package.module:function",
    "failing": "--model=models_of_a_user:failing raised ValueError: no weights. Run with --debug for the traceback.",
    "leaving": "--model=models_of_a_user:leaving raised SystemExit: 0.",
    "nothing": "--model=models_of_a_user:nothing returned a NoneType. Return a LightningModule",
    "number": "--model=models_of_a_user:number is a int. Name a function, or a class, that makes the module.",
}


@pytest.mark.parametrize("factory", BAD)
def test_a_factory_that_gives_no_module_is_a_bad_request(plan: Plan, factory: str) -> None:
    ran = plan(factory, "--device", "t4", batch="4x8")
    assert ran.code == BAD_REQUEST
    assert BAD[factory] in ran.err and "Traceback" not in ran.err


def test_two_losses_are_one_too_many(plan: Plan) -> None:
    ran = plan("triple", "--loss", "models_of_a_user:summed", "--device", "t4", batch="4x8")
    assert ran.code == BAD_REQUEST
    assert "returns its own loss and optimizer. Leave --loss and --optimizer out" in ran.err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:f", "there is no module 'nowhere'. Run memfit in the folder that holds it"),
        ("models_of_a_user.deeper:f", "there is no module 'models_of_a_user.deeper'"),
        ("no path", "is no import path. Write package.module:name"),
        ("models_of_a_user:Lit.tiny", "has no 'tiny'"),
    ],
)
def test_an_import_path_that_leads_nowhere_says_where_it_ends(memfit: Plan, path: str, message: str) -> None:
    ran = memfit("plan", "--model", path, "--batch", "4x8", "--device", "t4")
    assert ran.code == BAD_REQUEST and message in ran.err


def test_a_module_whose_own_imports_are_missing_names_them(memfit: Plan, tmp_path: Any) -> None:
    (tmp_path / "needs_more.py").write_text("import a_library_that_is_missing\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    ran = memfit("plan", "--model", "needs_more:f", "--batch", "4x8", "--device", "t4")
    assert ran.code == BAD_REQUEST and "importing needs_more needs a_library_that_is_missing" in ran.err
    ran = memfit("plan", "--model", "breaks:f", "--batch", "4x8", "--device", "t4")
    assert ran.code == BAD_REQUEST and "importing breaks raised ZeroDivisionError: division by zero" in ran.err
