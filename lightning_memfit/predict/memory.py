"""From a timeline to the peak: a replay of allocations and frees, with what probing found inside operators."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.trace.timeline import Event, Free, Operation, ProbeResult, Timeline


def predict_memory(
    timeline: Timeline, probes: Mapping[int, ProbeResult] | None = None, *, zero_gradients_early: bool = False
) -> MemoryBreakdown:
    """Replay a timeline and describe its peak.

    Args:
        timeline: one optimizer step in the steady state.
        probes: by signature; an operator without a result counts with its outputs alone.
        zero_gradients_early: the old gradients are gone before the first forward.

    Ignores: the allocator's own rounding and metadata (at most 64 bytes per block on a CPU), and memory that
    operators take from elsewhere than torch's allocator (oneDNN's scratchpads, thread stacks).
    """
    replay = _Replay(timeline, probes or {}, without_old_gradients=zero_gradients_early)
    for position, event in enumerate(timeline.events):
        if isinstance(event, Free):
            replay.free(event.storage)
        elif accumulates_in_place(timeline.events, position, event):
            replay.take_over(event)
        else:
            replay.run(event)
    return replay.breakdown()


class _Replay:
    """Running totals: what is alive, by category, and the highest point so far."""

    def __init__(self, timeline: Timeline, probes: Mapping[int, ProbeResult], *, without_old_gradients: bool) -> None:
        self._num_parameters = timeline.num_parameters
        self._probes = probes
        self._categories: dict[int, str] = dict(timeline.categories)
        self._sizes: dict[int, int] = {}
        self._by_category: Counter[str] = Counter()
        self._live = 0
        for resident in timeline.residents:
            if not (without_old_gradients and resident.category == "gradients"):
                self._categories[resident.storage] = resident.category
                self._add(resident.storage, resident.allocated_bytes)
        self._peak = self._live
        self._peak_operation: Operation | None = None
        self._peak_categories = Counter(self._by_category)
        self._by_phase: dict[str, int] = {}

    def run(self, operation: Operation) -> None:
        """Add the outputs; the most bytes alive within the call may be a new peak."""
        probe = None if operation.signature is None else self._probes.get(operation.signature)
        before = self._live
        for output in operation.outputs:
            real = None if probe is None else probe.output_bytes.get(output.position)
            self._add(output.storage, output.allocated_bytes if real is None else real)
        outputs = self._live - before
        highest = self._live if probe is None else max(self._live, before + probe.peak_with(outputs))
        self._note_peak(operation, highest)

    def _temporaries(self, operation: Operation) -> int:
        """Bytes inside a call beyond its outputs."""
        probe = None if operation.signature is None else self._probes.get(operation.signature)
        return 0 if probe is None else probe.temporary_bytes

    def _note_peak(self, operation: Operation, highest: int) -> None:
        self._by_phase[operation.phase] = max(self._by_phase.get(operation.phase, 0), highest)
        if highest > self._peak:
            self._peak, self._peak_operation = highest, operation
            self._peak_categories = Counter(self._by_category)
            self._peak_categories["temporaries"] += highest - self._live

    def free(self, storage: int) -> None:
        """The storage is gone."""
        size = self._sizes.pop(storage, 0)
        self._live -= size
        self._by_category[self._categories.get(storage, "temporaries")] -= size

    def take_over(self, operation: Operation) -> None:
        """The sum lives on in the storage of the first argument, whose own end follows at once."""
        assert operation.accumulates_into is not None
        target, new = operation.accumulates_into, operation.outputs[0].storage
        size = self._sizes.get(target, 0)
        self.free(target)
        self._add(new, size)
        self._note_peak(operation, self._live + self._temporaries(operation))

    def breakdown(self) -> MemoryBreakdown:
        """The peak and what it consists of."""
        operation = self._peak_operation
        return MemoryBreakdown(
            peak_allocated_bytes=self._peak,
            by_category={name: size for name, size in self._peak_categories.items() if size},
            by_phase=self._by_phase,
            peak_phase=operation.phase if operation else "forward",
            peak_op=operation.op if operation else None,
            peak_module=operation.module if operation else None,
            num_parameters=self._num_parameters,
        )

    def _add(self, storage: int, size: int) -> None:
        self._sizes[storage] = size
        self._live += size
        self._by_category[self._categories.get(storage, "temporaries")] += size


def accumulates_in_place(events: Sequence[Event], position: int, operation: Operation) -> bool:
    """Whether an operator is a sum that the autograd engine would have formed in its first argument on a real run.

    Args:
        events: the timeline's events.
        position: index of the operator.
        operation: the operator.
    """
    if operation.accumulates_into is None or len(operation.outputs) != 1:
        return False
    for following in itertools.islice(events, position + 1, None):
        if not isinstance(following, Free):
            return False
        if following.storage == operation.accumulates_into:
            return True
    return False
