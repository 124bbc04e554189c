"""What one optimizer step consists of, and how it is run in Lightning's own order, on fakes or on real tensors.

Lightning's order (``lightning/pytorch/loops/optimization/automatic.py``, 2.5 to 2.6) is forward, ``zero_grad``,
backward: the old gradients live through the next forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memfit.errors import ConfigurationError, TraceError, users_errors_as
from lightning_memfit.plan import Phase
from lightning_memfit.sharding import GroupPrecision
from lightning_memfit.trace.cpu_rules import CpuRules
from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.tensors import tensors_in

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
OptimizerFactory = Callable[[Iterator[nn.Parameter]], Optimizer]
AroundSlice = Callable[[int], AbstractContextManager[Any]]


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
    scale_loss: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
    """Scales the loss in front of the backward, as mixed precision with ``float16`` does."""
    rules: DeviceRules = field(default_factory=CpuRules)
    """How the device computes that the step is followed for."""
    group_precision: GroupPrecision | None = None
    """Dtypes that a policy of FSDP2 gives the step on one device; an engine that is followed itself has its own."""


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
        ConfigurationError: if a plain module comes without ``loss`` or ``optimizer``, or ``optimizer`` is no function.
    """
    if optimizer is not None and not callable(optimizer):
        raise ConfigurationError(
            f"optimizer= is of type {type(optimizer).__name__}. Pass a function of the parameters, such as "
            "optimizer=torch.optim.AdamW or lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
        )
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
        make_optimizer=(partial(_made, optimizer, module) if optimizer is not None else partial(_configured, module)),
        step_context=step_context,
        zero_gradients=(lambda opt: zero(0, 0, opt)) if callable(zero) else (lambda opt: opt.zero_grad()),
        clip_gradients=clip_gradients or (lambda opt: None),
    )


def _call_training_step(module: Any, batch: Any) -> Any:
    step = module.training_step
    return step(batch, 0) if takes_batch_idx(step) else step(batch)


def takes_batch_idx(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives a ``training_step`` the index of the batch: to any second argument, whatever its name.

    Source: ``is_param_in_hook_signature`` of ``lightning/pytorch/utilities/signature_utils.py``, 2.6.
    """
    step = getattr(step, "__wrapped__", step)  # as Lightning does: of a method put in its place, the method itself
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    by_position = [kind for kind in kinds if kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return Parameter.VAR_POSITIONAL in kinds or len(by_position) >= 2


def _made(optimizer: OptimizerFactory, module: nn.Module) -> Optimizer:
    made: object = optimizer(module.parameters())
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"optimizer= returned {type(made).__name__}. Pass a function of the parameters that returns one "
            "torch.optim.Optimizer."
        )
    return made


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
    steps: bool = True,
    around_slice: AroundSlice = lambda index: nullcontext(),
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
        steps: whether the optimizer steps at the end; the phase is announced all the same.
        around_slice: index of a slice to what its forward and backward run within.
    """
    if zero_gradients_early:
        observer.enter("zero_grad")
        program.zero_gradients(optimizer)
    kept: list[Any] = []
    for index, part in enumerate(slices):
        with around_slice(index):
            observer.enter("forward")
            if index and index + 1 == len(slices):
                kept.append(_like(kept[-1], times=slices_left_out))
            with users_code(), program.step_context():
                output = program.compute_loss(part)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if not isinstance(loss, torch.Tensor):
                raise TraceError(f"training_step returned {type(output).__name__} instead of a loss")
            loss = loss / len(slices)
            reported = loss.detach().clone()  # Lightning keeps a copy beside the loss of the graph
            loss = program.scale_loss(loss)
            extra = kept_beside_loss(output)
            kept.append([tensor.detach() for tensor in extra] if len(slices) > 1 else extra)
            del extra
            del output
            observer.after_forward()
            if index == 0 and not zero_gradients_early:
                observer.enter("zero_grad")
                program.zero_gradients(optimizer)
            observer.enter("backward")
            with users_code():
                torch.autograd.backward(loss)
            observer.after_backward()
            del loss, reported
    observer.enter("gradient_clipping")
    with users_code():
        program.clip_gradients(optimizer)
        observer.enter("optimizer_step")
        if steps:
            optimizer.step()


def users_code() -> AbstractContextManager[None]:
    """What the user's step raises becomes a :class:`TraceError`, so that the caller can fall back and say why."""
    return users_errors_as(TraceError)


def kept_beside_loss(output: Any) -> list[torch.Tensor]:
    """What Lightning keeps of a ``training_step``'s output until the batch ends: everything but the loss."""
    if not isinstance(output, Mapping):
        return []
    return [tensor for name, value in output.items() if name != "loss" for tensor in tensors_in(value)]


def _like(kept: Sequence[torch.Tensor], *, times: int) -> list[torch.Tensor]:
    size = times * sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return [torch.empty(size, dtype=torch.uint8)] if size else []
