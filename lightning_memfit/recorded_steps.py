"""The few recorded steps that many candidates are derived from, each recorded when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_memfit.apply.model_switches import switch_models
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.errors import BatchStructureError, TraceError
from lightning_memfit.observe.old_objects import old_objects_at_rest
from lightning_memfit.plan import BatchSplit, Candidate, Precision, balanced_slices
from lightning_memfit.predict.micro_batch_scaling import NotDerivableError
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.sharding import GroupPrecision
from lightning_memfit.shared_work import SharedWork, probes_key
from lightning_memfit.targets import Prober
from lightning_memfit.trace.op_probe import Probes
from lightning_memfit.trace.recording import record_window
from lightning_memfit.trace.step_program import StepProgram
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import GradientLayout

if TYPE_CHECKING:
    from lightning_memfit.hardware.rates import DeviceRates
    from lightning_memfit.predict.variant_seconds import VariantSeconds

Divide = Callable[[Any, Sequence[int]], Sequence[Any]]
"""(batch, slice sizes) to slices."""


@dataclass(frozen=True, kw_only=True)
class GivenBatch:
    """The batch that steps are traced with, and how it is divided."""

    batch: Any
    """One collated batch of the loader's size."""
    divide: Divide = split_by_sizes
    """Divides it into slices of given sizes."""
    samples_of: Callable[[Any], int] = batch_size_of
    """Number of samples in a batch."""
    resident_batches: int = 1
    """Batches alive at the same time."""
    waiting_batch: Any = None
    """One of the others, as the loader gives it; ``None`` if it is like ``batch``."""

    @cached_property
    def samples(self) -> int | None:
        """Samples in the batch; ``None`` if its structure does not tell."""
        try:
            return self.samples_of(self.batch)
        except BatchStructureError:
            return None

    def sizes(self, split: BatchSplit) -> tuple[int, ...]:
        """Samples in each slice of this batch: those of the split, unless this batch is smaller than the loader's.

        Raises:
            BatchStructureError: if it is to be divided and its structure does not tell how.
        """
        if split.num_slices == 1:
            return (split.loader_batch_size if self.samples is None else self.samples,)
        samples = self.samples_of(self.batch)
        if samples == sum(split.slice_sizes):
            return split.slice_sizes
        return balanced_slices(samples, -(-samples // split.micro_batch_size))

    def slices(self, batch: Any, split: BatchSplit) -> Sequence[Any]:
        """The slices of a batch like the given one."""
        return [batch] if split.num_slices == 1 else self.divide(batch, self.sizes(split))

    def slice_of(self, batch: Any, samples: int) -> Any:
        """One slice of this many samples; the batch itself if that is all it has."""
        if self.samples is None or samples == self.samples:
            return batch
        return self.divide(batch, (samples, self.samples - samples))[0]


class Recorded(NamedTuple):
    """A recorded step, ready to be asked about its variants."""

    variants: StepVariants
    """Tells what variants need."""
    gradients: tuple[GradientLayout | None, ...]
    """How gradients lie when the optimizer steps."""
    notes: tuple[str, ...]
    """Assumptions made while recording and probing."""
    recomputed: frozenset[str]
    """Qualified names of the modules that the program itself recomputes."""
    seconds: VariantSeconds | None
    """Tells how long variants take; ``None`` where no rates are known."""
    key: Hashable
    """Equal for records of equal steps in which the same was found inside operators."""


class RecordedSteps:
    """Records steps as candidates ask for them: one per precision, unless slices of other sizes run other operators.

    One record follows two slices of different sizes, the whole batch and a smaller one, so that it tells both what
    grows with the samples and what happens in a slice that adds to the gradients of another.

    Args:
        given: the batch.
        prober: finds the operators' hidden temporaries; ``None`` leaves them out.
        blocks: qualified names of the modules that may be recomputed.
        rates: how fast the device is; ``None`` leaves times out.
        shared: what was recorded of this batch, also for other devices; nothing by default.
    """

    def __init__(
        self,
        given: GivenBatch,
        prober: Prober | None,
        blocks: Sequence[str],
        rates: DeviceRates | None = None,
        shared: SharedWork | None = None,
    ) -> None:
        self._given, self._prober, self._rates = given, prober, rates
        self._blocks = tuple(blocks)
        self._shared = SharedWork() if shared is None else shared
        self._known: dict[tuple[Precision, GroupPrecision | None, tuple[int, ...], bool], Recorded | str] = {}
        self._on_their_own: set[tuple[Precision, tuple[int, ...]]] = set()

    def for_batch(self, given: GivenBatch) -> RecordedSteps:
        """The same for another batch, nothing recorded yet."""
        return RecordedSteps(given, self._prober, self._blocks, self._rates)

    def for_device(self, prober: Prober | None, rates: DeviceRates | None) -> RecordedSteps:
        """The same for another device; what was recorded under equal rules is shared."""
        return RecordedSteps(self._given, prober, self._blocks, rates, self._shared)

    def variant_of(self, candidate: Candidate) -> Variant:
        """The candidate in terms of slices.

        Raises:
            BatchStructureError: if the batch cannot be divided.
        """
        return Variant(
            slice_sizes=self._given.sizes(candidate.split),
            accumulate_grad_batches=candidate.split.accumulate_grad_batches,
            recomputed=candidate.checkpointed_modules,
            zero_gradients_early=candidate.zero_gradients_early,
        )

    def recorded(
        self, candidate: Candidate, variant: Variant, program: StepProgram, floating: torch.dtype | None
    ) -> Recorded:
        """A record from which the candidate can be derived.

        Args:
            candidate: the candidate.
            variant: it in terms of slices.
            program: the step at the candidate's precision.
            floating: dtype of module and batch, if it is not the one that they have now.

        Raises:
            NotDerivableError: if none can be had, with the reason.
        """
        unknown = [name for name in candidate.checkpointed_modules if name not in self._blocks]
        if unknown:
            self._blocks, self._known = (*self._blocks, *unknown), {}
        reasons: list[str] = []
        for sizes in self._choices(candidate.precision, variant):
            found = self._record(candidate.precision, sizes, program, floating)
            if not isinstance(found, str) and found.variants.has_caches and variant.recomputed:
                # Without those of the other blocks too: the models leave them out, or what they hold autograd holds.
                found = self._record(candidate.precision, sizes, program, floating, without_caches=True)
            reason = found if isinstance(found, str) else found.variants.size_obstacle(variant)
            if isinstance(found, str) or reason is not None:
                reasons.append(str(reason))
                continue
            reason = found.variants.block_obstacle(variant)
            if reason is not None:
                raise NotDerivableError(reason)
            notes = tuple(f"every size of a slice is traced on its own: {each}" for each in reasons)
            return found._replace(notes=(*found.notes, *notes))
        raise NotDerivableError(reasons[0])

    def distrust(self, candidate: Candidate, variant: Variant) -> None:
        """Derive candidates with slices of these sizes from a record of their own: they did not lie on the line."""
        self._on_their_own.add((candidate.precision, variant.followed))

    def _choices(self, precision: Precision, variant: Variant) -> list[tuple[int, ...]]:
        own, samples = variant.followed, self._given.samples
        if samples is None or (precision, own) in self._on_their_own:
            return [own]
        shared = (samples, _smaller(samples)) if samples > 1 else (1, 1)
        return list(dict.fromkeys((shared, own)))

    def _record(
        self,
        precision: Precision,
        sizes: tuple[int, ...],
        program: StepProgram,
        floating: torch.dtype | None,
        *,
        without_caches: bool = False,
    ) -> Recorded | str:
        key = precision, program.group_precision, sizes, without_caches
        if key not in self._known:
            by = "record", program.rules, self._blocks, self._prober is not None, *key
            record = self._shared.once(by, lambda: self._traced(sizes, program, floating, without_caches))
            self._known[key] = record if isinstance(record, str) else self._ready(record, by)
        return self._known[key]

    def _traced(
        self, sizes: tuple[int, ...], program: StepProgram, floating: torch.dtype | None, without_caches: bool
    ) -> StepRecord | str:
        """The record, or why there is none."""
        try:
            with ExitStack() as levers:
                if without_caches:
                    levers.callback(switch_models(program.module, self._blocks))
                return record_window(
                    program,
                    self._given.batch,
                    slices_of=lambda batch: [self._given.slice_of(batch, size) for size in sizes],
                    samples=sizes,
                    blocks=self._blocks,
                    without_caches=without_caches,
                    resident_batches=self._given.resident_batches,
                    waiting_batch=self._given.waiting_batch,
                    collect_signatures=self._prober is not None,
                    floating=floating,
                )
        except (TraceError, BatchStructureError) as error:
            return str(error)

    def _ready(self, record: StepRecord, by: Hashable) -> Recorded:
        probes = Probes(results={}) if self._prober is None else self._prober.probe(record.signatures)
        key = "variants", by, probes_key(probes.results)
        with old_objects_at_rest():
            variants = self._shared.once(key, lambda: StepVariants(record, probes.results))
        notes = (*record.notes, *probes.notes)
        return Recorded(variants, record.layouts, notes, record.recomputed, self._seconds_of(variants), key)

    def _seconds_of(self, variants: StepVariants) -> VariantSeconds | None:
        if self._rates is None:
            return None
        from lightning_memfit.predict.variant_seconds import VariantSeconds

        return VariantSeconds(variants, self._rates)


def _smaller(samples: int) -> int:
    """A size apart from the whole; not 1 where it can be helped, since tensors of one sample are laid out otherwise."""
    return min(max(2, samples // 4), samples - 1)
