"""The examples run as they are, small: what they print is held to the budget, and something is learned.

Run with ``pytest tests/examples``.
"""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lightning_memfit import Plan
from lightning_memfit.no_fit import load_no_fit
from lightning_memfit.units import MIB, parse_bytes
from tests.forked_programs import ForkedPrograms

EXAMPLES = Path(__file__).parents[2] / "examples"


class Examples:
    """Runs examples, each a process of its own, in a folder that is not the repository."""

    def __init__(self, programs: ForkedPrograms, cache: Path) -> None:
        self._programs = programs
        self._cache = cache

    def run(self, script: str, *arguments: str, folder: Path) -> str:
        """What it prints."""
        done = self.end_of(script, *arguments, folder=folder)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def end_of(self, script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Its exit code and what it prints, also where it fails."""
        environment = {"XDG_CACHE_HOME": str(self._cache)}
        return self._programs.run(EXAMPLES / script, *arguments, folder=folder, environment=environment)


@pytest.fixture
def examples(forked_programs: ForkedPrograms, programs_cache: Path) -> Examples:
    return Examples(forked_programs, programs_cache)


def value(output: str, label: str) -> str:
    """What stands behind a label at the beginning of a line."""
    found = re.search(rf"^{re.escape(label)} {{2,}}(.*)$", output, re.MULTILINE)
    assert found is not None, f"no line {label!r} in:\n{output}"
    return found.group(1)


def assert_proven_within(output: str, budget: str) -> None:
    """The budget is the one given, and the measured peak is below it."""
    assert parse_bytes(value(output, "budget"), setting="budget") == parse_bytes(budget, setting="budget")
    peak = parse_bytes(value(output, "measured peak"), setting="peak")
    assert 0 < peak <= parse_bytes(budget, setting="budget")


def losses(output: str) -> tuple[float, float]:
    """Validation loss in front of training, and at its end."""
    before, after = re.findall(r"\d+\.\d+", value(output, "validation loss"))
    return float(before), float(after)


def test_an_own_module_trains_inside_the_budget(tmp_path: Path, examples: Examples) -> None:
    options = ["--budget", "8MiB", "--samples", "384", "--layers", "1", "--output", "run"]
    output = examples.run("own_module.py", *options, folder=tmp_path)
    assert_proven_within(output, "8MiB")
    assert value(output, "effective batch").startswith("128 samples")
    plan = Plan.load(tmp_path / "run" / "plan.yaml")
    assert plan.candidate.label == value(output, "plan")
    assert plan.split.accumulate_grad_batches == 2  # batches of 64, an effective batch of 128
    before, after = losses(output)
    assert after < before - 0.1


def test_adapters_of_a_language_model_train_inside_the_budget(tmp_path: Path, examples: Examples) -> None:
    sizes = ["--width", "32", "--layers", "1", "--lines", "160", "--output", "run"]
    output = examples.run("causal_lm_lora.py", *sizes, "--budget", "4MiB", folder=tmp_path)
    assert_proven_within(output, "4MiB")
    plan = Plan.load(tmp_path / "run" / "plan.yaml")
    assert (plan.split.effective_batch_size, plan.request.loss_weight) == (16, "next-tokens")
    # Of each linear layer with i inputs and o outputs rank 8 trains 8 (i + o): four of 32 x 32, three of 32 x 128.
    trained = 4 * 8 * (32 + 32) + 3 * 8 * (32 + 128)
    assert value(output, "trained").startswith(f"{trained:,} of ")
    before, after = losses(output)
    assert before == pytest.approx(math.log(256), abs=0.2)  # an untrained model of bytes guesses
    assert after < before - 0.02


def test_a_hydra_app_composes_the_group_of_the_package(tmp_path: Path, examples: Examples) -> None:
    small = ["model.layers=1", "epochs=1", "memfit.budget=3MiB", "hydra.run.dir=run"]
    output = examples.run("vit_digits/app.py", *small, folder=tmp_path)
    assert_proven_within(output, "3MiB")
    assert float(value(output, "accuracy").rstrip("%")) > 15  # ten classes
    plan = Plan.load(tmp_path / "run" / "plan.yaml")
    assert plan.split.effective_batch_size == 64
    composed = yaml.safe_load((tmp_path / "run" / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
    assert (composed["memfit"]["budget"], composed["memfit"]["num_profiled_steps"]) == ("3MiB", 2)


# Learning rate and batch are given, so that the sampler chooses a width alone: with seed 8 first 1024, then 64.
TWO_TRIALS = (
    *("-m", "epochs=1", "learning_rate=0.001", "batch_size=128", "width=choice(64,1024)", "hydra.sweep.dir=sweep"),
    *("hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=8"),
)


def test_a_sweep_goes_on_where_a_trial_does_not_fit(tmp_path: Path, examples: Examples) -> None:
    output = examples.run("optuna_sweep/app.py", *TWO_TRIALS, folder=tmp_path)
    assert re.search(r"^width=1024 does not fit, \d[\d.]* MiB too much: counts as 10.0$", output, re.MULTILINE)
    assert re.search(r"^width=64 trained within \d[\d.]* KiB \(.*\): \d\.\d+$", output, re.MULTILINE)
    sweep = tmp_path / "sweep"
    assert load_no_fit(sweep / "0" / "no_fit.yaml").budget_bytes == 12 * MIB
    assert Plan.load(sweep / "1" / "plan.yaml").split.effective_batch_size == 128
    results = yaml.safe_load((sweep / "optimization_results.yaml").read_text(encoding="utf-8"))
    assert results["best_params"] == {"width": 64}
    assert 0 < results["best_value"] < math.log(10)  # better than a guess among ten digits, and no penalty


@pytest.mark.slow
def test_an_objective_that_is_no_number_would_end_the_sweep(tmp_path: Path, examples: Examples) -> None:
    """What the comment in the example's config says of hydra-optuna-sweeper 1.3."""
    skipping = ["memfit.on_no_fit=skip", "memfit.no_fit_value=null", "hydra.sweeper.max_failure_rate=1.0"]
    done = examples.end_of("optuna_sweep/app.py", *TWO_TRIALS, *skipping, folder=tmp_path)
    assert done.returncode == 1
    assert "Values cannot be specified when state is" in done.stderr
    assert not (tmp_path / "sweep" / "1").exists()


def test_gpus_that_are_not_here_are_compared(tmp_path: Path, examples: Examples) -> None:
    # Two blocks of 12 x 8192^2 parameters and 2 x 32000 x 8192 around them: 2.1 billion, 17 GB with their gradients,
    # which is more than a T4 has.
    sizes = ["--layers", "2", "--width", "8192", "--sequence", "64", "--gpus", "t4", "h100-sxm"]
    output = examples.run("rent_a_gpu.py", *sizes, folder=tmp_path)
    rows = {line.split()[0]: line for line in output.splitlines() if line.startswith(("  t4", "  h100"))}
    assert re.search(r"does not fit: \d[\d.]* GiB too much", rows["t4"])
    assert re.search(r"GiB +\d[\d.]* GiB +\d[\d.e-]* s +\S.*bf16-mixed", rows["h100-sxm"])
    assert "would allocate" in output and "assumed shares of the vendor's peak rates" in output
