"""One optimizer step followed on fakes: nothing is computed, nothing of the module's size is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.sharded_model import without_exchange
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.fake_module import FakeTensors
from lightning_memfit.trace.faked_step import (
    TracingObserver,
    add_batch_residents,
    add_module_residents,
    fake_batches,
    faked_step,
    layouts_of,
    make_optimizer,
    names_of,
    parameter_layouts,
    states_of,
    timeline_of,
)
from lightning_memfit.trace.fully_sharded import fully_sharded
from lightning_memfit.trace.group_precision import cast_between_groups, fakes_under
from lightning_memfit.trace.step_program import (
    LossFunction,
    OptimizerFactory,
    StepObserver,
    StepProgram,
    Unobserved,
    optimizers_of,
    program_of,
    run_window,
    users_code,
)
from lightning_memfit.trace.tensors import tensors_in
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.tracer import StepTracer

__all__ = [
    "LossFunction",
    "OptimizerFactory",
    "StepObserver",
    "StepProgram",
    "Unobserved",
    "optimizers_of",
    "program_of",
    "run_window",
    "trace_window",
]


def trace_window(
    program: StepProgram,
    batch: Any,
    *,
    divide: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
    micro_steps: int | None = None,
    resident_batches: int = 1,
    waiting_batch: Any = None,
    collect_signatures: bool = True,
    floating: torch.dtype | None = None,
    steps: bool = True,
    sharding: Sharding | None = None,
) -> Timeline:
    """Follow one optimizer step on fakes.

    What the user's code prints meanwhile is dropped; the real step will print it.

    The step is one in the steady state: optimizer states and the last step's gradients exist when it begins. States
    are created by an optimizer step that is not recorded.

    Args:
        program: what the step consists of; its module may be on the CPU or on ``meta``.
        batch: one collated batch, real or ``meta`` tensors in any nested structure.
        divide: divides the batch into slices.
        micro_steps: slices of the whole accumulation window, by default those of one batch. Two are followed: from the
            second on they repeat.
        resident_batches: batches alive at the same time (2 where the loop prefetches one).
        waiting_batch: one of the others, where it is not like ``batch``.
        collect_signatures: keep the distinct operator calls for probing.
        floating: the module and the batch have this floating dtype, whatever they have now.
        steps: whether the optimizer steps at the end; if not, the only states are those made with the optimizer.
        sharding: follow what the first rank does of a step that ``fully_shard`` spreads over several, under the
            policy of mixed precision that it names; without it, that of the program holds.

    Raises:
        TraceError: if the step needs values (boolean masks, ``nonzero``, ``.numpy()``) or raises for another reason.
    """
    parts = divide(batch)  # for real: a function of the user's may need values
    precision = program.group_precision if sharding is None else None
    fakes = fakes_under(program.module, precision, floating)
    tracer = StepTracer(names_of(program.module), collect_signatures=collect_signatures, rules=program.rules)
    with ExitStack() as ending:
        ending.enter_context(faked_step(program.module, fakes, tracer))
        with tracer.not_recording():
            if sharding is not None:
                ending.enter_context(fully_sharded(program.module, sharding, tracer))
            ending.enter_context(cast_between_groups(program.module, precision, tracer))
            waiting = batch if waiting_batch is None else waiting_batch
            batches = fake_batches(fakes, batch, waiting, resident_batches, floating)
            slices = [fakes.of_batch(part) for part in parts]
            tracer.known.tell(fakes.pairs())
        return _traced(program, tracer, fakes, batches, slices, micro_steps or len(slices), steps, sharding)


def _traced(
    program: StepProgram,
    tracer: StepTracer,
    fakes: FakeTensors,
    batches: Sequence[Any],
    slices: Sequence[Any],
    micro_steps: int,
    steps: bool,
    sharding: Sharding | None,
) -> Timeline:
    parameters = list(program.module.parameters())
    with tracer.not_recording():
        optimizer = make_optimizer(program, parameters)
        has_states = {id(parameter) for parameter in parameters if optimizer.state.get(parameter)}
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        if steps:
            with users_code():
                optimizer.step()
    add_module_residents(tracer, program.module)
    owned = {}
    for parameter in parameters:
        before = len(tracer.residents)
        if parameter.grad is not None:
            tracer.add_residents([parameter.grad], "gradients")
        gradients = len(tracer.residents)
        tracer.add_residents(tensors_in(optimizer.state.get(parameter, {})), "optimizer_states")
        # States that came with the optimizer are there whether the parameter is used or not.
        end = gradients if id(parameter) in has_states else len(tracer.residents)
        owned[id(parameter)] = {resident.storage for resident in tracer.residents[before:end]}
    tracer.note_gradients(parameters)
    layouts = parameter_layouts(tracer, program.module, fakes)
    if steps:
        tracer.add_residents(states_of(optimizer), "optimizer_states")  # and what it keeps beside its states
    add_batch_residents(tracer, [*batches, *slices])

    traced = representative(slices, micro_steps)
    defers = sharding is not None and sharding.synchronisation == "step" and len(slices) > 1
    if defers and micro_steps > len(slices):
        traced = [slices[0], *traced]  # gradients of earlier batches are shards when whole ones begin to wait again

    def around_slice(index: int) -> AbstractContextManager[None]:
        return without_exchange(program.module) if defers and index + 2 == len(traced) else nullcontext()

    with tracer.following_modules():
        observer = TracingObserver(tracer, parameters)
        left_out = max(0, len(slices) - len(traced))
        run_window(
            program, optimizer, traced, observer, slices_left_out=left_out, steps=steps, around_slice=around_slice
        )
    tracer.stop_following()
    unused = set().union(*(owned[id(p)] for p in parameters if p.grad is None)) if parameters else set()
    # Work grows with the elements of the slices; those left out may be smaller than those followed.
    whole, followed = micro_steps // len(slices) * _elements(slices), max(1, _elements(traced))
    return timeline_of(
        tracer,
        parameters,
        residents=tuple(resident for resident in tracer.residents if resident.storage not in unused),
        flops=tracer.flops * whole // followed,
        recomputed_flops=tracer.recomputed_flops * whole // followed,
        micro_steps=micro_steps,
        followed_micro_steps=len(traced),
        gradients=layouts_of(parameters),
        parameters=layouts,
        gradient_of=dict(tracer.gradient_of),
        calls_root=any(not call.module for call in tracer.calls),
    )


def representative(slices: Sequence[Any], micro_steps: int) -> list[Any]:
    """The slices that are followed: one, or two where there are more in the window."""
    # The first slice meets no gradients of this window, the second accumulates on them; all others repeat the second.
    # With accumulation over several batches the next batch's first slice, the largest, accumulates too.
    if micro_steps == 1:
        return list(slices)
    return [slices[0], slices[0] if micro_steps > len(slices) else slices[1]]


def _elements(slices: Sequence[Any]) -> int:
    return sum(tensor.numel() for part in slices for tensor in tensors_of(part))
