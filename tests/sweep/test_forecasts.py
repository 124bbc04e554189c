"""Forecasts of jobs: each kind once, for the right device, and never an error that ends the sweep."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_memfit.application.outcomes import asked_for
from lightning_memfit.application.subject import Subject
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep import forecasts
from lightning_memfit.sweep.forecasts import forecast_jobs
from lightning_memfit.sweep.job import compose_jobs
from lightning_memfit.sweep.job_forecast import JobForecast
from tests.sweep.conftest import composing

CONFIG = "width: 8\nlearning_rate: 0.1\nmemfit: {budget: 64MiB}\nhardware: {device: null}"


class Square:
    """One layer without a bias, stepped by SGD."""

    optimizer = torch.optim.SGD

    def __init__(self, config: Any) -> None:
        if config.width < 0:
            raise ValueError("a width below 0")
        self.module = nn.Linear(config.width, config.width, bias=False)
        self.batch = torch.zeros(4, config.width)
        self.optimizer_steps = 10

    @staticmethod
    def loss(module: nn.Module, batch: Any) -> Any:
        return module(batch).sum()


class Masked(Square):
    """Needs the values of its batch."""

    @staticmethod
    def loss(module: nn.Module, batch: Any) -> Any:
        return module(batch)[module.weight.sum(1) > 0].sum()


def forecast_all(
    tmp_path: Path, *jobs: tuple[str, ...], device: str | None = "t4", function: Any = Square
) -> tuple[dict[int, JobForecast], list[str]]:
    text = io.StringIO()
    with composing(tmp_path / "conf", CONFIG) as (config, loader):
        composed = compose_jobs(config, jobs, loader)
    console = Console(file=text, width=200)
    words = {job.number: job.words for job in composed}
    found = forecast_jobs(composed, words=words, device=device, function=function, real=False, console=console)
    return found, text.getvalue().splitlines()


def test_equal_jobs_are_forecast_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    outcome_on = forecasts.outcome_on

    def counted(asked: Any, subject: Any, *positional: Any, **named: Any) -> Any:
        planned.append(subject.words)
        return outcome_on(asked, subject, *positional, **named)

    monkeypatch.setattr(forecasts, "outcome_on", counted)
    jobs = [("learning_rate=0.1",), ("learning_rate=0.2",), ("width=16",), ("memfit.budget=32MiB",)]
    found, lines = forecast_all(tmp_path, *jobs)
    assert planned == ["learning_rate=0.1", "width=16", "memfit.budget=32MiB"]
    assert [found[number].same_as for number in range(4)] == [None, 0, None, None]
    assert found[1].predicted_peak_bytes == found[0].predicted_peak_bytes
    assert lines[0].startswith("forecast 1 of 4, about ") and " left: job 0 fits: " in lines[0]
    assert lines[1].endswith("job 1 fits, as job 0 (learning_rate=0.2)")
    assert lines[3].startswith("forecast 4 of 4: job 3 ") and len(lines) == 4


def test_jobs_with_other_budgets_are_not_equal_where_models_are(tmp_path: Path) -> None:
    with composing(tmp_path / "conf", "model: {width: 8, lr: 1}\nmemfit: {budget: 64MiB}") as (config, loader):
        jobs = compose_jobs(config, [(), ("model.lr=2",), ("memfit.budget=32MiB",)], loader)
    square = Square(jobs[0].config.model)
    kinds = [
        forecasts._kind_of(
            job,
            Subject(
                words=job.words, module=square.module, batch=square.batch, on_meta=False, settings=job.config.memfit
            ),
            asked_for("t4"),
            whole=False,
        )
        for job in jobs
    ]
    assert kinds[0] == kinds[1] != kinds[2]


def test_what_cannot_fit_is_told_with_its_bytes(tmp_path: Path) -> None:
    # 2048 x 2048 weights: 16 MiB of parameters and as many of gradients.
    found, _ = forecast_all(tmp_path, ("width=2048", "memfit.budget=24MiB"))
    assert found[0].verdict == "does not fit" and found[0].missing_bytes >= 8 * 1024**2
    assert found[0].predicted_peak_bytes == found[0].budget_bytes + found[0].missing_bytes  # type: ignore[operator]
    assert found[0].optimizer_steps == 10 and found[0].effective_batch_size == 4


@pytest.mark.parametrize(
    ("device", "own", "planned"),
    [("t4", "a100-40gb", "t4"), (None, "a100-40gb", "a100-40gb"), (None, "null", "local")],
)
def test_the_sweepers_device_comes_first_and_then_the_jobs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, own: str, planned: str
) -> None:
    asked_for = []

    def note(name: str) -> Any:
        asked_for.append(name)
        raise RuntimeError("no more is wanted")

    monkeypatch.setattr(forecasts, "asked_for", note)
    found, _ = forecast_all(tmp_path, (f"hardware.device={own}",), device=device)
    assert asked_for == [planned] and found[0].device == planned


def test_what_cannot_be_forecast_is_told_and_not_left_out(tmp_path: Path) -> None:
    found, _ = forecast_all(tmp_path, ("width=-1",), ("+hardware.device=x100", "width=8"), device=None)
    assert found[0].verdict == found[1].verdict == "cannot tell"
    assert "raised ValueError: a width below 0" in found[0].reason
    assert "x100" in found[1].reason
    untraced, _ = forecast_all(tmp_path, ("width=8",), function=Masked)
    assert untraced[0].verdict == "cannot tell" and "cannot be traced" in untraced[0].reason


def test_what_is_not_foreseen_does_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*positional: Any, **named: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(forecasts, "outcome_on", broken)
    found, _ = forecast_all(tmp_path, ("width=8",))
    assert found[0].verdict == "cannot tell" and found[0].reason == "its forecast raised KeyError: 'lost'"


def test_a_batch_that_cannot_be_divided_as_asked_is_refused_once_all_are_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def subject_of_job(job: Any, function: Any, *, real: bool) -> Iterator[Subject]:
        square = Square(job.config)
        settings = {"effective_batch_size": 4, "micro_batch_size": job.config.memfit.get("micro_batch_size")}
        yield Subject(
            words="", module=square.module, batch=square.batch, loss=square.loss, optimizer=torch.optim.SGD,
            on_meta=False, settings=settings,
        )  # fmt: skip

    monkeypatch.setattr(forecasts, "subject_of_job", subject_of_job)
    jobs = [("+model={a:1}", each) for each in ("width=8", "+memfit.micro_batch_size=8", "width=16")]
    text = "job 1 (+model={a:1} +memfit.micro_batch_size=8): memfit.micro_batch_size=8 is more than the 4 samples"
    with pytest.raises(ConfigurationError) as raised:
        forecast_all(tmp_path, *jobs, function=None)
    assert str(raised.value).startswith(f"No job is launched: 1 of 3 have settings that MemFit cannot use. {text}")
    # Of the user's own function it is not known whether a job's batch is of the same size.
    found, _ = forecast_all(tmp_path, *jobs)
    assert [found[number].verdict for number in range(3)] == ["fits", "cannot tell", "fits"]


def test_in_a_terminal_a_bar_shows_what_is_done_and_left(tmp_path: Path) -> None:
    text = io.StringIO()
    with composing(tmp_path / "conf", CONFIG) as (config, loader):
        jobs = compose_jobs(config, [("width=8",), ("width=16",)], loader)
    console = Console(file=text, force_terminal=True, width=120)
    forecast_jobs(jobs, words={}, device="t4", function=Square, real=False, console=console)
    assert "2/2" in text.getvalue() and "jobs," in text.getvalue() and "left" in text.getvalue()
