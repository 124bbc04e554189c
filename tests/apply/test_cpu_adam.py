"""DeepSpeed's Adam for the host is tried with a time limit, and a lock is taken away only where nobody holds it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_memfit.apply import cpu_adam
from lightning_memfit.apply.cpu_adam import extensions_folder, find_cpu_adam, forget_cpu_adam

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="who holds a lock is read from /proc")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    forget_cpu_adam()
    yield tmp_path
    forget_cpu_adam()


def lock_in(folder: Path, *, seconds_old: float) -> Path:
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - seconds_old, time.time() - seconds_old))
    return lock


def test_a_try_that_steps_is_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert extensions_folder() == folder
    monkeypatch.setattr(cpu_adam, "_TRY", f"open({str(folder / 'tries')!r}, 'a').write('x')")
    assert find_cpu_adam().works and find_cpu_adam().works
    assert (folder / "tries").read_text() == "x"
    forget_cpu_adam()
    assert find_cpu_adam().works
    assert (folder / "tries").read_text() == "xx"


def test_the_child_is_no_rank_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(cpu_adam, "_TRY", "import os; assert 'RANK' not in os.environ")
    assert find_cpu_adam().works


def test_a_try_that_fails_says_what_to_do_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_adam, "_TRY", "raise RuntimeError('no compiler')")
    found = find_cpu_adam()
    assert not found.works
    assert found.reason.startswith(
        "DeepSpeedCPUAdam cannot be had here: the try ended with code 1. Build it beforehand"
    )
    assert found.reason.endswith("RuntimeError: no compiler\n")


def test_a_crash_is_no_crash_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_adam, "_TRY", "import os; os.kill(os.getpid(), 4)")  # an instruction the machine lacks
    assert "ended with signal 4" in find_cpu_adam().reason


def test_a_try_that_hangs_is_ended_with_what_it_started_and_its_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        f"os.makedirs({str(folder / 'cpu_adam')!r}, exist_ok=True)\n"
        f"held = os.open({str(folder / 'cpu_adam' / 'lock')!r}, os.O_CREAT | os.O_EXCL)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(folder / 'compiler')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(cpu_adam, "_TRY", program)
    found = find_cpu_adam(seconds=2)
    assert not found.works and found.reason.startswith("DeepSpeedCPUAdam was not ready after 2 s. Build it beforehand")
    assert not (folder / "cpu_adam" / "lock").exists()
    compiler = Path("/proc") / (folder / "compiler").read_text() / "stat"
    assert not compiler.exists() or compiler.read_text().split()[2] == "Z"


def test_an_old_lock_that_nobody_holds_is_taken_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_in(folder, seconds_old=601)
    monkeypatch.setattr(cpu_adam, "_TRY", "pass")
    assert find_cpu_adam().works and not lock.exists()


def test_a_young_lock_stays_since_another_machine_may_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_in(folder, seconds_old=30)
    found = find_cpu_adam(seconds=1)
    assert not found.works and lock.exists()
    assert "was left by a build that nobody here runs; a machine that shares the folder may, for 600 s" in found.reason
    assert found.reason.endswith("It was waited for 1 s.")
    lock.unlink()  # that machine is done
    monkeypatch.setattr(cpu_adam, "_TRY", "pass")
    assert find_cpu_adam(seconds=60).works


def test_a_build_of_another_machine_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_in(folder, seconds_old=30)
    monkeypatch.setattr(cpu_adam, "_LOOK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(cpu_adam, "_TRY", f"import os; assert not os.path.exists({str(lock)!r})")
    ends = threading.Timer(0.2, lock.unlink)
    ends.start()
    try:
        assert find_cpu_adam(seconds=60).works
    finally:
        ends.join()


def test_a_lock_that_becomes_old_while_it_is_waited_for_is_taken_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_in(folder, seconds_old=599)
    monkeypatch.setattr(cpu_adam, "_LOOK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(cpu_adam, "_TRY", "pass")
    assert find_cpu_adam(seconds=60).works and not lock.exists()


def test_a_lock_that_a_process_holds_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_in(folder, seconds_old=5000)
    program = f"import time; held = open({str(lock)!r}); print(1, flush=True); time.sleep(60)"
    builder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert builder.stdout is not None and builder.stdout.readline()
        monkeypatch.setattr(cpu_adam, "_TRY", "import time; time.sleep(60)")
        found = find_cpu_adam(seconds=1)
        assert not found.works and lock.exists()
        assert f"while process {builder.pid} held {lock}" in found.reason
    finally:
        builder.kill()
        builder.communicate()


@pytest.mark.slow
def test_the_real_extension_is_built_and_steps() -> None:
    pytest.importorskip("deepspeed")
    found = find_cpu_adam()
    assert found.works, found.reason
