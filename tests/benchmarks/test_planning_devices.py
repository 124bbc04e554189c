"""The benchmark of planning for several GPUs, its commands replaced. Run: ``pytest tests/benchmarks``, this file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning_devices
from benchmarks.accuracy_devices_published import FORECAST, LEFT_OUT, DevicesRow
from benchmarks.published_rows import LISTED, published_rows


def done(words: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    predicted = {"candidate": "ZeRO-3 over 8", "minimum_feasible_bytes": 2**30, "step_seconds": 24.0}
    document = {"devices": [{"verdict": "fits", "predicted": predicted}]}
    return subprocess.CompletedProcess(words, 0, json.dumps(document), "")


def test_the_table_has_a_line_for_each_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning_devices.subprocess, "run", done)
    json_path, markdown = tmp_path / "a.json", tmp_path / "a.md"
    code = planning_devices.main(["--runs", "1", "--json", str(json_path), "--markdown", str(markdown)])
    found = json.loads(json_path.read_text(encoding="utf-8"))
    assert code == 0 and len(found["plans"]) == len(planning_devices.CASES)
    assert found["plans"][0]["command"] == "memfit plan hardware=a100-80gb devices=8 model=llama_70b"
    assert "| fits | ZeRO-3 over 8 | 1.000 GiB | 24 s |" in markdown.read_text(encoding="utf-8")


def test_a_command_that_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess(["memfit"], 2, "", "no such model")
    monkeypatch.setattr(planning_devices.subprocess, "run", lambda *args, **settings: failed)
    with pytest.raises(RuntimeError, match="ended with code 2: no such model"):
        planning_devices.planned("t4", 2, "none")


def test_every_published_row_of_several_gpus_is_forecast_or_left_out_with_a_reason() -> None:
    several = {row.id for row in published_rows() if row.group == LISTED and row.not_rebuilt.endswith(" GPUs")}
    assert several == {*FORECAST, *LEFT_OUT} and not {*FORECAST} & {*LEFT_OUT}
    assert all(LEFT_OUT.values())


def test_an_error_is_a_share_of_what_was_measured() -> None:
    row = DevicesRow(
        id="a", title="b", measured_bytes=200, predicted_bytes=190, by_category={}, seconds=1.0, assumed="nothing"
    )
    assert row.error == pytest.approx(-0.05)
