"""``self.log`` does nothing inside the context, also of modules inside the module, and works again afterwards."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_memfit.observe.unlogged import unlogged


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: object) -> None:
        self.log("loss", batch)

    def log(self, name: str, value: object) -> None:
        self.seen.append(name)


def test_nothing_is_logged_inside_and_attributes_are_as_before_after_an_error() -> None:
    outer = Logs()
    outer.inner = Logs()
    before = set(vars(outer)), set(vars(outer.inner))
    with pytest.raises(KeyError), unlogged(outer):
        outer.training_step(1)
        outer.inner.training_step(1)
        raise KeyError
    assert (outer.seen, outer.inner.seen) == ([], [])
    assert (set(vars(outer)), set(vars(outer.inner))) == before
    outer.training_step(1)
    assert outer.seen == ["loss"]
