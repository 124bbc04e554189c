"""A sweep of twelve jobs of which four cannot fit: MemFit's sweeper beside Hydra's own.

    python -m benchmarks.sweep_12_jobs [--sweepers memfit basic] [--json PATH] [--markdown PATH] [--pictures PATH]

``scripts/train.py -m`` over three sizes of the model, two effective batches and two budgets, four optimizer steps each.
MemFit's sweeper forecasts all of them and leaves out what cannot fit; under Hydra's own every job is started, and
MemFit says within it that nothing fits (``memfit.on_no_fit=skip``). Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, write_text
from lightning_memfit.no_fit import NO_FIT_FILE, load_no_fit
from lightning_memfit.sweep.measured import measured_in
from lightning_memfit.units import format_bytes

ROOT = Path(__file__).parents[1]
SWEPT = (
    "model.d_model=96,192,288",
    "memfit.effective_batch_size=16,32",
    "memfit.budget=10MiB,64MiB",
)
"""Twelve jobs. With 10 MiB the two larger models cannot hold their parameters, gradients and 8-bit states."""
SHARED = ("model.num_layers=3", "trainer=cpu_short", "data=stdlib_excerpt", "memfit.verbose=false")
"""What all jobs have: three blocks, and four optimizer steps on half a MiB of text."""
JOBS = 12
JOBS_THAT_CANNOT_FIT = 4


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What came of one job."""

    number: int
    """Its place in the sweep's order."""
    overrides: str
    """What is swept over, as far as it is known."""
    outcome: str
    """``"trained"``, ``"left out"`` (before it was launched), ``"does not fit"`` (once it ran), or ``"failed"``."""
    reason: str
    """Why it was not trained."""
    missing_bytes: int | None
    """What the smallest plan needs beyond the budget."""
    budget_bytes: int | None
    """What a plan may use."""
    predicted_peak_bytes: int | None
    """Of the plan that was applied, or of the smallest one where none fits."""
    measured_peak_bytes: int | None
    """Measured by the warm-up."""
    measured_samples_per_second: float | None
    """Of an optimizer step, measured by the warm-up."""
    forecast_seconds: float | None
    """What its forecast took before the launch."""
    job_seconds: float | None
    """What the launched job took: planning, warm-up and training; not known under Hydra's own sweeper."""
    planning_seconds: float | None
    """What plan and proof took of it."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What one sweeper did."""

    sweeper: str
    """Its name in Hydra."""
    exit_code: int
    """Of the whole command."""
    seconds: float
    """Wall clock of the whole command, imports included."""
    jobs: tuple[JobResult, ...]
    """In the sweep's order."""

    def numbers(self, *outcomes: str) -> list[int]:
        """The jobs with one of these outcomes."""
        return [job.number for job in self.jobs if job.outcome in outcomes]

    def total(self, field: str) -> float | None:
        """The sum of a field over the jobs of which it is known; ``None`` if it is of none."""
        known = [value for job in self.jobs if (value := getattr(job, field)) is not None]
        return sum(known) if known else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweepers", nargs="+", choices=("memfit", "basic"), default=["memfit", "basic"])
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--pictures", type=Path, help="copy the sweep's picture here, as sweep.png and sweep.svg")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    results = []
    for sweeper in chosen.sweepers:
        with tempfile.TemporaryDirectory(prefix="memfit_sweep_") as folder:
            results.append(run_sweep(sweeper, Path(folder)))
            if sweeper == "memfit" and chosen.pictures is not None:
                copy_pictures(Path(folder), chosen.pictures)
    _print(results, machine, console)
    missed = missed_targets(results)
    console.print("\n".join(missed) if missed else "met: " + targets_words(), style="red" if missed else "green")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(results, machine), indent=1) + "\n")
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(results, machine))
    return int(bool(missed))


def run_sweep(sweeper: str, folder: Path) -> SweepResult:
    """Run the whole sweep in a process of its own, whose output is shown as it comes."""
    own = () if sweeper == "memfit" else ("memfit.on_no_fit=skip",)
    words = (f"hydra/sweeper={sweeper}", f"hydra.sweep.dir={folder}", *SHARED, *own, *SWEPT)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began = time.perf_counter()
    # A cache of its own: what one sweep measured and planned must not shorten the other.
    with tempfile.TemporaryDirectory(prefix="memfit_cache_") as cache:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "train.py"), "-m", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": cache},
            check=False,
        )
    seconds = time.perf_counter() - began
    jobs = tuple(_jobs_of_memfit(folder) if sweeper == "memfit" else _jobs_of_hydra(folder))
    return SweepResult(sweeper=sweeper, exit_code=done.returncode, seconds=seconds, jobs=jobs)


def _jobs_of_memfit(folder: Path) -> Iterator[JobResult]:
    """From ``sweep.json``."""
    for job in json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["jobs"]:
        outcome = "trained" if job["status"] == "completed" else job["status"]
        words = " ".join(each for each in job["overrides"] if each.partition("=")[0] in _swept_keys())
        copied = {
            name: job[name]
            for name in (
                "number", "reason", "missing_bytes", "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes",
                "measured_samples_per_second", "forecast_seconds", "job_seconds",
                "planning_seconds",
            )
        }  # fmt: skip
        yield JobResult(outcome=outcome, overrides=words, **copied)


def _swept_keys() -> set[str]:
    return {each.partition("=")[0] for each in SWEPT}


def _jobs_of_hydra(folder: Path) -> Iterator[JobResult]:
    """From what each job left in its folder: Hydra's own sweeper keeps no record of how jobs end."""
    for number in range(JOBS):
        plan, no_fit = folder / str(number) / "plan.yaml", folder / str(number) / NO_FIT_FILE
        told = load_no_fit(no_fit) if no_fit.exists() else None
        measured = measured_in(plan)
        outcome = "trained" if measured is not None and told is None else "failed" if told is None else "does not fit"
        yield JobResult(
            number=number,
            overrides=_swept_overrides(folder / str(number)),
            outcome=outcome,
            reason="" if told is None else told.reason.partition("\n")[0],
            missing_bytes=None if told is None else told.missing_bytes,
            budget_bytes=told.budget_bytes if told is not None else None if measured is None else measured.budget_bytes,
            predicted_peak_bytes=None if measured is None else measured.predicted_peak_bytes,
            measured_peak_bytes=None if measured is None else measured.measured_peak_bytes,
            measured_samples_per_second=None if measured is None else measured.measured_samples_per_second,
            forecast_seconds=None,
            job_seconds=None,
            planning_seconds=None if measured is None else measured.planning_seconds,
        )


def _swept_overrides(folder: Path) -> str:
    kept = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    return " ".join(each for each in kept if each.partition("=")[0] in _swept_keys())


def copy_pictures(folder: Path, target: Path) -> None:
    """Copy the sweep's picture, if there is one."""
    target.mkdir(parents=True, exist_ok=True)
    for picture in (folder / "sweep.png", folder / "sweep.svg"):
        if picture.exists():
            shutil.copyfile(picture, target / picture.name)


def targets_words() -> str:
    """What a run must show."""
    return (
        f"{JOBS_THAT_CANNOT_FIT} of {JOBS} jobs do not fit, every other one is trained within its budget, and both "
        "sweepers agree"
    )


def missed_targets(results: Sequence[SweepResult]) -> list[str]:
    """The targets that were missed, in words."""
    missed = []
    for result in results:
        if result.exit_code != 0:
            missed.append(f"missed: the sweep of {result.sweeper} ended with code {result.exit_code}")
        without = result.numbers("left out", "does not fit")
        if len(without) != JOBS_THAT_CANNOT_FIT or len(result.numbers("trained")) != JOBS - JOBS_THAT_CANNOT_FIT:
            missed.append(
                f"missed: {result.sweeper} trained jobs {result.numbers('trained')} and found no room for {without}"
            )
        for job in result.jobs:
            if job.measured_peak_bytes is not None and job.budget_bytes is not None:
                above = job.measured_peak_bytes - job.budget_bytes
                if above > 0:
                    missed.append(f"missed: job {job.number} was {format_bytes(above)} above its budget")
    verdicts = {tuple(result.numbers("left out", "does not fit")) for result in results}
    if len(verdicts) > 1:
        missed.append(f"missed: the sweepers found no room for different jobs: {sorted(verdicts)}")
    return missed


def as_json(results: Sequence[SweepResult], machine: Machine) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        "machine": machine.to_dict(),
        "command": f"scripts/train.py -m {' '.join((*SHARED, *SWEPT))}",
        "sweeps": [
            {
                **asdict(result),
                "trained": len(result.numbers("trained")),
                "left_out": len(result.numbers("left out")),
                "forecast_seconds": result.total("forecast_seconds"),
                "job_seconds": result.total("job_seconds"),
                "planning_seconds": result.total("planning_seconds"),
            }
            for result in results
        ],
        "missed": missed_targets(results),
    }


def as_markdown(results: Sequence[SweepResult], machine: Machine) -> str:
    """The tables of the JSON, to read."""
    lines = [
        "# A sweep of twelve jobs",
        "",
        f"`scripts/train.py -m {' '.join((*SHARED, *SWEPT))}`, made by `python -m benchmarks.sweep_12_jobs`.",
    ]
    for result in results:
        headers = ("job", "overrides", "outcome", *_HEADERS)
        rows = [headers, tuple("---" for _ in headers), *(_cells(job) for job in result.jobs)]
        lines += ["", f"## hydra/sweeper={result.sweeper}", "", *(f"| {' | '.join(row)} |" for row in rows)]
        lines += ["", _words(result)]
    return "\n".join([*lines, "", machine.caption, ""])


_HEADERS = (
    "predicted peak",
    "budget",
    "too much by",
    "measured peak",
    "samples/s",
    "forecast",
    "job",
    "of it plan and proof",
)


def _cells(job: JobResult) -> tuple[str, ...]:
    sizes = (job.predicted_peak_bytes, job.budget_bytes, job.missing_bytes, job.measured_peak_bytes)
    speed = job.measured_samples_per_second
    seconds = (job.forecast_seconds, job.job_seconds, job.planning_seconds)
    return (
        str(job.number),
        job.overrides,
        job.outcome,
        *("" if size is None else format_bytes(size) for size in sizes),
        "" if speed is None else f"{speed:.3g}",
        *("" if each is None else f"{each:.1f} s" for each in seconds),
    )


def _words(result: SweepResult) -> str:
    forecasts, jobs = result.total("forecast_seconds"), result.total("job_seconds")
    planning = result.total("planning_seconds")
    parts = [f"{len(result.numbers('trained'))} of {len(result.jobs)} jobs trained in {result.seconds:.0f} s"]
    if forecasts is not None and jobs is not None:
        parts.append(f"forecasts {forecasts:.0f} s, launched jobs {jobs:.0f} s")
    if planning is not None:
        rest = "" if jobs is None else f", the rest of them, training among it, {jobs - planning:.0f} s"
        parts.append(f"plans and proofs within jobs {planning:.0f} s{rest}")
    return f"{'; '.join(parts)}."


def _print(results: Sequence[SweepResult], machine: Machine, console: Console) -> None:
    for result in results:
        console.print(_table(result))
        console.print(_words(result))
    console.print(machine.caption, style="dim")


def _table(result: SweepResult) -> Table:
    table = plain_table(f"hydra/sweeper={result.sweeper}")
    for column in ("job", "overrides", "outcome"):
        table.add_column(column)
    for column in _HEADERS:
        table.add_column(column, justify="right")
    for job in result.jobs:
        table.add_row(*_cells(job))
    return table


if __name__ == "__main__":
    sys.exit(main())
