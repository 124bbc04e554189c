"""Fixtures of the end-to-end tests, for failures that were reported in public too."""

from __future__ import annotations

from tests.e2e.conftest import known_rates, make_trainer, no_contest, no_probing, own_cache

__all__ = ["known_rates", "make_trainer", "no_contest", "no_probing", "own_cache"]
