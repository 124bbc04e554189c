"""Sweeps of the training job: each job leaves what a run of its own leaves, and nothing for the jobs behind it.

Hydra's basic launcher runs all jobs in one process: what one leaves, the next one has (open files, optuna/optuna#5337;
models held in memory, mit-ll-responsible-ai/hydra-zen#152; peak counters, hydra-ecosystem/hydra#2631).
Run with ``pytest tests/e2e/test_multirun.py``; ``-m slow`` runs the launchers that start processes of their own, too.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_memfit import Plan
from lightning_memfit.no_fit import load_no_fit
from lightning_memfit.units import MIB
from tests.e2e.job_probe import process_state
from tests.e2e.test_equal_runs import EQUAL
from tests.forked_programs import ForkedPrograms

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train.py"

# Two batches are accumulated in the first job; the second one is also run alone. The levers are given, so that no clock
# takes part in what is chosen, and all of them leave something to undo.
SWEPT = ["memfit.effective_batch_size=32,16", "memfit.budget=64MiB"]
ALONE = ["memfit.effective_batch_size=16", "memfit.budget=64MiB"]
STATES = "8bit" if importlib.util.find_spec("bitsandbytes") else "as-configured"
SMALL = [
    *("trainer=cpu_short", "trainer.max_steps=2", "trainer.limit_val_batches=1"),
    *("data=stdlib_excerpt", "data.max_bytes=200000", "model.d_model=64", "model.num_layers=2", "model.num_heads=2"),
    *("model.dropout=0.1", "memfit.on_no_fit=skip", "memfit.verbose=false", "memfit.precision=32-true"),
    *("memfit.optimizer_implementation=as-configured", f"memfit.optimizer_states={STATES}"),
    *("memfit.activation_checkpointing=blocks", "memfit.micro_batch_size=5"),
]
PROBED = [
    "+hydra.callbacks.probe._target_=tests.e2e.job_probe.JobProbe",
    "memfit.cache_dir=${hydra:runtime.output_dir}/cache",
]

OF_THE_CLOCK_OR_THE_HOST = {
    *("available_bytes", "capacity_bytes", "process_bytes", "non_torch_bytes", "measured_peak_rss_bytes"),
    *("predicted_step_seconds", "measured_step_seconds", "seconds_spent", "costliest_ops", "notes", "written_at"),
}
"""Fields of ``plan.yaml`` that two runs of one job do not share."""
# What the first job of a process leaves, none of it MemFit's.
OF_THE_FIRST_JOB = {
    "environment/PL_GLOBAL_SEED",  # Lightning's seed_everything
    "environment/PL_SEED_WORKERS",
    "bitsandbytes",  # it is imported, and makes two tables
    "tensors/(16,) torch.float32 on cpu",
    "torch/methods of optimizers",  # torch wraps `step` of a class when the first optimizer of it is made
}


def run_probed(programs: ForkedPrograms, measured: Path, folder: Path, *overrides: str) -> Path:
    """A run, or all jobs of a sweep, in one process that is looked at around each job; its folder."""
    settings = [f"+hydra.callbacks.probe.measured={measured}", f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
    done = programs.run(SCRIPT, *overrides, *SMALL, *PROBED, *settings, folder=folder.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def alone(forked_programs: ForkedPrograms, programs_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the second job, run in a process of its own; it measures the device where nobody did."""
    folder = tmp_path_factory.mktemp("jobs") / "alone"
    return run_probed(forked_programs, programs_cache / "lightning_memfit", folder, *ALONE)


@pytest.fixture(scope="module")
def sweep(forked_programs: ForkedPrograms, alone: Path) -> Path:
    """The sweep's folder; both jobs ran in one process."""
    return run_probed(forked_programs, alone / "cache", alone.with_name("sweep"), "-m", *SWEPT)


def assert_trained(folder: Path, *, effective_batch_size: int) -> None:
    """A job's folder holds its plan and figures, metrics, log, config and checkpoint."""
    assert (folder / ".hydra" / "overrides.yaml").exists() and len(list(folder.glob("*.log"))) == 1
    record = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    assert 0 < record["measured"]["measured_peak_bytes"] <= 64 * MIB
    assert Plan.load(folder / "plan.yaml").split.effective_batch_size == effective_batch_size
    assert "measured" in (folder / "memfit_report.txt").read_text(encoding="utf-8")
    columns, *rows = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert {"train_loss", "val_loss"} <= set(columns.split(",")) and len(rows) >= 2
    assert (folder / "checkpoints" / "last.ckpt").exists()


def without(record: Any, names: set[str]) -> Any:
    """Nested data without the fields of these names."""
    if isinstance(record, dict):
        return {key: without(value, names) for key, value in record.items() if key not in names}
    return [without(entry, names) for entry in record] if isinstance(record, list) else record


def state(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def differences(before: Any, after: Any, path: str = "") -> dict[str, str]:
    """What is not the same, by its path."""
    if before == after:
        return {}
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {path: f"{before} became {after}"}
    prefix = f"{path}/" if path else ""
    found: dict[str, str] = {}
    for key in {*before, *after}:
        found |= differences(before.get(key), after.get(key), f"{prefix}{key}")
    return found


def test_every_job_of_a_sweep_leaves_what_a_run_of_its_own_leaves(sweep: Path, alone: Path) -> None:
    for number, effective_batch_size in enumerate((32, 16)):
        assert_trained(sweep / str(number), effective_batch_size=effective_batch_size)
        assert {path.name for path in (sweep / str(number)).iterdir()} == {path.name for path in alone.iterdir()}
    assert Plan.load(sweep / "0" / "plan.yaml").split.accumulate_grad_batches == 2


def test_a_job_behind_another_plans_and_learns_what_it_would_alone(sweep: Path, alone: Path) -> None:
    """Reported in mlcommons/GaNDLF#725, hydra-ecosystem/hydra#2631."""
    assert_same_job(sweep / "1", alone)


def assert_same_job(behind: Path, alone: Path) -> None:
    """Two runs of one job planned, measured and learned the same, and drew the same random numbers."""
    for name in ("metrics.csv", "hparams.yaml"):
        assert (behind / name).read_text(encoding="utf-8") == (alone / name).read_text(encoding="utf-8"), name
    records = [yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8")) for folder in (behind, alone)]
    plans = [without(record, OF_THE_CLOCK_OR_THE_HOST) for record in records]
    assert differences(*plans) == {}
    assert "measured_peak_allocated_bytes" in plans[0]["measured"]  # measured peaks are among what is equal
    assert state(behind, "after")["random generators"] == state(alone, "after")["random generators"]


def test_a_job_leaves_the_process_as_it_was(sweep: Path) -> None:
    first = differences(state(sweep / "0", "before"), state(sweep / "0", "after"))
    left = {path: what for path, what in first.items() if not path.startswith("random generators")}
    assert {path: what for path, what in left.items() if not path.startswith(tuple(OF_THE_FIRST_JOB))} == {}
    assert_nothing_left(sweep)


def assert_nothing_left(sweep: Path) -> None:
    """The process is the same behind the second job as behind the first, but for random numbers that were drawn."""
    behind = state(sweep / "0", "after")
    assert differences(behind, state(sweep / "1", "before")) == {}
    found = differences(behind, state(sweep / "1", "after"))
    assert {path: what for path, what in found.items() if not path.startswith("random generators")} == {}


def test_what_a_job_might_leave_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_state()
    with warnings.catch_warnings(), (tmp_path / "left open").open("w"):
        warnings.filterwarnings("ignore", message="a filter that stays")
        monkeypatch.setenv("LEFT_BEHIND", "1")
        monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.CRITICAL)
        kept = torch.zeros(3, 5, 7)
        torch.set_default_dtype(torch.float64)
        try:
            after = process_state()
        finally:
            torch.set_default_dtype(torch.float32)
    found = set(differences(before, after))
    assert {"environment/LEFT_BEHIND", "open files", "warnings", "torch/default dtype"} <= found
    assert "logging/lightning.pytorch" in found and f"tensors/{tuple(kept.shape)} torch.float32 on cpu" in found


@pytest.mark.slow
def test_a_job_that_does_not_fit_leaves_nothing_either(
    forked_programs: ForkedPrograms, alone: Path, tmp_path: Path
) -> None:
    swept = ["memfit.effective_batch_size=16", "memfit.budget=1MiB,64MiB"]
    run_probed(forked_programs, alone / "cache", tmp_path, "-m", *swept)
    assert load_no_fit(tmp_path / "0" / "no_fit.yaml").missing_bytes > 0
    assert not (tmp_path / "0" / "plan.yaml").exists()
    assert_same_job(tmp_path / "1", alone)


LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
}


@pytest.mark.slow
def test_equal_jobs_at_the_same_time_plan_once(sweep: Path, programs_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    # A learning rate makes no other plan; of this budget nothing is kept yet.
    equal = ["memfit.effective_batch_size=16", "memfit.budget=63MiB", "model.learning_rate=1e-3,2e-3"]
    run_sweep(tmp_path, programs_cache, *SMALL, *equal, *LAUNCHERS["joblib"])
    plans = [Plan.load(tmp_path / "sweep" / str(number) / "plan.yaml") for number in range(2)]
    searched = [plan for plan in plans if EQUAL not in plan.notes]
    assert len(searched) == 1
    assert plans[0].candidate == plans[1].candidate
    for number in range(2):
        assert_trained(tmp_path / "sweep" / str(number), effective_batch_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_with_processes_of_their_own_leave_the_same(
    sweep: Path, programs_cache: Path, tmp_path: Path, launcher: str
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    run_sweep(tmp_path, programs_cache, *SMALL, *SWEPT, *LAUNCHERS[launcher])
    for number, effective_batch_size in enumerate((32, 16)):
        folder = tmp_path / "sweep" / str(number)
        assert_trained(folder, effective_batch_size=effective_batch_size)
        same = sweep / str(number) / "metrics.csv"
        assert (folder / "metrics.csv").read_text(encoding="utf-8") == same.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_optuna_sweeper_finds_the_best_of_the_jobs_that_fit(
    sweep: Path, programs_cache: Path, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    # With seed 8 the sampler chooses the second of two first, and then the first.
    suggested = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    suggested += ["hydra.sweeper.sampler.seed=8", "memfit.budget=choice(64MiB,1MiB)", "memfit.effective_batch_size=16"]
    penalty = ["memfit.on_no_fit=value", "memfit.no_fit_value=100.0"]
    run_sweep(tmp_path, programs_cache, *SMALL, *penalty, *suggested)
    assert load_no_fit(tmp_path / "sweep" / "0" / "no_fit.yaml").budget_bytes == MIB
    assert_trained(tmp_path / "sweep" / "1", effective_batch_size=16)
    results = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text(encoding="utf-8"))
    assert results["best_params"] == {"memfit.budget": "64MiB"}
    *_, val_loss = (sweep / "1" / "metrics.csv").read_text(encoding="utf-8").strip().split(",")
    assert results["best_value"] == pytest.approx(float(val_loss), rel=1e-6)  # that of the same job above


def run_sweep(folder: Path, cache: Path, *overrides: str) -> None:
    """A sweep in a process that was started for it; its jobs go to ``sweep`` in the folder."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "-m", *overrides, "hydra.sweep.dir=sweep"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
