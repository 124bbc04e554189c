"""The optimizer's step, traced alone and put in its place: it does not depend on precision, slices or checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.timeline import Event, Free, ProbeResult, Resident, Signature, TensorShape, Timeline


@dataclass(frozen=True, kw_only=True)
class OptimizerStepCost:
    """What one way to step an optimizer adds to a step."""

    states_bytes: int
    """The optimizer's states, there before and after."""
    memory: MemoryBreakdown
    """The peak within the step beyond what is alive before it."""


def optimizer_step_cost(step: Timeline, probes: Mapping[int, ProbeResult] | None = None) -> OptimizerStepCost:
    """Replay a step that was traced alone.

    Args:
        step: the timeline of the step; its residents are parameters, gradients and the optimizer's states.
        probes: by signature of that timeline.
    """
    states = sum(r.allocated_bytes for r in step.residents if r.category == "optimizer_states")
    return OptimizerStepCost(states_bytes=states, memory=predict_memory(replace(step, residents=()), probes))


def with_optimizer_step(window: Timeline, step: Timeline) -> Timeline:
    """Put a step that was traced alone in the place of the one in a timeline.

    Everything up to clipping is the window's; the optimizer's states and the step's events are the other's.

    Args:
        window: a whole step, with any optimizer step at its end or none.
        step: the timeline of the optimizer's step.
    """
    offset = 1 + max([*(r.storage for r in window.residents), *window.categories], default=0)
    first_signature = len(window.signatures)
    before = [event for event in window.events if event.phase != "optimizer_step"]
    states = [r for r in step.residents if r.category == "optimizer_states"]
    return replace(
        window,
        residents=(
            *(r for r in window.residents if r.category != "optimizer_states"),
            *(Resident(r.storage + offset, r.allocated_bytes, r.category) for r in states),
        ),
        events=(*before, *(renumbered(event, offset, first_signature) for event in step.events)),
        categories={**window.categories, **{number + offset: held for number, held in step.categories.items()}},
        signatures=(*window.signatures, *(moved(signature, first_signature) for signature in step.signatures)),
        num_operations=window.num_operations + step.num_operations,
        notes=tuple(dict.fromkeys((*window.notes, *step.notes))),
    )


def renumbered(event: Event, offset: int, first_signature: int) -> Event:
    """The same event where ``offset`` storages and ``first_signature`` signatures stand in front of its own."""
    if isinstance(event, Free):
        return event._replace(storage=event.storage + offset)
    into, signature = event.accumulates_into, event.signature
    return event._replace(
        signature=None if signature is None else signature + first_signature,
        outputs=tuple(output._replace(storage=output.storage + offset) for output in event.outputs),
        accumulates_into=None if into is None else into + offset,
        reads=tuple(number + offset for number in event.reads),
    )


def moved(value: Any, by: int) -> Any:
    """The same signature, or part of one, with ``by`` others in front of it: its arguments' makers are further back."""
    if isinstance(value, Signature):
        return Signature(value.op, moved(value.args, by), moved(dict(value.kwargs), by))
    if isinstance(value, TensorShape):
        origin = value.origin
        return value._replace(origin=None if origin is None else (origin[0] + by, origin[1]))
    if isinstance(value, tuple):
        return tuple(moved(item, by) for item in value)
    if isinstance(value, dict):
        return {name: moved(item, by) for name, item in value.items()}
    return value
