"""Fixtures of the end-to-end tests, for the zoo too."""

from __future__ import annotations

from tests.e2e.conftest import (
    imports_are_not_searched_for_garbage,
    known_rates,
    make_trainer,
    no_contest,
    no_probing,
    own_cache,
)

__all__ = [
    "imports_are_not_searched_for_garbage",
    "known_rates",
    "make_trainer",
    "no_contest",
    "no_probing",
    "own_cache",
]
