"""The optimizer's step over one rank's share of each parameter group, flat and in ``float32``, as ZeRO runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.faked_step import faked_step, make_optimizer, names_of, states_of, timeline_of
from lightning_memfit.trace.optimizer_step import look_at_optimizer
from lightning_memfit.trace.step_program import StepProgram, users_code
from lightning_memfit.trace.timeline import FlatStep
from lightning_memfit.trace.tracer import StepTracer

Share = Callable[[Sequence[int]], int]
"""Elements of each parameter of a group to those of one rank's flat tensor."""


def trace_flat_steps(program: StepProgram, share: Share, *, collect_signatures: bool = True) -> tuple[FlatStep, ...]:
    """Follow a step of the program's optimizer over flat shares in the steady state, group by group.

    The optimizer is the program's own: only what its groups hold is exchanged, as DeepSpeed does. Parameters that are
    frozen or empty are in no share, and groups of none are left out.
    Source: ``is_optimized_parameter`` in ``deepspeed/runtime/utils.py`` and ``param_group['params'] = [...]`` in
    ``deepspeed/runtime/zero/stage_1_and_2.py`` 0.19.8.

    Args:
        program: its module and optimizer are used; the module may be on the CPU or on ``meta``.
        share: sizes of a group to one rank's share, such as ``group_share`` of ``predict/zero_layout.py``.
        collect_signatures: keep the distinct operator calls for probing.

    Raises:
        TraceError: if the step needs values, or raises for another reason.
    """
    groups = look_at_optimizer(program, lambda optimizer: _groups_of(optimizer, program.module))
    return tuple(
        _flat_step(program, place, group, share, collect_signatures) for place, group in enumerate(groups) if group
    )


def _groups_of(optimizer: Optimizer, module: nn.Module) -> list[list[int]]:
    index = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    return [
        [index[id(each)] for each in group["params"] if each.requires_grad and each.numel()]
        for group in optimizer.param_groups
    ]


def _flat_step(
    program: StepProgram, place: int, group: Sequence[int], share: Share, collect_signatures: bool
) -> FlatStep:
    module = program.module
    tracer = StepTracer(names_of(module), collect_signatures=collect_signatures, rules=program.rules)
    with faked_step(module, fakes_in(new_fake_mode(), None), tracer):
        parameters = list(module.parameters())
        elements = share([parameters[index].numel() for index in group])
        tracer.phase = "optimizer_step"
        with tracer.not_recording():
            optimizer = make_optimizer(program, parameters)
            flat = _flatten(optimizer, place, elements)
            with users_code():
                optimizer.step()
        tracer.add_residents([flat], "parameters")
        tracer.add_residents([flat.grad] if flat.grad is not None else [], "gradients")
        tracer.add_residents(states_of(optimizer), "optimizer_states")
        with users_code():
            optimizer.step()
        tracer.stop_following()
        return FlatStep(parameters=tuple(group), elements=elements, step=timeline_of(tracer, [flat]))


def _flatten(optimizer: Optimizer, place: int, elements: int) -> nn.Parameter:
    """Let the optimizer hold one flat tensor with a gradient, in the settings of one of its groups."""
    kept: dict[str, Any] = optimizer.param_groups[place]
    flat = nn.Parameter(torch.empty(elements, dtype=torch.float32))
    flat.grad = torch.empty_like(flat)
    kept["params"] = [flat]
    optimizer.param_groups[:] = [kept]
    optimizer.state.clear()
    return flat
