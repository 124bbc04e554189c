"""The picture of memory against throughput."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.picture import KINDS, points, write_picture
from lightning_memfit.sweep.rows import Row
from tests.sweep.rowmaking import end, forecast, job, measured, row

UNKNOWN = JobForecast(verdict="cannot tell", reason="no model")


def rows() -> list[Row]:
    return [
        row(0, "a=1", forecast=forecast(), end=end(job(0)), measured=measured()),
        row(1, "a=2", forecast=forecast(), end=end(job(1))),
        row(2, "a=3", forecast=forecast(peak_mib=120)),
        row(3, "a=4", forecast=forecast(), end=end(job(3), "does not fit")),
        row(4, "a=5", forecast=UNKNOWN, end=end(job(4), "failed"), measured=measured()),
        row(7, "a=8", forecast=forecast(), end=end(job(7), "failed")),
        row(5, "a=6", forecast=UNKNOWN, end=end(job(5))),
        row(6, "a=7", forecast=forecast()),
    ]


def test_throughput_is_measured_for_what_was_trained_and_predicted_for_what_was_not() -> None:
    found = points(rows())
    # Of 100 MiB 48 by the plan that was applied, and 50 and 120 before the launch;
    # 8 samples in 0.25 s as measured, in 0.5 s as predicted.
    assert [(point.percent, point.samples_per_second) for point in found] == [
        (48.0, 32.0), (50.0, 16.0), (120.0, 16.0), (50.0, 16.0), (48.0, 32.0), (50.0, 16.0),
    ]  # fmt: skip
    assert [point.kind for point in found] == list(KINDS)


@pytest.mark.parametrize("count", [1, 8, 30])
def test_a_picture_is_written_and_is_the_same_for_the_same_results(tmp_path: Path, count: int) -> None:
    import dataclasses

    found = [dataclasses.replace(rows()[number % 8], job=job(number, f"a={number}")) for number in range(count)]
    assert write_picture(tmp_path, found) == ""
    first = [(tmp_path / f"sweep.{ending}").read_bytes() for ending in ("png", "svg")]
    assert first[0].startswith(b"\x89PNG") and b"<svg" in first[1]
    write_picture(tmp_path, found)
    assert [(tmp_path / f"sweep.{ending}").read_bytes() for ending in ("png", "svg")] == first


def test_the_users_backend_and_settings_stay_as_they_are(tmp_path: Path) -> None:
    import matplotlib

    def figures() -> list[int]:
        return matplotlib.pyplot.get_fignums() if "matplotlib.pyplot" in sys.modules else []

    before, open_before = dict(matplotlib.rcParams), figures()
    write_picture(tmp_path, rows())
    assert dict(matplotlib.rcParams) == before
    assert figures() == open_before


def test_without_matplotlib_the_way_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'lightning-memfit[sweeps]'" in write_picture(tmp_path, rows())
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_could_not_be_forecast_is_drawn_by_the_plan_that_it_made(tmp_path: Path) -> None:
    assert write_picture(tmp_path, [row(0, forecast=UNKNOWN, end=end(job(0)), measured=measured())]) == ""


def test_without_a_forecast_there_is_nothing_to_draw(tmp_path: Path) -> None:
    assert write_picture(tmp_path, [row(0, forecast=UNKNOWN, end=end(job(0)))]).startswith("no picture")
