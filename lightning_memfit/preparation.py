"""What is looked at before a fit is planned: loader, batch, device, budget, and what may be sliced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_memfit.agreement import RankFacts, check_agreement, least_host_budget, most_demanding, poorest
from lightning_memfit.apply.batch_scan import ScanLimits, ScannedBatch, given_worst_batch
from lightning_memfit.apply.batch_shapes import measure, shapes_in_words
from lightning_memfit.apply.deepspeed_config import is_deepspeed, offload_of, own_precision
from lightning_memfit.apply.length_cap import at_max_length
from lightning_memfit.apply.loader import TrainLoader, loaders_in_sight, scan_validation_batches
from lightning_memfit.apply.sharding import sharding_of
from lightning_memfit.apply.slicing import weight_of
from lightning_memfit.apply.stepping_batches import answering_num_batches
from lightning_memfit.batch_functions import BatchFunctions
from lightning_memfit.batch_tree import map_tensors
from lightning_memfit.errors import BatchStructureError, ConfigurationError, TraceError
from lightning_memfit.fingerprint import fingerprint_of, sharding_facts, trainer_facts_of
from lightning_memfit.forecasting import rates_of, resident_bytes
from lightning_memfit.hardware.detect import detect_again, detect_device
from lightning_memfit.hardware.device import DeviceSpec, shared_by
from lightning_memfit.hardware.gpu_probe import GpuProbe, probe_present, probed_rates, with_probe
from lightning_memfit.hardware.measure_rates import measure_rates
from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.observe.callbacks import callback_bytes
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.observe.snapshot import reachable_tensors
from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, Offload, PlanRequest, Precision
from lightning_memfit.predict.budget import form_budget, host_budget
from lightning_memfit.probers import Probers
from lightning_memfit.run_forecaster import RunForecaster, floor_forecast, forecaster_of
from lightning_memfit.run_notes import notes_of_run
from lightning_memfit.search.batch_arithmetic import (
    LoaderPlan,
    resolve_loader,
)
from lightning_memfit.sharding import Sharding
from lightning_memfit.slice_guard import SliceGuard
from lightning_memfit.units import format_bytes
from lightning_memfit.validate.arrived_batch import ArrivedBatch, arrived_batch
from lightning_memfit.validate.splittable import has_train_mode_batch_norm

SCAN_LIMITS = ScanLimits()
"""How far the batches of an epoch are looked through for the largest."""
WorstBatch = Any
"""The largest batch of a run as the user gives it: a batch, or a function that makes it; ``None`` if not given."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that planning a fit needs to know."""

    request: PlanRequest
    """What the user asked for."""
    functions: BatchFunctions
    """The user's functions."""
    module: Any
    """The LightningModule."""
    trainer: Any
    """The Trainer."""
    loader: TrainLoader
    """The train loader, asked for once."""
    loader_plan: LoaderPlan
    """Batch size and accumulation that form the effective batch."""
    batch: Any
    """The batch that is planned and proven, as the loader gives it: the largest that was found, of the planned size."""
    arrived: ArrivedBatch
    """The same behind the transfer hooks: what ``training_step`` gets, and what is divided."""
    planned_batch: str
    """Which one that is, in words."""
    rival: ScannedBatch | None
    """Another batch, of fewer bytes but more per sample, that may need more."""
    device: DeviceSpec
    """Where the fit runs."""
    probe: GpuProbe | None = None
    """What was measured of it where it is a GPU; ``None`` for a host."""
    budget: Budget
    """What it may use."""
    forecaster: RunForecaster
    """Says what a candidate needs."""
    resident_batches: int
    """Batches alive at the same time."""
    sharding: Sharding | None = None
    """How the run is spread over several devices; ``None`` on one."""
    offload: Offload = "never"
    """What the strategy keeps on the host."""
    host_budget_bytes: int | None = None
    """Bytes that all ranks may keep in the memory of their hosts; ``None`` where the host is the device."""
    engine_precision: Precision | None = None
    """The one that the user's own configuration of the engine sets; ``None`` if it sets none."""
    saved_precision: Precision | None = None
    """The only one in which the checkpoint that is resumed can go on; ``None`` if any can."""
    scan_is_complete: bool
    """Whether every batch of the epoch was looked at."""
    recomputed: frozenset[str] = frozenset()
    """Modules that the step was seen to recompute by itself, once it was looked at."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know about loader and accumulation."""

    @property
    def num_batches(self) -> int | None:
        """Lightning batches per epoch under the plan; ``None`` if unknown."""
        return self.loader.num_batches_at(self.loader_plan.rebuilt_batch_size)

    def of_the_more_demanding_batch(self) -> Preparation:
        """The same for the rival, where the run as it is needs more memory for that one."""
        if self.rival is None:
            return self
        other = self.with_batch(self.rival.batch, self.rival.describe())
        plain = self._plain
        needs, needs_other = (each.forecast(plain).predicted_peak_bytes for each in (self, other))
        return other if needs_other > needs else replace(self, rival=None)

    def seen_recomputing(self) -> Preparation:
        """The same, once a step without any lever was traced and it is known what it recomputes by itself."""
        return replace(self, recomputed=self.forecaster.recomputed_anyway(self._plain))

    @property
    def scan_notes(self) -> tuple[str, ...]:
        """What the user should know about the batch."""
        if self.scan_is_complete:
            return ()
        return (f"forecast and proof are those of {self.planned_batch}; a larger batch would need more",)

    def fingerprint(self) -> Mapping[str, str]:
        """What a plan for this run is made for."""
        return fingerprint_of(
            self.module,
            self.batch,
            device=self.device,
            request=self.request,
            optimizer=self.forecaster.optimizer_words,
            loader_batch_size=self.loader_plan.loader_batch_size,
            accumulate_grad_batches=self.loader_plan.accumulate_grad_batches,
            ranks=self.num_ranks,
            trainer_facts=trainer_facts_of(self.trainer) | sharding_facts(self.sharding, self.offload),
        )

    @property
    def num_ranks(self) -> int:
        """Devices that each take a share of the effective batch."""
        return 1 if self.sharding is None else self.sharding.ranks

    @property
    def gathers(self) -> bool:
        """Whether a forward needs the other ranks, which hold parts of the parameters."""
        return self.sharding is not None and self.sharding.engine == "fsdp2"

    @property
    def evaluation_gathers(self) -> bool:
        """Whether an evaluation step needs the other ranks, once the engine is built."""
        return self.gathers or (self.sharding is not None and self.sharding.zero_stage == 3)

    @property
    def _plain(self) -> Candidate:
        return Candidate(
            precision=self.request.precision or "32-true",
            split=self.whole,
            sharding=self.sharding,
            offload=self.offload,
        )

    @property
    def whole(self) -> BatchSplit:
        """The effective batch with one slice per Lightning batch."""
        samples = self.loader_plan.loader_batch_size
        return BatchSplit(
            effective_batch_size=self.loader_plan.effective_batch_size,
            ranks=self.num_ranks,
            loader_batch_size=samples,
            accumulate_grad_batches=self.loader_plan.accumulate_grad_batches,
            slice_sizes=(samples,),
        )

    @property
    def guard(self) -> SliceGuard:
        """Says why batches may not be divided."""
        return SliceGuard(
            trainer=self.trainer,
            module=self.module,
            functions=self.functions,
            batch=self._beside_module(self.arrived.batch),
            allow_inexact_slicing=self.request.allow_inexact_slicing,
            uneven_batches=self.loader.uneven_batches,
            with_other_ranks=self.gathers,
        )

    def _beside_module(self, batch: Any) -> Any:
        """A batch where the module is: on the host until training begins, then perhaps on a GPU."""
        parameter = next(iter(self.module.parameters()), None)
        if parameter is None or parameter.device.type in ("cpu", "meta"):
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(parameter.device))

    def loaders_in_sight(self) -> AbstractContextManager[None]:
        """Within it, the Trainer tells loaders and numbers of batches as it will once it trains."""
        return loaders_in_sight(self.trainer, self.loader, self.loader_plan.rebuilt_batch_size)

    def facts(self) -> RankFacts:
        """What the other ranks of the run are told."""
        with self.as_planned():
            fingerprint = self.fingerprint()
        return RankFacts(
            request=self.request,
            fingerprint=fingerprint,
            num_batches=self.num_batches,
            device=self.device,
            budget=self.budget,
            batch_bytes=measure(self.batch).num_bytes,
            batch_shapes=shapes_in_words(self.batch),
            host_budget_bytes=self.host_budget_bytes,
        )

    def agreed(self, facts: Sequence[RankFacts], from_rank: Callable[[int, Any], Any]) -> Preparation:
        """The same with the budget of the poorest rank, and the batch of the rank that has the largest.

        Args:
            facts: by rank.
            from_rank: exchanges a value: (rank, this one's value) to that rank's.

        Raises:
            RanksDisagreeError: if the ranks are not about to train the same.
        """
        check_agreement(facts)
        rank, budget = poorest(facts)
        host = least_host_budget(facts)
        agreed = replace(self, budget=budget, device=facts[rank].device, host_budget_bytes=host)
        demanding = most_demanding(facts)
        if demanding is None:
            return agreed
        batch, words = from_rank(demanding, (self.batch, self.planned_batch))
        return agreed.with_batch(batch, f"{words}, of rank {demanding}")

    def with_batch(self, batch: Any, planned_batch: str) -> Preparation:
        """The same for another batch, which is planned and proven whatever others there are.

        Args:
            batch: as a loader gives it.
            planned_batch: which one it is, in words.
        """
        arrived = arrived_batch(self.trainer, self.module, batch)
        return replace(
            self,
            batch=batch,
            arrived=arrived,
            planned_batch=planned_batch,
            rival=None,
            forecaster=self.forecaster.for_batch(arrived.batch, waiting_batch=batch),
        )

    @contextmanager
    def as_planned(self) -> Iterator[None]:
        """Within it, user code may read the Trainer's loader, its length and its estimate of steps as they will be."""
        with (
            self.loaders_in_sight(),
            answering_num_batches(
                self.trainer,
                num_batches=self.num_batches,
                accumulate_grad_batches=self.loader_plan.accumulate_grad_batches,
            ),
        ):
            yield

    def looked_at_again(self) -> Preparation:
        """The same with the device as it is now, such as just before a warm-up; a host stays what it was.

        Raises:
            NoFeasiblePlanError: if the device leaves nothing any more.
        """
        if self.device.kind == "cpu":
            return self
        device = detect_again(self.device)
        device = device if self.probe is None else with_probe(device, self.probe)
        kept = resident_bytes(self.module, self.batch) + self.forecaster.callback_bytes
        return replace(self, device=device, budget=form_budget(device, self.request, resident_bytes=kept))

    def validation_batch(self) -> ScannedBatch | None:
        """The largest validation batch that was found; ``None`` if the run does not validate."""
        return scan_validation_batches(self.trainer, SCAN_LIMITS)

    def estimate(self, candidate: Candidate) -> Forecast:
        """What a candidate needs, derived from the traces of others where that is possible.

        Raises:
            ConfigurationError: if what the user set cannot be used.
        """
        try:
            return self.forecaster.estimate(candidate)
        except TraceError as error:
            return self._floor(candidate, error)

    def forecast(self, candidate: Candidate) -> Forecast:
        """What a candidate needs; where its step can neither be traced nor run yet, what it certainly needs.

        Raises:
            ConfigurationError: if what the user set cannot be used.
        """
        try:
            return self.forecaster(candidate)
        except TraceError as error:
            # A step may need what a later hook sets up. The warm-up runs after those, and raises the user's own errors.
            return self._floor(candidate, error)

    def _floor(self, candidate: Candidate, error: TraceError) -> Forecast:
        floor = floor_forecast(candidate, self.module, self.arrived.batch, error)
        return replace(floor, memory=floor.memory.beside(self.forecaster.callback_bytes))


def prepare(
    trainer: Any,
    module: Any,
    request: PlanRequest,
    functions: BatchFunctions,
    loader: TrainLoader,
    probers: Probers,
    *,
    worst_batch: WorstBatch = None,
    cache_dir: Path | None = None,
    leads: bool = True,
) -> Preparation:
    """Look at everything; change nothing, random states included.

    Args:
        trainer: the Trainer, fitting.
        module: its LightningModule.
        request: what the user asked for.
        functions: the user's functions for batches.
        loader: the train loader.
        probers: find the operators' hidden temporaries.
        worst_batch: the largest batch, or a function that makes it, if the user gives one.
        cache_dir: keeps what was measured of the device.
        leads: whether this rank plans; the others need not know how fast the device is.

    Raises:
        ConfigurationError: if the effective batch cannot be formed, or there is nothing to train on.
        NoFeasiblePlanError: if the device leaves nothing.
    """
    first = loader.peek()
    first_arrived = arrived_batch(trainer, module, first).batch
    declared = loader.batch_size
    loader_plan = _loader_plan(
        trainer,
        module,
        request,
        loader,
        declared if declared is not None else _samples_seen(first_arrived, functions, request),
    )
    if callable(functions.loss_weight) or functions.loss_weight != "samples":
        weight_of(first_arrived, loader_plan.loader_batch_size, functions.loss_weight)  # raises if it cannot be told
    scanned = _planned_batch(first, request, loader, loader_plan, worst_batch)
    batch, arrived = scanned.batch, arrived_batch(trainer, module, scanned.batch)
    device, probe = detect_device(str(trainer.strategy.root_device)), None
    rates: DeviceRates | None
    if device.kind == "cpu":
        rates = measure_rates(cache_dir=cache_dir) if leads else None
        device = shared_by(device, trainer.num_devices)
    else:
        probe = probe_present(device, cache_dir=cache_dir)
        device, rates = with_probe(device, probe), probed_rates(probe) or rates_of(device)
    kept = callback_bytes(trainer, module)
    # On a GPU there is one: the others wait on the host.
    resident_batches = _resident_batches(loader, scanned) if device.kind == "cpu" else 1
    return Preparation(
        request=request,
        functions=functions,
        module=module,
        trainer=trainer,
        loader=loader,
        loader_plan=loader_plan,
        batch=batch,
        arrived=arrived,
        planned_batch=scanned.describe(),
        rival=scanned.rival,
        device=device,
        probe=probe,
        budget=form_budget(device, request, resident_bytes=resident_bytes(module, batch) + kept),
        forecaster=forecaster_of(
            trainer,
            module,
            arrived.batch,
            functions=functions,
            probers=probers,
            resident_batches=resident_batches,
            waiting_batch=batch,
            rates=rates,
            callback_bytes=kept,
            device=device,
        ),
        resident_batches=resident_batches,
        sharding=sharding_of(trainer),
        offload=offload_of(trainer.strategy) if is_deepspeed(trainer.strategy) else "never",
        engine_precision=_engine_precision(trainer, request),
        host_budget_bytes=_host_budget(trainer, device),
        scan_is_complete=scanned.complete,
        notes=notes_of_run(
            trainer,
            module,
            request,
            loader=loader,
            loader_plan=loader_plan,
            arrived=arrived,
            device=device,
            rates=rates,
        ),
    )


def _engine_precision(trainer: Any, request: PlanRequest) -> Precision | None:
    if not is_deepspeed(trainer.strategy):
        return None
    return own_precision(trainer.strategy, request.precision or "32-true")


def _host_budget(trainer: Any, device: DeviceSpec) -> int | None:
    """What all ranks may keep in the memory of their hosts, as this one sees its own."""
    if device.kind == "cpu":
        return None
    return host_budget(detect_device("cpu")) * int(trainer.num_nodes)


def _loader_plan(trainer: Any, module: Any, request: PlanRequest, loader: TrainLoader, samples: int) -> LoaderPlan:
    """Batch size and accumulation that form the effective batch.

    Raises:
        ConfigurationError: if it cannot be formed.
    """
    asked = request.effective_batch_size
    if not module.automatic_optimization and asked not in (None, samples * trainer.world_size):
        of = "" if trainer.world_size == 1 else f" on each of {trainer.world_size} ranks"
        raise ConfigurationError(
            f"effective_batch_size={asked}, and the loader's batches have {samples} samples{of}: under manual "
            "optimization training_step itself decides when its optimizers step, so that MemFit neither accumulates "
            f"batches nor changes their size. Set the loader's batch_size to {asked // trainer.world_size}, or leave "
            "effective_batch_size out."
        )
    return resolve_loader(
        effective_batch_size=asked,
        ranks=trainer.world_size,
        loader_batch_size=samples,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        can_rebuild=loader.can_rebuild,
        has_batch_norm=has_train_mode_batch_norm(module) is not None,
        allow_inexact_slicing=request.allow_inexact_slicing,
        rebuild_obstacle=loader.rebuild_obstacle,
    )


def _planned_batch(
    first: Any, request: PlanRequest, loader: TrainLoader, loader_plan: LoaderPlan, worst_batch: WorstBatch
) -> ScannedBatch:
    """The batch that the user gave, or the longest that may occur, or else the largest that a bounded scan finds."""
    if worst_batch is not None:
        given = given_worst_batch(worst_batch, first)
        if not loader_plan.rebuilt:
            _check_at_least(given.batch, first)
        return given
    scanned = loader.scan(SCAN_LIMITS, batch_size=loader_plan.rebuilt_batch_size)
    if request.max_length is None:
        return scanned
    return at_max_length(scanned, request.max_length)


def _check_at_least(worst: Any, first: Any) -> None:
    seen, given = measure(first).num_bytes, measure(worst).num_bytes
    if given < seen:
        raise ConfigurationError(
            f"worst_batch= gives a batch of {format_bytes(given)}, and the first batch of the run has "
            f"{format_bytes(seen)}: {shapes_in_words(worst)} against {shapes_in_words(first)}. Give the largest that "
            "may occur, or leave worst_batch= out, and MemFit looks for it."
        )


def _resident_batches(loader: TrainLoader, scanned: ScannedBatch) -> int:
    """Batches alive at the same time.

    Lightning fetches one ahead where it cannot know which one is the last; those that were looked at in a stream wait
    until training gets them.
    """
    ahead = 1 if loader.num_batches is not None else 2
    largest = storage_bytes(reachable_tensors([scanned.batch]))
    return max(ahead, -(-scanned.held_bytes // largest) if largest else 0)


def _samples_seen(batch: Any, functions: BatchFunctions, request: PlanRequest) -> int:
    """Samples in a batch; where its parts disagree and no effective batch is asked for, those of its first part."""
    try:
        return functions.samples_of(batch)
    except BatchStructureError:
        parts = [part for part in tree_leaves(batch) if isinstance(part, torch.Tensor) and part.dim() > 0]
        if request.effective_batch_size is not None or not parts:
            raise
        return max(1, int(parts[0].shape[0]))
