"""CUDA's rules on fakes of the CPU give, byte for byte, what fakes on ``cuda`` give.

Run: ``pytest tests/trace/test_fake_cuda.py``; with ``-m slow`` every model at every setting (about three minutes).
Attention and recurrent layers are routed alike on both sides: without a GPU torch would take them apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.allocator.budget_allocator import build_allocator, why_unavailable
from benchmarks.child_process import stream_child
from benchmarks.fake_cuda import steps
from benchmarks.fake_cuda.steps import CAPABILITY, CudaCase, all_cases, step_of
from lightning_memfit.trace.cuda_rules import CudaRules

_SOURCE = Path(steps.__file__).with_name("fake_cuda.cpp")


def _why_skipped() -> str | None:
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this build of torch has a device of its own, with which fakes run no backward without a GPU"
    return why_unavailable()


pytestmark = pytest.mark.skipif(_why_skipped() is not None, reason=_why_skipped() or "")


def _spanning() -> list[CudaCase]:
    """Models of several kinds once each, and every value of every setting; CI runs all with ``-m slow``."""
    labels = (
        "gpt bf16-mixed blocks foreach",
        "bert 16-mixed none fused",
        "resnet bf16-mixed none 8bit",
        "lstm 32-true blocks foreach",
    )
    return [CudaCase.of(label) for label in labels]


def _differences(cases: Sequence[CudaCase]) -> Iterator[str]:
    library = build_allocator(source=_SOURCE)
    labels = [case.label for case in cases]
    for real in stream_child("benchmarks.fake_cuda.steps", [str(library), *labels]):
        case = CudaCase.of(real["label"])
        emulated = json.loads(json.dumps(step_of(case, CudaRules(compute_capability=CAPABILITY), "cpu")))
        if emulated != real:
            yield f"{case.label}: {_first_difference(emulated, real)}"


def _first_difference(emulated: dict[str, Any], real: dict[str, Any]) -> str:
    for category in {*emulated["residents"], *real["residents"]}:
        mine, theirs = emulated["residents"].get(category), real["residents"].get(category)
        if mine != theirs:
            return f"{category}: {mine} instead of {theirs}"
    pairs = enumerate(zip(emulated["events"], real["events"], strict=False))
    return next(
        (f"event {place}: {mine} instead of {theirs}" for place, (mine, theirs) in pairs if mine != theirs),
        f"{len(emulated['events'])} events instead of {len(real['events'])}",
    )


def test_the_models_of_every_kind_are_traced_as_on_fake_cuda_tensors() -> None:
    cases = _spanning()
    assert {case.precision for case in cases} == {"32-true", "bf16-mixed", "16-mixed"}
    assert {case.checkpointing for case in cases} == {"none", "blocks"}
    assert {case.stepping for case in cases} == {"foreach", "fused", "8bit"}
    assert list(_differences(cases)) == []


@pytest.mark.slow
def test_every_model_at_every_setting_is_traced_as_on_fake_cuda_tensors() -> None:
    assert list(_differences(all_cases())) == []


def test_a_difference_is_seen() -> None:
    # The CPU's own rules keep a mask of dropout in the dtype of the activations, and cast other operators.
    from lightning_memfit.trace.cpu_rules import CpuRules

    case = CudaCase("bert", "bf16-mixed", "none", "foreach")
    on_the_cpu = step_of(case, CpuRules(), "cpu")
    as_on_cuda = step_of(case, CudaRules(compute_capability=CAPABILITY), "cpu")
    assert _first_difference(on_the_cpu, as_on_cuda)
    assert on_the_cpu["events"] != as_on_cuda["events"]
