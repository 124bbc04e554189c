"""The benchmark of twelve jobs: what it reads of a sweep's folder, and what counts as missed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import this_machine
from benchmarks.sweep_12_jobs import (
    JobResult,
    SweepResult,
    _jobs_of_hydra,
    _jobs_of_memfit,
    as_json,
    as_markdown,
    missed_targets,
)
from lightning_memfit.no_fit import NoFit, no_fit_record
from lightning_memfit.plan_file import to_yaml
from lightning_memfit.sweep.sweep_file import write_sweep
from lightning_memfit.units import MIB
from tests.sweep.rowmaking import end, forecast, job, measured, row

NO_FIT = NoFit(reason="too large\nmore", budget_bytes=10, best_peak_bytes=15, missing_bytes=5)


def result(sweeper: str = "memfit", left_out: str = "left out", exit_code: int = 0) -> SweepResult:
    jobs = tuple(
        JobResult(
            number=number,
            overrides=f"model.d_model={number}",
            outcome=left_out if number < 4 else "trained",
            reason="",
            missing_bytes=MIB if number < 4 else None,
            budget_bytes=20 * MIB,
            predicted_peak_bytes=19 * MIB,
            measured_peak_bytes=None if number < 4 else 19 * MIB,
            measured_samples_per_second=None if number < 4 else 100.0,
            forecast_seconds=2.0,
            job_seconds=None if number < 4 else 5.0,
            planning_seconds=None if number < 4 else 2.0,
        )
        for number in range(12)
    )
    return SweepResult(sweeper=sweeper, exit_code=exit_code, seconds=90.0, jobs=jobs)


def test_a_sweep_as_it_should_be_misses_nothing() -> None:
    assert missed_targets([result(), result("basic", "does not fit")]) == []


def test_what_a_sweep_gets_wrong_is_told() -> None:
    assert missed_targets([result(exit_code=1)]) == ["missed: the sweep of memfit ended with code 1"]
    (first, *others) = result().jobs
    trained = replace(result(), jobs=(replace(first, outcome="trained", measured_peak_bytes=21 * MIB), *others))
    missed = missed_targets([trained, result("basic", "does not fit")])
    # 21 MiB of a budget of 20 MiB.
    assert "missed: memfit trained jobs [0, 4, 5, 6, 7, 8, 9, 10, 11] and found no room for [1, 2, 3]" in missed
    assert "missed: job 0 was 1.000 MiB above its budget" in missed
    assert any("different jobs: [(0, 1, 2, 3), (1, 2, 3)]" in line for line in missed)


def test_the_json_has_the_sums_and_the_markdown_every_job() -> None:
    machine = this_machine()
    content = json.loads(json.dumps(as_json([result()], machine)))
    (sweep,) = content["sweeps"]
    # 12 forecasts of 2 s, and 8 launched jobs of 5 s.
    assert (sweep["trained"], sweep["left_out"], sweep["forecast_seconds"], sweep["job_seconds"]) == (8, 4, 24.0, 40.0)
    assert content["missed"] == [] and content["machine"]["date"] == machine.date
    text = as_markdown([result()], machine)
    assert "| 3 | model.d_model=3 | left out | 19.00 MiB | 20.00 MiB | 1.000 MiB |  |  | 2.0 s |  |  |" in text
    # 8 plans and proofs of 2 s.
    assert (
        "8 of 12 jobs trained in 90 s; forecasts 24 s, launched jobs 40 s; plans and proofs within jobs 16 s, the rest "
        "of them, training among it, 24 s." in text
    )


def test_a_folder_of_memfits_sweeper_is_read_from_its_file(tmp_path: Path) -> None:
    words = ("trainer=cpu_short", "model.d_model=96")
    rows = [
        row(0, *words, forecast=forecast(), end=end(job(0), seconds=9.0), measured=measured()),
        row(1, *words, forecast=forecast(peak_mib=120)),
    ]
    write_sweep(tmp_path, rows, arguments=[])
    trained, left_out = _jobs_of_memfit(tmp_path)
    assert (trained.outcome, trained.overrides, trained.job_seconds) == ("trained", "model.d_model=96", 9.0)
    assert (left_out.outcome, left_out.missing_bytes) == ("left out", 20 * MIB)


def test_a_folder_of_hydras_own_sweeper_is_read_from_what_jobs_left(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / str(number) / ".hydra").mkdir(parents=True)
        (tmp_path / str(number) / ".hydra" / "overrides.yaml").write_text(f"- trainer=cpu\n- model.d_model={number}\n")
    (tmp_path / "1" / "no_fit.yaml").write_text(to_yaml(no_fit_record(NO_FIT)))
    found = list(_jobs_of_hydra(tmp_path))
    assert len(found) == 12
    assert [each.outcome for each in found[:2]] == ["failed", "does not fit"]
    assert found[7].overrides == "model.d_model=7"
    assert (found[1].reason, found[1].budget_bytes, found[1].missing_bytes) == ("too large", 10, 5)
