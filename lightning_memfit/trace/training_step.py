"""One optimizer step in Lightning's own order, run on fakes for a timeline or on real tensors for a measurement.

Lightning's order (``lightning/pytorch/loops/optimization/automatic.py``, 2.5 to 2.6) is forward, ``zero_grad``,
backward: the old gradients live through the next forward.
"""

from __future__ import annotations

import gc
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.errors import ConfigurationError, MemFitError, TraceError, is_out_of_memory
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import Phase
from lightning_memfit.trace.cpu_rules import real_cpu_behaviour
from lightning_memfit.trace.fake_module import FakeTensors, faked, new_fake_mode
from lightning_memfit.trace.tensors import tensors_in
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.tracer import StepTracer

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
OptimizerFactory = Callable[[Iterator[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """What one optimizer step of a module consists of."""

    module: nn.Module
    """The module whose parameters are trained."""
    compute_loss: Callable[[Any], Any]
    """Batch to what ``training_step`` returns: a scalar loss, or a mapping with ``"loss"``."""
    make_optimizer: Callable[[], Optimizer]
    """Creates the optimizer over the module's present parameters."""
    step_context: Callable[[], AbstractContextManager[Any]]
    """Context of the forward, such as autocast."""
    zero_gradients: Callable[[Optimizer], None]
    """Drops the gradients."""
    clip_gradients: Callable[[Optimizer], None]
    """Clips the gradients, or does nothing."""


class StepObserver(Protocol):
    """Is told where the step is."""

    def enter(self, phase: Phase) -> None:
        """A phase begins."""

    def after_forward(self) -> None:
        """The forward of a slice is done, its graph alive."""

    def after_backward(self) -> None:
        """The backward of a slice is done."""


class Unobserved:
    """Nobody is told."""

    def enter(self, phase: Phase) -> None:
        """Do nothing."""

    def after_forward(self) -> None:
        """Do nothing."""

    def after_backward(self) -> None:
        """Do nothing."""


def program_of(
    module: nn.Module,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    clip_gradients: Callable[[Optimizer], None] | None = None,
) -> StepProgram:
    """Describe the step of a ``LightningModule`` (no Trainer needed), or of a module with a loss and an optimizer.

    Args:
        module: a module with ``training_step`` and ``configure_optimizers``, or any module if both functions are given.
        loss: ``loss(module, batch) -> scalar``; replaces ``training_step``.
        optimizer: ``optimizer(parameters) -> Optimizer``; replaces ``configure_optimizers``.
        step_context: context of the forward.
        clip_gradients: clips the gradients of an optimizer in place.

    Raises:
        ConfigurationError: if a plain module comes without ``loss`` or ``optimizer``.
    """
    training_step = getattr(module, "training_step", None)
    if loss is None and not callable(training_step):
        raise ConfigurationError(
            f"{type(module).__name__} has no training_step. Pass loss=..., a function (module, batch) -> scalar loss."
        )
    configure = getattr(module, "configure_optimizers", None)
    if optimizer is None and not callable(configure):
        raise ConfigurationError(
            f"{type(module).__name__} has no configure_optimizers. Pass optimizer=..., a function of the parameters."
        )
    zero = getattr(module, "optimizer_zero_grad", None)
    return StepProgram(
        module=module,
        compute_loss=partial(loss, module) if loss is not None else partial(_call_training_step, module),
        make_optimizer=(
            (lambda: optimizer(module.parameters())) if optimizer is not None else partial(_configured, module)
        ),
        step_context=step_context,
        zero_gradients=(lambda opt: zero(0, 0, opt)) if callable(zero) else (lambda opt: opt.zero_grad()),
        clip_gradients=clip_gradients or (lambda opt: None),
    )


def _call_training_step(module: Any, batch: Any) -> Any:
    parameters = inspect.signature(module.training_step).parameters
    # Lightning passes the batch index to any second argument, whatever its name.
    return module.training_step(batch, 0) if len(parameters) >= 2 else module.training_step(batch)


def _configured(module: Any) -> Optimizer:
    optimizers = optimizers_of(module.configure_optimizers())
    if len(optimizers) != 1:
        raise TraceError(f"configure_optimizers returned {len(optimizers)} optimizers; one is traced")
    return optimizers[0]


def optimizers_of(configured: Any) -> list[Optimizer]:
    """The optimizers in what ``configure_optimizers`` returned, in any of the forms that Lightning documents."""
    if configured is None:
        return []
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return optimizers_of(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        found: list[Optimizer] = []
        for item in configured:
            if isinstance(item, (Optimizer, list, tuple)) or (isinstance(item, Mapping) and "optimizer" in item):
                found += optimizers_of(item)
        return found
    raise TraceError(f"configure_optimizers returned a {type(configured).__name__}, which has no optimizer")


def run_window(
    program: StepProgram,
    optimizer: Optimizer,
    slices: Sequence[Any],
    observer: StepObserver,
    *,
    zero_gradients_early: bool = False,
    slices_left_out: int = 0,
) -> None:
    """Run one optimizer step: forward and backward of every slice, clipping, step.

    Slices are weighted equally: weights change values, not memory.

    Args:
        program: what the step consists of.
        optimizer: its optimizer.
        slices: the slices in order.
        observer: is told where the step is.
        zero_gradients_early: drop the old gradients before the first forward instead of after it.
        slices_left_out: slices of the same batch that are not run because they repeat the last one; what they would
            have returned beside the loss is held while the last one runs.
    """
    if zero_gradients_early:
        observer.enter("zero_grad")
        program.zero_gradients(optimizer)
    kept: list[Any] = []
    for index, part in enumerate(slices):
        observer.enter("forward")
        if index and index + 1 == len(slices):
            kept.append(_like(kept[-1], times=slices_left_out))
        with _users_code(), program.step_context():
            output = program.compute_loss(part)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise TraceError(f"training_step returned {type(output).__name__} instead of a loss")
        loss = loss / len(slices)
        reported = loss.detach().clone()  # Lightning keeps a copy beside the loss of the graph
        kept.append(_kept(output, detach=len(slices) > 1))
        del output
        observer.after_forward()
        if index == 0 and not zero_gradients_early:
            observer.enter("zero_grad")
            program.zero_gradients(optimizer)
        observer.enter("backward")
        with _users_code():
            torch.autograd.backward(loss)
        observer.after_backward()
        del loss, reported
    observer.enter("gradient_clipping")
    with _users_code():
        program.clip_gradients(optimizer)
        observer.enter("optimizer_step")
        optimizer.step()


@contextmanager
def _users_code() -> Iterator[None]:
    """What the user's step raises becomes a :class:`TraceError`, so that the caller can fall back and say why.

    MemFit's own errors and those of memory pass through, and so does everything raised outside of this context.
    """
    try:
        yield
    except MemFitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TraceError(f"{type(error).__name__}: {_first_line(error)}") from error


def _kept(output: Any, *, detach: bool) -> list[torch.Tensor]:
    # Beside the loss, Lightning keeps what training_step returned until the batch ends.
    if not isinstance(output, Mapping):
        return []
    extra = [tensor for name, value in output.items() if name != "loss" for tensor in tensors_in(value)]
    return [tensor.detach() for tensor in extra] if detach else extra


def _like(kept: Sequence[torch.Tensor], *, times: int) -> list[torch.Tensor]:
    size = times * sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return [torch.empty(size, dtype=torch.uint8)] if size else []


class _TracingObserver:
    def __init__(self, tracer: StepTracer, parameters: Sequence[torch.Tensor]) -> None:
        self._tracer = tracer
        self._parameters = parameters
        self._forwards = 0

    def enter(self, phase: Phase) -> None:
        self._tracer.phase = phase
        if phase == "forward":
            self._tracer.micro_step = self._forwards
            self._forwards += 1

    def after_forward(self) -> None:
        self._tracer.categorise_saved()

    def after_backward(self) -> None:
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._tracer.categorise(grads, "gradients")


def trace_window(
    program: StepProgram,
    batch: Any,
    *,
    divide: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
    micro_steps: int | None = None,
    resident_batches: int = 1,
    collect_signatures: bool = True,
) -> Timeline:
    """Follow one optimizer step on fakes: nothing is computed, nothing of the module's size is allocated.

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
        collect_signatures: keep the distinct operator calls for probing.

    Raises:
        TraceError: if the step needs values (boolean masks, ``nonzero``, ``.numpy()``) or raises for another reason.
    """
    gc.collect()
    module = program.module
    names = {id(part): name for name, part in module.named_modules()}
    mode = new_fake_mode()
    fakes = FakeTensors(mode)
    tracer = StepTracer(names, collect_signatures=collect_signatures)
    try:
        with (
            redirect_stdout(io.StringIO()),
            _untouched(module),
            faked(module, fakes),
            real_cpu_behaviour(),
            mode,
            tracer,
        ):
            return _traced(program, fakes, tracer, batch, divide, micro_steps, resident_batches)
    finally:
        tracer.stop_following()


def _traced(
    program: StepProgram,
    fakes: FakeTensors,
    tracer: StepTracer,
    batch: Any,
    divide: Callable[[Any], Sequence[Any]],
    micro_steps: int | None,
    resident_batches: int,
) -> Timeline:
    module = program.module
    parameters = list(module.parameters())
    with tracer.not_recording():
        fake_batches = [fakes.of_batch(batch)] + [_copy(fakes, batch) for _ in range(resident_batches - 1)]
        tracer.known.tell(fakes.pairs())
        slices = list(divide(fake_batches[0]))
        with _users_code():
            optimizer = program.make_optimizer()
        _check_parameters(optimizer, parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        with _users_code():
            optimizer.step()
    tracer.add_residents(parameters, "parameters")
    tracer.add_residents(module.buffers(), "buffers")
    tracer.add_residents(_loose_tensors(module), "buffers")
    owned = {}
    for parameter in parameters:
        before = len(tracer.residents)
        if parameter.grad is not None:
            tracer.add_residents([parameter.grad], "gradients")
        tracer.add_residents(tensors_in(optimizer.state.get(parameter, {})), "optimizer_states")
        owned[id(parameter)] = {resident.storage for resident in tracer.residents[before:]}
    for fake_batch in fake_batches:
        tracer.add_residents(tensors_of(fake_batch), "inputs")

    micro_steps = micro_steps or len(slices)
    traced = _representative(slices, micro_steps)
    with tracer.following_modules():
        run_window(
            program,
            optimizer,
            traced,
            _TracingObserver(tracer, parameters),
            slices_left_out=max(0, len(slices) - len(traced)),
        )
    tracer.stop_following()
    unused = set().union(*(owned[id(p)] for p in parameters if p.grad is None)) if parameters else set()
    # Work grows with the elements of the slices; those left out may be smaller than those followed.
    whole, followed = micro_steps // len(slices) * _elements(slices), max(1, _elements(traced))
    with _disable_current_modes():
        return Timeline(
            residents=tuple(resident for resident in tracer.residents if resident.storage not in unused),
            events=tuple(tracer.events),
            categories=dict(tracer.categories),
            signatures=tuple(tracer.signatures),
            num_parameters=sum(parameter.numel() for parameter in parameters),
            num_operations=tracer.num_operations,
            flops=tracer.flops * whole // followed,
            recomputed_flops=tracer.recomputed_flops * whole // followed,
            micro_steps=micro_steps,
            followed_micro_steps=len(traced),
            calls=tuple(tracer.calls),
            notes=_notes(tracer),
        )


def _representative(slices: Sequence[Any], micro_steps: int) -> list[Any]:
    # The first slice meets no gradients of this window, the second accumulates on them; all others repeat the second.
    # With accumulation over several batches the next batch's first slice, the largest, accumulates too.
    if micro_steps == 1:
        return list(slices)
    return [slices[0], slices[0] if micro_steps > len(slices) else slices[1]]


def _elements(slices: Sequence[Any]) -> int:
    return sum(tensor.numel() for part in slices for tensor in tensors_of(part))


def _check_parameters(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    known = {id(parameter) for parameter in parameters}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise TraceError(
            f"the optimizer was given {len(strangers)} tensors that are not parameters of the module now "
            f"(the first has shape {tuple(strangers[0].shape)}); were they collected before configure_optimizers?"
        )


def _copy(fakes: FakeTensors, batch: Any) -> Any:
    return FakeTensors(fakes.mode).of_batch(batch)


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
            if _is_metric(part):
                vars(part).update(update=_ignore, compute=_ignore, forward=_ignore)
        yield


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__ == "torchmetrics.metric" and base.__name__ == "Metric" for base in type(module).__mro__)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def _notes(tracer: StepTracer) -> tuple[str, ...]:
    if not tracer.scalars_read:
        return ()
    return (
        f"the step reads {tracer.scalars_read} values of tensors (such as loss.item()); the trace answers as a healthy "
        "step would: 1 for numbers, False for flags",
    )
