"""Jobs keep their numbers and folders, whatever the order of the launches; one batch that breaks is not the others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_memfit.sweep import launching
from lightning_memfit.sweep.job import SweepJob
from lightning_memfit.sweep.launching import launch_jobs
from lightning_memfit.sweep.recorded_task import RecordedTask
from tests.sweep.rowmaking import job

JOBS = [job(3, "a=3"), job(0, "a=0"), job(1, "a=1")]


class Launcher:
    """Notes what it is asked for; breaks where it is told to."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.calls: list[tuple[list[list[str]], int]] = []
        self.breaks_at = breaks_at

    def launch(self, job_overrides: list[list[str]], initial_job_idx: int) -> list[str]:
        self.calls.append((job_overrides, initial_job_idx))
        if self.breaks_at == len(self.calls):
            raise RuntimeError("a worker was killed\nmore")
        return ["ran"] * len(job_overrides)


def launched(launcher: Launcher, max_batch_size: int | None) -> tuple[Any, list[tuple[list[int], str]], RecordedTask]:
    task, after = RecordedTask(lambda config: None), []

    def note(jobs: Sequence[SweepJob], problem: str) -> None:
        after.append(([each.number for each in jobs], problem))

    returns = launch_jobs(JOBS, launcher=launcher, task=task, max_batch_size=max_batch_size, after_batch=note)
    return returns, after, task


def test_a_launcher_gets_whole_batches_with_folders_and_the_task_the_numbers() -> None:
    launcher = Launcher()
    returns, after, task = launched(launcher, None)
    overrides = [[f"a={number}", f"hydra.sweep.subdir='{number}'"] for number in (3, 0, 1)]
    assert launcher.calls == [(overrides, 0)]
    assert task.numbers == {"3": 3, "0": 0, "1": 1}
    assert returns == [["ran"] * 3] and after == [([3, 0, 1], "")]


def test_numbers_that_follow_each_other_are_the_launchers_own() -> None:
    launcher = Launcher()
    launched(launcher, 1)
    assert [first for _, first in launcher.calls] == [3, 0, 1]
    launcher = Launcher()
    launched(launcher, 2)
    # 3 and 0 do not follow each other: counted from 0 on; 1 is alone.
    assert [(len(jobs), first) for jobs, first in launcher.calls] == [(2, 0), (1, 1)]


def test_hydras_own_launcher_gets_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "runs_one_by_one", lambda launcher: True)
    launcher = Launcher()
    launched(launcher, None)
    assert [(len(jobs), first) for jobs, first in launcher.calls] == [(1, 3), (1, 0), (1, 1)]


def test_a_batch_that_breaks_is_told_and_the_others_are_launched() -> None:
    returns, after, _ = launched(Launcher(breaks_at=1), 2)
    assert returns == [["ran"]]
    assert after == [([3, 0], "RuntimeError: a worker was killed"), ([1], "")]


def test_a_folder_with_any_characters_is_read_back_as_it_is() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for name in ("a=1,b='x'", "model=large lr=0.1", "x{1}", "[a: b]"):
        odd = SweepJob(number=0, overrides=(), subdir=name, config_digest="", config=None)
        override = OverridesParser.create().parse_override(launching._folder_override(odd))
        assert override.value() == name
