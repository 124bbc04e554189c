"""What the end-to-end tests share: a cache of their own, no child processes, and Trainers that say nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest

from lightning_memfit import MemFit, planning, preparation
from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.trace.op_probe import OperatorProber, Probes
from tests.docs.known_machine import RATES


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MemFit's cache goes to a folder of the test."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


@pytest.fixture
def no_probing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators are not probed: the small models here have no hidden temporaries, and a child process takes seconds."""
    monkeypatch.setattr(OperatorProber, "start", lambda prober: None)
    monkeypatch.setattr(OperatorProber, "probe", lambda prober, signatures: Probes(results={}))
    yield


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> DeviceRates:
    """The device is not measured: choices by speed are the same on every machine, and bf16 is slower than float32."""
    monkeypatch.setattr(preparation, "measure_rates", lambda **settings: RATES)
    return RATES


@pytest.fixture(autouse=True)
def no_contest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that is predicted to be fastest is taken: on a busy machine a clock would choose another.

    Not in tests that are marked with ``contest``.
    """
    if request.node.get_closest_marker("contest") is None:
        monkeypatch.setattr(planning, "MOST_CONTENDERS", 1)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """``make_trainer(plugin or None, **settings)``: a quiet Trainer on the CPU."""

    def make(plugin: MemFit | None = None, **settings: Any) -> Any:
        quiet = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        return lightning.Trainer(plugins=[] if plugin is None else [plugin], **{**quiet, **settings})

    return make


@pytest.fixture(scope="module", autouse=True)
def imports_are_not_searched_for_garbage() -> Iterator[None]:
    """Every warm-up collects garbage first, which takes most of a small run's time where large libraries are loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
