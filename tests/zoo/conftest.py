"""Fixtures of the end-to-end tests, for the zoo too."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import known_rates, make_trainer, no_contest, no_probing, own_cache

__all__ = ["known_rates", "make_trainer", "no_contest", "no_probing", "own_cache"]


@pytest.fixture(scope="module", autouse=True)
def imports_are_not_searched_for_garbage() -> Iterator[None]:
    """Every warm-up collects garbage first, which takes most of a small run's time where large libraries are loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
