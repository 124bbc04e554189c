"""The plugin that Hydra imports in every application: light, harmless, and found by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
# What scanning for plugins adds to the modules that are loaded, the other plugins of this environment left out.
SCAN = """
import sys, warnings
warnings.simplefilter("error")
import hydra, hydra.core.plugins, hydra.utils
before = set(sys.modules)
{more}
plugins = hydra.core.plugins.Plugins.instance()
names = [cls.__name__ for cls in plugins.discover(hydra.core.plugins.Sweeper)]
assert "MemFitSweeper" in names, names
import importlib
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
print(*(name for name in plugins.get_stats().modules_import_time if "memfit" in name))
"""
HEAVY = {"torch", "lightning", "pytorch_lightning", "lightning_memfit", "numpy", "matplotlib", "rich", "pandas"}


def scanned(tmp_path: Path, more: str = "") -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", SCAN.format(more=more)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_hydra_finds_the_sweeper_and_loads_nothing_heavy_for_it(tmp_path: Path) -> None:
    loaded, ours = scanned(tmp_path)
    assert ours.split() == ["hydra_plugins.memfit_sweeper", "hydra_plugins.memfit_sweeper.memfit_sweeper"]
    assert set(loaded.split()) & HEAVY == set()


def test_the_check_of_what_is_loaded_can_fail(tmp_path: Path) -> None:
    folder = tmp_path / "hydra_plugins" / "heavy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import rich\n")
    loaded, _ = scanned(tmp_path)
    assert set(loaded.split()) & HEAVY == {"rich"}


def test_its_folder_is_a_namespace_that_other_plugins_share() -> None:
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()


@pytest.mark.parametrize("part", ["wheel", "sdist"])
def test_it_is_part_of_what_is_published(part: str) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    target = project["tool"]["hatch"]["build"]["targets"][part]
    assert "hydra_plugins" in target["packages" if part == "wheel" else "include"]


def test_its_settings_reach_the_sweep_and_params_come_before_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_plugins.memfit_sweeper.memfit_sweeper import MemFitSweeper
    from lightning_memfit.sweep import conduct

    asked: dict[str, object] = {}

    def note(arguments: list[str], **named: object) -> list[str]:
        asked.update(named, arguments=arguments)
        return ["returned"]

    monkeypatch.setattr(conduct, "conduct", note)
    sweeper = MemFitSweeper(max_batch_size=3, params={"a": "1,2"}, device="t4", subject="x.y", real=True)
    sweeper.config = sweeper.launcher = sweeper._task = object()
    sweeper._context = SimpleNamespace(config_loader="loader")  # type: ignore[assignment]
    assert sweeper.sweep(["b=3"]) == ["returned"]
    assert asked["arguments"] == ["a=1,2", "b=3"] and asked["config_loader"] == "loader"
    assert asked["settings"] == conduct.Settings(max_batch_size=3, device="t4", subject="x.y", real=True)


def test_every_setting_of_the_config_is_an_argument_of_the_sweeper() -> None:
    import dataclasses
    import inspect

    from hydra_plugins.memfit_sweeper.memfit_sweeper import MemFitSweeper, MemFitSweeperConf

    settings = {field.name: field.default for field in dataclasses.fields(MemFitSweeperConf)}
    target = settings.pop("_target_")
    assert target == f"{MemFitSweeper.__module__}.{MemFitSweeper.__qualname__}"
    arguments = {name: each.default for name, each in inspect.signature(MemFitSweeper).parameters.items()}
    assert arguments == settings
