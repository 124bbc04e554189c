"""What is looked at before a fit is planned: loader, batch, device, budget, and what may be sliced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memfit.apply.loader import TrainLoader
from lightning_memfit.apply.micro_batches import unsliceable_reason
from lightning_memfit.apply.slicing import LossWeight, SplitBatch, weight_of
from lightning_memfit.batch_tree import batch_size_of, join_outputs, split_by_sizes, tensors_of
from lightning_memfit.errors import BatchStructureError, ConfigurationError, TraceError, is_out_of_memory
from lightning_memfit.forecasting import Forecaster, resident_bytes
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.observe.meter import storage_bytes
from lightning_memfit.observe.snapshot import reachable_tensors
from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, MemoryBreakdown, PlanRequest, balanced_slices
from lightning_memfit.predict.budget import form_budget
from lightning_memfit.search.batch_arithmetic import (
    LoaderPlan,
    last_window_is_short,
    optimizer_steps_per_epoch,
    resolve_loader,
)
from lightning_memfit.search.checkpointing import find_repeated_blocks, match_modules
from lightning_memfit.search.levers import SearchSpace, search_space
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.training_step import optimizers_of, program_of
from lightning_memfit.validate.splittable import check_splittable, has_train_mode_batch_norm

_UNLIMITED = 2**31
_COMPARED_PAIRS = 8


@dataclass(frozen=True, kw_only=True)
class BatchFunctions:
    """The user's functions for batches, which a plan cannot carry as data."""

    split_batch: SplitBatch | None
    """Divides batches of a structure of their own."""
    loss_weight: LossWeight
    """What a slice's mean loss counts."""

    def divide(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """The slices of ``batch``, of these numbers of samples.

        The user's function is only told the size of the first, so that further ones may have other sizes and numbers.
        """
        if self.split_batch is None:
            return split_by_sizes(batch, sizes)
        return [part for part, _ in self.split_batch(batch, sizes[0])]

    def samples_of(self, batch: Any) -> int:
        """Samples in ``batch``.

        Raises:
            BatchStructureError: if nothing tells.
        """
        if self.split_batch is None:
            return batch_size_of(batch)
        return sum(samples for _, samples in self.split_batch(batch, _UNLIMITED))

    def weight_of(self, batch: Any) -> float:
        """What the mean loss of ``batch`` counts."""
        return weight_of(batch, self.samples_of(batch), self.loss_weight)


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
    """The first batch, of the planned size."""
    device: DeviceSpec
    """Where the fit runs."""
    budget: Budget
    """What it may use."""
    forecaster: Forecaster
    """Says what a candidate needs."""
    resident_batches: int
    """Batches alive at the same time."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know about loader and accumulation."""

    @property
    def num_batches(self) -> int | None:
        """Lightning batches per epoch under the plan; ``None`` if unknown."""
        return _num_batches(self.loader, self.loader_plan)

    def forecast(self, candidate: Candidate) -> Forecast:
        """What a candidate needs; where its step can neither be traced nor run yet, what it certainly needs.

        Raises:
            ConfigurationError: if what the user set cannot be used.
        """
        try:
            return self.forecaster(candidate)
        except TraceError as error:
            # A step may need what a later hook sets up. The warm-up runs after those, and raises the user's own errors.
            return _floor(candidate, self.module, self.batch, error)

    def space(self, slicing_obstacle: str | None) -> SearchSpace:
        """What may be chosen, given why the batch may not be sliced (``None``: it may).

        Raises:
            ConfigurationError: if a pinned lever cannot be had.
        """
        patterns = self.request.activation_checkpointing
        samples = self.loader_plan.loader_batch_size
        whole = BatchSplit(
            effective_batch_size=self.loader_plan.effective_batch_size,
            loader_batch_size=samples,
            accumulate_grad_batches=self.loader_plan.accumulate_grad_batches,
            slice_sizes=(samples,),
        )
        return search_space(
            self.request,
            whole,
            blocks=find_repeated_blocks(self.module),
            matched=match_modules(self.module, patterns) if isinstance(patterns, tuple) else (),
            slicing_reason=slicing_obstacle,
        )

    def slicing_obstacle(self) -> str | None:
        """Why batches may not be divided, as far as can be seen without running anything."""
        reason = unsliceable_reason(self.trainer, self.module)
        if reason is None and not self.request.allow_inexact_slicing:
            batch_norm = has_train_mode_batch_norm(self.module)
            if batch_norm is not None:
                reason = (
                    f"{batch_norm} normalises over the batch in train mode, so that slices would change the result. "
                    "allow_inexact_slicing=True slices it all the same."
                )
        if reason is None:
            reason = self._structure_obstacle()
        return None if reason is None else f"not sliced: {reason}"

    def compare_slices(self, micro_batch_size: int) -> str | None:
        """Why slices of the real batch differ from the whole; ``None`` if they do not.

        Four samples are compared first, then pairs of slices of the planned size: a loss that weighs classes or leaves
        labels out is no mean over samples, but four samples need not show it.
        """
        obstacle = self._compare_halves_of(self.batch, 4)
        # More samples than a slice may not fit, even without gradients; then as many as a slice are compared.
        for samples in (2 * micro_batch_size, micro_batch_size):
            if obstacle is not None or samples <= 4:
                break
            try:
                return self._compare_pairs(samples)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        return obstacle

    def _compare_pairs(self, samples: int) -> str | None:
        present = self.functions.samples_of(self.batch)
        sizes = balanced_slices(present, -(-present // samples))
        pairs = self.functions.divide(self.batch, sizes) if len(sizes) > 1 else [self.batch]
        for pair in pairs[:_COMPARED_PAIRS]:
            obstacle = self._compare_halves_of(pair, samples)
            if obstacle is not None:
                return obstacle
        return None

    def _compare_halves_of(self, batch: Any, samples: int) -> str | None:
        try:
            verdict = check_splittable(
                module=self.module,
                batch=batch,
                split_by_sizes=self.functions.divide,
                training_step=program_of(self.module).compute_loss,
                weights=self.functions.weight_of,
                join=join_outputs,
                batch_size=self.functions.samples_of(batch),
                compared_samples=samples,
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # A step may need what a later hook sets up. Nothing is sliced that could not be compared.
            words = (str(error).strip().splitlines() or [""])[0][:200]
            return f"not sliced: the comparison of slices raised {type(error).__name__}: {words}"
        return None if verdict.exact else f"not sliced: {verdict.reason}"

    def _structure_obstacle(self) -> str | None:
        try:
            samples = self.functions.samples_of(self.batch)
        except BatchStructureError as error:
            return str(error)
        return None if samples > 1 else "the batch is a single sample"


def prepare(
    trainer: Any,
    module: Any,
    request: PlanRequest,
    functions: BatchFunctions,
    loader: TrainLoader,
    prober: OperatorProber,
) -> Preparation:
    """Look at everything; change nothing, random states included.

    Raises:
        ConfigurationError: if the effective batch cannot be formed, or there is nothing to train on.
        NoFeasiblePlanError: if the device leaves nothing.
    """
    batch = loader.peek()
    declared = loader.batch_size
    loader_plan = resolve_loader(
        effective_batch_size=request.effective_batch_size,
        ranks=1,
        loader_batch_size=declared if declared is not None else _samples_seen(batch, functions, request),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        can_rebuild=loader.can_rebuild,
        has_batch_norm=has_train_mode_batch_norm(module) is not None,
        allow_inexact_slicing=request.allow_inexact_slicing,
        rebuild_obstacle=loader.rebuild_obstacle,
    )
    if callable(functions.loss_weight) or functions.loss_weight != "samples":
        weight_of(batch, loader_plan.loader_batch_size, functions.loss_weight)  # raises if it cannot be told
    if loader_plan.rebuilt:
        batch = _first_samples(batch, loader_plan.loader_batch_size, functions)
    # Lightning fetches one batch ahead where it cannot know which one is the last.
    resident_batches = 1 if loader.num_batches is not None else 2
    device = detect_device("local")
    return Preparation(
        request=request,
        functions=functions,
        module=module,
        trainer=trainer,
        loader=loader,
        loader_plan=loader_plan,
        batch=batch,
        device=device,
        budget=form_budget(device, request, resident_bytes=resident_bytes(module, batch)),
        forecaster=_forecaster(trainer, module, batch, functions, prober, resident_batches),
        resident_batches=resident_batches,
        notes=_notes(trainer, batch, loader, loader_plan),
    )


def _forecaster(
    trainer: Any, module: Any, batch: Any, functions: BatchFunctions, prober: OperatorProber, resident_batches: int
) -> Forecaster:
    def clip(optimizer: Any) -> None:
        module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    program = program_of(module, step_context=trainer.precision_plugin.train_step_context, clip_gradients=clip)
    program = replace(program, make_optimizer=lambda: _the_optimizer(trainer, module))
    return Forecaster(
        program,
        batch,
        prober=prober,
        divide=functions.divide,
        samples_of=functions.samples_of,
        resident_batches=resident_batches,
    )


def _floor(candidate: Candidate, module: Any, batch: Any, error: TraceError) -> Forecast:
    parameters = list(module.parameters())
    by_category = {
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes([parameter for parameter in parameters if parameter.requires_grad]),
        "buffers": storage_bytes(list(module.buffers())),
        "inputs": storage_bytes(reachable_tensors([batch])),
    }
    return Forecast(
        candidate=candidate,
        memory=MemoryBreakdown(
            peak_allocated_bytes=sum(by_category.values()),
            by_category=by_category,
            peak_phase=None,
            num_parameters=sum(parameter.numel() for parameter in parameters),
        ),
        method="floor",
        notes=(
            f"before training begins the step can neither be traced nor run ({error}); the "
            "forecast is only what parameters, gradients, buffers and inputs take, and the warm-up will tell",
        ),
    )


def _the_optimizer(trainer: Any, module: Any) -> Optimizer:
    """The one optimizer that automatic optimization steps.

    Raises:
        ConfigurationError: if there is none, or more than one, or it cannot be accumulated for.
    """
    configured, name = module.configure_optimizers(), f"{type(module).__qualname__}.configure_optimizers()"
    try:
        found = optimizers_of(configured)
    except TraceError as error:
        raise ConfigurationError(
            f"{name} returned a {type(configured).__name__}, which holds no optimizer. Return one, such as "
            "torch.optim.AdamW(self.parameters())."
        ) from error
    if len(found) == 1:
        accumulate = trainer.accumulate_grad_batches  # the planned number, while a step is traced
        if isinstance(found[0], LBFGS) and accumulate > 1:
            raise ConfigurationError(
                f"LBFGS runs its closure several times per optimizer step, so that with {accumulate} accumulated "
                "batches the gradients of the last one would be added several times. Make the loader's batch as large "
                "as effective_batch_size (MemFit slices it exactly), or use another optimizer."
            )
        return found[0]
    if not found:
        raise ConfigurationError(
            f"{name} returned no optimizer, so that there is no optimizer step to plan. Return one, such as "
            "torch.optim.AdamW(self.parameters()), or set MEMFIT=off in the environment to run without."
        )
    raise ConfigurationError(
        f"{name} returned {len(found)} optimizers; automatic optimization steps 1. Return one, or set "
        "self.automatic_optimization = False and step them in training_step: MemFit leaves such a run alone."
    )


def _samples_seen(batch: Any, functions: BatchFunctions, request: PlanRequest) -> int:
    """Samples in a batch; where its parts disagree and no effective batch is asked for, those of its first part."""
    try:
        return functions.samples_of(batch)
    except BatchStructureError:
        parts = [part for part in tree_leaves(batch) if isinstance(part, torch.Tensor) and part.dim() > 0]
        if request.effective_batch_size is not None or not parts:
            raise
        return max(1, int(parts[0].shape[0]))


def _first_samples(batch: Any, samples: int, functions: BatchFunctions) -> Any:
    """The first samples of the peeked batch: the rebuilt loader draws from the same sampler."""
    present = functions.samples_of(batch)
    return batch if present <= samples else functions.divide(batch, (samples, present - samples))[0]


def _num_batches(loader: TrainLoader, loader_plan: LoaderPlan) -> int | None:
    return loader.num_batches_at(loader_plan.loader_batch_size if loader_plan.rebuilt else None)


def _shapes(batch: Any) -> str:
    tensors = tensors_of(batch)
    shown = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors[:3]]
    return ", ".join(shown) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")


def _notes(trainer: Any, batch: Any, loader: TrainLoader, loader_plan: LoaderPlan) -> tuple[str, ...]:
    notes = [loader_plan.reason] if loader_plan.rebuilt else []
    batches, accumulate = _num_batches(loader, loader_plan), loader_plan.accumulate_grad_batches
    before = optimizer_steps_per_epoch(loader.num_batches, trainer.accumulate_grad_batches)
    after = optimizer_steps_per_epoch(batches, accumulate)
    if before != after:
        notes.append(f"optimizer steps per epoch: {after} instead of {before}; learning rates are not changed")
    if batches is None:
        notes.append(
            "the train loader has no length: optimizer steps per epoch are not known, and Lightning fetches one batch "
            "ahead, so that two are counted as inputs"
        )
    if last_window_is_short(batches, accumulate):
        notes.append(
            "the last optimizer step of an epoch has fewer batches: it takes the exact mean over its own samples, "
            "where Lightning alone would scale it down"
        )
    if accumulate > 1:
        notes.append("accumulated batches are weighed by their samples; Lightning alone weighs them equally")
    notes.append(f"forecast and proof are those of the first batch ({_shapes(batch)}); a larger one would need more")
    return tuple(notes)
