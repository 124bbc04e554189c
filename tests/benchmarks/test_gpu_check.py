"""The check for a GPU works: it runs small on a CPU, stops in time, and a failure costs nothing but its section.

What it finds on a real GPU is not tested here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.allocator.budget_allocator import why_unavailable
from benchmarks.gpu_check import run as check_run
from benchmarks.gpu_check import traces
from benchmarks.gpu_check.boundaries import largest_that_fits
from benchmarks.gpu_check.cases import Case, all_cases
from benchmarks.gpu_check.operators import compared_by_operator, probing_process
from benchmarks.gpu_check.run import Check, Section
from benchmarks.gpu_check.workloads import MODELS, models_of
from lightning_memfit.predict.cuda_temporaries import CudaArchitecture
from lightning_memfit.trace.op_probe import OperatorProber, Probes
from lightning_memfit.trace.timeline import ProbeResult

ROOT = Path(__file__).parents[2]


class IdleGauge:
    """A device that nothing is allocated on."""

    device = torch.device("cpu")
    live_bytes = peak_bytes = 0
    peak_reserved_bytes = used_bytes = None

    def reset(self) -> None:
        """Nothing to do."""

    def clean(self) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to do."""

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """No limit."""
        yield

    def counters(self) -> dict[str, int]:
        """Nothing was counted."""
        return {}


def check_of(monkeypatch: pytest.MonkeyPatch, out: Path, *sections: Section, seconds: float = 60.0) -> dict[str, Any]:
    monkeypatch.setattr(check_run, "gauge_of", lambda device: IdleGauge())
    monkeypatch.setattr(Check, "_sections", lambda *_: list(sections))
    Check(device="cpu", seconds=seconds, out=out).run([])
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")
def test_the_script_runs_small_on_a_cpu_and_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "cpu", "--out", str(out)]
    sections = ["context", "device", "workspaces", "cases", "boundaries", "budgets", "rates"]
    command += ["--seconds", "60", "--models", "gpt", "--sections", ",".join(sections)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert {name: each["status"] for name, each in report["sections"].items()} == dict.fromkeys(sections, "done")
    assert report["machine"]["torch"] == torch.__version__
    (case,) = report["sections"]["cases"]["rows"]
    # Without probes of operators a transformer in fp32 is predicted well, not exactly.
    assert abs(case["relative_error"]) < 0.1
    assert case["without_gpu"]["predicted_peak_reserved_bytes"] % 2**21 == 0
    (boundary,) = report["sections"]["boundaries"]["rows"]
    assert boundary["survives_at_share"] > boundary["runs_out_at_share"]
    (budget,) = report["sections"]["budgets"]["rows"]
    assert {run["ran_out"] for run in budget["runs"]} == {True, False}


def test_a_section_that_fails_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield {"number": 1}
        raise RuntimeError("no such kernel")

    sections = (
        Section(name="first", share=1.0, rows=failing),
        Section(name="second", share=1.0, rows=lambda: [{"number": 2}]),
    )
    report = check_of(monkeypatch, tmp_path / "check.json", *sections)
    first, second = report["sections"]["first"], report["sections"]["second"]
    assert (first["status"], first["error"], first["rows"]) == (
        "failed",
        "RuntimeError: no such kernel",
        [{"number": 1}],
    )
    assert (second["status"], second["rows"]) == ("done", [{"number": 2}])


def test_a_section_stops_after_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Section(name="endless", share=0.5, rows=lambda: iter(lambda: {}, None))  # type: ignore[arg-type]
    report = check_of(monkeypatch, tmp_path / "check.json", endless, seconds=0.02)
    assert report["sections"]["endless"]["status"] == "out of time"


def test_probes_are_held_to_formulas_operator_by_operator() -> None:
    def call(op: str, seen: int | None, low: int | None = None, high: int | None = None, **more: Any) -> dict[str, Any]:
        bounds = {} if low is None else {"predicted_low_bytes": low, "predicted_high_bytes": high}
        return {"op": op, "measured_hidden_bytes": seen, "failure": None, **bounds, **more}

    calls = [
        call("convolution", 900, 0, 500),  # above, 900 beyond the lower end
        call("convolution", 300, 0, 500),
        call("convolution", None, 0, 500, failure="out of memory"),
        call("sum", 100, 200, 200),  # below
        call("gelu", 64),
    ]
    convolution, gelu, total = compared_by_operator(calls)
    assert (convolution["op"], convolution["calls"], convolution["not_run"]) == ("convolution", 3, 1)
    assert convolution["failures"] == ["out of memory"]
    assert [convolution[word] for word in ("below", "within", "above", "missing_bytes")] == [0, 1, 1, 900]
    assert (gelu["without_formula"], gelu["missing_bytes"]) == (1, 64)
    assert [total[word] for word in ("below", "within", "above", "missing_bytes")] == [1, 0, 0, 0]


def test_the_probing_process_is_looked_at_while_it_lives_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(model="mlp", size="small", precision="32-true", checkpointing="none", stepping="foreach")
    free = iter((10_000, 4_000, 9_900))
    found = Probes(results={0: ProbeResult(peak_bytes=0, output_bytes={})}, failures={"aten.mm.default": "no"})
    monkeypatch.setattr(OperatorProber, "probe", lambda prober, signatures: found)
    architecture = CudaArchitecture(compute_capability=(8, 0), multiprocessors=None)
    row = probing_process(case, "cpu", architecture, lambda: next(free))
    assert (row["measured_held_bytes"], row["measured_kept_after_end_bytes"]) == (6_000, 100)
    assert row["calls"] > row["answered"] >= 1
    assert "aten.mm.default (no)" in row["remarks"][0]


def test_twelve_models_are_checked_and_each_once_before_any_twice() -> None:
    assert len(MODELS) == 12
    names = list(models_of("full"))
    cases = list(all_cases("full", names, has_8bit=True))
    assert [case.model for case in cases[:12]] == list(MODELS)
    assert len({case.label for case in cases}) == len(cases) == 6 * len(names)  # six settings with bitsandbytes


def test_the_reference_of_traces_goes_through_every_setting_of_a_model() -> None:
    cases = traces.cases_here(["mlp", "gpt"])
    assert [case.name for case in cases[:4]] == ["mlp", "gpt", "mlp", "gpt"]
    assert len({case.label for case in cases}) == len(cases)


def test_the_largest_batch_is_found_where_memory_grows_in_steps() -> None:
    # A thousand bytes a sample, in blocks of 4,096: 40,960 bytes are ten blocks, and 40 samples are 40,000 bytes.
    assert largest_that_fits(lambda samples: -(-samples * 1000 // 4096) * 4096, 40_960) == 40
    assert largest_that_fits(lambda samples: 5000 * samples, 4999) == 0
