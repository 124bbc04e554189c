"""Operators run on the GPU of the run, and formulas where that tells nothing. Run: ``pytest tests/test_probers.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memfit import probers
from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.probers import GpuProber, Probers, gpu_prober
from lightning_memfit.targets import CudaTarget, FormulaProber, target_of
from lightning_memfit.trace.op_probe import OperatorProber, Probes
from lightning_memfit.trace.timeline import ProbeResult, Signature, TensorShape

ABSENT = catalog_device("a100-40gb")
PRESENT = replace(ABSENT, is_present=True, uuid="1234-56")
_TARGET = target_of(ABSENT)
assert isinstance(_TARGET, CudaTarget)
TARGET: CudaTarget = _TARGET
ROWS = TensorShape("float32", (8192, 768), (768, 1), None)
IMAGES = TensorShape("float32", (8, 64, 56, 56), (200704, 3136, 56, 1), None)
WEIGHT = TensorShape("float32", (64, 64, 3, 3), (576, 9, 3, 1), None)
SUM = Signature("aten.sum.dim_IntList", (ROWS, (0,), True), {})
GELU = Signature("aten.gelu.default", (ROWS,), {})
CONVOLUTION = Signature(
    "aten.convolution.default", (IMAGES, WEIGHT, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1), {}
)
SIGNATURES = [SUM, GELU, CONVOLUTION]
OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"


class Process:
    """Stands for the process on the GPU: answers what it was given, by operator."""

    def __init__(self, answers: dict[str, int | str]) -> None:
        self.answers = answers
        self.done: list[str] = []

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        self.done.append("asked")
        results, failures = {}, {}
        for number, signature in enumerate(signatures):
            answer = self.answers[signature.op]
            if isinstance(answer, str):
                failures[signature.op] = answer
            else:
                results[number] = ProbeResult(peak_bytes=answer + 512, output_bytes={0: 512})
        return Probes(results=results, failures=failures)

    def end_process(self) -> None:
        self.done.append("ended")

    def close(self) -> None:
        self.done.append("closed")


def prober_with(process: Any) -> GpuProber:
    return GpuProber(process, FormulaProber(TARGET.architecture))


def test_what_was_run_on_the_gpu_counts_and_no_formula_does() -> None:
    process = Process({SUM.op: 0, GELU.op: 0, CONVOLUTION.op: 3_000_000})
    found = prober_with(process).probe(SIGNATURES)
    assert [found.results[number].temporary_bytes for number in range(3)] == [0, 0, 3_000_000]
    assert found.failures == {} and found.notes == ()
    # The formula would have said something else of the sum, and left the convolution out.
    told = FormulaProber(TARGET.architecture).probe(SIGNATURES)
    assert told.results[0].temporary_bytes > 0
    assert set(told.failures) == {CONVOLUTION.op}


def test_formulas_stand_for_what_could_not_be_run_and_a_note_names_it() -> None:
    process = Process({SUM.op: OUT_OF_MEMORY, GELU.op: 0, CONVOLUTION.op: OUT_OF_MEMORY})
    found = prober_with(process).probe(SIGNATURES)
    told = FormulaProber(TARGET.architecture).probe(SIGNATURES)
    assert found.results[0] == told.results[0]
    assert set(found.results) == {0, 1}
    assert found.failures == told.failures  # the library decides, and neither tells
    assert found.remarks == (
        "could not be run on the GPU, so that formulas stand for what they take inside: "
        f"aten.convolution.default ({OUT_OF_MEMORY}), aten.sum.dim_IntList ({OUT_OF_MEMORY})",
    )
    assert found.notes[0] == found.remarks[0] and len(found.notes) == 2
    assert process.done == ["asked"]


def test_where_values_decide_zeros_do_not_show_less_than_a_formula() -> None:
    gradient, ids = TensorShape("float32", (8192, 768), (768, 1), None), TensorShape("int64", (8192,), (1,), None)
    backward = Signature("aten.embedding_dense_backward.default", (gradient, ids, 50257, -1, False), {})
    (by_formula,) = FormulaProber(TARGET.architecture).probe([backward]).results.values()
    less, more = by_formula.temporary_bytes - 512, by_formula.temporary_bytes + 512
    assert prober_with(Process({backward.op: less})).probe([backward]).results[0] == by_formula
    assert prober_with(Process({backward.op: more})).probe([backward]).results[0].temporary_bytes == more


class Failing(Process):
    def probe(self, signatures: Sequence[Signature]) -> Probes:
        super().probe(signatures)
        raise OSError("no such interpreter")


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (Failing(dict.fromkeys((SUM.op, GELU.op, CONVOLUTION.op), 0)), "OSError: no such interpreter"),
        (Process(dict.fromkeys((SUM.op, GELU.op, CONVOLUTION.op), "the GPU is busy")), "the GPU is busy"),
    ],
)
def test_a_process_that_tells_nothing_is_ended_and_not_asked_again(process: Process, reason: str) -> None:
    prober = prober_with(process)
    told = FormulaProber(TARGET.architecture).probe(SIGNATURES)
    for _ in range(2):
        found = prober.probe(SIGNATURES)
        assert found.results == told.results
        assert found.failures == told.failures
        assert found.remarks == (
            f"operators could not be run on the GPU ({reason}): formulas stand for what they take inside",
        )
    assert process.done == ["asked", "ended"]


def test_nothing_is_started_for_no_operators() -> None:
    process = Process({})
    assert prober_with(process).probe([]) == Probes(results={})
    assert process.done == []


def test_a_gpu_that_is_not_here_has_formulas() -> None:
    found = gpu_prober(ABSENT, TARGET, cache_dir=None, make_process=lambda *_: pytest.fail("started"))
    assert isinstance(found, FormulaProber)


def test_a_gpu_that_is_here_runs_operators_unless_its_driver_fails() -> None:
    process: Any = Process({GELU.op: 512})
    found = gpu_prober(PRESENT, TARGET, cache_dir=None, make_process=lambda *_: process)
    assert isinstance(found, GpuProber)
    assert found.probe([GELU]).results[0].temporary_bytes == 512

    def gone(*_: Any) -> OperatorProber:
        raise RuntimeError("the driver is gone")

    found = gpu_prober(PRESENT, TARGET, cache_dir=None, make_process=gone)
    assert isinstance(found, FormulaProber)
    assert found.probe([GELU]).notes == (
        "operators could not be run on the GPU (RuntimeError: the driver is gone): formulas stand for what they take "
        "inside",
    )


def test_the_process_is_told_the_gpu_by_its_identifier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(probers, "TorchDriver", lambda: SimpleNamespace(current_index=lambda: 0))
    monkeypatch.setattr(probers, "index_of", lambda uuid, driver: {"1234-56": 3}[uuid])
    monkeypatch.setattr(probers, "OperatorProber", lambda **settings: seen.update(settings))
    probers.process_on(PRESENT, tmp_path)
    assert seen == {"cache_dir": tmp_path, "device": "cuda:3", "uuid": "1234-56", "seconds": 60.0}
    probers.process_on(replace(PRESENT, uuid=None), None)
    assert (seen["device"], seen["uuid"]) == ("cuda:0", None)


def test_a_fit_on_the_host_asks_the_hosts_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatorProber, "end_process", lambda prober: pytest.fail("ended"))
    host = detect_device("cpu")
    fit = Probers(cache_dir=None)
    assert isinstance(fit.of(host, target_of(host)), OperatorProber)
    fit.leave_gpu()  # the host's process keeps nothing of a GPU


def test_the_process_on_the_gpu_ends_before_a_warm_up_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process({GELU.op: 0})
    monkeypatch.setattr(probers, "process_on", lambda *_: process)
    fit = Probers(cache_dir=None)
    fit.leave_gpu()  # nothing was started yet
    fit.of(PRESENT, TARGET).probe([GELU])
    fit.leave_gpu()
    fit.of(PRESENT, TARGET)
    fit.close()
    fit.close()
    assert process.done == ["asked", "ended", "closed", "closed"]
