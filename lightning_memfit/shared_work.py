"""What was traced and replayed, kept by everything that decides it, so that forecasts of several devices share it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar, cast

from lightning_memfit.trace.timeline import ProbeResult

Made = TypeVar("Made")


class SharedWork:
    """Keeps results by key, and makes each once.

    Where making one raises, nothing is kept.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What is kept under a key; made now if nothing is.

        Args:
            key: everything that decides the result, and a word for what it is.
            make: makes it.
        """
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])


def probes_key(results: Mapping[int, ProbeResult]) -> Hashable:
    """Equal where equal things were found inside equal operators."""
    return frozenset(
        (number, found.peak_bytes, found.hidden_bytes, frozenset(found.output_bytes.items()))
        for number, found in results.items()
    )
