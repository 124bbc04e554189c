"""What may import what: pure rooms know no Lightning and no device, and the core runs without optional libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_memfit"
PURE = (
    "plan.py", "measurement.py", "plan_file.py", "plan_schema.py", "contest.py", "errors.py", "units.py",
    "hardware/device.py", "hardware/rates.py", "trace/timeline.py", "validate/verdict.py",
)  # fmt: skip
PURE_ROOMS = ("predict", "search")
NOT_IN_PURE = ("lightning", "pytorch_lightning", "omegaconf", "hydra")
OPTIONAL = ("hydra", "omegaconf", "bitsandbytes", "deepspeed", "matplotlib", "pynvml", "torchao", "transformers")

# Refuses the named libraries, wherever they are imported from. `pure` gives the package an empty __init__, since the
# real one offers the plugin, which is not pure. Otherwise Lightning comes first: torchmetrics imports transformers
# where it is installed, which is no import of ours.
IMPORTER = """
import sys, importlib, importlib.abc, types
folder, forbidden, pure, modules = sys.argv[1], sys.argv[2].split(","), sys.argv[3] == "pure", sys.argv[4:]
if not pure:
    import lightning.pytorch
    for name in [name for name in sys.modules if name.split(".")[0] in forbidden]:
        del sys.modules[name]

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in forbidden:
            raise ImportError(f"{name} may not be imported here", name=name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, folder)
if pure:
    package = types.ModuleType(modules[0].split(".")[0])
    package.__path__ = [f"{folder}/{package.__name__}"]
    sys.modules[package.__name__] = package
for module in modules:
    importlib.import_module(module)
print(len(modules), "imported")
"""


def import_without(
    forbidden: Iterable[str], modules: list[str], *, folder: Path = PACKAGE.parent, pure: bool
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORTER, str(folder), ",".join(forbidden), "pure" if pure else "whole", *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def pure_sources() -> list[Path]:
    named = [PACKAGE / name for name in PURE]
    assert all(path.exists() for path in named), f"a pure file was renamed: {named}"
    return named + [path for room in PURE_ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]


def impurities(source: str) -> list[str]:
    """What the source of a pure room may not do: touch ``torch.cuda``, read a clock, print."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                found.append(f"line {node.lineno}: torch.cuda")
            case ast.Import(names=names):
                found += [
                    f"line {node.lineno}: import {n.name}"
                    for n in names
                    if n.name in ("time", "datetime", "torch.cuda")
                ]
            case ast.ImportFrom(module=module, names=names):
                torch_cuda = module == "torch" and any(n.name == "cuda" for n in names)
                if module in ("time", "datetime", "torch.cuda") or torch_cuda:
                    found.append(f"line {node.lineno}: from {module}")
            case ast.Call(func=ast.Name(id="print")):
                found.append(f"line {node.lineno}: print")
    return found


def test_pure_rooms_import_no_lightning_and_no_config_library() -> None:
    modules = [module_name(path) for path in pure_sources()]
    assert "lightning_memfit.plan" in modules
    result = import_without(NOT_IN_PURE, modules, pure=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", ["import lightning.pytorch", "from omegaconf import OmegaConf", "import hydra"])
def test_the_check_of_pure_rooms_can_fail(tmp_path: Path, line: str) -> None:
    (tmp_path / "offender").mkdir()
    (tmp_path / "offender" / "plan.py").write_text(line + "\n")
    result = import_without(NOT_IN_PURE, ["offender.plan"], folder=tmp_path, pure=True)
    assert result.returncode != 0
    assert "may not be imported here" in result.stderr


@pytest.mark.parametrize("path", pure_sources(), ids=module_name)
def test_pure_rooms_touch_no_device_read_no_clock_and_print_nothing(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.cuda.is_available()", ["line 2: torch.cuda"]),
        ("import torch.cuda", ["line 1: import torch.cuda"]),
        ("from torch import cuda", ["line 1: from torch"]),
        ("from time import perf_counter", ["line 1: from time"]),
        ("def f():\n    print(1)", ["line 2: print"]),
    ],
)
def test_the_check_of_what_pure_rooms_do_can_fail(source: str, found: list[str]) -> None:
    assert impurities(source) == found


def test_every_module_imports_without_optional_libraries() -> None:
    modules = [module_name(path) for path in sorted(PACKAGE.rglob("*.py"))]
    result = import_without(OPTIONAL, modules, pure=False)
    assert result.returncode == 0, result.stderr


def test_the_check_of_optional_libraries_can_fail(tmp_path: Path) -> None:
    (tmp_path / "offender.py").write_text("import hydra\n")
    result = import_without(OPTIONAL, ["offender"], folder=tmp_path, pure=False)
    assert result.returncode != 0
    assert "hydra may not be imported here" in result.stderr


def test_importing_the_package_changes_nothing_of_the_process() -> None:
    code = (
        "import os, random, torch, threading\n"
        "import lightning.pytorch, torchmetrics\n"
        "def state():\n"
        "    return dict(os.environ), random.getstate(), torch.get_rng_state().tolist(), torch.get_default_dtype(),\\\n"
        "        threading.active_count(), torch.get_num_threads()\n"
        "before = state()\n"
        "import lightning_memfit\n"
        "assert state() == before\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    assert result.returncode == 0, result.stderr
