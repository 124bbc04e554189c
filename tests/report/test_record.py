"""``plan.yaml``: whole or not at all, and readable as a plan."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import fsspec
import pytest
import torch
import yaml

from lightning_memfit._version import __version__
from lightning_memfit.errors import PlanFileError
from lightning_memfit.measurement import SecondsSpent
from lightning_memfit.no_fit import NoFit, load_no_fit
from lightning_memfit.plan import Measurement, Plan
from lightning_memfit.plan_schema import load_seconds_spent
from lightning_memfit.report.record import write_no_fit, write_record
from lightning_memfit.report.table import report_text


def test_a_record_is_read_back_as_the_plan(plan: Plan, measurement: Measurement, tmp_path: Path) -> None:
    path = write_record(plan, measurement, tmp_path / "run" / "1")
    assert path == str(tmp_path / "run" / "1" / "plan.yaml")
    assert Plan.load(path) == plan


def test_a_record_holds_what_was_measured_as_plain_data(plan: Plan, measurement: Measurement, tmp_path: Path) -> None:
    content = yaml.safe_load(Path(write_record(plan, measurement, tmp_path)).read_text())
    measured = content["measured"]
    assert measured["measured_peak_allocated_bytes"] == 561 * 1024**2
    assert measured["measured_peak_bytes"] == 561 * 1024**2
    assert measured["measured_step_seconds"] == 0.8124
    assert measured["costliest_ops"][0] == {"name": "aten::addmm", "self_seconds": 0.61, "calls": 400}


def test_a_record_without_a_warm_up_says_so(plan: Plan, tmp_path: Path) -> None:
    path = write_record(plan, None, tmp_path)
    assert yaml.safe_load(Path(path).read_text())["measured"] is None
    assert Plan.load(path) == plan


def test_a_record_names_versions_and_time(plan: Plan, tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    content = yaml.safe_load(Path(write_record(plan, None, tmp_path)).read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["versions"]["lightning_memfit"] == __version__
    assert set(content["versions"]) == {"python", "torch", "lightning", "lightning_memfit"}
    written = datetime.fromisoformat(content["written_at"])
    assert written.utcoffset() is not None
    assert before <= written <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"lightning": "2.6.6", "pytorch-lightning": "2.5.0"}, "2.6.6"),
        ({"pytorch-lightning": "2.5.0"}, "2.5.0"),
        ({}, None),
    ],
)
def test_lightning_is_found_under_either_name(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: str | None
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert yaml.safe_load(Path(write_record(plan, None, tmp_path)).read_text())["versions"]["lightning"] == expected


def test_an_earlier_record_is_replaced_and_nothing_is_left_beside_it(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("schema_version: 1\n")
    path = write_record(plan, None, tmp_path)
    assert Plan.load(path) == plan
    assert sorted(each.name for each in tmp_path.iterdir()) == ["memfit_report.txt", "plan.yaml"]


def test_a_failed_write_leaves_the_earlier_record(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.yaml").write_text("schema_version: 1\n")

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_record(plan, None, tmp_path)
    assert (tmp_path / "plan.yaml").read_text() == "schema_version: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_record_goes_to_a_remote_folder_too(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_record(plan, None, "memory://runs/one")
    memory = fsspec.filesystem("memory")
    try:
        assert path == "memory://runs/one/plan.yaml"
        assert Plan.from_dict(yaml.safe_load(memory.cat_file("/runs/one/plan.yaml"))) == plan
    finally:
        memory.rm("/runs", recursive=True)
    assert not list(tmp_path.iterdir()), "no local folder of that name"


def test_writing_a_record_moves_no_random_numbers(plan: Plan, tmp_path: Path) -> None:
    import random

    python, on_torch = random.getstate(), torch.get_rng_state()
    write_record(plan, None, tmp_path)
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), on_torch)


def test_a_file_that_is_no_plan_is_left_alone(plan: Plan, measurement: Measurement, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("mine: 1\n")
    with pytest.raises(FileExistsError, match="is no file of MemFit's"):
        write_record(plan, measurement, tmp_path)
    assert (tmp_path / "plan.yaml").read_text() == "mine: 1\n"


def test_what_planning_took_is_recorded_and_read_back(plan: Plan, tmp_path: Path) -> None:
    spent = SecondsSpent(planning=1.5, proving=0.25)
    assert load_seconds_spent(write_record(plan, None, tmp_path, spent=spent)) == spent
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert load_seconds_spent(write_record(plan, None, tmp_path)) is None
    assert load_seconds_spent(plan.save(tmp_path / "saved.yaml")) is None
    (tmp_path / "plan.yaml").write_text("seconds_spent: {planning: -1, proving: 0}\n")
    with pytest.raises(PlanFileError, match=r"seconds_spent\.planning is -1"):
        load_seconds_spent(tmp_path / "plan.yaml")


def test_the_report_is_beside_the_plan_as_it_was_printed(plan: Plan, measurement: Measurement, tmp_path: Path) -> None:
    write_record(plan, measurement, tmp_path)
    report = (tmp_path / "memfit_report.txt").read_text(encoding="utf-8")
    assert report == report_text(plan, measurement)
    assert report.startswith("MemFit plan ") and "\nMemFit warm-up " in report
    assert "\x1b" not in report, "no colours"
    write_record(plan, None, tmp_path)
    assert "MemFit warm-up" not in (tmp_path / "memfit_report.txt").read_text(encoding="utf-8")


def test_a_report_of_somebody_else_is_left_alone(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "memfit_report.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"memfit_report\.txt is there and is no file of MemFit's$"):
        write_record(plan, None, tmp_path)
    assert (tmp_path / "memfit_report.txt").read_text() == "mine"


def test_why_nothing_fits_is_written_and_read_back(plan: Plan, tmp_path: Path) -> None:
    no_fit = NoFit(
        reason="No plan fits.\nTry less.", budget_bytes=10, best_peak_bytes=15, missing_bytes=5, smallest="1"
    )
    path = write_no_fit(no_fit, tmp_path)
    assert path == str(tmp_path / "no_fit.yaml")
    assert load_no_fit(path) == no_fit
    write_record(plan, None, tmp_path)
    assert not Path(path).exists(), "this run fits"


def test_a_plan_takes_the_place_of_an_earlier_record_and_leaves_a_file_of_the_users(plan: Plan, tmp_path: Path) -> None:
    no_fit = NoFit(reason="30 B too much", budget_bytes=100, best_peak_bytes=130, missing_bytes=30)
    path = Path(write_no_fit(no_fit, tmp_path))
    write_record(plan, None, tmp_path)
    assert not path.exists()
    path.write_text("notes: mine\n")
    write_record(plan, None, tmp_path)
    assert path.read_text() == "notes: mine\n"


@pytest.mark.parametrize("text", ["a: 1", "schema_version: 1", "schema_version: 1\nreason: 3"])
def test_what_is_no_record_of_a_run_that_does_not_fit_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "no_fit.yaml"
    path.write_text(text)
    with pytest.raises(PlanFileError, match="is no record of a run that does not fit"):
        load_no_fit(path)
