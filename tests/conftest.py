"""What every test gets: one torch thread, fixed seeds, and a check that it left the process as it found it."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from lightning_memfit import fit_session

settings.register_profile("same examples every time", derandomize=True, database=None)
settings.register_profile("new examples")
settings.load_profile("same examples every time")

WATCHED_VARIABLES = ("MEMFIT", "HYDRA", "MALLOC_")
"""Beginnings of the names of environment variables that change what MemFit or a later test does."""


def process_state() -> dict[str, Any]:
    """What a test must leave as it was, by name."""
    return {
        "environment": {name: value for name, value in os.environ.items() if name.startswith(WATCHED_VARIABLES)},
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        # A daemon thread ends with the process; libraries such as tqdm keep one.
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.is_alive() and not thread.daemon),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for every entry that changed."""
    return [f"{name}: {before[name]!r} became {after[name]!r}" for name in before if before[name] != after[name]]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kept_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def kept_folder(kept_folders: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A run is planned anew, not as another test left it; within a test, equal runs plan once."""
    folder = kept_folders / hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    with pytest.MonkeyPatch.context() as patch:  # not the fixture: see below
        patch.setattr(fit_session, "plans_folder", lambda cache_dir: folder / "plans")
        patch.setattr(fit_session, "corrections_folder", lambda cache_dir: folder / "corrections")
        yield folder


@pytest.fixture(scope="session")
def forked_programs() -> Iterator[Any]:
    """A :class:`~tests.forked_programs.ForkedPrograms` for all tests that run whole programs."""
    from tests.forked_programs import ForkedPrograms  # a test copies this file to where nothing else is

    with ForkedPrograms() as programs:
        yield programs


@pytest.fixture(scope="session")
def programs_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``XDG_CACHE_HOME`` of whole programs: the first one measures the device for all."""
    return tmp_path_factory.mktemp("programs_cache")


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was(one_torch_thread: None) -> Iterator[None]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    # A developer's own MEMFIT=off must not turn off what is tested. A context of its own, not the fixture of that name:
    # that one would be undone after the check below, and what it undoes would be taken for a trace.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MEMFIT", raising=False)
        before = process_state()
        yield
        changed = differences(before, process_state())
    assert not changed, "the test left traces in the process: " + "; ".join(changed)
