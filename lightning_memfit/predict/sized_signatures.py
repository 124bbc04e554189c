"""The signature that an operator would have in a slice of another size, read off those in the two recorded slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_memfit.trace.timeline import Signature, TensorShape


class SizedSignatures:
    """Signatures of a record, and those at other sizes as they are asked for.

    Args:
        signatures: those of the record.
        sizes: samples in the two recorded slices.
    """

    def __init__(self, signatures: Sequence[Signature], sizes: tuple[int, int]) -> None:
        self.signatures = list(signatures)
        self._sizes = sizes
        self._known: dict[tuple[int, int, int], int | None] = {}

    def at(self, pair: tuple[int | None, int | None], samples: int) -> int | None:
        """Number of the signature at a number of samples; ``None`` if the two recorded ones do not tell.

        Args:
            pair: numbers of the signatures in the larger and in the smaller recorded slice.
            samples: samples of the slice.
        """
        large, small = pair
        if large is None or small is None or samples == self._sizes[0]:
            return large
        if samples == self._sizes[1]:
            return small
        key = large, small, samples
        if key not in self._known:
            self._known[key] = self._made(large, small, samples)
        return self._known[key]

    def _made(self, large: int, small: int, samples: int) -> int | None:
        if large == small:
            return large
        one, two = self.signatures[large], self.signatures[small]
        if one.op != two.op:
            return None
        try:
            args, kwargs = self._between(one.args, two.args, samples), self._between(one.kwargs, two.kwargs, samples)
        except _UnlikeError:
            return None
        self.signatures.append(Signature(one.op, args, kwargs))
        return len(self.signatures) - 1

    def _between(self, one: Any, two: Any, samples: int) -> Any:
        if isinstance(one, TensorShape) and isinstance(two, TensorShape) and one.dtype == two.dtype:
            size, stride = self._between(one.size, two.size, samples), self._between(one.stride, two.stride, samples)
            return TensorShape(one.dtype, size, stride, one.origin)
        if isinstance(one, (tuple, list)) and isinstance(two, (tuple, list)) and len(one) == len(two):
            return tuple(self._between(a, b, samples) for a, b in zip(one, two, strict=True))
        if isinstance(one, Mapping) and isinstance(two, Mapping) and one.keys() == two.keys():
            return {name: self._between(value, two[name], samples) for name, value in one.items()}
        if one == two:
            return one
        if isinstance(one, int) and isinstance(two, int):
            larger, smaller = self._sizes
            return two + (one - two) * (samples - smaller) // (larger - smaller)
        raise _UnlikeError


class _UnlikeError(Exception):
    """Two arguments are not the same at two sizes."""
