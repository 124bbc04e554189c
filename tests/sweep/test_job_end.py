"""``job.json``: whole, plain, and read only where it can be trusted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lightning_memfit.sweep.job_end import FILE_NAME, JobEnd, read_job_end, write_job_end

END = JobEnd(status="completed", number=3, overrides=("a=1", "b=x"), config_digest="0123", objective=0.5, seconds=2.0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_job_end(tmp_path / "new", END)
    assert read_job_end(tmp_path / "new") == END
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_objective_that_is_not_finite_is_kept_in_json_that_everyone_can_read(tmp_path: Path, value: float) -> None:
    import dataclasses

    write_job_end(tmp_path, dataclasses.replace(END, objective=value))

    def refuse(word: str) -> None:
        raise ValueError(word)

    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
    read = read_job_end(tmp_path)
    assert read is not None and read.objective is not None
    assert read.objective == value or (math.isnan(value) and math.isnan(read.objective))


@pytest.mark.parametrize(
    ("name", "value"),
    [("plan_file", 5), ("overrides", 5), ("overrides", [5]), ("seconds", "2"), ("budget_bytes", 1.5), ("number", True)],
)
def test_a_record_that_was_damaged_by_hand_is_none(tmp_path: Path, name: str, value: object) -> None:
    path = write_job_end(tmp_path, END)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert read_job_end(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema_version": 2, "status": "completed", "overrides": []}',
        '{"schema_version": 1, "status": "done", "overrides": []}',
        '{"schema_version": 1, "status": "completed"}',
        '{"schema_version": 1, "status": "completed", "overrides": []}',
    ],
)
def test_what_is_no_record_of_an_end_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert read_job_end(tmp_path) is None
    assert read_job_end(tmp_path / "nowhere") is None
