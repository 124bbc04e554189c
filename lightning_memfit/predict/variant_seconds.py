"""How long the variants of a recorded step take, without going through their operators one by one.

An operator's time depends on nothing but itself, so that those that cost the same are predicted once per size. Only the
memory that is fetched from the system in small blocks depends on what came before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.plan import Category
from lightning_memfit.predict.new_memory import new_bytes
from lightning_memfit.predict.optimizer_step import with_optimizer_step
from lightning_memfit.predict.step_time import predict_step_seconds
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.trace.timeline import Event, Free, ModuleCall, Operation, Resident, Timeline

_APART = 2**40
_SLICES = ("forward", "zero_grad", "backward")


class StepSeconds:
    """Seconds of an optimizer's step that was traced alone, and what it takes in small blocks.

    Args:
        step: the timeline of the step.
        rates: how fast the device is.
    """

    def __init__(self, step: Timeline, rates: DeviceRates) -> None:
        limit = rates.allocator.largest_kept_block_bytes
        small = _small_blocks(step, 0 if limit is None else limit)
        self.seconds = predict_step_seconds(step, rates) - _fetching(small, rates, 1.0)
        """Without those of fetching small blocks."""
        renumbered = with_optimizer_step(_timeline(categories={_APART: "temporaries"}), small)
        self.states, self.events = renumbered.residents, renumbered.events
        """What it holds and takes in small blocks, numbered apart from any slices."""


class VariantSeconds:
    """Predicts seconds of whole optimizer steps, as :func:`predict_step_seconds` does from their timelines.

    Args:
        variants: what runs in each variant.
        rates: how fast the device is.
    """

    def __init__(self, variants: StepVariants, rates: DeviceRates) -> None:
        self._variants, self._rates = variants, rates
        self._known: dict[tuple[int, int], float] = {}
        repeated = ModuleCall("", 0, 0, 0, (), recomputed=True)
        self._per_repeated_call = predict_step_seconds(_timeline(calls=(repeated,)), rates)

    def of(self, variant: Variant, step: StepSeconds) -> float:
        """Seconds of a variant with a way to step its optimizer.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        operators = sum(each.times * self._one(each.kind, each.samples) for each in self._variants.times(variant))
        repeated = self._variants.repeated_calls(variant) * self._per_repeated_call
        return operators + repeated + step.seconds + self._fetching(variant, step)

    def _one(self, kind: int, samples: int) -> float:
        key = kind, samples
        if key not in self._known:
            operation = self._variants.operation(kind, samples)._replace(micro_step=0)
            alone = _timeline(events=(operation,))
            limit = self._rates.allocator.largest_kept_block_bytes
            small = 0.0 if limit is None else _fetching(_small_blocks(alone, limit), self._rates, 1.0)
            self._known[key] = predict_step_seconds(alone, self._rates) - small
        return self._known[key]

    def _fetching(self, variant: Variant, step: StepSeconds) -> float:
        limit = self._rates.allocator.largest_kept_block_bytes
        if limit is None:
            return 0.0
        slices = self._variants.small_blocks(variant, limit)
        whole = replace(slices, residents=slices.residents + step.states, events=slices.events + step.events)
        return _fetching(whole, self._rates, self._variants.second_slice_counts(variant))


def _fetching(timeline: Timeline, rates: DeviceRates, second_slice_counts: float) -> float:
    def repeats(micro_step: int, phase: str) -> float:
        return second_slice_counts if micro_step and phase in _SLICES else 1.0

    return new_bytes(timeline, rates.allocator, repeats) * rates.allocator.seconds_per_new_byte


def _small_blocks(timeline: Timeline, limit: int) -> Timeline:
    """The same with nothing in it but blocks of at most ``limit`` bytes, and operators that count FLOPs."""
    small = {resident.storage for resident in timeline.residents if resident.allocated_bytes <= limit}
    events: list[Event] = []
    for event in timeline.events:
        if isinstance(event, Operation):
            outputs = tuple(output for output in event.outputs if output.allocated_bytes <= limit)
            small.update(output.storage for output in outputs)
            if outputs or event.flops:
                events.append(event._replace(outputs=outputs, signature=None))
        elif event.storage in small:
            events.append(Free(event.storage, event.phase))
    residents = tuple(resident for resident in timeline.residents if resident.storage in small)
    return _timeline(events=tuple(events), residents=residents)


def _timeline(
    *,
    events: tuple[Event, ...] = (),
    calls: tuple[ModuleCall, ...] = (),
    residents: tuple[Resident, ...] = (),
    categories: Mapping[int, Category] | None = None,
) -> Timeline:
    return Timeline(
        residents=residents, events=events, categories=categories or {}, signatures=(), num_parameters=0,
        num_operations=len(events), flops=0, recomputed_flops=0, calls=calls,
    )  # fmt: skip
