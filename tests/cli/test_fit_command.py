"""``memfit fit``: trains what a user's own config names, in a process of its own, as Hydra sets up logging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_memfit.cli.arguments import DOES_NOT_FIT, FITS
from lightning_memfit.cli.fit_command import _sweep_code
from lightning_memfit.no_fit import NoFit, no_fit_record
from lightning_memfit.plan_file import to_yaml
from lightning_memfit.sweep.sweep_file import write_sweep
from tests.sweep.rowmaking import end, forecast, job, row

ROOT = Path(__file__).parents[2]
Memfit = Callable[..., Any]
SMALL = (
    *("trainer.accelerator=cpu", "trainer.callbacks=[]", "trainer.logger=false", "trainer.max_steps=2"),
    *("memfit.optimizer_implementation=as-configured", "memfit.precision=32-true", "hydra.run.dir=run"),
)


@pytest.fixture
def fit(memfit: Memfit, tmp_path: Path) -> Callable[..., Any]:
    """``memfit fit`` as a process in the folder of the user's code."""

    def run(*words: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "lightning_memfit.cli", "fit", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_config_is_trained_and_the_document_holds_plan_and_measurement(fit: Callable[..., Any]) -> None:
    ran = fit(*SMALL, "--json")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["plan"]["forecast"]["candidate"]["split"]["effective_batch_size"] == 8
    assert document["measured"]["measured_peak_allocated_bytes"] > 0 and document["no_fit"] is None
    folder = Path(document["output_dir"])
    assert {"plan.yaml", "memfit_report.txt"} <= {path.name for path in folder.iterdir()}
    assert "optimizer steps           2" in ran.stderr, "what the run prints does not end up inside the document"


def test_plugins_of_the_trainers_config_are_made_too(fit: Callable[..., Any]) -> None:
    ran = fit(*SMALL, "+trainer.plugins=[{_target_: there.is.no.such.Plugin}]")
    assert ran.returncode != 0 and "there.is.no.such.Plugin" in ran.stderr


def test_a_run_that_does_not_fit_ends_with_one(fit: Callable[..., Any], tmp_path: Path) -> None:
    ran = fit(*SMALL, "memfit.budget=1KiB")
    assert ran.returncode == 1
    assert "memfit: No plan fits" in ran.stderr
    skipped = fit(*SMALL, "memfit.budget=1KiB", "memfit.on_no_fit=skip")
    assert skipped.returncode == 1
    assert "does not fit" in skipped.stdout and "nothing was trained" in skipped.stdout
    assert (tmp_path / "run" / "no_fit.yaml").exists()


def test_what_an_earlier_run_left_deeper_in_the_folder_does_not_count(fit: Callable[..., Any], tmp_path: Path) -> None:
    logs = tmp_path / "run" / "a" / "deeper"
    logs.mkdir(parents=True)
    no_fit = NoFit(reason="30 B too much", budget_bytes=100, best_peak_bytes=130, missing_bytes=30)
    (logs / "no_fit.yaml").write_text(to_yaml(no_fit_record(no_fit)))
    (logs / "plan.yaml").write_text("of an earlier run")
    ran = fit(*SMALL, "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["plan"] is not None


def test_a_run_that_does_not_fit_ends_with_one_wherever_it_writes(fit: Callable[..., Any], tmp_path: Path) -> None:
    elsewhere = f"trainer.default_root_dir={tmp_path / 'elsewhere'}"
    ran = fit(*SMALL, "memfit.budget=1KiB", "memfit.on_no_fit=skip", elsewhere)
    assert ran.returncode == 1, ran.stderr
    assert (tmp_path / "elsewhere" / "no_fit.yaml").exists()


def test_a_wrong_key_is_named_with_its_value_and_the_choices(fit: Callable[..., Any]) -> None:
    ran = fit("memfit.budgit=1GiB")
    assert ran.returncode == 2
    assert "memfit.budgit=1GiB" in ran.stderr
    assert "Did you mean 'budget'? Choose one of: effective_batch_size, budget, headroom, " in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_sweep_is_another_command(memfit: Memfit) -> None:
    ran = memfit("fit", "-m", "trainer.max_steps=1,2")
    assert (ran.code, ran.err) == (2, "memfit: -m makes a sweep: write memfit sweep in place of memfit fit -m.\n")


def test_a_folder_without_a_config_is_named(memfit: Memfit, tmp_path: Path) -> None:
    ran = memfit("fit", "--config-dir", "nowhere")
    assert ran.code == 2
    assert f"There is no folder {tmp_path / 'nowhere'} to compose a config from." in ran.err


def test_a_completion_script_knows_every_command(memfit: Memfit) -> None:
    for shell in ("bash", "zsh", "tcsh"):
        ran = memfit("completion", shell)
        assert ran.code == 0
        assert all(command in ran.out for command in ("plan", "fit", "sweep", "explain", "hardware"))


def test_a_sweep_of_which_no_job_was_trained_does_not_fit(tmp_path: Path) -> None:
    trained, left_out = row(0, forecast=forecast(), end=end(job(0))), row(1, forecast=forecast(peak_mib=120))
    write_sweep(tmp_path, [left_out], arguments=[])
    assert _sweep_code([tmp_path]) == DOES_NOT_FIT
    write_sweep(tmp_path, [trained, left_out], arguments=[])
    assert _sweep_code([tmp_path]) == FITS
    assert _sweep_code([]) == FITS, "another sweeper tells nothing"
