"""The one table at the end."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from lightning_memfit.sweep.job_forecast import JobForecast
from lightning_memfit.sweep.rows import Row
from lightning_memfit.sweep.table import COLUMNS_OF_A_FILE, count_words, print_table, seconds_words
from tests.sweep.rowmaking import end, forecast, job, measured, row


def rows() -> list[Row]:
    completed = end(job(0, "model.width=8", "a=1"), objective=0.12345678, seconds=12.3)
    failed = end(job(2, "model.width=32", "a=1"), "failed", reason="ValueError: [red]x", error_file="job_error.txt")
    return [
        row(0, "model.width=8", "a=1", forecast=forecast(seconds=1.5), end=completed, measured=measured()),
        row(1, "model.width=16", "a=1", forecast=forecast(peak_mib=120, same_as=0)),
        row(2, "model.width=32", "a=1", forecast=JobForecast(verdict="cannot tell", reason="no model"), end=failed),
        row(3, "model.width=64", "a=1", forecast=forecast(), end=end(job(3)), from_before=True),
    ]


def printed(width: int = COLUMNS_OF_A_FILE, some: list[Row] | None = None) -> list[str]:
    text = io.StringIO()
    print_table(rows() if some is None else some, console=Console(file=text, width=width))
    return text.getvalue().splitlines()


def test_every_job_has_a_line_with_what_was_predicted_and_measured() -> None:
    lines = printed()
    first = next(line for line in lines if " width=8 " in line)
    predicted, recorded = ("48.00 MiB", "100.0 MiB", "1.5 s"), ("49.00 MiB", "32", "12.3 s", "0.12346")
    for cell in ("2 slices of <= 4", *predicted, *recorded, "completed"):
        assert cell in first
    second = next(line for line in lines if " width=16 " in line)
    assert "as job 0" in second and "left out: 20 MiB too" in second
    # Text of an error is not read as markup.
    assert "[red]x" in " ".join(lines)
    assert "[2/job_error.txt]" in " ".join(lines)
    assert any("by an earlier" in line for line in lines)
    assert not any("a=1" in line for line in lines)


def test_lines_of_a_file_are_no_wider_than_it_and_end_where_their_text_ends() -> None:
    lines = printed()
    assert max(len(line) for line in lines) <= COLUMNS_OF_A_FILE
    assert all(line == line.rstrip() for line in lines)


def test_a_narrow_terminal_shows_sizes_and_what_came_of_each_job_whole() -> None:
    lines = printed(80)
    assert max(len(line) for line in lines[:-1]) <= 80
    first = next(line for line in lines if " width=8 " in line)
    for cell in ("48.00 MiB", "100.0 MiB", "49.00 MiB", "0.12346", "completed"):
        assert cell in first
    assert "slices" not in first


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    text = "\n".join(printed(some=[row(0, "a=1", forecast=forecast()), row(1, "a=2", forecast=forecast())]))
    assert "predicted" in text and "measured" not in text and "objective" not in text


def test_of_a_completed_job_a_long_reason_why_it_was_not_forecast_is_left_to_the_files() -> None:
    unknown = JobForecast(verdict="cannot tell", reason="no model")
    text = "\n".join(printed(some=[row(0, "a=1", forecast=unknown, end=end(job(0))), row(1, "a=2", forecast=unknown)]))
    assert "completed: could not be told before" in text
    assert text.count("no model") == 1 and "not run: cannot tell: no model" in text


def test_the_objective_of_a_job_that_was_left_out_is_what_stands_for_it() -> None:
    left_out = row(1, "a=2", forecast=forecast(peak_mib=120), job=job(1, "a=2", no_fit_value=1e9))
    (line,) = (line for line in printed(some=[row(0, "a=1"), left_out]) if " a=2 " in line)
    assert "1e+09" in line


def test_one_job_is_not_called_several() -> None:
    assert count_words([row(0)]) == "1 job: 1 not run"


def test_the_jobs_of_each_status_are_counted() -> None:
    assert count_words(rows()) == "4 jobs: 2 completed, 1 left out, 1 failed, 1 of them by an earlier run"


def test_seconds_of_planning_stand_against_the_rest() -> None:
    one, two = job(0, "a=1"), job(1, "a=2")
    some = [
        Row(
            job=one,
            forecast=forecast(seconds=2.0),
            end=end(one, seconds=10.0),
            measured=replace(measured(), planning_seconds=3.0),
        ),
        Row(job=two, forecast=forecast(seconds=0.5), end=end(two, seconds=6.0), measured=measured()),
    ]
    # 2 + 0.5 of forecasts; of the one job that tells, 3 of 10.
    assert some[0].other_seconds == 7.0 and some[1].other_seconds is None
    assert seconds_words(some) == (
        "forecasts took 2.5 s, plans and proofs within jobs 3 s, the rest of these jobs, training among it, 7 s"
    )
    assert seconds_words(some[1:]) is None
    assert some[0].to_dict()["planning_seconds"] == 3.0
