"""The wheel, and what a newcomer meets who installs it and writes a Hydra app of their own in some other folder.

Run with ``pytest tests/packaging``; ``-m slow`` installs into an environment that has nothing yet, from pip's index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import lightning_memfit
from lightning_memfit import Plan
from lightning_memfit.units import MIB
from tests.forked_programs import ForkedPrograms

ROOT = Path(__file__).parents[2]

APP = """
import hydra
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import lightning_memfit
from lightning_memfit.config import memfit_from_config, register_configs


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    memfit = memfit_from_config(config.memfit)
    folder = hydra.core.hydra_config.HydraConfig.get().runtime.output_dir
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, plugins=[memfit],
                      enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder)
    trainer.fit(Regression(), DataLoader(data, batch_size=128))
    print("package", lightning_memfit.__file__)


if __name__ == "__main__":
    register_configs()
    main()
"""

CONFIG = """
defaults:
  - memfit: auto
  - _self_
hydra:
  searchpath:
    - pkg://lightning_memfit.conf
memfit:
  effective_batch_size: 128
  verbose: false
"""
TYPED = CONFIG.replace("defaults:\n", "defaults:\n  - memfit_schema\n")


def write_app(folder: Path) -> Path:
    """A newcomer's app: ``config`` composes the group as it is, ``typed`` over its schema."""
    (folder / "conf").mkdir()
    (folder / "conf" / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (folder / "conf" / "typed.yaml").write_text(TYPED, encoding="utf-8")
    app = folder / "app.py"
    app.write_text(APP, encoding="utf-8")
    return app


def tree(folder: Path) -> set[Path]:
    """What lies in the source tree, without what tests and tools keep there."""
    return {path for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a release has it, built without a network."""
    folder, before = tmp_path_factory.mktemp("dist"), tree(ROOT)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tree(ROOT) == before, "the build left something in the source tree"
    (built,) = folder.glob("*.whl")
    return built


def interpreter(folder: Path) -> Path:
    """Python of a virtual environment."""
    return folder / "bin" / "python"


def pip_install(folder: Path, *arguments: str) -> None:
    """Install into a virtual environment that need not have pip itself."""
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter(folder)), "install", "--quiet"]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def new_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; libraries are those of the tests' own environment.

    Their folder is a line of a ``.pth`` file: it comes behind the environment's own, and ``.pth`` files within it (that
    of an editable install, which would put this source tree in front) are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    outer = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    (own / "libraries.pth").write_text("\n".join(outer) + "\n", encoding="utf-8")
    pip_install(folder, "--no-deps", "--no-index", str(wheel))
    return folder


@pytest.fixture(scope="module")
def newcomer(new_environment: Path) -> Iterator[ForkedPrograms]:
    with ForkedPrograms(interpreter(new_environment)) as programs:
        yield programs


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.split("/")[0] for name in names}
    dist_info = f"lightning_memfit-{lightning_memfit.__version__}.dist-info"
    assert folders == {"lightning_memfit", "hydra_plugins", dist_info}
    data = {name for name in names if not name.endswith(".py") and "dist-info" not in name}
    presets = {f"lightning_memfit/conf/memfit/{name}.yaml" for name in ("auto", "disabled", "fast", "report", "safe")}
    gpus = {f"lightning_memfit/conf/hardware/{name}.yaml" for name in ("local", "a100-40gb", "t4")}
    assert presets | gpus | {"lightning_memfit/py.typed", "lightning_memfit/hardware/catalog.yaml"} <= data
    assert "lightning_memfit/conf/__init__.py" in names  # Hydra finds pkg:// folders through it
    assert "hydra_plugins/__init__.py" not in names  # it would hide the plugins of other packages
    assert not [name for name in names if re.search(r"tests?/|__pycache__|\.pyc$", name)]
    packages = ("lightning_memfit", "hydra_plugins")
    sources = {str(path.relative_to(ROOT)) for package in packages for path in (ROOT / package).rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_command_is_installed(new_environment: Path) -> None:
    script = (new_environment / "bin" / "memfit").read_text(encoding="utf-8")
    assert "from lightning_memfit.cli import main" in script


@pytest.mark.parametrize("config", ["config", "typed"])
def test_an_app_of_their_own_shows_the_keys(newcomer: ForkedPrograms, tmp_path: Path, config: str) -> None:
    done = newcomer.run(write_app(tmp_path), "-cn", config, "--cfg", "job", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    keys = yaml.safe_load(done.stdout)["memfit"]
    assert keys == {
        **yaml.safe_load((ROOT / "lightning_memfit/conf/memfit/auto.yaml").read_text(encoding="utf-8")),
        "effective_batch_size": 128,
        "verbose": False,
    }


@pytest.mark.parametrize("config", ["config", "typed"])
def test_a_wrong_value_is_told_with_its_key_and_the_choices(
    newcomer: ForkedPrograms, tmp_path: Path, config: str
) -> None:
    done = newcomer.run(write_app(tmp_path), "-cn", config, "memfit.optimizer_states=9bit", folder=tmp_path)
    assert done.returncode == 1
    assert "optimizer_states" in done.stderr and "9bit" in done.stderr
    assert all(choice in done.stderr for choice in ("auto", "as-configured", "8bit"))


def test_a_wrong_key_is_told(newcomer: ForkedPrograms, tmp_path: Path) -> None:
    app = write_app(tmp_path)
    done = newcomer.run(app, "memfit.bugdet=4MiB", folder=tmp_path)
    assert done.returncode == 1
    assert "memfit.bugdet" in done.stderr
    added = newcomer.run(app, "+memfit.bugdet=4MiB", folder=tmp_path)
    assert added.returncode == 1
    assert "memfit.bugdet='4MiB' is not a setting of MemFit." in added.stderr
    assert "'budget'" in added.stderr  # the one that was meant


@pytest.mark.slow
def test_two_budgets_of_a_multirun_train_under_a_plan_each(
    newcomer: ForkedPrograms, programs_cache: Path, tmp_path: Path
) -> None:
    # Weights (16 + 1 + 1) x 256 + 1 in float32 with gradient and two states: 72 KiB. Of 128 samples the hidden layer
    # keeps 128 KiB in front of the activation and as much behind it.
    overrides = ["-cn", "typed", "memfit.budget=200KiB,4MiB", "hydra.sweep.dir=sweep"]
    done = newcomer.run(
        write_app(tmp_path), "-m", *overrides, folder=tmp_path, environment={"XDG_CACHE_HOME": str(programs_cache)}
    )
    assert done.returncode == 0, done.stderr
    for job, budget in ((0, 200 * 1024), (1, 4 * MIB)):
        record = tmp_path / "sweep" / str(job) / "plan.yaml"
        plan = Plan.load(record)
        assert (plan.budget.budget_bytes, plan.split.effective_batch_size) == (budget, 128)
        measured = yaml.safe_load(record.read_text(encoding="utf-8"))["measured"]
        assert 0 < measured["measured_peak_bytes"] <= budget
    slices = [Plan.load(tmp_path / "sweep" / job / "plan.yaml").split.num_slices for job in ("0", "1")]
    assert slices[0] > 1 == slices[1]
    packages = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("package ")}
    assert len(packages) == 1
    (package,) = packages
    assert ROOT not in Path(package).parents and "environment" in package and "site-packages" in package


def test_the_source_tree_has_the_group_alike(tmp_path: Path) -> None:
    """As an editable install does, or ``PYTHONPATH``: whichever the tests run from."""
    write_app(tmp_path)
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        config = compose("config", ["memfit=safe"])
    assert config.memfit.num_profiled_steps == 4  # what the preset `safe` says
    assert Path(lightning_memfit.__file__).parent == ROOT / "lightning_memfit"


@pytest.mark.slow
def test_an_environment_that_has_nothing_yet_needs_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    pip_install(folder, "-c", str(ROOT / "constraints.txt"), f"{wheel}[cli]")
    done = subprocess.run(
        [interpreter(folder), str(write_app(tmp_path)), "-cn", "typed", "memfit.budget=4MiB", "hydra.run.dir=run"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Plan.load(tmp_path / "run" / "plan.yaml").budget.budget_bytes == 4 * MIB
    assert str(folder) in done.stdout
