"""The optimizer's step followed alone, on fakes: nothing in front of it changes what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.faked_step import add_step_residents, faked_step, make_optimizer, names_of, timeline_of
from lightning_memfit.trace.sharded_fakes import ShardedFakes
from lightning_memfit.trace.step_program import StepProgram, users_code
from lightning_memfit.trace.timeline import GradientLayout, Timeline
from lightning_memfit.trace.tracer import StepTracer

Found = TypeVar("Found")


def trace_optimizer_step(
    program: StepProgram,
    *,
    gradients: Sequence[GradientLayout | None] | None = None,
    collect_signatures: bool = True,
    floating: torch.dtype | None = None,
    sharding: Sharding | None = None,
) -> Timeline:
    """Follow one step of a program's optimizer in the steady state, in which its states exist.

    States are created by a step that is not recorded. Residents are parameters, gradients and states.

    Args:
        program: its module and optimizer are used; the module may be on the CPU or on ``meta``.
        gradients: by parameter of the module, how its gradient lies in memory, ``None`` for those without; by default
            every parameter that requires one has one like itself.
        collect_signatures: keep the distinct operator calls for probing.
        floating: the module has this floating dtype, whatever it has now.
        sharding: how training is spread over devices; under FSDP2 the first rank's shards are stepped. What ZeRO steps,
            :func:`~lightning_memfit.trace.flat_step.trace_flat_steps` follows.

    Raises:
        TraceError: if the step needs values, or raises for another reason.
    """
    module = program.module
    tracer = StepTracer(names_of(module), collect_signatures=collect_signatures, rules=program.rules)
    fakes = fakes_in(new_fake_mode(), floating)
    divided = sharding is not None and sharding.engine == "fsdp2"
    if divided and sharding is not None:
        fakes = ShardedFakes(fakes, sharding.ranks)
    with faked_step(module, fakes, tracer):
        parameters = list(module.parameters())
        tracer.phase = "optimizer_step"
        with tracer.not_recording():
            optimizer = make_optimizer(program, parameters)
            if divided:
                _give_gradients_of_shards(parameters, gradients)
            else:
                _give_gradients(parameters, gradients)
            with users_code():
                optimizer.step()
        tracer.add_residents(parameters, "parameters")
        add_step_residents(tracer, parameters, [optimizer])
        with users_code():
            optimizer.step()
        tracer.stop_following()
        return timeline_of(tracer, parameters)


def _give_gradients(parameters: Sequence[nn.Parameter], layouts: Sequence[GradientLayout | None] | None) -> None:
    if layouts is None:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        return
    for parameter, layout in zip(parameters, layouts, strict=True):
        if layout is None:
            parameter.grad = None
        else:
            dtype = getattr(torch, layout.dtype)
            parameter.grad = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=parameter.device)


def _give_gradients_of_shards(
    parameters: Sequence[nn.Parameter], layouts: Sequence[GradientLayout | None] | None
) -> None:
    """Gradients like the shards; parameters without a gradient have none of their shard either."""
    by_parameter = [True] * len(parameters) if layouts is None else [layout is not None for layout in layouts]
    for parameter, has_gradient in zip(parameters, by_parameter, strict=True):
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad and has_gradient else None


def look_at_optimizer(program: StepProgram, look: Callable[[Optimizer], Found]) -> Found:
    """What ``look`` finds out about the program's optimizer, made over fakes and thrown away.

    Raises:
        TraceError: if the optimizer cannot be made.
    """
    module = program.module
    tracer = StepTracer(names_of(module), collect_signatures=False, rules=program.rules)
    with faked_step(module, fakes_in(new_fake_mode(), None), tracer), tracer.not_recording():
        return look(make_optimizer(program, list(module.parameters())))
