"""Sweeps of small applications, each in a process of its own, with the launchers that Hydra offers on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.sweep.conftest import Application


def test_what_cannot_fit_is_left_out_and_the_rest_is_launched_cheapest_first(application: Application) -> None:
    # 2048 x 2048 weights: 16 MiB of parameters and as many of gradients.
    ran = application.sweep("width=2048,8", "memfit.budget=24MiB", "+steps=100,10")
    assert ran.code == 0, ran.err
    assert ran.column("status") == ["left out", "left out", "completed", "completed"]
    # Ten steps take less than a hundred; the numbers are those of the sweep's order.
    assert application.ran() == [3, 2]
    left_out = ran.jobs[0]
    assert left_out["missing_bytes"] >= (32 - 24) * 1024**2 and "too much" in left_out["reason"]
    assert "left out: job 0" in ran.out and "4 jobs: 2 left out, 2 completed" in ran.out
    assert not (ran.folder / "0").exists()
    # The task gives width / 2 + number.
    assert ran.column("objective") == [None, None, 6.0, 7.0]
    assert ran.read("2/job.json")["objective"] == 6.0
    assert {path.name for path in ran.folder.iterdir()} >= {"sweep.csv", "sweep.json", "sweep.png", "sweep.svg"}
    assert (ran.folder / "multirun.yaml").exists()


ENDS = "task=trains,fails,does not fit,skips,leaves,untraceable"
STATUSES = ["completed", "failed", "does not fit", "does not fit", "failed", "completed"]


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_every_job_ends_in_a_record_and_failed_ones_are_named_at_the_end(
    application: Application, launcher: str
) -> None:
    more = ("hydra.launcher.n_jobs=2",) if launcher == "joblib" else ()
    ran = application.sweep(ENDS, f"hydra/launcher={launcher}", *more)
    assert ran.code == 1
    assert ran.column("status") == STATUSES, ran.err
    assert sorted(application.ran()) == [0, 1, 2, 3, 4, 5]
    assert ran.column("reason")[1] == "ValueError: the data is missing"
    assert ran.column("reason")[2:5] == ["No plan fits.", "too large", "the job ended with exit code 3"]
    assert ran.column("missing_bytes")[2:4] == [30, 5]
    assert ran.column("reason")[5].startswith("cannot tell: hydra.sweeper.subject (square) raised KeyError")
    # Folders and numbers are those of the sweep, whatever the order of the launches: the task gives 8 / 2 + number.
    assert ran.column("objective") == [4.0, None, None, None, None, 9.0]
    assert [ran.read(f"{number}/job.json")["number"] for number in range(6)] == [0, 1, 2, 3, 4, 5]
    assert "SweepError: 2 of 6 jobs failed:" in ran.err
    told = "job 1 (task=fails): ValueError: the data is missing [traceback: swept/1/job_error.txt]"
    assert told in ran.err
    assert "in main\n" in (ran.folder / "1" / "job_error.txt").read_text()
    assert ran.err.rindex("SweepError") > 0 and "6 jobs: 2 completed, 2 failed, 2 does not fit" in ran.out


@pytest.mark.slow
def test_jobs_run_in_processes_of_their_own_and_one_that_is_killed_is_a_failed_one(application: Application) -> None:
    ran = application.sweep("task=trains,is killed", "hydra/launcher=submitit_local")
    assert ran.code == 1
    assert ran.column("status") == ["completed", "failed"], ran.err
    assert "its process was killed" in ran.column("reason")[1]


def test_a_sweep_that_was_killed_goes_on(application: Application) -> None:
    words = ("+steps=10", "task=trains,waits")
    process = subprocess.Popen(
        application.command(*words),
        cwd=application.folder,
        env=application.environment(SECONDS_TO_WAIT="600"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    folder = application.folder / "swept"
    _wait_for(folder / "1" / ".hydra" / "overrides.yaml")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert application.ran() == [0, 1]
    assert (folder / "0" / "job.json").exists() and not (folder / "1" / "job.json").exists()

    ran = application.sweep(*words)
    assert ran.code == 0, ran.err
    assert application.ran() == [1]
    assert "1 of 2 jobs was completed by an earlier run in swept; the other 1 is looked at again" in ran.out
    assert ran.column("status") == ["completed", "completed"]
    assert ran.column("from_before") == [True, False]
    # What was predicted of the first one before is still known.
    assert ran.jobs[0]["predicted_peak_bytes"] == ran.jobs[1]["predicted_peak_bytes"] > 0


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


TRAINING = """
import hydra
from lightning_memfit import config as memfit_config


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    memfit = memfit_config.memfit_from_config(config.memfit)
    model, data = hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.data)
    trainer = hydra.utils.instantiate(config.trainer, plugins=[memfit])
    trainer.fit(model, datamodule=data)
    return trainer.global_step


if __name__ == "__main__":
    memfit_config.register_configs()
    main()
"""
TRAINED = """
defaults:
  - memfit_schema
  - override hydra/sweeper: memfit
  - _self_
model:
  _target_: lightning_memfit.demo.byte_gpt.ByteGPT
  d_model: 16
  num_layers: 1
  num_heads: 2
  max_sequence_length: 16
data:
  _target_: lightning_memfit.demo.text_files.TextFiles
  path: ${hydra:runtime.cwd}/text.txt
  sequence_length: 16
  batch_size: 4
  validation_batch_size: 2
  validation: tail
trainer:
  _target_: lightning.pytorch.Trainer
  accelerator: cpu
  max_steps: 2
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: ${hydra:runtime.output_dir}
memfit:
  effective_batch_size: 8
  budget: 4MiB
  precision: 32-true
  activation_checkpointing: none
  optimizer_states: as-configured
  optimizer_implementation: as-configured
  verbose: false
"""


@pytest.mark.slow
def test_a_real_application_is_forecast_trained_and_measured(tmp_path: Path) -> None:
    application = Application(tmp_path / "trained", TRAINING, TRAINED)
    (application.folder / "text.txt").write_text("the quick brown fox\n" * 200)
    cache = str(tmp_path / "cache")
    ran = application.sweep("memfit.budget=100KiB,4MiB", XDG_CACHE_HOME=cache)
    assert ran.code == 0, ran.err
    assert ran.column("status") == ["left out", "completed"]
    fits = ran.jobs[1]
    # 256 x 16 for bytes, 16 x 16 for positions, 12 x 16 x 16 + 13 x 16 for the block, 2 x 16 for the norm: 7,664
    # weights, each with a gradient and two states of AdamW: 16 bytes, 122,624 in all.
    assert fits["predicted_peak_bytes"] > 122_624
    assert fits["measured_peak_bytes"] == pytest.approx(fits["predicted_peak_bytes"], rel=0.01)
    assert fits["measured_samples_per_second"] > 0 and fits["objective"] == 2.0
    assert fits["forecast"]["optimizer_steps"] == 2
