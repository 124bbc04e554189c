"""Recorded steps written by hand, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_memfit.plan import Phase
from lightning_memfit.trace.step_record import BlockCall, BufferCopy, Mark, SavedTensor, StepRecord
from lightning_memfit.trace.timeline import Event, Free, Operation, Output, Resident


class StepWriter:
    """Writes down a step as it happens; storages and saved tensors are numbered as they come."""

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.module = ""
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.saved: list[SavedTensor] = []
        self.blocks: list[BlockCall] = []
        self.residents: list[Resident] = []
        self.starts: list[int] = []
        self.forward_ends: list[int] = []
        self.gradients: set[int] = set()
        self._open: list[int] = []
        self._next = 0

    def resident(self, size: int, category: Any = "parameters") -> int:
        """Something that was there before."""
        self.residents.append(Resident(self._number(), size, category))
        return self.residents[-1].storage

    def start_slice(self) -> None:
        """A forward begins."""
        self.phase = "forward"
        self.starts.append(len(self.events))

    def end_forward(self) -> None:
        """The forward is done, the backward begins."""
        self.forward_ends.append(len(self.events))
        self.phase = "backward"

    def op(
        self,
        *sizes: int,
        name: str = "op",
        reads: tuple[int, ...] = (),
        into: int | None = None,
        flops: int = 0,
        signature: int | None = None,
        recomputed: bool = False,
        gradient: bool = False,
    ) -> Any:
        """An operator that allocates; its storage, or its storages if there are several."""
        numbers = [self._number() for _ in sizes]
        outputs = tuple(Output(n, i, size) for i, (n, size) in enumerate(zip(numbers, sizes, strict=True)))
        self.events.append(
            Operation(
                name, self.module, self.phase, signature, outputs, into, reads, flops, sum(sizes),
                micro_step=len(self.starts) - 1, recomputed=recomputed,
            )
        )  # fmt: skip
        if gradient:
            self.gradients.update(numbers)
        return numbers[0] if len(numbers) == 1 else tuple(numbers)

    def free(self, *storages: int) -> None:
        """The program lets go."""
        self.events += [Free(storage, self.phase) for storage in storages]

    def save(self, storage: int) -> int:
        """Autograd saves a tensor; its number."""
        self.saved.append(SavedTensor(storage, True))
        self.mark("saved", len(self.saved) - 1)
        return len(self.saved) - 1

    def unpack(self, *numbers: int) -> None:
        """A node asks for what was saved."""
        for number in numbers:
            self.mark("unpacked", number)

    def release(self, *numbers: int) -> None:
        """The node has returned, and autograd is done with it."""
        for kind in ("used", "released"):
            for number in numbers:
                self.mark(kind, number)

    def begin(self, module: str, *inputs: int, buffers: tuple[BufferCopy, ...] = (), has_cache: bool = False) -> None:
        """A block is called."""
        self._open.append(len(self.blocks))
        place = (len(self.events), len(self.events), len(self.marks), len(self.marks))
        self.blocks.append(BlockCall(module, len(self.starts) - 1, *place, inputs, buffers, has_cache))
        self.module = module

    def end(self) -> None:
        """The block returns."""
        number = self._open.pop()
        self.blocks[number] = self.blocks[number]._replace(end_event=len(self.events), end_mark=len(self.marks))
        self.module = self.blocks[self._open[-1]].module if self._open else ""

    def record(self, *samples: int, **changed: Any) -> StepRecord:
        """What was written."""
        return StepRecord(
            **{
                "residents": tuple(self.residents),
                "events": tuple(self.events),
                "marks": tuple(self.marks),
                "saved": tuple(self.saved),
                "blocks": tuple(self.blocks),
                "slice_starts": tuple(self.starts),
                "forward_ends": tuple(self.forward_ends),
                "gradients": frozenset(self.gradients),
                "layouts": (),
                "samples": samples,
                "rng_state_bytes": 5,
                "signatures": (),
                "num_parameters": 1,
                **changed,
            }
        )

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def mark(self, kind: Any, number: int) -> None:
        """Autograd does something with a saved tensor."""
        self.marks.append(Mark(kind, number, len(self.events)))


@pytest.fixture(scope="session")
def write() -> Callable[[], StepWriter]:
    """Begins to write a step."""
    return StepWriter
