"""Looks at several loaders that are read side by side, begun in the order in which Lightning begins to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_memfit.apply.batch_scan import ScannedBatch
from lightning_memfit.apply.epoch_scan import Scan
from lightning_memfit.apply.first_batch import Look, NoBatchError
from lightning_memfit.apply.random_sources import Move, RandomSources


def first_batches(looks: Sequence[Look], hook_move: Move | None) -> list[Any] | None:
    """The first batch of each loader; ``None`` if one has none.

    Args:
        looks: one for each loader, not started.
        hook_move: how the hook that made the loaders moved the random generators, if that is still to come.
    """
    try:
        with _begun(looks, hook_move):
            return [look.first() for look in looks]
    except NoBatchError:
        return None


def largest_batches(looks: Sequence[Look], scans: Sequence[Scan], hook_move: Move | None) -> list[ScannedBatch] | None:
    """The largest batch that is found in each loader; ``None`` if one has no batch.

    Args:
        looks: one for each loader, not started.
        scans: the scan of each.
        hook_move: how the hook that made the loaders moved the random generators, if that is still to come.
    """
    try:
        with _begun(looks, hook_move):
            for scan in scans:
                scan.begin()
            for scan in scans:
                scan.go_on()
            return [scan.found() for scan in scans]
    except NoBatchError:
        return None


@contextmanager
def _begun(looks: Sequence[Look], hook_move: Move | None) -> Iterator[None]:
    """Make all iterators before any is advanced, as Lightning does. Random generators get their states back."""
    sources = RandomSources(*(generator for look in looks for generator in look.generators))
    try:
        with sources.kept():
            if hook_move is not None:
                hook_move.replay()
            for look in looks:
                look.start()
            yield
    finally:
        for look in looks:
            look.end()
