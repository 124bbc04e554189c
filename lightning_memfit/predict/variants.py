"""Every variant of one recorded step: which blocks are recomputed, how large the slices are, when gradients are zeroed.

Milliseconds each, whatever the size of the model: the tables are made once, and a variant is a handful of sums over
them. The result is what the plain replay of the variant's own timeline gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_memfit.plan import CATEGORIES, PHASES, Category, MemoryBreakdown, Phase
from lightning_memfit.predict.micro_batch_scaling import NotDerivableError, Numbers, at_samples, pair_operations
from lightning_memfit.predict.optimizer_step import OptimizerStepCost
from lightning_memfit.predict.recomputation import Moments, recomputations
from lightning_memfit.predict.sized_signatures import SizedSignatures
from lightning_memfit.predict.variant_arrays import UNDECIDED, Flags, Holds, Operators, State, Storages, lines, numbers
from lightning_memfit.predict.variant_tables import ALWAYS, FIRST, SECOND, clipping_begins, tables_of
from lightning_memfit.predict.variant_timeline import events_of, small_block_events
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import Operation, Output, ParameterLayout, ProbeResult, Resident, Timeline


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step."""

    slice_sizes: tuple[int, ...]
    """Samples in each slice of one Lightning batch, largest first."""
    accumulate_grad_batches: int = 1
    """Lightning batches per optimizer step."""
    recomputed: tuple[str, ...] = ()
    """Qualified names of the blocks that are recomputed."""
    zero_gradients_early: bool = False
    """Gradients are dropped before the first forward instead of after it."""

    @property
    def micro_steps(self) -> int:
        """Slices of the whole accumulation window."""
        return len(self.slice_sizes) * self.accumulate_grad_batches

    @property
    def followed(self) -> tuple[int, ...]:
        """Samples in the slices that a trace would follow: the first, and if there are more, one that accumulates."""
        if self.micro_steps == 1:
            return self.slice_sizes
        return self.slice_sizes[0], self.slice_sizes[0 if self.accumulate_grad_batches > 1 else 1]


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """What one of several ranks holds in place of the whole, by sums: close, where a timeline would be exact."""

    parameters: float = 1.0
    """Share of the parameters' bytes."""
    gradients: float = 1.0
    """Share of the gradients' bytes."""
    held: Mapping[Category, int] = field(default_factory=dict)
    """Bytes that it holds beside the step all the time."""
    added: Mapping[Phase, tuple[Category, int]] = field(default_factory=dict)
    """By phase, bytes that it takes in all of it, and of which category."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds beside the step all the time."""
        return sum(self.held.values())


_WHOLE = OneRank()


class Times(NamedTuple):
    """How often operators of one kind run at one size."""

    kind: int
    """Number of the kind; operators of one kind cost the same."""
    samples: int
    """Samples in their slice."""
    times: float
    """Times in the whole accumulation window; a slice that is not followed counts by its share of samples."""


class StepVariants:
    """Tells what the variants of a recorded step need.

    Args:
        record: the step, with one slice or two.
        probes: by signature of the record, what probing found; an operator without a result counts with its outputs.
    """

    def __init__(self, record: StepRecord, probes: Mapping[int, ProbeResult] | None = None) -> None:
        self.scaling_obstacle: str | None = None
        """Why only the recorded sizes can be told; ``None`` if others can."""
        partners: Mapping[int, int] = {}
        try:
            partners = pair_operations(record)
        except NotDerivableError as error:
            self.scaling_obstacle = str(error)
        self._record = record
        self._moments = Moments(record)
        self._plans = recomputations(record, self._moments)
        tables = tables_of(record, partners, probes or {}, self._plans, self._moments)
        self._operators = Operators(tables.operators)
        self._storages = Storages(tables.storages, tables.freed, self._operators)
        self._left_out = [index for index, s in enumerate(tables.storages) if s.number == record.left_out]
        self._holds = Holds(tables.holds)
        self._forward_ends = [float(self._moments.of_event[end]) - 0.5 for end in record.forward_ends]
        starts, end = record.slice_starts, clipping_begins(record)
        second = starts[1] if len(starts) > 1 else end
        self._second_slice = self._moments.of_event[second] - 0.5, self._moments.of_event[end] - 0.5

    @property
    def parameters(self) -> tuple[ParameterLayout, ...]:
        """The module's parameters in its own order, tied ones once."""
        return self._record.parameters

    @property
    def has_caches(self) -> bool:
        """Whether blocks were given key/value caches, which they are not given where they are recomputed."""
        return any(plan.call.has_cache for plan in self._plans)

    def obstacle(self, variant: Variant) -> str | None:
        """Why a variant cannot be told from the record; ``None`` if it can."""
        return self.size_obstacle(variant) or self.block_obstacle(variant)

    def size_obstacle(self, variant: Variant) -> str | None:
        """Why the sizes of its slices cannot be told; ``None`` if they can."""
        recorded = self._record.samples
        if len(variant.followed) > len(recorded):
            return "only one slice was recorded"
        fixed = self.scaling_obstacle is not None or len(set(recorded)) == 1
        if fixed and variant.followed != recorded[: len(variant.followed)]:
            return self.scaling_obstacle or f"only slices of {recorded[0]} samples were recorded"
        return None

    def block_obstacle(self, variant: Variant) -> str | None:
        """Why recomputing its blocks cannot be told; ``None`` if it can."""
        names, followed = set(variant.recomputed), {plan.call.module for plan in self._plans}
        for plan in self._plans:
            if plan.obstacle is not None and plan.call.module in names:
                return f"recomputing {plan.call.module} cannot be derived: {plan.obstacle}"
        inner = [name for name in sorted(names) if any(name.startswith(f"{outer}.") for outer in names)]
        if inner:
            return f"{inner[0]} lies in another block that is recomputed"
        # Whether a module that was not followed is called at all, only a trace can say.
        unknown = sorted(names - followed)
        return f"no call of {unknown[0]} was followed" if unknown else None

    def memory(self, variant: Variant, step: OptimizerStepCost, rank: OneRank = _WHOLE) -> MemoryBreakdown:
        """The peak of a variant, the optimizer's step included.

        Args:
            variant: the slices, and what is recomputed.
            step: the optimizer's step, of the rank's share.
            rank: what one of several ranks holds; by default there is one.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        state = self._of_rank(self._state(variant), rank)
        before, after = (alive + step.states_bytes + rank.held_bytes for alive in self._alive(state))
        at_step = int(before[-1]) + _added(rank, "optimizer_step")
        added = numbers([_added(rank, phase) for phase in PHASES])[self._operators.phase]
        highest = np.where(state.runs, np.maximum(after, before[:-1] + state.hidden) + added, -1)
        by_phase: dict[str, int] = {}
        for number, phase in enumerate(PHASES):
            of_phase = state.runs & (self._operators.phase == number)
            if of_phase.any():
                by_phase[phase] = int(highest[of_phase].max())
        by_phase.update({phase: at_step + size for phase, size in step.memory.by_phase.items()})
        peak, at = int(state.sizes[self._storages.there].sum()) + step.states_bytes + rank.held_bytes, -1
        if len(highest) and int(highest.max()) > peak:
            at = int(highest.argmax())
            peak = int(highest[at])
        if at_step + step.memory.peak_allocated_bytes > peak:
            found = self._by_category(state, step, len(highest)) + Counter(step.memory.by_category)
            found += Counter[str](rank.held) + _in_phase(rank, "optimizer_step")
            peak = at_step + step.memory.peak_allocated_bytes
            return self._breakdown(
                peak, found, by_phase, ("optimizer_step", step.memory.peak_op, step.memory.peak_module)
            )
        found = self._by_category(state, step, at) + Counter[str](rank.held)
        if at < 0:
            return self._breakdown(peak, found, by_phase, ("forward", None, None))
        operation = self._operators.operation[at]
        found += _in_phase(rank, operation.phase)
        found["temporaries"] += peak - int(after[at]) - _added(rank, operation.phase)
        return self._breakdown(peak, found, by_phase, (operation.phase, operation.op, operation.module))

    def flops(self, variant: Variant) -> tuple[int, int]:
        """Floating point operations of the whole accumulation window, and those of them that are repeated.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        self._check(variant)
        runs = self._exist(variant, self._operators.slice_, self._operators.gate) & (self._operators.slice_ == FIRST)
        repeated = runs & (self._operators.gate > 0)
        total = again = 0
        for size, count in Counter(variant.slice_sizes).items():
            flops = self._at(self._operators.flops, np.full(len(runs), size))
            total += count * int(flops[runs].sum())
            again += count * int(flops[repeated].sum())
        return total * variant.accumulate_grad_batches, again * variant.accumulate_grad_batches

    def times(self, variant: Variant) -> list[Times]:
        """How often operators of each kind run in the whole accumulation window, the optimizer's step left out.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        self._check(variant)
        runs = self._exist(variant, self._operators.slice_, self._operators.gate)
        found = []
        for slice_, (samples, times) in self._repeats(variant).items():
            kinds = np.bincount(self._operators.kind[runs & (self._operators.slice_ == slice_)])
            found += [Times(kind, samples, times * int(kinds[kind])) for kind in np.flatnonzero(kinds).tolist()]
        return found

    def repeated_calls(self, variant: Variant) -> float:
        """Calls of blocks that are repeated in the whole accumulation window."""
        names, repeats = set(variant.recomputed), self._repeats(variant)
        slices = [plan.call.micro_step for plan in self._plans if plan.call.module in names and plan.begins < math.inf]
        return sum(repeats[slice_][1] for slice_ in slices if slice_ in repeats)

    def second_slice_counts(self, variant: Variant) -> float:
        """How often the second slice counts in the whole accumulation window; 1 if only one is followed."""
        return self._repeats(variant).get(SECOND, (0, 1.0))[1]

    def operation(self, kind: int, samples: int) -> Operation:
        """An operator of a kind at a number of samples; storages are those of one of them."""
        row = self._operators.kinds[kind]
        one = np.array([samples])
        sizes = [int(self._at(lines([line]), one)[0]) for line in row.written]
        outputs = zip(row.operation.outputs, sizes, strict=True)
        sized: Operation = row.operation._replace(
            signature=None,
            outputs=tuple(output._replace(allocated_bytes=size) for output, size in outputs),
            flops=int(self._at(lines([row.flops]), one)[0]),
            moved_bytes=int(self._at(lines([row.moved]), one)[0]),
        )
        return sized

    def timeline(self, variant: Variant) -> Timeline:
        """The timeline of a variant without the optimizer's step: what a trace of it would give.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        state, storages = self._state(variant), self._storages
        held = [CATEGORIES[category] for category in self._categories(state).tolist()]
        samples = self._samples(variant, self._operators.slice_)
        flops, moved = self._at(self._operators.flops, samples), self._at(self._operators.moved, samples)
        sizes = self._record.samples[0], self._record.samples[-1]
        sized_signatures = SizedSignatures(self._record.signatures, sizes)

        def sized(place: int, outputs: tuple[Output, ...]) -> Operation:
            operation, target = self._operators.operation[place], self._operators.target[place]
            at_size: Operation = operation._replace(
                signature=sized_signatures.at(self._operators.signatures[place], int(samples[place])),
                accumulates_into=None if target is None else storages.number[target],
                outputs=outputs,
                flops=int(flops[place]),
                moved_bytes=int(moved[place]),
            )
            return at_size

        total, again = self.flops(variant)
        exist = np.flatnonzero(state.exists & ~storages.there).tolist()
        events = tuple(events_of(self._operators, storages, state, sized, self._phase_at))
        return Timeline(
            residents=self._residents(state, state.exists),
            events=events,
            categories={storages.number[i]: held[i] for i in exist},
            signatures=tuple(sized_signatures.signatures),
            num_parameters=self._record.num_parameters,
            num_operations=int(state.runs.sum()),
            flops=total,
            recomputed_flops=again,
            micro_steps=variant.micro_steps,
            followed_micro_steps=len(variant.followed),
            gradients=self._record.layouts,
            parameters=self._record.parameters,
            gradient_of=self._record.gradient_of,
            calls_root=self._record.calls_root,
            notes=self._record.notes,
        )

    def small_blocks(self, variant: Variant, limit: int) -> Timeline:
        """What comes and goes in blocks of at most ``limit`` bytes, between operators that count FLOPs.

        A timeline with the events of :func:`~lightning_memfit.predict.variant_timeline.small_block_events`.

        Raises:
            NotDerivableError: if the variant cannot be told from the record.
        """
        state, flops = self._state(variant), self._operators.flops
        chosen = state.exists & (state.sizes <= limit) & (state.sizes > 0)
        counting = state.runs & ((flops[0] > 0) | (flops[1] > 0))
        return Timeline(
            residents=self._residents(state, chosen),
            events=tuple(small_block_events(self._operators, self._storages, state, chosen, counting)),
            categories={},
            signatures=(),
            num_parameters=self._record.num_parameters,
            num_operations=0,
            flops=0,
            recomputed_flops=0,
            micro_steps=variant.micro_steps,
            followed_micro_steps=len(variant.followed),
        )

    def _residents(self, state: State, chosen: Flags) -> tuple[Resident, ...]:
        numbers, sizes, categories = self._storages.number, state.sizes, self._storages.category
        there = np.flatnonzero(chosen & self._storages.there).tolist()
        return tuple(Resident(numbers[i], int(sizes[i]), CATEGORIES[categories[i]]) for i in there)

    def _phase_at(self, moment: float) -> Phase:
        index = int(np.searchsorted(self._moments.of_event, moment, side="right")) - 1
        return self._record.events[min(max(index, 0), len(self._record.events) - 1)].phase

    def _check(self, variant: Variant) -> None:
        obstacle = self.obstacle(variant)
        if obstacle is not None:
            raise NotDerivableError(obstacle)

    def _state(self, variant: Variant) -> State:
        self._check(variant)
        operators, opened = self._operators, self._opened(variant)
        runs = self._exist(variant, operators.slice_, operators.gate)
        exists = self._exist(variant, self._storages.slice_, self._storages.gate)
        if variant.zero_gradients_early:
            exists = exists & ~self._storages.old_gradients
        sizes = np.where(
            exists, self._at(self._storages.allocated_bytes, self._samples(variant, self._storages.slice_)), 0
        )
        self._size_what_is_left_out(sizes, variant)
        freed = self._holds.prolong(self._storages.freed, opened)
        if len(variant.followed) == 1:
            start, end = self._second_slice
            freed[(freed > start) & (freed < end)] = math.inf  # only a second slice would let go of it
        gap = np.searchsorted(operators.moment, freed)
        gap[np.isposinf(freed)] = len(operators.moment) + 1
        hidden = self._at(operators.hidden, self._samples(variant, operators.slice_))
        return State(sizes, freed, gap, exists, runs, hidden, len(variant.followed))

    def _of_rank(self, state: State, rank: OneRank) -> State:
        if rank.parameters == rank.gradients == 1:
            return state
        shares = np.ones(len(CATEGORIES) + 1)
        shares[CATEGORIES.index("parameters")] = rank.parameters
        shares[CATEGORIES.index("gradients")] = rank.gradients
        return state._replace(sizes=(state.sizes * shares[self._storages.category]).astype(np.int64))

    def _alive(self, state: State) -> tuple[Numbers, Numbers]:
        """Bytes alive in front of each operator and once more behind the last, and after each has allocated."""
        count = len(state.runs)
        new, there = ~self._storages.there, int(state.sizes[self._storages.there].sum())
        allocated = np.bincount(self._storages.made_by[new], weights=state.sizes[new], minlength=count)
        freed = np.bincount(state.gap, weights=state.sizes, minlength=count + 2)[: count + 1]
        before = there + np.cumsum(np.concatenate(([0.0], allocated)) - freed).astype(np.int64)
        return before, before[:-1] + allocated.astype(np.int64)

    def _by_category(self, state: State, step: OptimizerStepCost, at: int) -> Counter[str]:
        """What is alive while operator ``at`` runs; -1 is before the first, the number of operators after the last."""
        alive = self._storages.there
        if at >= 0:
            alive = (alive | (self._storages.made_by <= at)) & (state.gap > at)
        sums = np.bincount(self._categories(state)[alive], weights=state.sizes[alive], minlength=len(CATEGORIES))
        found: Counter[str] = Counter(dict(zip(CATEGORIES, sums.astype(np.int64).tolist(), strict=True)))
        found["optimizer_states"] += step.states_bytes
        return found

    def _categories(self, state: State) -> Numbers:
        saved = np.zeros(len(self._storages.made), dtype=np.bool_)
        for end in self._forward_ends[: state.slices]:
            saved |= (self._storages.made < end) & (state.freed > end)
        decided = np.where(saved, CATEGORIES.index("activations"), CATEGORIES.index("temporaries"))
        return np.where(self._storages.category == UNDECIDED, decided, self._storages.category)

    def _breakdown(
        self, peak: int, found: Counter[str], by_phase: dict[str, int], place: tuple[Phase, str | None, str | None]
    ) -> MemoryBreakdown:
        phase, op, module = place
        return MemoryBreakdown(
            peak_allocated_bytes=peak,
            by_category={name: size for name, size in found.items() if size},
            by_phase=by_phase,
            peak_phase=phase,
            peak_op=op,
            peak_module=module,
            num_parameters=self._record.num_parameters,
        )

    def _opened(self, variant: Variant) -> Flags:
        """By gate, whether it is open; the first one is none and counts as closed."""
        names = set(variant.recomputed)
        return np.array([False, *(plan.call.module in names for plan in self._plans)], dtype=np.bool_)

    def _exist(self, variant: Variant, slices: Numbers, gates: Numbers) -> Flags:
        exist: Flags = (gates == 0) | self._opened(variant)[gates]
        return exist & (slices != SECOND) if len(variant.followed) == 1 else exist

    def _samples(self, variant: Variant, slices: Numbers) -> Numbers:
        return numbers([variant.followed[0], variant.followed[-1], variant.followed[0]])[slices]

    def _at(self, lines: tuple[Numbers, Numbers], samples: Numbers) -> Numbers:
        return at_samples(*lines, (self._record.samples[0], self._record.samples[-1]), samples)

    def _repeats(self, variant: Variant) -> dict[int, tuple[int, float]]:
        """By slice, its samples and how often it counts: the second stands for all that are not followed."""
        first, second = variant.followed[0], variant.followed[-1]
        found = {FIRST: (first, 1.0), ALWAYS: (first, 1.0)}
        if len(variant.followed) > 1:
            samples = variant.accumulate_grad_batches * sum(variant.slice_sizes)
            found[SECOND] = second, (samples - first) / second
        return found

    def _size_what_is_left_out(self, sizes: Numbers, variant: Variant) -> None:
        # What slices that are not followed returned beside the loss; each is taken to be as large as the first.
        for index in self._left_out:
            kept = self._record.kept_bytes
            one = int(self._at(lines([(kept[0], kept[-1])]), numbers([variant.followed[0]]))[0])
            sizes[index] = one * max(0, len(variant.slice_sizes) - len(variant.followed))


def _added(rank: OneRank, phase: Phase) -> int:
    return rank.added[phase][1] if phase in rank.added else 0


def _in_phase(rank: OneRank, phase: Phase) -> Counter[str]:
    return Counter(dict([rank.added[phase]])) if phase in rank.added else Counter()
