"""The prediction decides: 1 % more memory than predicted and every case finishes, 1 % less and it dies.

In child processes, because the allocator with its limit stays for the life of its process. All models:
bash scripts/test.sh tests/benchmarks/test_prediction_decides.py -m "slow or not slow"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy_case import OPTIMIZER_STEPS
from benchmarks.allocator.budget_allocator import build_allocator, why_unavailable
from benchmarks.child_process import stream_child
from benchmarks.prediction_decides import Outcome
from benchmarks.zoo import select_cases
from benchmarks.zoo_models import MODELS

needs_a_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(scope="module")
def library() -> Path:
    return build_allocator()


@needs_a_compiler
@pytest.mark.parametrize(
    "cases",
    [
        "mlp * none *",  # the backward sets the peak
        "wide * sgd 8bit",  # the optimizer's step does
        *(pytest.param(f"{model} *", marks=pytest.mark.slow) for model in MODELS),
    ],
)
def test_every_case_finishes_above_its_predicted_peak_and_dies_below_it(
    cases: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen: dict[str, Any] = {}
    # A case that did otherwise ends the child with code 1, which is reported after the cases themselves.
    for outcome in stream_child(
        "benchmarks.prediction_decides", ["--cases", cases, "--library", str(library)], allowed_codes=(0, 1)
    ):
        seen[outcome.pop("label")] = outcome
    assert list(seen) == [case.label for case in select_cases(cases)]
    otherwise = {
        label: outcome
        for label, outcome in seen.items()
        if (outcome["steps_above"], outcome["error_above"]) != (OPTIMIZER_STEPS, None)
        or outcome["error_below"] != "OutOfMemoryError"
    }
    assert otherwise == {}
    # The optimizer's states exist from the second step on: before that a step needs less than the predicted peak.
    assert all(outcome["steps_below"] < OPTIMIZER_STEPS for outcome in seen.values())


def test_an_error_other_than_out_of_memory_is_not_as_predicted() -> None:
    common = {"label": "gpt", "predicted_peak_bytes": 100, "steps_above": 3, "error_above": None}
    assert Outcome(**common, steps_below=1, error_below="OutOfMemoryError").as_predicted
    assert not Outcome(**common, steps_below=1, error_below="ValueError: no").as_predicted
    assert not Outcome(**common, steps_below=3, error_below=None).as_predicted
