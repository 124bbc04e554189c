"""What a rank that failed leaves for the others in torch's store, which needs no meeting: why, and where it was.

Written where the engine's collectives run, in which a rank that failed cannot say anything.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

ALIKE_WITHIN = datetime.timedelta(seconds=30)
"""How long a rank that failed waits for the others to fail at the same place; at most half the strategy's time-out.
They took part in the same collectives before: only what one rank computes between two of them lies between them."""
_GAVE_UP = "not waiting any more"


class RankNotes:
    """The notes of one group of ranks.

    Args:
        store: gives torch's store; it may be gone, with rank 0.
        number: of the group; the same on every rank.
        index: which of the ranks this is.
        count: how many there are.
    """

    def __init__(self, store: Callable[[], Any], *, number: int, index: int, count: int) -> None:
        self._store, self._number, self._index, self._count = store, number, index, count
        self._caught = self._got_over = 0

    def leave(self, words: str) -> None:
        """Say why this rank fails. Whoever finds a note already leaves that one: the first failure counts."""
        with suppress(RuntimeError):  # the store ends with rank 0
            self._store().set(self._name, pickle.dumps((self._index, words)))

    def read(self) -> tuple[int, str] | None:
        """Which rank failed, and how; ``None`` if none left a note since all got over an error."""
        try:
            store = self._store()
            if not store.check([self._name]):
                return None
            rank, words = pickle.loads(store.get(self._name))
        except RuntimeError:
            return None
        return rank, words

    def all_failed_at(self, place: str, *, within: datetime.timedelta) -> bool:
        """Whether every rank says that it failed at the same place, so that all get over it.

        Args:
            place: where this one did.
            within: how long the others are waited for. One that comes later learns that it came too late.
        """
        self._caught += 1
        names = [f"memfit/place/{self._number}/{self._caught}/{rank}" for rank in range(self._count)]
        try:
            store = self._store()
            store.set(names[self._index], place)
            store.wait(names, within)
            alike = all(store.get(name).decode() == place for name in names)
        except RuntimeError:  # one of them is not there in time, or the store ended with rank 0
            with suppress(RuntimeError):
                self._store().set(names[self._index], _GAVE_UP)
            return False
        self._got_over += alike
        return alike

    @property
    def _name(self) -> str:
        """Another behind each error that all ranks got over: its note stays, and nobody reads it any more."""
        return f"memfit/failed/{self._number}/{self._got_over}"
