"""Signatures at sizes that were not recorded. Run: ``pytest tests/predict/test_sized_signatures.py``."""

from __future__ import annotations

from lightning_memfit.predict.sized_signatures import SizedSignatures
from lightning_memfit.trace.timeline import Signature, TensorShape


def _rows(samples: int) -> Signature:
    """A sum over the rows of ``(samples x 10, 7)``, which lie in ``float32`` one after the other."""
    shape = TensorShape("float32", (samples * 10, 7), (7, 1), None)
    return Signature("aten.sum.dim_IntList", (shape, (0,), True), {"out": None, "count": samples})


def test_sizes_and_numbers_lie_on_the_line_through_both() -> None:
    known = SizedSignatures([_rows(8), _rows(2)], (8, 2))
    assert known.at((0, 1), 8) == 0
    assert known.at((0, 1), 2) == 1
    number = known.at((0, 1), 5)
    assert number == 2
    assert known.signatures[2] == _rows(5)
    assert known.at((0, 1), 5) == 2  # made once
    assert known.signatures[known.at((0, 1), 1) or 0] == _rows(1)


def test_what_does_not_grow_stays() -> None:
    known = SizedSignatures([_rows(8)], (8, 2))
    assert known.at((0, 0), 5) == 0
    assert known.at((None, None), 5) is None


def test_signatures_that_are_not_alike_tell_nothing() -> None:
    shape = TensorShape("float16", (20, 7), (7, 1), None)
    others = [
        Signature("aten.mean.dim", _rows(2).args, {}),  # another operator
        Signature("aten.sum.dim_IntList", (shape, (0,), True), _rows(2).kwargs),  # another dtype
        Signature("aten.sum.dim_IntList", _rows(2).args[:2], _rows(2).kwargs),  # other arguments
        Signature("aten.sum.dim_IntList", _rows(2).args, {"out": None}),
    ]
    for other in others:
        known = SizedSignatures([_rows(8), other], (8, 2))
        assert known.at((0, 1), 5) is None
        assert len(known.signatures) == 2
