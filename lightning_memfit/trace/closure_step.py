"""An optimizer that runs forward and backward itself, several times per step, such as ``LBFGS``: followed on fakes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from lightning_memfit.observe.grown_states import grows, let_states_grow
from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.faked_step import (
    TracingObserver,
    add_batch_residents,
    add_module_residents,
    add_step_residents,
    fake_batches,
    faked_step,
    make_optimizer,
    names_of,
    timeline_of,
)
from lightning_memfit.trace.step_program import StepObserver, StepProgram, Unobserved, run_window, users_code
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.tracer import StepTracer
from lightning_memfit.trace.training_step import representative

_ITERATIONS = 3
_EVALUATIONS = 8
_NEVER = -1.0  # a tolerance below every distance


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step must be given a function that runs forward and backward."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def trace_closure_step(
    program: StepProgram,
    batch: Any,
    *,
    divide: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
    zero_gradients_early: bool = False,
    resident_batches: int = 1,
    waiting_batch: Any = None,
    collect_signatures: bool = True,
    floating: torch.dtype | None = None,
) -> Timeline:
    """Follow one step of an optimizer that is given a closure, late in training: its states have grown.

    The closure is what Lightning's is: slices forward and backward, old gradients zeroed, clipping. Of the iterations
    of ``LBFGS`` three are followed (of a line search eight evaluations): the others repeat them.

    Args:
        program: what the step consists of.
        batch: one collated batch.
        divide: divides the batch into slices.
        zero_gradients_early: gradients are dropped before the forward.
        resident_batches: batches alive at the same time (2 where the loop prefetches one).
        waiting_batch: one of the others, where it is not like ``batch``.
        collect_signatures: keep the distinct operator calls for probing.
        floating: the module and the batch have this floating dtype, whatever they have now.

    Raises:
        TraceError: if the step needs values, or raises for another reason.
    """
    parts = divide(batch)
    fakes = fakes_in(new_fake_mode(), floating)
    tracer = StepTracer(names_of(program.module), collect_signatures=collect_signatures, rules=program.rules)
    with faked_step(program.module, fakes, tracer):
        parameters = list(program.module.parameters())
        observer = TracingObserver(tracer, parameters)
        with tracer.not_recording():
            waiting = batch if waiting_batch is None else waiting_batch
            batches = fake_batches(fakes, batch, waiting, resident_batches, floating)
            slices = [fakes.of_batch(part) for part in parts]
            tracer.known.tell(fakes.pairs())
            optimizer = make_optimizer(program, parameters)
            follow_few_iterations(optimizer)
            followed = representative(slices, len(slices))

            @torch.enable_grad()  # as Lightning's closure: a step may call it without gradients
            def closure(watch: StepObserver) -> Any:
                run_window(
                    program,
                    optimizer,
                    followed,
                    watch,
                    zero_gradients_early=zero_gradients_early,
                    slices_left_out=len(slices) - len(followed),
                    steps=False,
                )
                return torch.ones(())

            with users_code():
                optimizer.step(lambda: closure(Unobserved()))
            let_states_grow(optimizer)
        add_module_residents(tracer, program.module)
        add_step_residents(tracer, parameters, [optimizer])
        add_batch_residents(tracer, [*batches, *slices])
        with tracer.following_modules(), users_code():
            tracer.phase = "optimizer_step"
            optimizer.step(lambda: closure(observer))
        tracer.stop_following()
        return timeline_of(tracer, parameters, notes=growth_notes([optimizer]))


def growth_notes(optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
    """What the user should know of optimizers whose states grow after their first steps."""
    growths = dict.fromkeys(growth for optimizer in optimizers if (growth := grows(optimizer)) is not None)
    return tuple(f"{growth}: forecast and proof are those of a late step" for growth in growths)


def follow_few_iterations(optimizer: Optimizer) -> None:
    """Let an optimizer over fakes iterate a few times: they have no values, by which a tolerance would end it."""
    if isinstance(optimizer, LBFGS):
        for group in optimizer.param_groups:
            group.update(
                max_iter=min(_ITERATIONS, group["max_iter"]),
                max_eval=min(_EVALUATIONS, group["max_eval"]),
                tolerance_grad=_NEVER,
                tolerance_change=_NEVER,
            )
