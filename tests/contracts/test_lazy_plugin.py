"""Forecasts need neither Lightning nor what reports are drawn with: the plugin is imported when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_memfit

PACKAGE = Path(lightning_memfit.__file__).parent
IMPORTER = """
import importlib.abc, sys
forbidden = sys.argv[1].split(",")

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in forbidden:
            raise ImportError(f"{name} may not be imported here", name=name)

sys.meta_path.insert(0, Refuse())
from lightning_memfit import forecast, make_plan, trace_step
exec(sys.argv[2])
"""


def without(libraries: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORTER, libraries, code]
    return subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)


def test_forecasts_are_imported_without_lightning_rich_and_psutil() -> None:
    result = without("lightning,pytorch_lightning,rich,psutil,fsspec,torchmetrics", "")
    assert result.returncode == 0, result.stderr


def test_the_plugin_is_imported_when_it_is_asked_for() -> None:
    result = without("rich", "from lightning_memfit import MemFit")
    assert result.returncode != 0
    assert "rich may not be imported here" in result.stderr


def test_the_plugin_is_listed_and_other_names_are_not_there() -> None:
    assert "MemFit" in dir(lightning_memfit)
    with pytest.raises(AttributeError, match="has no attribute 'MemFat'"):
        _ = lightning_memfit.MemFat  # type: ignore[attr-defined]
