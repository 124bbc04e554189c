"""The fixture that looks for traces of a test finds them, and lets clean tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import os, threading, torch

def test_a_variable():
    os.environ["MEMFIT"] = "off"

def test_a_dtype():
    torch.set_default_dtype(torch.float64)

def test_a_thread():
    threading.Thread(target=threading.Event().wait, args=(2,), name="left-running").start()

def test_what_is_undone(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
"""


def test_what_a_test_leaves_behind_is_named_and_what_it_undoes_is_not(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_traces.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    environment = {**os.environ, "PYTHONPATH": str(CONFTEST.parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert result.returncode == 1, result.stdout
    assert "4 passed, 3 errors" in result.stdout
    found = {line.split("::")[1].split(" - ")[0] for line in result.stdout.splitlines() if line.startswith("ERROR ")}
    assert found == {"test_a_variable", "test_a_dtype", "test_a_thread"}
    assert "the test left traces in the process: default dtype: torch.float32 became torch.float64" in result.stdout
    assert "left-running" in result.stdout
