"""Hands jobs to Hydra's launcher, and sees to it that they keep their numbers and folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_memfit.errors import first_line
from lightning_memfit.sweep.basic_hydra import runs_one_by_one
from lightning_memfit.sweep.job import SweepJob
from lightning_memfit.sweep.recorded_task import RecordedTask


def launch_jobs(
    jobs: Sequence[SweepJob],
    *,
    launcher: Any,
    task: RecordedTask,
    max_batch_size: int | None,
    after_batch: Callable[[Sequence[SweepJob], str], None],
) -> list[Sequence[Any]]:
    """Launch jobs in the order given.

    A launcher numbers the jobs of one call from a first number on. Hydra's own runs them one after the other, so that
    it gets them one by one, each with its number. Others get a whole batch: the folder is then given as an override,
    and the task sets ``hydra.job.num`` right; only the launcher's log and ``.hydra/hydra.yaml`` count launches.

    Args:
        jobs: in the order of their launch.
        launcher: Hydra's.
        task: what the launcher runs; it is told the jobs' numbers.
        max_batch_size: most jobs of one batch; ``None`` for all.
        after_batch: is called after each batch, with its jobs and with what went wrong with the launcher, if anything.

    Returns:
        What the launcher returned for each batch.
    """
    task.numbers = {job.subdir: job.number for job in jobs}
    returns = []
    launched = 0
    for batch in _batches(jobs, 1 if runs_one_by_one(launcher) else max_batch_size):
        numbers = [job.number for job in batch]
        consecutive = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        problem = ""
        try:
            overrides = [[*job.overrides, _folder_override(job)] for job in batch]
            returns.append(launcher.launch(overrides, initial_job_idx=numbers[0] if consecutive else launched))
        except Exception as error:  # such as a process of a job that was killed; the other batches are still run
            problem = f"{type(error).__name__}: {first_line(error)}"
        launched += len(batch)
        after_batch(batch, problem)
    return returns


def _batches(jobs: Sequence[SweepJob], size: int | None) -> Iterator[Sequence[SweepJob]]:
    size = size or max(1, len(jobs))
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]


def _folder_override(job: SweepJob) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"hydra.sweep.subdir={QuotedString(text=job.subdir, quote=Quote.single).with_quotes()}"
