"""Forecasts the jobs of a sweep, each kind of job once, and says how far it is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_memfit.application.composed import device_of
from lightning_memfit.application.outcomes import Asked, asked_for, outcome_on
from lightning_memfit.application.subject import Subject
from lightning_memfit.batch_tree import batch_size_of
from lightning_memfit.cache_folder import default_cache_dir
from lightning_memfit.errors import BatchArithmeticError, MemFitError, first_line, is_out_of_memory
from lightning_memfit.fingerprint import fingerprint_key, fingerprint_of
from lightning_memfit.plan import PlanRequest
from lightning_memfit.sweep.job import SweepJob
from lightning_memfit.sweep.job_forecast import JobForecast, forecast_of
from lightning_memfit.sweep.subjects import SubjectFunction, subject_of_job, told_settings
from lightning_memfit.sweep.wrong_settings import batch_is_as_it_will_be, refuse
from lightning_memfit.units import format_seconds

_REAL_OPTION = "hydra.sweeper.real=true"
_Kind = tuple[Any, ...]
_Say = Callable[[SweepJob, JobForecast], None]


def forecast_jobs(
    jobs: Sequence[SweepJob],
    *,
    words: Mapping[int, str],
    device: str | None,
    function: SubjectFunction | None,
    real: bool,
    console: Console,
    note: _Say = lambda job, forecast: None,
) -> dict[int, JobForecast]:
    """Forecast every job.

    Args:
        jobs: the jobs.
        words: what tells each from the others, by number.
        device: what is planned for; ``None`` for what a job's ``hardware.device`` says, or ``"local"``.
        function: makes what a job trains; ``None`` makes it of the config.
        real: make modules for real, not on ``meta``.
        console: shows how far it is: a bar in a terminal, and lines anywhere else.
        note: is told each job's forecast as soon as it is made.

    Returns:
        By the job's number.

    Raises:
        ConfigurationError: naming the jobs whose batch cannot be divided as they ask, once all are forecast.
    """
    found: dict[int, JobForecast] = {}
    kinds: dict[_Kind, int] = {}
    wrong: dict[int, str] = {}
    with _progress(len(jobs), words, console) as say:
        for job in jobs:
            try:
                found[job.number] = _forecast(job, device, function, real=real, kinds=kinds, found=found)
            except BatchArithmeticError as error:
                wrong[job.number] = f"memfit.{error}"
                found[job.number] = JobForecast(verdict="cannot tell", reason=first_line(error))
            note(job, found[job.number])
            say(job, found[job.number])
    refuse(wrong, jobs)
    return found


def _forecast(
    job: SweepJob,
    device: str | None,
    function: SubjectFunction | None,
    *,
    real: bool,
    kinds: dict[_Kind, int],
    found: dict[int, JobForecast],
) -> JobForecast:
    began = time.perf_counter()
    name = device or device_of(job.config) or "local"
    try:
        asked = asked_for(name)
        with subject_of_job(job, function, real=real) as subject:
            kind = _kind_of(job, subject, asked, whole=function is not None)
            equal = kinds.setdefault(kind, job.number)
            if equal != job.number:
                steps, seconds = subject.optimizer_steps, time.perf_counter() - began
                return dataclasses.replace(found[equal], optimizer_steps=steps, same_as=equal, seconds=seconds)
            settings = {"cache_dir": default_cache_dir(), **subject.settings}
            outcome = outcome_on(asked, subject, settings, real_option=_REAL_OPTION)
    # Whatever cannot be forecast is launched: it is the job's own run that tells. What cannot be run at all is not.
    except Exception as error:
        is_sure = function is None and batch_is_as_it_will_be(job.config)
        if isinstance(error, BatchArithmeticError) and is_sure:
            raise
        seconds = time.perf_counter() - began
        return JobForecast(verdict="cannot tell", reason=_words(error), device=name, seconds=seconds)
    seconds = time.perf_counter() - began
    return forecast_of(outcome, optimizer_steps=subject.optimizer_steps, seconds=seconds)


def _kind_of(job: SweepJob, subject: Subject, asked: Asked, *, whole: bool) -> _Kind:
    """What equal jobs have in common: what a plan is made for, what is asked of it, and the model's own settings."""
    if asked.device is None:
        return (job.number,)
    fingerprint = fingerprint_of(
        subject.module,
        subject.batch,
        device=asked.device,
        request=PlanRequest(),
        optimizer=None,  # that of equal modules with equal settings
        loader_batch_size=batch_size_of(subject.batch),
    )
    settings = sorted((name, repr(value)) for name, value in subject.settings.items())
    return asked.name, fingerprint_key(fingerprint), *settings, *told_settings(job.config, whole=whole)


def _words(error: Exception) -> str:
    if isinstance(error, MemFitError):
        return first_line(error)
    if is_out_of_memory(error):
        return f"this machine ran out of memory while forecasting ({type(error).__name__}: {first_line(error)})"
    return f"its forecast raised {type(error).__name__}: {first_line(error)}"


@contextmanager
def _progress(count: int, words: Mapping[int, str], console: Console) -> Iterator[_Say]:
    if not console.is_terminal:
        yield _Lines(count, words, console)
        return
    columns = (
        TextColumn("forecasting"), BarColumn(), MofNCompleteColumn(), TextColumn("jobs,"), TimeElapsedColumn(),
        TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("forecasting", total=count)
        yield lambda job, forecast: progress.advance(task)


class _Lines:
    """One line for each job that is done."""

    def __init__(self, count: int, words: Mapping[int, str], console: Console) -> None:
        self._count, self._words, self._console = count, words, console
        self._done, self._began = 0, time.perf_counter()

    def __call__(self, job: SweepJob, forecast: JobForecast) -> None:
        self._done += 1
        left = (self._count - self._done) * (time.perf_counter() - self._began) / self._done
        until = f", about {format_seconds(left)} left" if self._done < self._count else ""
        what = f"{forecast.verdict}: {forecast.reason}"
        if forecast.same_as is not None:
            what = f"{forecast.verdict}, as job {forecast.same_as}"
        line = f"forecast {self._done} of {self._count}{until}: job {job.number} {what} ({self._words[job.number]})"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
