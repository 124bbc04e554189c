"""``memfit explain``: a saved plan with everything that was passed over, or why a run does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memfit.no_fit import NoFit
from lightning_memfit.plan import PassedOver
from lightning_memfit.report.record import write_no_fit, write_record
from tests.test_kept_plans import HALVES, PLAN

Memfit = Callable[..., Any]
NO_FIT = NoFit(reason="No plan fits.\nTry less.", budget_bytes=10, best_peak_bytes=15, missing_bytes=5)


def test_a_plan_is_explained_with_all_that_was_passed_over(memfit: Memfit, tmp_path: Path) -> None:
    others = tuple(PassedOver(candidate=HALVES, predicted_peak_bytes=60, reason=f"reason {n}") for n in range(9))
    write_record(replace(PLAN, passed_over=others), None, tmp_path / "run")
    ran = memfit("explain", "run")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("run/plan.yaml\nMemFit plan ")
    assert all(f"reason {n}" in ran.out for n in range(9)), "the report of a run shows six"
    assert "more in plan.yaml" not in ran.out
    assert memfit("explain", "run/plan.yaml").out == ran.out


def test_the_document_is_the_plan(memfit: Memfit, tmp_path: Path) -> None:
    write_record(PLAN, None, tmp_path / "run")
    document = memfit("explain", "run", "--json").document
    assert (document["exit_code"], document["measured"], document["no_fit"]) == (0, None, None)
    assert document["plan"] == json.loads(json.dumps(PLAN.to_dict()))


def test_why_a_run_does_not_fit_is_said_with_its_exit_code(memfit: Memfit, tmp_path: Path) -> None:
    write_no_fit(NO_FIT, tmp_path / "run")
    ran = memfit("explain", "run")
    assert ran.code == 1
    assert ran.out.endswith("\nNo plan fits.\nTry less.\n")
    document = memfit("explain", "run", "--json").document
    assert document["no_fit"]["missing_bytes"] == 5 and document["plan"] is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "There is no file or folder nowhere. Name a plan.yaml, or the folder of a run that left one.\n"),
        ("empty", "empty holds no plan.yaml. Name a folder of a run that MemFit planned.\n"),
        ("two", "two holds 2 records. Name one of:\n  two/0/plan.yaml\n  two/1/no_fit.yaml\n"),
        (
            "bad.yaml",
            "bad.yaml cannot be used as a plan: it is 3, but must be a mapping of the plan's fields.",
        ),
    ],
)
def test_what_cannot_be_explained_is_refused(path: str, words: str, memfit: Memfit, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.yaml").write_text("3\n")
    write_record(PLAN, None, tmp_path / "two" / "0")
    write_no_fit(NO_FIT, tmp_path / "two" / "1")
    ran = memfit("explain", path)
    assert ran.code == 2
    assert ran.err.startswith(f"memfit: {words}")
