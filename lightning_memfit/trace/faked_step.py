"""The setting in which a step is followed: fakes for every tensor, the device's rules, and nothing left behind."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.errors import TraceError
from lightning_memfit.observe.old_objects import old_objects_at_rest
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.observe.uncompiled import uncompiled
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import Phase
from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.fake_collectives import answer_collectives
from lightning_memfit.trace.fake_module import FakeTensors, faked
from lightning_memfit.trace.step_program import StepProgram, users_code
from lightning_memfit.trace.tensors import held_part, tensors_in
from lightning_memfit.trace.timeline import GradientLayout, ParameterLayout, Timeline
from lightning_memfit.trace.tracer import StepTracer
from lightning_memfit.trace.whole_module import whole_module

# Much of what a trace exchanges belongs to the process (standard output, names of torch, operators at dispatch keys):
# two at a time would put back each other's stand-ins.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def faked_step(module: nn.Module, fakes: FakeTensors, tracer: StepTracer) -> Iterator[None]:
    """Within this context the module's tensors are fakes, and the tracer sees every operator.

    A module that ``fully_shard`` spread over ranks is whole within it, as on one device.

    What the user's code prints meanwhile is dropped; the real step will print it. Of several threads one is here at a
    time.
    """
    answer_collectives()
    try:
        with (
            _ONE_AT_A_TIME,
            torch.inference_mode(False),
            torch.enable_grad(),  # as training does, wherever the forecast is asked for
            old_objects_at_rest(),
            uncompiled(),
            _nothing_logged(),
            redirect_stdout(io.StringIO()),
            _untouched(module),
            whole_module(module) as tracer.registered_methods,
            tracer.rules.behaviour(),
            faked(module, fakes),
            fakes.mode,
            tracer,
        ):
            yield
    finally:
        tracer.stop_following()


@contextmanager
def _nothing_logged() -> Iterator[None]:
    """Nothing is logged of operators that fail on fakes, or of what transformers leaves out where it recomputes.

    What is raised says it, and the real step may be another.
    """
    torchs, transformers = logging.getLogger("torch._subclasses.fake_tensor"), logging.getLogger("transformers")
    before = torchs.disabled, transformers.level
    torchs.disabled = True
    transformers.setLevel(logging.ERROR)
    try:
        yield
    finally:
        torchs.disabled = before[0]
        transformers.setLevel(before[1])


class TracingObserver:
    """Tells the tracer where the step is."""

    def __init__(self, tracer: StepTracer, parameters: Sequence[torch.Tensor]) -> None:
        self._tracer = tracer
        self._parameters = parameters
        self._forwards = 0

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        self._tracer.phase = phase
        if phase == "forward":
            self._tracer.micro_step = self._forwards
            self._forwards += 1

    def after_forward(self) -> None:
        """What is alive now was saved for the backward."""
        self._tracer.categorise_saved()

    def after_backward(self) -> None:
        """The parameters have their gradients now."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._tracer.categorise(grads, "gradients")
        self._tracer.note_gradients(self._parameters)


def names_of(module: nn.Module) -> dict[int, str]:
    """Qualified name of each module, by ``id``."""
    return {id(part): name for name, part in module.named_modules()}


def fake_batches(fakes: FakeTensors, batch: Any, waiting: Any, count: int, floating: torch.dtype | None) -> list[Any]:
    """The batch on fakes, and ``count - 1`` that wait, each on its own storages; the values of the first are known."""
    return [fakes.of_batch(batch), *(fakes_in(fakes.mode, floating).of_batch(waiting) for _ in range(count - 1))]


def make_optimizer(program: StepProgram, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The program's optimizer over the module's fakes.

    Raises:
        TraceError: if it was given tensors that are not parameters of the module now.
    """
    with users_code():
        optimizer = program.make_optimizer()
    check_known(optimizer, parameters)
    return optimizer


def check_known(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that was given tensors which are not parameters of the module now.

    Raises:
        TraceError: with their number.
    """
    known = {id(parameter) for parameter in parameters}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise TraceError(
            f"the optimizer was given {len(strangers)} tensors that are not parameters of the module now "
            f"(the first has shape {tuple(strangers[0].shape)}); were they collected before configure_optimizers?"
        )


def add_module_residents(tracer: StepTracer, module: nn.Module) -> None:
    """Register the module's own tensors as there before the step: parameters, buffers, tensors in attributes."""
    tracer.add_residents(module.parameters(), "parameters")
    tracer.add_residents(module.buffers(), "buffers")
    tracer.add_residents(_loose_tensors(module), "buffers")


def add_step_residents(tracer: StepTracer, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Register gradients and optimizer states as there before the step."""
    tracer.add_residents([each.grad for each in parameters if each.grad is not None], "gradients")
    for optimizer in optimizers:
        tracer.add_residents(states_of(optimizer), "optimizer_states")


def states_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's states, and those that it keeps as attributes: averages, or another optimizer."""
    seen: set[int] = set()
    stack: list[Any] = [optimizer]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield from tensors_in(dict(enumerate(each.state.values())))
        for name, value in vars(each).items():
            if name not in ("state", "param_groups", "defaults"):
                yield from tensors_in(value)
                stack += [value] if isinstance(value, Optimizer) else []


def add_batch_residents(tracer: StepTracer, batches: Iterable[Any]) -> None:
    """Register the batches as there before the step."""
    for batch in batches:
        tracer.add_residents(tensors_of(batch), "inputs")


def layouts_of(parameters: Iterable[nn.Parameter]) -> tuple[GradientLayout | None, ...]:
    """How the gradients lie in memory now."""
    return tuple(None if parameter.grad is None else _layout(parameter.grad) for parameter in parameters)


def _layout(whole: torch.Tensor) -> GradientLayout:
    gradient = held_part(whole)
    dtype = str(gradient.dtype).removeprefix("torch.")
    return GradientLayout(dtype, tuple(gradient.size()), tuple(gradient.stride()))


def parameter_layouts(tracer: StepTracer, module: nn.Module, fakes: FakeTensors) -> tuple[ParameterLayout, ...]:
    """The parameters of a module whose storages the tracer follows, in the dtypes that they are kept in."""
    found, at_rest = [], fakes.dtypes_at_rest
    for name, parameter in module.named_parameters():
        storage = tracer.number_of(parameter)
        dtype = str(at_rest.get(id(parameter), parameter.dtype)).removeprefix("torch.")
        if storage is not None:
            size = tuple(held_part(parameter).size())
            found.append(ParameterLayout(name, storage, dtype, size, parameter.requires_grad))
    return tuple(found)


def timeline_of(tracer: StepTracer, tensors: Sequence[nn.Parameter], /, **facts: Any) -> Timeline:
    """What a tracer recorded of a step; further facts replace those of one slice, ``notes`` are added.

    Args:
        tracer: followed the step.
        tensors: the module's parameters.
        facts: fields of the timeline.
    """
    notes = (*notes_of(tracer), *facts.pop("notes", ()))
    with _disable_current_modes():
        whole: dict[str, Any] = {
            "residents": tuple(tracer.residents),
            "events": tuple(tracer.events),
            "categories": dict(tracer.categories),
            "signatures": tuple(tracer.signatures),
            "num_parameters": sum(tensor.numel() for tensor in tensors),
            "num_operations": tracer.num_operations,
            "flops": tracer.flops,
            "recomputed_flops": tracer.recomputed_flops,
            "calls": tuple(tracer.calls),
        }
        return Timeline(**whole | facts, notes=notes)


def notes_of(tracer: StepTracer) -> tuple[str, ...]:
    """Assumptions made on the way."""
    if not tracer.scalars_read:
        return ()
    return (
        f"the step reads {tracer.scalars_read} values of tensors (such as loss.item()); the trace answers as a healthy "
        "step would: 1 for numbers, False for flags",
    )


def _loose_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that modules keep as plain attributes, outside parameters and buffers."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from tensors_in(value)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Put every submodule's attributes back at the end; tensors are not copied, since fakes stand in for them."""
    with take_snapshot(module, tensors_in="nowhere"), unlogged(module):
        for part in module.modules():
            if _is_of_torchmetrics(part, "Metric"):
                vars(part).update(update=_ignore, compute=_ignore, forward=_ignore)
            elif _is_of_torchmetrics(part, "MetricCollection"):  # compares the states of its metrics
                vars(part).update(update=_ignore, compute=_no_values, forward=_no_values)
        yield


def _is_of_torchmetrics(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.startswith("torchmetrics.") for base in type(module).__mro__)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _no_values(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}
