"""The tables of a recorded step as arrays, in the form in which variants are summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_memfit.plan import CATEGORIES, PHASES
from lightning_memfit.predict.micro_batch_scaling import Numbers
from lightning_memfit.predict.variant_tables import Hold, Line, Row, Storage

Flags = npt.NDArray[np.bool_]
Moment = npt.NDArray[np.float64]
UNDECIDED = len(CATEGORIES)
"""Category of what is an activation if it is alive at the end of a forward, and a temporary otherwise."""


class State(NamedTuple):
    """What a variant chooses, by storage and by operator."""

    sizes: Numbers
    """Bytes of each storage, 0 for those that the variant does not have."""
    freed: Moment
    """Moment at which each is free."""
    gap: Numbers
    """Number of operators in front of that moment; one more than there are for those that live on."""
    exists: Flags
    """Which storages the variant has."""
    runs: Flags
    """Which operators run."""
    hidden: Numbers
    """Most bytes within each operator beyond those before."""
    slices: int
    """Slices that are followed."""


class Operators:
    """The operators as arrays."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.operation = [row.operation for row in rows]
        self.target = [row.target for row in rows]
        self.signatures = [row.signatures for row in rows]
        self.moment: Moment = np.array([row.moment for row in rows], dtype=np.float64)
        self.slice_ = numbers([row.slice_ for row in rows])
        self.gate = numbers([row.gate for row in rows])
        self.phase = numbers([PHASES.index(row.operation.phase) for row in rows])
        self.hidden = lines([row.hidden for row in rows])
        self.flops = lines([row.flops for row in rows])
        self.moved = lines([row.moved for row in rows])
        found: dict[object, int] = {}
        self.kind = numbers([found.setdefault(_cost_key(row), len(found)) for row in rows])
        firsts = np.unique(self.kind, return_index=True)[1].tolist()
        self.kinds = [rows[index] for index in firsts]
        """One of each kind."""


class Storages:
    """The storages as arrays.

    Args:
        rows: the storages.
        freed: by storage, when the last lets go that holds it in every variant.
        operators: what allocates them.
    """

    def __init__(self, rows: Sequence[Storage], freed: Sequence[float], operators: Operators) -> None:
        self.number = [row.number for row in rows]
        self.index = {number: index for index, number in enumerate(self.number)}
        self.made: Moment = np.array([row.made for row in rows], dtype=np.float64)
        self.slice_ = numbers([row.slice_ for row in rows])
        self.gate = numbers([row.gate for row in rows])
        self.allocated_bytes = lines([row.allocated_bytes for row in rows])
        self.category = numbers([UNDECIDED if r.category is None else CATEGORIES.index(r.category) for r in rows])
        self.freed: Moment = np.array(freed, dtype=np.float64)
        self.there: Flags = np.isneginf(self.made)
        """Which were there before the step."""
        makers = {output.storage: index for index, made in enumerate(operators.operation) for output in made.outputs}
        self.made_by = numbers([makers.get(row.number, 0) for row in rows])
        """Index of the operator that allocates each; of no meaning for what was there."""
        self.old_gradients: Flags = self.there & (self.category == CATEGORIES.index("gradients"))


class Holds:
    """What holds storages depending on what is recomputed, as arrays sorted by storage."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        ordered = sorted(holds, key=lambda hold: hold.storage)
        most = max((len(hold.gates) for hold in ordered), default=1)
        self._until: Moment = np.array([hold.until for hold in ordered], dtype=np.float64)
        gates = [[*hold.gates, *[0] * (most - len(hold.gates))] for hold in ordered]
        self._gates = numbers(gates).reshape(-1, most)
        self._if_recomputed: Flags = np.array([hold.if_recomputed for hold in ordered], dtype=np.bool_)
        self._storages, self._starts = np.unique(numbers([hold.storage for hold in ordered]), return_index=True)

    def prolong(self, freed: Moment, opened: Flags) -> Moment:
        """Moments at which storages are free, given until when they are held anyway and which gates are open."""
        freed = freed.copy()
        if len(self._storages):
            holding = opened[self._gates].any(axis=1) == self._if_recomputed
            until = np.where(holding, self._until, -math.inf)
            freed[self._storages] = np.maximum(freed[self._storages], np.maximum.reduceat(until, self._starts))
        return freed


def _cost_key(row: Row) -> object:
    """What an operator's time depends on."""
    operation = row.operation
    return (
        operation.op, operation.phase, operation.dtype, operation.recomputed, operation.views, operation.inner_calls,
        row.flops, row.moved, row.written,
    )  # fmt: skip


def numbers(values: Sequence[object]) -> Numbers:
    """Whole numbers as an array."""
    return np.array(values, dtype=np.int64)


def lines(values: Sequence[Line]) -> tuple[Numbers, Numbers]:
    """Numbers at the larger and at the smaller slice, an array each."""
    both = numbers(values).reshape(-1, 2)
    return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])
