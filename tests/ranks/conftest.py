"""What real ranks returned, started once for all processes that run tests."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import filelock
import pytest

Once = Callable[[str, Callable[[], Any]], Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """(name, function) to the function's result: the first process that asks runs it, and the others read it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def result_of(name: str, make: Callable[[], Any]) -> Any:
        kept = folder / f"{name}.pickle"
        with filelock.FileLock(kept.with_suffix(".lock")):
            if not kept.exists():
                kept.write_bytes(pickle.dumps(make()))
        return pickle.loads(kept.read_bytes())

    return result_of
