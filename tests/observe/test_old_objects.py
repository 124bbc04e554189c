"""Old objects are left alone while new ones are made, and what someone else froze stays frozen."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lightning_memfit.observe.old_objects import frozen_objects_counted_once, old_objects_at_rest


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def raising() -> None:
    with old_objects_at_rest(), old_objects_at_rest():
        assert gc.get_freeze_count() > 0
        raise KeyError


def test_garbage_collection_is_as_before_also_when_the_body_raises() -> None:
    with pytest.raises(KeyError):
        raising()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("counted_before", [True, False])
def test_what_someone_else_froze_stays_frozen(counted_before: bool) -> None:
    gc.freeze()  # as a server does before it forks
    if counted_before:
        with frozen_objects_counted_once(), pytest.raises(KeyError):
            raising()
    else:
        with pytest.raises(KeyError):
            raising()
    assert gc.get_freeze_count() > 0


def test_frozen_objects_are_counted_once_for_a_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or count())
    gc.freeze()
    with frozen_objects_counted_once():
        for _ in range(3):
            with old_objects_at_rest():
                pass
    assert len(asked) == 1
    gc.unfreeze()
    for _ in range(3):
        with old_objects_at_rest(), old_objects_at_rest():  # the inner one does not count what the outer one froze
            pass
    assert len(asked) == 4
