"""The counting allocator counts exactly, refuses above its limit, and goes on afterwards.

Each test runs in a child process, because an installed allocator stays for the life of its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.memory import is_oom_error

from benchmarks.allocator.budget_allocator import build_allocator, why_unavailable
from lightning_memfit.errors import is_out_of_memory

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

ROOT = Path(__file__).parents[2]
PREAMBLE = """
import json, sys
from pathlib import Path
import torch
from benchmarks.allocator.budget_allocator import BudgetAllocator
allocator = BudgetAllocator(Path(sys.argv[1]))
before = torch.ones(1000)
allocator.install()
seen = {}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_allocator(tmp_path_factory.mktemp("allocator"))


def _run(library: Path, body: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = f"{PREAMBLE}\n{body}\nprint(json.dumps(seen))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(library)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_it_is_built_once(library: Path) -> None:
    built = library.stat().st_mtime_ns
    assert build_allocator(library.parent) == library
    assert library.stat().st_mtime_ns == built


def test_live_and_peak_bytes_are_exact(library: Path) -> None:
    seen = _run(
        library,
        """
seen["at_start"] = allocator.live_bytes
a = torch.empty(1000)                         # 4,000 bytes
b = torch.empty(3, dtype=torch.float64)       # 24 bytes
seen["two"] = allocator.live_bytes
del a
c = torch.empty(7, dtype=torch.uint8)
seen["after"] = allocator.live_bytes, allocator.peak_bytes
allocator.reset_peak()
seen["reset"] = allocator.peak_bytes
seen["aligned"] = c.data_ptr() % 64
del b, c, before                              # what was there before the installation is not counted
seen["end"] = allocator.live_bytes
torch.empty(0)
""",
    )
    assert seen == {"at_start": 0, "two": 4024, "after": [31, 4024], "reset": 31, "aligned": 0, "end": 0}


def test_temporaries_inside_an_operator_are_counted(library: Path) -> None:
    seen = _run(
        library,
        """
x = torch.ones(1000)
allocator.reset_peak()
y = torch.logsumexp(x, 0)                     # needs a temporary as large as its input
seen["extra"] = allocator.peak_bytes - allocator.live_bytes
""",
    )
    assert seen["extra"] >= 4000


def test_above_the_limit_the_real_error_is_raised_and_the_process_goes_on(library: Path) -> None:
    seen = _run(
        library,
        """
allocator.set_limit(10_000)
a = torch.empty(8_000, dtype=torch.uint8)
try:
    torch.empty(2_001, dtype=torch.uint8)
except torch.OutOfMemoryError as error:
    seen["text"] = str(error).splitlines()[0]
seen["denied"] = allocator.denied_count, allocator.live_bytes, allocator.peak_bytes
b = torch.empty(2_000, dtype=torch.uint8)     # exactly the limit is allowed
seen["full"] = allocator.live_bytes
allocator.set_limit(None)
c = torch.empty(1_000_000, dtype=torch.uint8)
seen["lifted"] = allocator.live_bytes
""",
    )
    # What Lightning and MemFit recognise the error by is in its text.
    error = torch.OutOfMemoryError(seen["text"])
    assert is_oom_error(error)
    assert is_out_of_memory(error)
    assert seen == {
        "text": "CUDA out of memory. Tried to allocate 2001 bytes on a device simulated in CPU memory; 8000 bytes are "
        "live and the limit is 10000 bytes.",
        "denied": [1, 8000, 8000],
        "full": 10000,
        "lifted": 1010000,
    }


def test_a_training_step_that_ran_out_is_repeated_smaller(library: Path) -> None:
    seen = _run(
        library,
        """
model = torch.nn.Linear(256, 256)
def step(samples):
    model.zero_grad()
    model(torch.ones(samples, 256)).square().mean().backward()
step(16)
allocator.set_limit(allocator.live_bytes + 256 * 1024)
try:
    step(4096)                                # the inputs alone are 4 MiB
except torch.OutOfMemoryError:
    seen["raised"] = True
step(16)
seen["finished"] = model.weight.grad is not None
""",
    )
    assert seen == {"raised": True, "finished": True}


def test_the_profiler_sees_its_blocks(library: Path) -> None:
    seen = _run(
        library,
        """
with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    kept = torch.empty(1234)
events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
seen["bytes"] = [event.nbytes() for event in events]
""",
    )
    assert 4936 in seen["bytes"]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"false failed on budget_allocator.cpp with exit code 1"):
        build_allocator(tmp_path)
    assert list(tmp_path.iterdir()) == []
