"""From the arrays of a variant to its events: all of them, or only those of small blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lightning_memfit.plan import Phase
from lightning_memfit.predict.micro_batch_scaling import Numbers
from lightning_memfit.predict.variant_arrays import Flags, Operators, State, Storages
from lightning_memfit.trace.timeline import Event, Free, Operation, Output

Sized = Callable[[int, tuple[Output, ...]], Operation]
"""(index of an operator, its outputs) to the operator at the variant's sizes."""


def events_of(
    operators: Operators, storages: Storages, state: State, sized: Sized, phase_at: Callable[[float], Phase]
) -> Iterator[Event]:
    """Every event of a variant.

    Args:
        operators: all that may run.
        storages: all that may be allocated.
        state: what the variant chooses.
        sized: gives an operator its sizes.
        phase_at: phase of a moment.
    """
    ends = _Ends(state, np.flatnonzero(state.exists))
    for place, runs in enumerate(state.runs.tolist()):
        written_into = operators.target[place] if runs else None
        for index in ends.until(place):
            if index != written_into:
                yield Free(storages.number[index], phase_at(state.freed[index]))
        if runs:
            outputs = operators.operation[place].outputs
            sizes = [int(state.sizes[storages.index[output.storage]]) for output in outputs]
            pairs = zip(outputs, sizes, strict=True)
            yield sized(place, tuple(output._replace(allocated_bytes=size) for output, size in pairs))
        if written_into is not None:  # its end is what says that the result lies in its place
            yield Free(storages.number[written_into], phase_at(state.freed[written_into]))
    for index in ends.until(len(state.runs)):
        yield Free(storages.number[index], phase_at(state.freed[index]))


def small_block_events(
    operators: Operators, storages: Storages, state: State, chosen: Flags, counting: Flags
) -> list[Event]:
    """Allocations and frees of some storages, and the operators among which they lie that count FLOPs.

    Operators have no names and no work, ``flops`` is 1 or 0, and frees are told without their phase.

    Args:
        operators: all that may run.
        storages: all that may be allocated.
        state: what the variant chooses.
        chosen: the storages.
        counting: the operators that count.
    """
    ends = _Ends(state, np.flatnonzero(chosen))
    made = np.flatnonzero(chosen & ~storages.there)
    made = made[np.argsort(storages.made_by[made], kind="stable")]
    makers, sizes = storages.made_by[made].tolist(), state.sizes[made].tolist()
    numbers = [storages.number[index] for index in made.tolist()]
    events: list[Event] = []
    done = 0
    for place in np.union1d(storages.made_by[made], np.flatnonzero(counting)).tolist():
        written_into, phase = operators.target[place], operators.operation[place].phase
        for index in ends.until(place):
            if index != written_into:
                events.append(Free(storages.number[index], phase))
        first = done
        while done < len(makers) and makers[done] == place:
            done += 1
        outputs = tuple(Output(numbers[i], 0, sizes[i]) for i in range(first, done))
        micro_step = operators.operation[place].micro_step
        events.append(Operation("", "", phase, None, outputs, flops=int(counting[place]), micro_step=micro_step))
        if written_into is not None and chosen[written_into]:
            events.append(Free(storages.number[written_into], phase))
    events += [Free(storages.number[index], "backward") for index in ends.until(len(operators.operation))]
    return events


class _Ends:
    """Ends of storages in order."""

    def __init__(self, state: State, indices: Numbers) -> None:
        ordered = indices[np.argsort(state.freed[indices], kind="stable")]
        self._indices: list[int] = ordered.tolist()
        self._gaps: list[int] = state.gap[ordered].tolist()
        self._next = 0

    def until(self, place: int) -> list[int]:
        """Indices of the storages that end in front of an operator, and were not told before."""
        first = self._next
        while self._next < len(self._gaps) and self._gaps[self._next] <= place:
            self._next += 1
        return self._indices[first : self._next]
