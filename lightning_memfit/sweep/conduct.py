"""Runs a sweep: composes and forecasts its jobs, launches those that may fit, and says what came of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_memfit.application.outcomes import asked_for
from lightning_memfit.errors import ConfigurationError, SweepError
from lightning_memfit.sweep.basic_hydra import sweep_overrides
from lightning_memfit.sweep.forecasts import forecast_jobs
from lightning_memfit.sweep.heard import tell
from lightning_memfit.sweep.job import SweepJob, compose_jobs, varying_overrides
from lightning_memfit.sweep.job_end import ERROR_FILE, read_job_end
from lightning_memfit.sweep.job_end import FILE_NAME as JOB_FILE
from lightning_memfit.sweep.job_forecast import JobForecast, launch_order
from lightning_memfit.sweep.launching import launch_jobs
from lightning_memfit.sweep.messages import (
    counted_jobs,
    done_before_words,
    failed_words,
    no_forecast_words,
    no_record_words,
)
from lightning_memfit.sweep.picture import NAME as PICTURE
from lightning_memfit.sweep.picture import write_picture
from lightning_memfit.sweep.recorded_task import RecordedTask
from lightning_memfit.sweep.rows import Row, rows_of
from lightning_memfit.sweep.subjects import subject_function
from lightning_memfit.sweep.sweep_file import completed_before, earlier_forecasts, write_sweep, write_table
from lightning_memfit.sweep.table import COLUMNS_OF_A_FILE, print_table
from lightning_memfit.sweep.wrong_settings import refuse_wrong_settings

_SECONDS_BETWEEN_WRITES = 5.0  # while forecasting: each write looks into the folders of all jobs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``hydra.sweeper`` says, checked where it is used."""

    max_batch_size: int | None = None
    """Most jobs that are handed to the launcher at a time."""
    device: str | None = None
    """What is planned for; ``None`` for the job's own."""
    subject: str | None = None
    """Import path of a function that makes what a job trains."""
    real: bool = False
    """Make modules for real to forecast them."""


def conduct(
    arguments: Sequence[str], *, config: Any, config_loader: Any, launcher: Any, task: RecordedTask, settings: Settings
) -> list[Sequence[Any]]:
    """Run a sweep, or the rest of one that was stopped.

    Args:
        arguments: the overrides to sweep over.
        config: the config of the sweep.
        config_loader: Hydra's.
        launcher: Hydra's, which was made with ``task``.
        task: the user's, recorded.
        settings: of the sweeper.

    Returns:
        What the launcher returned for each batch of jobs, in the order of their launch.

    Raises:
        SweepError: if jobs failed, once the others are done, and table and files are written.
        ConfigurationError: if a setting of the sweep or of a job cannot be used, or the folder holds another sweep.
    """
    function = subject_function(settings.subject)
    if settings.device is not None:
        asked_for(settings.device)
    if settings.max_batch_size is not None and settings.max_batch_size < 1:
        raise ConfigurationError(
            f"hydra.sweeper.max_batch_size={settings.max_batch_size} must be at least 1, or null for all jobs at once."
        )
    sweep = _Sweep(
        arguments=arguments,
        sweep_dir=Path(str(config.hydra.sweep.dir)),
        jobs=compose_jobs(config, sweep_overrides(arguments, config_loader), config_loader),
        console=_console(),
    )
    tell(sweep.sweep_dir)
    sweep.begin(config)
    refuse_wrong_settings(sweep.open_jobs)
    returns = []
    try:
        forecast_jobs(
            sweep.open_jobs,
            words=sweep.words,
            device=settings.device,
            function=function,
            real=settings.real,
            console=sweep.console,
            note=sweep.after_forecast,
        )
        to_launch = sweep.planned()
        if to_launch:
            returns = launch_jobs(
                to_launch,
                launcher=launcher,
                task=task,
                max_batch_size=settings.max_batch_size,
                after_batch=sweep.after_batch,
            )
    finally:  # also where the user stops the sweep
        rows = sweep.end()
    if failed := failed_words(rows, sweep.sweep_dir):
        raise SweepError(failed)
    return returns


@dataclass(kw_only=True)
class _Sweep:
    """A sweep that is under way."""

    arguments: Sequence[str]
    sweep_dir: Path
    jobs: Sequence[SweepJob]
    console: Console
    done_before: set[int] = field(default_factory=set)
    forecasts: dict[int, JobForecast] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    written_at: float = field(default_factory=time.monotonic)

    @property
    def words(self) -> dict[int, str]:
        """What tells each job from the others, for messages."""
        return {number: short or "no overrides" for number, short in varying_overrides(self.jobs).items()}

    @property
    def open_jobs(self) -> list[SweepJob]:
        return [job for job in self.jobs if job.number not in self.done_before]

    def begin(self, config: Any) -> None:
        """See what an earlier run completed, and keep the config as Hydra's own sweeper does."""
        from omegaconf import OmegaConf

        self.done_before = completed_before(self.sweep_dir, self.jobs)
        before = earlier_forecasts(self.sweep_dir, self.jobs)
        self.forecasts = {number: before[number] for number in self.done_before if number in before}
        try:
            self.sweep_dir.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(config, self.sweep_dir / "multirun.yaml")
        except OSError as error:
            raise ConfigurationError(
                f"hydra.sweep.dir={str(self.sweep_dir)!r} cannot be written to: {error}. Name another folder."
            ) from error
        if self.done_before:
            self._say(done_before_words(len(self.done_before), len(self.jobs), self.sweep_dir))

    def after_forecast(self, job: SweepJob, forecast: JobForecast) -> None:
        """Keep it; write how far the sweep is now and then, so that one that is killed meanwhile leaves something."""
        self.forecasts[job.number] = forecast
        if time.monotonic() - self.written_at >= _SECONDS_BETWEEN_WRITES:
            self.write()

    def planned(self) -> list[SweepJob]:
        """The jobs to launch, in that order; says what is left out, and why."""
        by_number = {job.number: job for job in self.open_jobs}
        order = launch_order({number: self.forecasts[number] for number in by_number})
        self.write()
        for number in by_number:
            if number not in order:
                self._say(f"left out: job {number}, {self.forecasts[number].reason} ({self.words[number]})")
        if order:
            if warning := no_forecast_words(self.forecasts[number] for number in by_number):
                self._say(warning, style="bold red")
            named = ", ".join(map(str, order))
            self._say(f"launching {len(order)} of {counted_jobs(len(self.jobs))}, cheapest first: {named}")
            self._say(f"if the sweep is stopped, the same command with hydra.sweep.dir={self.sweep_dir} goes on")
        for number in order:
            # What an earlier try left must not be taken for the end of this one.
            for name in (JOB_FILE, ERROR_FILE):
                (self.sweep_dir / by_number[number].subdir / name).unlink(missing_ok=True)
        return [by_number[number] for number in order]

    def after_batch(self, jobs: Sequence[SweepJob], problem: str) -> None:
        """Keep what went wrong with jobs that left no record, and write how far the sweep is."""
        for job in jobs:
            if read_job_end(self.sweep_dir / job.subdir) is None:
                self.problems[job.number] = no_record_words(problem, batch_size=len(jobs))
        self.write()

    def rows(self) -> list[Row]:
        return rows_of(
            self.jobs,
            self.forecasts,
            sweep_dir=self.sweep_dir,
            from_before=self.done_before,
            problems=self.problems,
        )

    def write(self) -> None:
        self.written_at = time.monotonic()
        write_sweep(self.sweep_dir, self.rows(), arguments=self.arguments)

    def end(self) -> list[Row]:
        """Write everything and print the table."""
        rows = self.rows()
        write_sweep(self.sweep_dir, rows, arguments=self.arguments)
        write_table(self.sweep_dir, rows)
        why_not = write_picture(self.sweep_dir, rows)
        print_table(rows, console=self.console)
        names = "sweep.csv, sweep.json" if why_not else f"sweep.csv, sweep.json, {PICTURE}.png, {PICTURE}.svg"
        self._say(f"in {self.sweep_dir}: {names}")
        if why_not:
            self._say(why_not)
        return rows

    def _say(self, words: str, style: str | None = None) -> None:
        self.console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=COLUMNS_OF_A_FILE)
