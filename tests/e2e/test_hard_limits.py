"""The demo's model and batch under limits that kill: plain Lightning dies, MemFit trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.allocator.budget_allocator import build_allocator, why_unavailable
from lightning_memfit.units import MIB

ROOT = Path(__file__).parents[2]
DEMO_BUDGET = 150 * MIB  # memfit.budget in conf/config.yaml

# Beside torch's blocks the data segment holds what Python, the trace, torch's threads and oneDNN's compiled operators
# take. The undivided step needs 345 MiB, so that with this much plain Lightning is still 67 MiB short.
BESIDE_TORCH = 128 * MIB


def train(folder: Path, mode: str, how: str, size: int, *library: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "131072",  # freed blocks go back to the system at once
    }
    command = [sys.executable, str(ROOT / "tests/e2e/hard_limit_child.py"), mode, how, str(size), *library]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=300, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_under_the_demos_budget_plain_lightning_runs_out_of_memory_and_memfit_trains(tmp_path: Path) -> None:
    library = str(build_allocator())
    plain = train(tmp_path, "plain", "allocator", DEMO_BUDGET, library)
    assert not plain["trained"]
    assert plain["error"] == "OutOfMemoryError"
    with_memfit = train(tmp_path, "memfit", "allocator", DEMO_BUDGET, library)
    assert with_memfit["trained"], with_memfit
    assert "slices" in with_memfit["plan"]
    assert with_memfit["predicted"] <= DEMO_BUDGET


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts private mappings on Linux only")
def test_under_a_limit_on_the_data_segment_plain_lightning_dies_and_memfit_trains(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", "rlimit", BESIDE_TORCH)
    assert not plain["trained"]
    assert "can't allocate memory" in plain["message"]
    with_memfit = train(tmp_path, "memfit", "rlimit", BESIDE_TORCH)
    assert with_memfit["trained"], with_memfit
