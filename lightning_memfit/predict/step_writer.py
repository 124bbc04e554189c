"""Writes down what an engine allocates and frees between the events of a step that was traced without it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lightning_memfit.plan import Category, Phase
from lightning_memfit.predict.optimizer_step import moved, renumbered
from lightning_memfit.trace.timeline import Event, Free, Operation, Output, Resident, Signature, Timeline

Memory = Literal["device", "host", "both"]
"""Whose memory is looked at. On a CPU the two are one."""


class Adopted(NamedTuple):
    """An optimizer's step among a writer's storages."""

    events: tuple[Event, ...]
    """Its events."""
    on_host: bool
    """Whether it runs on the host."""


class StepWriter:
    """Collects residents and events of a rank's step; storages are on the device or on its host.

    Attributes:
        phase: of what is written next.
        micro_step: of what is written next.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Begin with nothing of ``timeline`` but its storages' numbers and signatures."""
        self.phase: Phase = "forward"
        self.micro_step = 0
        self._residents: list[Resident] = []
        self._events: list[tuple[Event, bool]] = []  # and whether it is one of the host
        self._categories: dict[int, Category] = dict(timeline.categories)
        self._signatures: list[Signature] = list(timeline.signatures)
        self._on_host: set[int] = set()
        self._next = 1 + max([*(r.storage for r in timeline.residents), *timeline.categories], default=0)

    def resident(self, num_bytes: int, category: Category, *, on_host: bool = False) -> int:
        """Something that is there before the step; its storage."""
        storage = self._new(on_host)
        self._residents.append(Resident(storage, num_bytes, category))
        return storage

    def keep_resident(self, resident: Resident) -> None:
        """One of the timeline that stays as it was."""
        self._residents.append(resident)

    def keep(self, event: Event) -> None:
        """An event of the timeline that stays as it was."""
        self._events.append((event, False))

    def allocate(self, op: str, num_bytes: int, category: Category, *, on_host: bool = False) -> int:
        """Something new; its storage."""
        storage = self._new(on_host)
        self._categories[storage] = category
        operation = Operation(op, "", self.phase, None, (Output(storage, 0, num_bytes),), micro_step=self.micro_step)
        self._events.append((operation, on_host))
        return storage

    def free(self, *storages: int) -> None:
        """Their last references go away."""
        self._events += [(Free(storage, self.phase), storage in self._on_host) for storage in storages]

    def use(self, op: str, num_bytes: int, category: Category, *, on_host: bool = False) -> None:
        """Something that is there for one moment."""
        if num_bytes:
            self.free(self.allocate(op, num_bytes, category, on_host=on_host))

    def adopt(self, step: Timeline, *, on_host: bool = False) -> Adopted:
        """Take over an optimizer's step that was traced alone; its states are residents from now on."""
        offset, first_signature = self._next, len(self._signatures)
        numbers = {*(r.storage for r in step.residents), *step.categories}
        self._next += 1 + max(numbers, default=0)
        self._categories.update((number + offset, held) for number, held in step.categories.items())
        self._signatures += [moved(signature, first_signature) for signature in step.signatures]
        states = (each for each in step.residents if each.category == "optimizer_states")
        self._residents += [each._replace(storage=each.storage + offset) for each in states]
        if on_host:
            self._on_host.update(number + offset for number in numbers)
        return Adopted(tuple(renumbered(event, offset, first_signature) for event in step.events), on_host)

    def run(self, adopted: Adopted) -> None:
        """The events of a step that was taken over."""
        self._events += [(event, adopted.on_host) for event in adopted.events]

    def parts(self, memory: Memory) -> tuple[tuple[Resident, ...], tuple[Event, ...]]:
        """Residents and events in one memory."""
        wanted = {"device": (False,), "host": (True,), "both": (False, True)}[memory]
        residents = tuple(each for each in self._residents if (each.storage in self._on_host) in wanted)
        return residents, tuple(event for event, on_host in self._events if on_host in wanted)

    @property
    def categories(self) -> dict[int, Category]:
        """Of every storage that is allocated within the step."""
        return self._categories

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """Of the step, the optimizer's included."""
        return tuple(self._signatures)

    def _new(self, on_host: bool) -> int:
        self._next += 1
        if on_host:
            self._on_host.add(self._next - 1)
        return self._next - 1
