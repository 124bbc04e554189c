"""From two slices of different sizes in one recorded step: what each operator takes at any size.

With the same operators in the same order, every allocation, FLOP and byte moved is a straight line in the number of
samples, known from two points. Exact for what is affine in the batch; a trace of the size itself confirms it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import Operation

Numbers = npt.NDArray[np.int64]


class NotDerivableError(Exception):
    """A candidate cannot be told from the recorded step; the message says why."""


def pair_operations(record: StepRecord) -> Mapping[int, int]:
    """Which operator of the second slice does what which operator of the first does, by index of their events.

    Only the first slice makes gradients, and only the second adds to them: such operators have no partner, and their
    size does not depend on the slice's. A record of one slice, or of two of the same size, has no pairs.

    Raises:
        NotDerivableError: if the slices run different operators, or the same ones on other storages.
    """
    if len(record.samples) < 2 or record.samples[0] == record.samples[1]:
        return {}
    end_of_first, end = record.slice_starts[1], _end_of_slices(record)
    first = _operations(record, 0, end_of_first)
    second = _operations(record, end_of_first, end)
    partners: dict[int, int] = {}
    same: dict[int, int] = {}  # storage of the first slice to that of the second
    i = j = 0
    while i < len(first) or j < len(second):
        one = first[i] if i < len(first) else None
        two = second[j] if j < len(second) else None
        if one is not None and two is not None and _alike(one[1], two[1], same):
            partners[one[0]], partners[two[0]] = two[0], one[0]
            same.update(zip(_made(one[1]), _made(two[1]), strict=True))
            i, j = i + 1, j + 1
        elif two is not None and _adds_to_gradient(two[1], record):
            j += 1
        elif one is not None and _makes_gradient(one[1], record):
            i += 1
        else:
            raise NotDerivableError(_difference(record, one and one[1], two and two[1]))
    return partners


def at_samples(large: Numbers, small: Numbers, sizes: tuple[int, int], samples: Numbers) -> Numbers:
    """Values at numbers of samples, on the lines through ``large`` at ``sizes[0]`` and ``small`` at ``sizes[1]``.

    Rounded up; never below zero.
    """
    span = sizes[0] - sizes[1]
    if span == 0:
        return large
    rise = (large - small) * (samples - sizes[1]) * (1 if span > 0 else -1)
    return np.maximum(small - (-rise // abs(span)), 0)


def _end_of_slices(record: StepRecord) -> int:
    clipping = (
        index
        for index in range(record.forward_ends[-1], len(record.events))
        if record.events[index].phase == "gradient_clipping"
    )
    return next(clipping, len(record.events))


def _operations(record: StepRecord, start: int, end: int) -> list[tuple[int, Operation]]:
    found = []
    for index in range(start, end):
        event = record.events[index]
        if isinstance(event, Operation) and not _stands_for_others(event, record):
            found.append((index, event))
    return found


def _stands_for_others(operation: Operation, record: StepRecord) -> bool:
    return record.left_out is not None and record.left_out in _made(operation)


def _made(operation: Operation) -> tuple[int, ...]:
    return tuple(output.storage for output in operation.outputs)


def _alike(one: Operation, two: Operation, same: dict[int, int]) -> bool:
    if (one.op, one.phase, one.module) != (two.op, two.phase, two.module) or len(one.outputs) != len(two.outputs):
        return False
    if any(mine.position != other.position for mine, other in zip(one.outputs, two.outputs, strict=True)):
        return False
    return tuple(same.get(storage, storage) for storage in one.reads) == two.reads


def _adds_to_gradient(operation: Operation, record: StepRecord) -> bool:
    return operation.phase == "backward" and any(storage in record.gradients for storage in operation.reads)


def _makes_gradient(operation: Operation, record: StepRecord) -> bool:
    touched = (*_made(operation), *operation.reads)
    return operation.phase == "backward" and any(storage in record.gradients for storage in touched)


def _difference(record: StepRecord, one: Operation | None, two: Operation | None) -> str:
    def told(operation: Operation | None) -> str:
        return "nothing more" if operation is None else f"{operation.op} in {operation.module or 'the module itself'!r}"

    return (
        f"slices of {record.samples[0]} and {record.samples[1]} samples run different operators ({told(one)} where the "
        f"other runs {told(two)})"
    )
