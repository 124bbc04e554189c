"""Children of benchmarks: their JSON is read, their failures are quoted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.child_process import ChildFailedError, run_child, stream_child


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_child.py").write_text(
        """
import json, sys, time
print("words that are no JSON")
for number in range(2):
    print(json.dumps({"number": number, "argument": sys.argv[1]}), flush=True)
if sys.argv[1] == "fail":
    print("x" * 100_000, file=sys.stderr)  # more than a pipe holds
    sys.exit("the reason")
if sys.argv[1] == "hang":
    time.sleep(60)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_child"


def test_the_last_object_is_returned(child: str) -> None:
    assert run_child(child, ["fine"]) == {"number": 1, "argument": "fine"}


def test_objects_come_in_order(child: str) -> None:
    assert [found["number"] for found in stream_child(child, ["fine"])] == [0, 1]


def test_a_failure_is_quoted(child: str) -> None:
    with pytest.raises(ChildFailedError, match=r"python -m a_child fail ended with code 1:\n[\s\S]*the reason"):
        run_child(child, ["fail"])
    with pytest.raises(ChildFailedError, match=r"ended with code 1:\n[\s\S]*the reason"):
        list(stream_child(child, ["fail"]))
    assert len(list(stream_child(child, ["fail"], allowed_codes=(1,)))) == 2


def test_a_child_that_takes_too_long_is_ended(child: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(child, ["hang"], timeout_seconds=1)


def test_a_reader_that_stops_early_ends_the_child(child: str) -> None:
    objects = stream_child(child, ["hang"])
    assert next(objects)["number"] == 0
    objects.close()
