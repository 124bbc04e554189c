"""Small Hydra applications in folders of their own, and the sweeps that are run with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
APPLICATION = '''
"""Trains nothing: what its jobs do is told by their config."""
import json, os, sys, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

RAN = Path(__file__).parent / "ran.txt"


def square(config):
    import torch
    if config.task == "untraceable":
        raise KeyError("no such model")
    module = torch.nn.Linear(config.width, config.width, bias=False)
    return Subject(module, torch.zeros(4, config.width), config.get("steps"))


class Subject:
    def __init__(self, module, batch, steps):
        self.module, self.batch, self.optimizer_steps = module, batch, steps
        self.loss = lambda module, batch: module(batch).sum()

    def optimizer(self, parameters):
        import torch
        return torch.optim.SGD(parameters, lr=0.1)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    number = HydraConfig.get().job.num
    with RAN.open("a") as file:
        file.write(f"{number}\\n")
    output = Path(HydraConfig.get().runtime.output_dir)
    if config.task == "fails":
        raise ValueError("the data is missing")
    if config.task == "does not fit":
        from lightning_memfit.errors import NoFeasiblePlanError
        raise NoFeasiblePlanError("No plan fits.\\nMore lines.", budget_bytes=100, best_peak_bytes=130)
    if config.task == "skips":
        sizes = "budget_bytes: 10\\nbest_peak_bytes: 15\\nmissing_bytes: 5\\n"
        (output / "no_fit.yaml").write_text(f"schema_version: 1\\nreason: too large\\n{sizes}")
        return float("nan")
    if config.task == "leaves":
        sys.exit(3)
    if config.task == "is killed":
        os.kill(os.getpid(), 9)
    if config.task == "waits":
        time.sleep(float(os.environ.get("SECONDS_TO_WAIT", "0")))
    return config.width / 2 + number


if __name__ == "__main__":
    main()
'''
CONFIG = """
task: trains
width: 8
memfit:
  budget: 64MiB
hydra:
  sweeper:
    device: t4
    subject: application.square
  job_logging:
    root: {handlers: []}
defaults:
  - override hydra/sweeper: memfit
  - _self_
"""


class Swept:
    """What a sweep did."""

    def __init__(self, folder: Path, result: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = result.returncode, result.stdout, result.stderr
        self.folder = folder

    def read(self, name: str) -> Any:
        """The JSON file of that name, from the sweep's folder."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Of ``sweep.json``, in the sweep's order."""
        found: list[dict[str, Any]] = self.read("sweep.json")["jobs"]
        return found

    def column(self, name: str) -> list[Any]:
        return [job[name] for job in self.jobs]


class Application:
    """A Hydra application in a folder."""

    def __init__(self, folder: Path, source: str, config: str) -> None:
        self.folder = folder
        (folder / "conf").mkdir(parents=True)
        (folder / "application.py").write_text(source)
        (folder / "conf" / "config.yaml").write_text(config)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "application.py", "-m", "hydra.sweep.dir=swept", *words]

    def environment(self, **more: str) -> dict[str, str]:
        paths = os.pathsep.join((str(ROOT), str(self.folder)))
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1", **more}

    def sweep(self, *words: str, **environment: str) -> Swept:
        result = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        return Swept(self.folder / "swept", result)

    def ran(self) -> list[int]:
        """The numbers of the jobs that ran, in that order; forgotten once they are read."""
        path = self.folder / "ran.txt"
        if not path.exists():
            return []
        numbers = [int(line) for line in path.read_text().split()]
        path.unlink()
        return numbers


@pytest.fixture
def application(tmp_path: Path) -> Application:
    """Jobs whose forecasts take a moment, and that train nothing."""
    return Application(tmp_path / "application", APPLICATION, CONFIG)


@contextmanager
def composing(folder: Path, config: str, *overrides: str) -> Iterator[tuple[Any, Any]]:
    """The config of a sweep, and Hydra's config loader, for a folder with one config."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    with initialize_config_dir(str(folder), version_base="1.3", job_name="app"):
        yield (
            compose("config", overrides=list(overrides), return_hydra_config=True),
            GlobalHydra.instance().config_loader(),
        )
