"""A step recorded on fakes, so that what checkpointing and smaller slices change in it can be told without a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.plan import Phase
from lightning_memfit.trace.faked_step import (
    TracingObserver,
    add_batch_residents,
    add_module_residents,
    fake_batches,
    faked_step,
    layouts_of,
    make_optimizer,
    names_of,
    notes_of,
    parameter_layouts,
)
from lightning_memfit.trace.followed_blocks import FollowedBlocks
from lightning_memfit.trace.group_precision import cast_between_groups, fakes_under
from lightning_memfit.trace.saved_tensors import SavedTensorTracer
from lightning_memfit.trace.step_program import StepProgram, kept_beside_loss, run_window
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import Operation


def record_window(
    program: StepProgram,
    batch: Any,
    *,
    slices_of: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
    samples: Sequence[int],
    blocks: Sequence[str] = (),
    without_caches: bool = False,
    resident_batches: int = 1,
    waiting_batch: Any = None,
    collect_signatures: bool = True,
    floating: torch.dtype | None = None,
) -> StepRecord:
    """Record one or two slices of a step on fakes, up to the moment at which the optimizer steps.

    Args:
        program: what the step consists of; its module may be on the CPU or on ``meta``.
        batch: one collated batch, real or ``meta`` tensors in any nested structure.
        slices_of: the one or two slices of the batch that are followed; they may be of different sizes and overlap.
        samples: samples in each of them.
        blocks: qualified names of the modules that could be recomputed.
        without_caches: give those modules no key/value caches, as recomputing them does.
        resident_batches: batches alive at the same time (2 where the loop prefetches one).
        waiting_batch: one of the others, where it is not like ``batch``.
        collect_signatures: keep the distinct operator calls for probing.
        floating: the module and the batch have this floating dtype, whatever they have now.

    Raises:
        TraceError: if the step needs values (boolean masks, ``nonzero``, ``.numpy()``) or raises for another reason.
    """
    module = program.module
    parts = slices_of(batch)  # for real: a function of the user's may need values
    fakes = fakes_under(module, program.group_precision, floating)
    tracer = SavedTensorTracer(names_of(module), collect_signatures=collect_signatures, rules=program.rules)
    with faked_step(module, fakes, tracer), cast_between_groups(module, program.group_precision, tracer):
        parameters = list(module.parameters())
        with tracer.not_recording():
            waiting = batch if waiting_batch is None else waiting_batch
            batches = fake_batches(fakes, batch, waiting, resident_batches, floating)
            slices = [fakes.of_batch(part) for part in parts]
            tracer.known.tell(fakes.pairs())
            optimizer = make_optimizer(program, parameters)
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        add_module_residents(tracer, module)
        owned = _add_gradients(tracer, parameters)
        tracer.note_gradients(parameters)
        parameter_facts = parameter_layouts(tracer, module, fakes)
        add_batch_residents(tracer, batches)
        followed = FollowedBlocks(tracer, module, blocks, without_caches=without_caches)
        observer = _RecordingObserver(tracer, parameters)
        recorded = replace(program, compute_loss=observer.observing(program.compute_loss))
        with followed.following(), tracer.following_modules():
            run_window(recorded, optimizer, slices, observer, slices_left_out=len(slices) - 1, steps=False)
        unused = set().union(*(owned[id(p)] for p in parameters if p.grad is None)) if parameters else set()
        with _disable_current_modes():
            return StepRecord(
                residents=tuple(resident for resident in tracer.residents if resident.storage not in unused),
                events=tuple(tracer.events),
                marks=tuple(tracer.marks),
                saved=tuple(tracer.saved),
                blocks=tuple(followed.calls),
                slice_starts=tuple(observer.slice_starts),
                forward_ends=tuple(observer.forward_ends),
                gradients=frozenset(s for s, category in tracer.categories.items() if category == "gradients"),
                layouts=layouts_of(parameters),
                parameters=parameter_facts,
                gradient_of=dict(tracer.gradient_of),
                samples=tuple(samples),
                left_out=observer.left_out,
                kept_bytes=tuple(observer.kept_bytes),
                rng_state_bytes=torch.get_rng_state().numel(),
                signatures=tuple(tracer.signatures),
                num_parameters=sum(parameter.numel() for parameter in parameters),
                recomputed=frozenset(call.module for call in tracer.calls if call.recomputed),
                calls_root=any(not call.module for call in tracer.calls),
                notes=notes_of(tracer),
            )


def _add_gradients(tracer: SavedTensorTracer, parameters: Sequence[nn.Parameter]) -> dict[int, set[int]]:
    owned = {}
    for parameter in parameters:
        before = len(tracer.residents)
        if parameter.grad is not None:
            tracer.add_residents([parameter.grad], "gradients")
        owned[id(parameter)] = {resident.storage for resident in tracer.residents[before:]}
    return owned


class _RecordingObserver(TracingObserver):
    """Notes where slices and their forwards begin and end, and stops before the optimizer steps."""

    def __init__(self, tracer: SavedTensorTracer, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(tracer, parameters)
        self.slice_starts: list[int] = []
        self.forward_ends: list[int] = []
        self.kept_bytes: list[int] = []
        self.left_out: int | None = None
        self._saving = tracer

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        if phase == "forward":
            self.slice_starts.append(len(self._saving.events))
        elif phase == "optimizer_step":
            self._saving.stop_following()

    def after_forward(self) -> None:
        super().after_forward()
        self.forward_ends.append(len(self._saving.events))

    def observing(self, compute_loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same function, under which autograd lets go of what it saves."""

        def compute(part: Any) -> Any:
            tracer = self._saving
            made = [event for event in tracer.events[self.slice_starts[-1] :] if isinstance(event, Operation)]
            if made:  # what stands for the outputs of slices that are not followed
                self.left_out = made[0].outputs[0].storage
            with tracer.hooks():
                output = compute_loss(part)
            kept = kept_beside_loss(output)
            self.kept_bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in kept))
            return output

        return compute
