"""A recorded step with every repetition of every block in it, as arrays: what its variants are read from.

Operators stand in one order, repeated ones in front of the node that asks for them, and each says when it runs at all.
Storages say when they are allocated, how large they are at two numbers of samples, and who holds them until when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from lightning_memfit.plan import Category, Phase
from lightning_memfit.predict.memory import accumulates_in_place
from lightning_memfit.predict.recomputation import Moments, Recomputation
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import Operation, Output, ProbeResult

FIRST, SECOND, ALWAYS = 0, 1, 2
"""Slices that something belongs to; what belongs to neither of the two is there in every variant."""

Line = tuple[int, int]
"""A number at the larger and at the smaller of the two recorded slices."""


class Row(NamedTuple):
    """One operator, in the order in which they run."""

    moment: float
    """When it runs."""
    operation: Operation
    """What it is."""
    slice_: int
    """``FIRST``, ``SECOND`` or ``ALWAYS``."""
    gate: int
    """0 if it always runs, else 1 + the number of the call that must be recomputed."""
    hidden: Line
    """Most bytes alive within it beyond those before, as probed; what it writes into in place counts as gone before."""
    flops: Line
    """Floating point operations."""
    moved: Line
    """Bytes of its arguments and results."""
    written: tuple[Line, ...]
    """Bytes of each output, as traced."""
    target: int | None
    """Index of the storage in :attr:`Tables.storages` that it writes into in place, which is gone with it."""
    signatures: tuple[int | None, int | None] = (None, None)
    """Numbers of its signatures at the two sizes."""


class Storage(NamedTuple):
    """One storage."""

    number: int
    """Unique; that of the record, or a new one for what is repeated."""
    made: float
    """Moment of the operator that allocates it; minus infinity for what was there before the step."""
    slice_: int
    """``FIRST``, ``SECOND`` or ``ALWAYS``."""
    gate: int
    """0 if it is always allocated, else 1 + the number of the call that must be recomputed."""
    allocated_bytes: Line
    """Its size."""
    category: Category | None
    """What it holds; ``None`` for an activation if it is alive at the end of a forward, a temporary otherwise."""


class Hold(NamedTuple):
    """What keeps a storage alive, depending on what is recomputed."""

    storage: int
    """Index of the storage in :attr:`Tables.storages`."""
    until: float
    """Moment at which it lets go."""
    gates: tuple[int, ...]
    """Gates of the calls that decide."""
    if_recomputed: bool
    """Whether it holds if one of them is recomputed, or if none is."""


class Tables(NamedTuple):
    """Everything that a variant may consist of."""

    operators: list[Row]
    """In the order in which they run."""
    storages: list[Storage]
    """In no order."""
    freed: list[float]
    """By storage, the moment at which the last lets go that holds it in every variant; infinite if none ever does."""
    holds: list[Hold]
    """What holds them beside that."""


def tables_of(
    record: StepRecord,
    partners: Mapping[int, int],
    probes: Mapping[int, ProbeResult],
    plans: tuple[Recomputation, ...],
    moments: Moments,
) -> Tables:
    """Put the tables of one record together.

    Args:
        record: one step.
        partners: which operator of one slice does what which of the other does, by event.
        probes: by signature, what probing found.
        plans: how each call would be recomputed.
        moments: the order of everything.
    """
    builder = _Builder(record, partners, probes, plans, moments)
    builder.add_recorded()
    builder.add_autograds_holds()
    for number, plan in enumerate(plans):
        if plan.obstacle is None:
            builder.add_recomputed(number + 1, plan)
    builder.operators.sort(key=lambda row: row.moment)
    return Tables(builder.operators, builder.storages, builder.freed, builder.holds)


def clipping_begins(record: StepRecord) -> int:
    """Index of the first event after the last slice."""
    return next((i for i, event in enumerate(record.events) if event.phase == "gradient_clipping"), len(record.events))


class _Builder:
    def __init__(
        self,
        record: StepRecord,
        partners: Mapping[int, int],
        probes: Mapping[int, ProbeResult],
        plans: tuple[Recomputation, ...],
        moments: Moments,
    ) -> None:
        self.operators: list[Row] = []
        self.storages: list[Storage] = []
        self.freed: list[float] = []
        self.holds: list[Hold] = []
        self._record, self._partners, self._probes = record, partners, probes
        self._plans, self._moments = plans, moments
        self._rows: dict[int, Row] = {}
        self._index_of: dict[int, int] = {}
        self._held_by_others = {saved.storage for saved in record.saved}
        self._held_by_others.update(*(call.inputs for call in record.blocks))
        self._clipping = clipping_begins(record)
        self._next_number = 1 + max([*moments.made, *(r.storage for r in record.residents)], default=0)

    # What was recorded

    def add_recorded(self) -> None:
        """What was there, and what each recorded operator allocates, held as long as the program holds it."""
        for resident in self._record.residents:
            size = resident.allocated_bytes
            there = Storage(resident.storage, -math.inf, ALWAYS, 0, (size, size), resident.category)
            self._add(there, self._moments.freed.get(resident.storage, math.inf))
        for index, event in enumerate(self._record.events):
            if isinstance(event, Operation):
                self._add_operation(index, event)

    def _add_operation(self, index: int, operation: Operation) -> None:
        moment, number = float(self._moments.of_event[index]), self._target(index, operation)
        row = self._row(index, operation, moment, None if number is None else self._index_of[number])
        self._rows[index] = row
        self.operators.append(row)
        for output, size in zip(operation.outputs, self._sizes(index, row), strict=True):
            if row.target is not None:
                self.freed[row.target] = moment - 0.05
            category: Category | None = "gradients" if output.storage in self._record.gradients else None
            made = Storage(output.storage, moment, row.slice_, 0, size, category)
            self._add(made, self._moments.freed.get(output.storage, math.inf))

    def _target(self, index: int, operation: Operation) -> int | None:
        """Storage that an operator writes its result into on a real run; ``None`` if the result has one of its own."""
        if not accumulates_in_place(self._record.events, index, operation):
            return None
        # What autograd or a repeated block holds is not written into, though the program has let go of it.
        return None if operation.accumulates_into in self._held_by_others else operation.accumulates_into

    def _add(self, storage: Storage, freed: float) -> int:
        index = len(self.storages)
        self._index_of[storage.number] = index
        self.storages.append(storage)
        self.freed.append(freed)
        return index

    def _row(self, index: int, operation: Operation, moment: float, target: int | None) -> Row:
        slice_, other = self._slice_of(index), self._partner(index)
        large, small = (operation, other) if slice_ == FIRST else (other, operation)
        if target is None:
            hidden = self._peak_within(large), self._peak_within(small)
        else:
            room = self.storages[target].allocated_bytes
            hidden = room[0] + self._temporaries(large), room[1] + self._temporaries(small)
        return Row(
            moment, operation, slice_, 0, hidden,
            flops=(large.flops, small.flops),
            moved=(large.moved_bytes, small.moved_bytes),
            written=tuple(
                (one.allocated_bytes, two.allocated_bytes)
                for one, two in zip(large.outputs, small.outputs, strict=True)
            ),
            target=target,
            signatures=(large.signature, small.signature),
        )  # fmt: skip

    def _sizes(self, index: int, row: Row) -> tuple[Line, ...]:
        """Bytes of each output: as probed where it was, and as large as what it is written into."""
        if row.target is not None:
            return (self.storages[row.target].allocated_bytes,)
        if not self._probes:
            return row.written
        other = self._partner(index)
        large, small = (row.operation, other) if row.slice_ == FIRST else (other, row.operation)
        probed = self._probed(large).output_bytes, self._probed(small).output_bytes
        return tuple(
            (probed[0].get(output.position, size[0]), probed[1].get(output.position, size[1]))
            for output, size in zip(row.operation.outputs, row.written, strict=True)
        )

    def _partner(self, index: int) -> Operation:
        """The operator of the other slice that does the same; itself where it has no partner."""
        event = self._record.events[self._partners.get(index, index)]
        assert isinstance(event, Operation)
        return event

    def _peak_within(self, operation: Operation) -> int:
        return self._probed(operation).peak_with(sum(output.allocated_bytes for output in operation.outputs))

    def _temporaries(self, operation: Operation) -> int:
        return self._probed(operation).temporary_bytes

    def _probed(self, operation: Operation) -> ProbeResult:
        found = None if operation.signature is None else self._probes.get(operation.signature)
        return _UNPROBED if found is None else found

    def _slice_of(self, index: int) -> int:
        if index >= self._clipping:
            return ALWAYS
        starts = self._record.slice_starts
        return SECOND if len(starts) > 1 and index >= starts[1] else FIRST

    # What autograd holds

    def add_autograds_holds(self) -> None:
        """What was saved is held until the node has run; where it was made within a call, only if that is not repeated.

        What a repeated call saves of tensors from outside is saved again by the repetition, so that its hold is the
        same either way.
        """
        inside: dict[int, list[int]] = {}
        for number, plan in enumerate(self._plans):
            first, end = self._moments.in_front_of(plan.call), self._moments.behind(plan.call)
            for saved in plan.saved:
                if first < self._moments.made.get(self._record.saved[saved].storage, -math.inf) < end:
                    inside.setdefault(saved, []).append(number + 1)
        for saved, tensor in enumerate(self._record.saved):
            index, until = self._index_of.get(tensor.storage), self._moments.released[saved]
            if index is None:
                continue
            if saved in inside:
                self.holds.append(Hold(index, until, tuple(inside[saved]), False))
            elif self.storages[index].made > -math.inf:  # what was there before stays anyway
                self.freed[index] = max(self.freed[index], until)

    # What recomputing a call adds

    def add_recomputed(self, gate: int, plan: Recomputation) -> None:
        """Inputs held, the generator's state and buffers kept, and the repetition in front of the first node."""
        call, begins = plan.call, self._moments.in_front_of(plan.call)
        ends = plan.ends + 0.2
        self.holds += [
            Hold(self._index_of[storage], ends, (gate,), True) for storage in call.inputs if storage in self._index_of
        ]
        slice_ = SECOND if call.micro_step else FIRST
        self._add_kept(begins - 0.2, plan, slice_, gate, self._record.rng_state_bytes, ends)
        behind = self._moments.behind(call)
        for copy in call.buffers:
            until = ends if copy.changes else behind
            self._add_kept(begins - 0.1, plan, slice_, gate, copy.allocated_bytes, until)
        if plan.begins < math.inf:
            self._add_repetition(gate, plan, slice_)

    def _add_kept(
        self,
        moment: float,
        plan: Recomputation,
        slice_: int,
        gate: int,
        size: int,
        until: float,
        category: Category | None = None,
        *,
        views: int = 0,
    ) -> None:
        # In the forward it depends on the moment what it is.
        phase: Phase = "forward" if category is None else "backward"
        number = self._next_number
        self._next_number += 1
        operation = Operation(
            op="aten.empty.memory_format", module=plan.call.module, phase=phase, signature=None,
            outputs=(Output(number, 0, size),), micro_step=plan.call.micro_step, recomputed=phase == "backward",
            views=views,
        )  # fmt: skip
        self.operators.append(Row(moment, operation, slice_, gate, (0, 0), (0, 0), (size, size), ((size, size),), None))
        self._add(Storage(number, moment, slice_, gate, (size, size), category), until)

    def _add_repetition(self, gate: int, plan: Recomputation, slice_: int) -> None:
        """The forward's operators up to the last that saves something, on storages of their own."""
        call, moments = plan.call, self._moments
        begins, ends = plan.begins - 0.5, plan.begins - 0.05
        squeeze = 0.4 / (plan.stops - moments.in_front_of(call) + 1)

        def repeated(moment: float) -> float:
            return begins + squeeze * (moment - moments.in_front_of(call))

        # Each saved tensor is detached when it is saved again, and once more when its node asks for it.
        views = 2 * sum(self._record.saved[number].requires_grad for number in plan.saved)
        state = self._record.rng_state_bytes
        self._add_kept(begins - 0.02, plan, slice_, gate, state, ends, "activations", views=views)
        saved = self._saved_again(plan)
        copies: dict[int, int] = {}
        for copy in call.buffers:
            if copy.changes:
                until = max(ends, saved.get(copy.storage, ends))
                self._add_kept(begins - 0.01, plan, slice_, gate, copy.allocated_bytes, until, "temporaries")
        for index in range(call.first_event, call.end_event):
            event, moment = self._record.events[index], float(moments.of_event[index])
            if moment > plan.stops or not isinstance(event, Operation):
                continue
            row, again = self._rows[index], self._repeat(event)
            number_written = self._target(index, event)
            if number_written is not None:
                # What came from outside is held for the repetition, and not written into again.
                row = self._row(index, event, moment, copies.get(number_written))
            if row.target is not None:
                self.freed[row.target] = repeated(moment) - 0.05 * squeeze
            self.operators.append(row._replace(moment=repeated(moment), operation=again, gate=gate))
            sizes = zip(event.outputs, again.outputs, self._sizes(index, row), strict=True)
            for output, copied, size in sizes:
                gone = moments.freed.get(output.storage, math.inf)
                if output.storage in saved:
                    until = max(ends, saved[output.storage])
                else:
                    until = repeated(gone) if gone < plan.stops else ends
                made = Storage(copied.storage, repeated(moment), slice_, gate, size, "activations")
                copies[output.storage] = self._add(made, until)

    def _repeat(self, operation: Operation) -> Operation:
        numbers = range(self._next_number, self._next_number + len(operation.outputs))
        self._next_number += len(numbers)
        outputs = tuple(o._replace(storage=n) for o, n in zip(operation.outputs, numbers, strict=True))
        return operation._replace(phase="backward", outputs=outputs, recomputed=True)

    def _saved_again(self, plan: Recomputation) -> dict[int, float]:
        """Storages of the forward that the repetition saves, with the moment until which someone waits for them."""
        found: dict[int, float] = {}
        for saved in plan.saved:
            released = self._moments.released[saved]
            until = self._moments.used.get(saved, released)
            waited_for = until if released > plan.begins else -math.inf
            storage = self._record.saved[saved].storage
            found[storage] = max(found.get(storage, -math.inf), waited_for)
        return found


_UNPROBED = ProbeResult(peak_bytes=0, output_bytes={})
