"""What is refused before a sweep begins, and what a sweep that is stopped leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError, SweepError
from lightning_memfit.sweep import conduct as conducting
from lightning_memfit.sweep.conduct import Settings, conduct
from lightning_memfit.sweep.job import compose_jobs
from lightning_memfit.sweep.job_end import JobEnd, write_job_end
from lightning_memfit.sweep.recorded_task import RecordedTask
from tests.sweep.conftest import composing

CONFIG = "width: 8\nmemfit: {budget: 64MiB}\nhydra: {sweep: {dir: swept}}"


class Square:
    """What a job trains; ``hydra.sweeper.subject`` names it."""

    optimizer = torch.optim.SGD

    def __init__(self, config: Any) -> None:
        self.module = nn.Linear(config.width, config.width, bias=False)
        self.batch = torch.zeros(4, config.width)

    @staticmethod
    def loss(module: nn.Module, batch: Any) -> Any:
        return module(batch).sum()


class Stopped:
    """A launcher during which the user stops the sweep."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        raise KeyboardInterrupt


class Refused:
    """A launcher that launches nothing."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        raise AssertionError("nothing may be launched")


def swept(folder: Path, launcher: Any, *arguments: str, **settings: Any) -> Any:
    with composing(folder / "conf", CONFIG) as (config, loader):
        return conduct(
            arguments,
            config=config,
            config_loader=loader,
            launcher=launcher,
            task=RecordedTask(lambda config: None),
            settings=Settings(**settings),
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "x100"}, "x100"),
        ({"subject": "no.such.function"}, "hydra.sweeper.subject='no.such.function' cannot be imported"),
        ({"subject": "no.such.function"}, "No module named 'no'.* Write package.module.function, and run where"),
        ({"max_batch_size": 0}, "hydra.sweeper.max_batch_size=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_used_end_the_sweep_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        swept(tmp_path, Refused(), "width=8,16", **settings)
    assert not (tmp_path / "swept").exists()


def test_a_job_with_a_setting_that_cannot_be_used_ends_the_sweep_before_any_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"job 1 \(memfit.budget=lots\): memfit.budget='lots'"):
        swept(tmp_path, Refused(), "memfit.budget=64MiB,lots", device="t4", subject=f"{__name__}.Square")
    assert "forecast" not in capsys.readouterr().out


def test_a_sweep_of_which_nothing_fits_launches_nothing_and_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # 2048 x 2048 weights: 16 MiB of parameters and as many of gradients.
    words = ("width=2048", "memfit.budget=20MiB,24MiB")
    assert swept(tmp_path, Refused(), *words, device="t4", subject=f"{__name__}.Square") == []
    out = capsys.readouterr().out
    assert "2 jobs: 2 left out" in out
    assert "left out: job 0" in out and "(budget=20MiB)" in out


def test_a_sweep_that_the_user_stops_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, Stopped(), "width=8,16", device="t4", subject=f"{__name__}.Square")
    assert "2 jobs: 2 not run" in capsys.readouterr().out
    jobs = json.loads((tmp_path / "swept" / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["not run", "not run"]


class StoppedAt16(Square):
    """Square, of which making a wide one takes so long that the user stops the sweep."""

    def __init__(self, config: Any) -> None:
        if config.width == 16:
            raise KeyboardInterrupt
        super().__init__(config)


def test_a_sweep_that_the_user_stops_while_jobs_are_forecast_leaves_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        swept(
            tmp_path, Refused(), "width=2048,16", "memfit.budget=24MiB", device="t4", subject=f"{__name__}.StoppedAt16"
        )
    jobs = json.loads((tmp_path / "swept" / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["left out", "not run"]
    assert "2 jobs: 1 left out, 1 not run" in capsys.readouterr().out


def test_how_far_a_sweep_is_with_its_forecasts_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conducting, "_SECONDS_BETWEEN_WRITES", 0.0)
    written = []
    monkeypatch.setattr(conducting, "write_sweep", lambda folder, rows, **named: written.append(known(rows)))

    def known(rows: Any) -> int:
        return sum(row.forecast is not None for row in rows)

    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, Stopped(), "width=8,16", device="t4", subject=f"{__name__}.Square")
    assert written[:2] == [1, 2]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swept").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"hydra.sweep.dir='swept' cannot be written to: .* Name another"):
        swept(tmp_path, Refused(), "width=8", device="t4", subject=f"{__name__}.Square")


def fails(config: Any) -> Any:
    raise ValueError("not in a forecast")


@pytest.mark.parametrize(
    ("subject", "reason"), [(f"{__name__}.fails", "raised ValueError: not in a forecast"), (None, "has no 'model'")]
)
def test_that_nothing_could_be_forecast_is_said_aloud_before_anything_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subject: Any, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SweepError):
        swept(tmp_path, Silent(), "width=8,16", device="t4", subject=subject)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING"))
    assert line.startswith("WARNING: no job is left out, since none could be forecast: ") and reason in line
    assert "other reasons" not in line


def test_that_some_could_not_be_forecast_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SweepError):
        swept(tmp_path, Silent(), "width=8,-1", device="t4", subject=f"{__name__}.Square")
    assert "WARNING" not in capsys.readouterr().out


class Silent:
    """A launcher whose jobs leave nothing, as if their processes were killed."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        return []


def test_a_job_that_leaves_no_record_is_a_failed_one_whatever_an_earlier_try_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"device": "t4", "subject": f"{__name__}.Square"}
    with composing(tmp_path / "conf", CONFIG) as (config, loader):
        (job,) = compose_jobs(config, [("width=8",)], loader)
    write_job_end(
        tmp_path / "swept" / "0",
        JobEnd(status="failed", number=0, overrides=("width=8",), config_digest=job.config_digest, reason="earlier"),
    )
    with pytest.raises(SweepError) as raised:
        swept(tmp_path, Silent(), "width=8", **settings)
    assert "1 of 1 job failed:\n  - job 0 (width=8): it left no job.json: its process was killed" in str(raised.value)
    assert "run the same command with hydra.sweep.dir=swept" in str(raised.value)
