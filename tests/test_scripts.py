"""The scripts: the environment is made once and repaired, and the application trains, refuses and says so."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]

# Stands in for Python: `-m venv` makes a folder with a copy of itself, `-m pip` notes what was asked for and fails if
# told to. Everything else succeeds.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; touch "$3/made"; echo venv >> "$LOG"; fi
if [ "$1 $2" = "-m pip" ]; then echo pip >> "$LOG"; [ -z "${PIP_FAILS:-}" ]; fi
"""


class Checkout:
    """A folder with the scripts, the two files they read, and the stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "environment.sh", folder / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            (folder / name).write_text(f"{name}\n")
        python = folder / "fake_python"
        python.write_text(FAKE_PYTHON)
        python.chmod(python.stat().st_mode | stat.S_IXUSR)

    def prepare(self, **environment: str) -> tuple[int, list[str]]:
        """Exit code, and what the stand-in was asked for this time."""
        self.log.unlink(missing_ok=True)
        result = subprocess.run(
            ["bash", "-c", f"set -euo pipefail; source '{self.folder}/scripts/environment.sh'; prepare_environment"],
            cwd="/",
            env={**os.environ, "PYTHON": str(self.folder / "fake_python"), "LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode, self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a folder")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_environment_is_installed_once(checkout: Checkout) -> None:
    assert checkout.prepare() == (0, ["venv", "pip"])
    assert checkout.prepare() == (0, [])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_the_environment_follows_its_inputs(checkout: Checkout, name: str) -> None:
    checkout.prepare()
    (checkout.folder / name).write_text("changed\n")
    (checkout.folder / ".venv" / "kept").touch()
    assert checkout.prepare() == (0, ["venv", "pip"])
    assert (checkout.folder / ".venv" / "kept").exists()
    assert checkout.prepare() == (0, [])


def test_an_install_that_did_not_finish_is_started_anew(checkout: Checkout) -> None:
    code, asked = checkout.prepare(PIP_FAILS="1")
    assert (code != 0, asked) == (True, ["venv", "pip"])
    (checkout.folder / ".venv" / "half").touch()
    assert checkout.prepare() == (0, ["venv", "pip"])
    assert not (checkout.folder / ".venv" / "half").exists()


def test_an_environment_that_was_moved_is_installed_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.prepare()
    moved = Checkout(tmp_path / "elsewhere")
    shutil.copytree(checkout.folder / ".venv", moved.folder / ".venv")
    assert moved.prepare() == (0, ["venv", "pip"])


def train(output: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"hydra.run.dir={output}", "trainer=cpu_short"]
    small = ["data=stdlib_excerpt", "data.max_bytes=200000", "model.d_model=48", "model.num_layers=2"]
    return subprocess.run(
        [*command, *small, *overrides],
        cwd=output.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_application_trains_and_leaves_a_checkpoint_and_the_plan(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "memfit.budget=200MiB")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text(encoding="utf-8"))
    assert plan["forecast"]["candidate"]["split"]["effective_batch_size"] == 16
    assert "optimizer steps           4" in result.stdout
    assert f"checkpoint                {tmp_path / 'run' / 'checkpoints' / 'best.ckpt'}" in result.stdout


def test_a_budget_that_nothing_fits_ends_with_the_message_and_a_code_of_its_own(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "memfit.budget=1MiB")
    assert result.returncode == 2
    assert "NoFeasiblePlanError" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_word_ends_with_the_key_the_value_and_the_choices(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "memfit.mode=on")
    assert result.returncode == 2
    assert "memfit.mode='on' is not known. Choose one of: 'apply', 'report', 'off'." in result.stderr


def test_the_application_trains_without_memfit_too(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "memfit=disabled", "memfit.budget=auto", "memfit.effective_batch_size=null")
    assert result.returncode == 0, result.stderr
    assert "optimizer steps           4" in result.stdout
    assert not (tmp_path / "run" / "plan.yaml").exists()
