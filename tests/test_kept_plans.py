"""Plans and corrections between runs: whole files, one run at a time, and nothing lost when a process dies.

Run: ``pytest tests/test_kept_plans.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memfit import kept_plans
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.kept_plans import WAITED_IN_VAIN, KeptCorrections, KeptPlan
from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, MemoryBreakdown, Plan, PlanRequest

ONE = Candidate(precision="32-true", split=BatchSplit(effective_batch_size=4, loader_batch_size=4, slice_sizes=(4,)))
HALVES = replace(ONE, split=replace(ONE.split, slice_sizes=(2, 2)))
PLAN = Plan(
    request=PlanRequest(),
    device=DeviceSpec(name="host", kind="cpu", capacity_bytes=100, available_bytes=90, process_bytes=10, cores=1),
    budget=Budget(budget_bytes=90, capacity_bytes=100, headroom_bytes=0, non_torch_bytes=0, reason="given"),
    forecast=Forecast(
        candidate=ONE, memory=MemoryBreakdown(peak_allocated_bytes=50, peak_phase=None, num_parameters=1)
    ),
    choices=(),
    fingerprint={},
)
HOLD = """
import sys, time
from pathlib import Path
from lightning_memfit.kept_plans import KeptPlan
with KeptPlan(Path(sys.argv[1]), "key").alone():
    print("alone", flush=True)
    time.sleep(120)
"""


def test_a_plan_is_kept_under_its_key(tmp_path: Path) -> None:
    KeptPlan(tmp_path / "deep", "one").save(PLAN)
    assert KeptPlan(tmp_path / "deep", "one").load() == PLAN
    assert KeptPlan(tmp_path / "deep", "another").load() is None


@pytest.mark.parametrize("text", ["", "schema_version: 1\n", "schema_version: 1\nrequest: {effecti", "\x00"])
def test_what_cannot_be_read_is_as_if_it_were_not_there_and_is_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / "key.yaml").write_text(text)
    kept = KeptPlan(tmp_path, "key")
    assert kept.load() is None
    kept.save(PLAN)
    assert kept.load() == PLAN


def test_a_folder_that_cannot_be_written_to_keeps_nothing_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptPlan(tmp_path / "file" / "plans", "key")
    with kept.alone() as note:
        assert note is None
        kept.save(PLAN)
    assert kept.load() is None
    corrections = KeptCorrections(tmp_path / "file" / "corrections", "key")
    corrections.add({ONE: 1})
    assert corrections.load() == {}


def test_the_oldest_plans_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST_PLANS", 2)
    for age, key in ((3, "oldest"), (2, "old")):
        KeptPlan(tmp_path, key).save(PLAN)
        os.utime(tmp_path / f"{key}.yaml", (10_000 - age, 10_000 - age))
    KeptPlan(tmp_path, "new").save(PLAN)
    assert sorted(path.name for path in tmp_path.glob("*.yaml")) == ["new.yaml", "old.yaml"]


def test_a_run_waits_for_another_no_longer_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "WAIT_SECONDS", 0.05)
    with KeptPlan(tmp_path, "key").alone() as first, KeptPlan(tmp_path, "other").alone() as other:
        assert first is None and other is None
        with KeptPlan(tmp_path, "key").alone() as second:
            assert second == WAITED_IN_VAIN


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "alone\n"
        monkeypatch.setattr(kept_plans, "WAIT_SECONDS", 0.05)
        with KeptPlan(tmp_path, "key").alone() as note:
            assert note == WAITED_IN_VAIN, "the other process has it"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        monkeypatch.setattr(kept_plans, "WAIT_SECONDS", 30.0)
        with KeptPlan(tmp_path, "key").alone() as note:
            assert note is None
    finally:
        holder.kill()
        holder.communicate()


def test_corrections_are_kept_in_the_order_of_running_and_the_latest_counts(tmp_path: Path) -> None:
    kept = KeptCorrections(tmp_path, "key")
    assert kept.load() == {}
    kept.add({ONE: 100, HALVES: -7})
    kept.add({ONE: 90})
    assert list(kept.load().items()) == [(HALVES, -7), (ONE, 90)]
    assert KeptCorrections(tmp_path, "other").load() == {}


def test_the_oldest_corrections_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST_CORRECTIONS", 1)
    kept = KeptCorrections(tmp_path, "key")
    kept.add({ONE: 100, HALVES: -7})
    assert kept.load() == {HALVES: -7}


@pytest.mark.parametrize(
    "text", ["", "corrections: 3\n", "corrections: [{candidate: {}, bytes: 1}]\n", "corrections:\n- {bytes: 1}\n"]
)
def test_corrections_that_cannot_be_read_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "key.yaml").write_text(text)
    assert KeptCorrections(tmp_path, "key").load() == {}
