"""Slices: one Lightning batch in several forwards and backwards, with the gradient, logs, outputs and hooks of one.

Adapter for Lightning's automatic optimization and its result collection: touches
``trainer.fit_loop.epoch_loop.automatic_optimization`` (``_make_closure``, ``_make_step_fn``, ``_make_zero_grad_fn``,
``_make_backward_fn``, ``output_result_cls``; ``AbstractClosure`` and ``Closure.warning_cache`` of its module) and
``trainer.fit_loop.epoch_loop._results.log``.

How the gradient stays exact, with A Lightning batches per optimizer step and w the weight of a slice (its samples, its
tokens, or what the user's function says):

1. The gradient wanted is that of the mean over the window: sum(w x mean loss of the slice) / W_true, where W_true is
   the weight of everything in the window.
2. W_true is not known before the window ends. The expected weight is A x W_first, with W_first that of the window's
   first batch, so each slice contributes its loss x (w / W_first) / A. Gradients keep the size that the undivided run
   gives them, which matters for the range of fp16.
3. Before the optimizer steps, and only where W_true differs (a short window, a smaller batch), every gradient is
   multiplied once by A x W_first / W_true.

Losses that are sums over samples (``loss_weight="sum"``) are added as they are: no factor, no rescaling.

Under several ranks the engine takes the mean of their gradients, so that W_first must be the same number on all of them
and W_true the mean of theirs: W_first is then the loader's batch size, or for other weights the mean over the ranks of
the first batch that has any, kept for all windows; W_true is exchanged once per optimizer step. Gradients are exchanged
in the last slice alone where the engine allows it, and each rank goes backward in every batch, since the others wait.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.apply.deepspeed_config import is_deepspeed
from lightning_memfit.apply.gradient_exchange import GradientExchange, NoExchange
from lightning_memfit.apply.gradients import gradients_of_zero
from lightning_memfit.apply.precision import DelegatingPrecision, install_rescale
from lightning_memfit.apply.slice_logs import SliceLogs
from lightning_memfit.apply.slicing import BatchDivider, BatchSlice, LossWeight, SplitBatch
from lightning_memfit.batch_tree import detach_tensors, join_outputs, weighted_mean
from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import BatchSplit
from lightning_memfit.ranks import OneRank, Ranks
from lightning_memfit.undo import Undo, set_instance_attribute
from lightning_memfit.upstream import defining_module

_LOOP_NAMES = ("_make_closure", "_make_step_fn", "_make_zero_grad_fn", "_make_backward_fn", "output_result_cls")
_MODULE_NAMES = ("AbstractClosure", "Closure")


@dataclass(kw_only=True)
class _Window:
    """Lightning batches that share one optimizer step."""

    expected_batches: int
    as_they_are: bool = False
    first_weight: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)  # by batch_idx: a closure that runs twice counts once
    needs_rescale: bool = False
    stepped: bool = False

    def factor(self, weight: float) -> float:
        """What a slice's loss, divided by A already, is multiplied by."""
        return 1.0 if self.as_they_are or weight == self.first_weight else weight / self.first_weight

    def record(self, batch_idx: int, weight: float) -> None:
        self.weights[batch_idx] = weight
        self.needs_rescale = True

    @property
    def true_weight(self) -> float:
        return math.fsum(self.weights.values())

    def close(self, mean: Callable[[float], float]) -> float:
        """End the window; what every gradient must be multiplied by.

        Args:
            mean: gives the mean of a number over the ranks.
        """
        self.needs_rescale = False
        self.stepped = True
        if self.as_they_are:
            return 1.0
        expected, true = self.expected_batches * self.first_weight, mean(self.true_weight)
        if true == 0 or math.isclose(expected, true, rel_tol=1e-13):
            return 1.0
        return expected / true


class Slicer:
    """Runs every Lightning batch in balanced slices and keeps accumulation windows exact.

    With one slice, one batch per step and gradients zeroed where Lightning does it, Lightning's own closure runs.
    """

    def __init__(
        self,
        *,
        trainer: Any,
        module: Any,
        split: BatchSplit,
        split_batch: SplitBatch | None = None,
        loss_weight: LossWeight = "samples",
        zero_gradients_early: bool = False,
        ranks: Ranks | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        """Remember the settings; nothing is changed before ``apply``.

        Args:
            trainer: the Trainer; its precision plugin is a ``DelegatingPrecision``.
            module: the LightningModule in training.
            split: sizes of the slices. A plan of one slice never divides; else no slice exceeds its largest.
            split_batch: the user's ``(batch, micro_batch_size) -> pairs of (slice, samples)``.
            loss_weight: what a slice's mean loss counts; the words are those of
                :func:`~lightning_memfit.apply.slicing.weight_of`.
            zero_gradients_early: free the gradients before the forward of a window instead of after it.
            ranks: the processes that train together; by default this one alone.
            exchange: how they exchange gradients.

        Raises:
            ConfigurationError: if ``loss_weight`` is neither a known word nor callable.
        """
        self._trainer = trainer
        self._module = module
        self._split = split
        self._divider = BatchDivider(split=split, split_batch=split_batch, loss_weight=loss_weight)
        self._zero_gradients_early = zero_gradients_early
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self._exchange: GradientExchange = NoExchange() if exchange is None else exchange
        # Under several ranks, what a batch is expected to weigh on each; ``None`` until it is known.
        self._common_weight = float(split.loader_batch_size) if self._divider.weighs_samples else None
        self._window: _Window | None = None
        self._original_make_closure: Callable[..., Any] | None = None
        self._warned: set[str] = set()

    def apply(self) -> Undo:
        """Stand in for the loop's ``_make_closure`` and run ``rescale_gradients`` before each optimizer step.

        Raises:
            UnsupportedError: if this release of Lightning has other names there.
        """
        loop = _automatic_optimization(self._trainer)
        self._original_make_closure = loop._make_closure
        plugin = self._trainer.precision_plugin
        assert isinstance(plugin, DelegatingPrecision), "slices fire backward hooks through DelegatingPrecision"
        undo_rescale = install_rescale(plugin.delegate, self.rescale_gradients)
        undo_closure = set_instance_attribute(loop, "_make_closure", self.make_closure)

        def undo() -> None:
            undo_closure()
            undo_rescale()
            self._window = None

        return undo

    def make_closure(self, kwargs: Any, optimizer: Optimizer, batch_idx: int) -> Any:
        """The closure for one Lightning batch, as ``_AutomaticOptimization.run`` uses it."""
        assert self._original_make_closure is not None, "make_closure is called by the loop, after apply"
        accumulate = self._trainer.accumulate_grad_batches
        undivided = self._split.num_slices == 1
        if undivided and accumulate == 1 and not self._zero_gradients_early:
            return self._original_make_closure(kwargs, optimizer, batch_idx)
        weighed = not (undivided and accumulate == 1)
        if weighed:
            slices = self._divided(kwargs["batch"])
        else:
            slices = [BatchSlice(batch=kwargs["batch"], samples=1, weight=1.0)]
        weight = sum(part.weight for part in slices)
        window, leftover_gradients = self._window_for(batch_idx, accumulate, weight, weighed=weighed)
        loop = _automatic_optimization(self._trainer)
        zero_at = batch_idx - batch_idx % accumulate if leftover_gradients else batch_idx
        step = _BatchStep(
            trainer=self._trainer,
            module=self._module,
            loop=loop,
            kwargs=kwargs,
            batch_idx=batch_idx,
            slices=slices,
            window=window,
            zero_gradients=loop._make_zero_grad_fn(zero_at, optimizer),
            zero_gradients_early=self._zero_gradients_early,
            backward=loop._make_backward_fn(optimizer),
            warned=self._warned,
            ranks=self._ranks,
            exchange=self._exchange,
        )
        return _closure_class(_loop_module(loop).AbstractClosure)(step)

    def _divided(self, batch: Any) -> list[BatchSlice]:
        if self._ranks.count == 1 or not self._exchange.in_every_slice or self._split.num_slices == 1:
            return self._divider.divide(batch)
        with self._ranks.failing("dividing a batch"):
            return self._divider.divide(batch, self._ranks.largest)

    def rescale_gradients(self, optimizer: Any) -> None:
        """Multiply every gradient once, where the window's true weight is not the expected one. Idempotent."""
        if self._window is None or not self._window.needs_rescale:
            return
        factor = self._window.close(self._ranks.mean)
        if factor == 1.0:
            return
        self._exchange.rescale(optimizer, factor)

    def _window_for(self, batch_idx: int, accumulate: int, weight: float, *, weighed: bool) -> tuple[_Window, bool]:
        """The window of a batch, and whether gradients of a finished one are still there to be zeroed.

        A window starts anew where Lightning starts one, after a step, and with the first batch seen (resume).
        """
        window = self._window
        starts = batch_idx % accumulate == 0
        leftover_gradients = window is not None and window.stepped and not starts
        if window is None or window.stepped or starts:
            window = self._window = _Window(expected_batches=accumulate, as_they_are=not weighed or self._divider.sums)
        if window.first_weight == 0 and not window.as_they_are:
            window.first_weight = self._expected_weight(weight)
        return window, leftover_gradients

    def _expected_weight(self, weight: float) -> float:
        """What each batch of a window is expected to weigh, the same on every rank."""
        if self._ranks.count == 1:
            return weight
        if self._common_weight is not None:
            return self._common_weight
        expected = self._ranks.mean(weight)
        if expected and not self._ranks.is_alone:
            self._common_weight = expected
        return expected


@dataclass(frozen=True, kw_only=True)
class _BatchStep:
    """One run of the closure: every slice forward and backward, everything else once."""

    trainer: Any
    module: Any
    loop: Any
    kwargs: Any
    batch_idx: int
    slices: list[BatchSlice]
    window: _Window
    zero_gradients: Callable[[], None] | None
    zero_gradients_early: bool
    backward: Callable[[Tensor], None] | None
    warned: set[str]
    ranks: Ranks
    exchange: GradientExchange

    def run(self) -> Any:
        """Lightning's ``ClosureResult`` for the whole batch."""
        if self.ranks.count == 1:
            return self._run()
        with self.ranks.failing("running a training step"):
            return self._run()

    def _run(self) -> Any:
        if self.zero_gradients is not None and self.zero_gradients_early:
            self.zero_gradients()
        return self._run_undivided(self.slices[0]) if len(self.slices) == 1 else self._run_slices()

    def _run_undivided(self, whole: BatchSlice) -> Any:
        with self.exchange.around_slice(is_last=True):
            return self._run_whole(whole)

    def _run_whole(self, whole: BatchSlice) -> Any:
        result = self._forward(whole)
        if result.closure_loss is None:
            self._check_may_be_none(of=1)
            self._warn_of_none()
        self._zero_gradients_late()
        if result.closure_loss is not None:
            self._backward(result.closure_loss, whole.weight, is_last=True)
        self.window.record(self.batch_idx, whole.weight if result.closure_loss is not None else 0.0)
        return result

    def _run_slices(self) -> Any:
        hooks = self.trainer.precision_plugin.backward_hooks
        logs, done, losses, extras = SliceLogs(), [], [], []
        went_backward = False
        last = self._last_backward()
        for index, part in enumerate(self.slices):
            with self.exchange.around_slice(is_last=index == last):
                with self._collected(logs, part.weight):
                    result = self._forward(part)
                if index == 0:
                    self._zero_gradients_late()
                if result.closure_loss is None:
                    self._check_may_be_none(of=len(self.slices))
                    continue
                done.append(part)
                losses.append(result.loss)
                extras.append(detach_tensors(result.extra))
                result.extra = {}
                with hooks.firing(before=not went_backward, after=False):
                    went_backward |= self._backward(result.closure_loss, part.weight, is_last=index == last)
                del result  # its graph must not live through the next forward
        logs.emit(self._results.log)
        if went_backward:
            self.trainer.precision_plugin.post_backward(losses[-1], self.module)
        self.window.record(self.batch_idx, math.fsum(part.weight for part in done))
        return self._joined(done, losses, extras)

    def _joined(self, done: list[BatchSlice], losses: list[Tensor], extras: list[Any]) -> Any:
        if not done:
            self._warn_of_none()
            return self.loop.output_result_cls(None)
        if len(done) < len(self.slices):
            self._warn_of_some_none(len(self.slices) - len(done))
        weights = [part.weight for part in done]
        joined = join_outputs(extras, [part.samples for part in done], weights)
        loss = torch.stack(losses).sum() if self.window.as_they_are else weighted_mean(losses, weights)
        return self.loop.output_result_cls(loss, extra=joined)

    def _forward(self, part: BatchSlice) -> Any:
        kwargs = type(self.kwargs)(self.kwargs)
        kwargs["batch"] = part.batch
        return self.loop._make_step_fn(kwargs)()

    def _last_backward(self) -> int:
        """Index of the last slice that weighs something; of the last one where none does, since other ranks wait."""
        weighing = [index for index, part in enumerate(self.slices) if part.weight]
        return weighing[-1] if weighing else len(self.slices) - 1

    def _check_may_be_none(self, *, of: int) -> None:
        """Refuse a step without a loss where other ranks would wait for its gradients for ever.

        Raises:
            UnsupportedError: naming rank and batch.
        """
        if self.ranks.count > 1 and self.backward is not None:
            part = f"batch {self.batch_idx}" if of == 1 else f"a slice of batch {self.batch_idx} (of {of})"
            raise UnsupportedError(
                f"training_step returned None for {part} on rank {self.ranks.index}, and {self.ranks.count} ranks wait "
                "for its gradients. Return a loss, such as one that is multiplied by 0."
            )

    def _backward(self, loss: Tensor, weight: float, *, is_last: bool) -> bool:
        """Backward of one slice's loss, which Lightning divided by A; whether there was anything to do."""
        if self.backward is None:
            return False
        if weight == 0:
            if self.ranks.count == 1 or not (is_last or self.exchange.in_every_slice):
                return False
            with gradients_of_zero(self.module):  # the other ranks wait for them all the same
                self.backward(torch.nan_to_num(loss) * 0.0)
            return True
        factor = self.window.factor(weight)
        self.backward(loss if factor == 1.0 else loss * factor)
        return True

    def _zero_gradients_late(self) -> None:
        if self.zero_gradients is not None and not self.zero_gradients_early:
            self.zero_gradients()

    def _warn_of_none(self) -> None:
        _loop_module(self.loop).Closure.warning_cache.warn(
            "`training_step` returned `None`. If this was on purpose, ignore this warning..."
        )

    def _warn_of_some_none(self, skipped: int) -> None:
        if "some" not in self.warned:
            self.warned.add("some")
            warnings.warn(
                f"training_step returned None for {skipped} of {len(self.slices)} slices of batch {self.batch_idx}: "
                "they add nothing, and the mean is taken over the others. This is said once.",
                UserWarning,
                stacklevel=2,
            )

    @property
    def _results(self) -> Any:
        return self.trainer.fit_loop.epoch_loop._results

    @contextmanager
    def _collected(self, logs: SliceLogs, weight: float) -> Iterator[None]:
        """Send ``self.log`` of one slice to ``logs``; hooks between the slices log as ever."""
        logs.begin_slice(weight)
        record = torch.compiler.disable(logs.record)  # type: ignore[no-untyped-call]  # as Lightning's own is
        undo = set_instance_attribute(self._results, "log", record)
        try:
            yield
        finally:
            undo()


def unsliceable_reason(trainer: Any, module: Any) -> str | None:
    """Why the batches of this run cannot be divided, in words; ``None`` if they can.

    Args:
        trainer: the Trainer.
        module: the LightningModule.
    """
    if not module.automatic_optimization:
        return "manual optimization: training_step runs backward and steps itself"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "training_step(dataloader_iter) fetches its own batches"
    for name in ("optimizer_step", "backward"):
        if _overrides(module, name):
            return f"{type(module).__qualname__} overrides {name}, which could depend on how often it runs"
    if len(trainer.optimizers) > 1:
        return f"{len(trainer.optimizers)} optimizers: automatic optimization drives one"
    if trainer.strategy.handles_gradient_accumulation and not is_deepspeed(trainer.strategy):
        return f"{type(trainer.strategy).__qualname__} accumulates gradients itself"
    return None


def _overrides(module: Any, name: str) -> bool:
    base = next(
        cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule" and "lightning" in cls.__module__
    )
    return name in vars(module) or getattr(type(module), name) is not getattr(base, name)


def _loop_module(loop: Any) -> Any:
    return defining_module(loop, "_AutomaticOptimization")


def _automatic_optimization(trainer: Any) -> Any:
    """The loop that makes closures.

    Raises:
        UnsupportedError: if a name this module relies on is gone.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    loop = getattr(epoch_loop, "automatic_optimization", None)
    missing = [f"_AutomaticOptimization.{name}" for name in _LOOP_NAMES if not hasattr(loop, name)]
    if loop is not None:
        missing += [f"automatic.{name}" for name in _MODULE_NAMES if not hasattr(_loop_module(loop), name)]
    if not hasattr(getattr(epoch_loop, "_results", None), "log"):
        missing.append("_TrainingEpochLoop._results.log")
    if missing:
        package = sys.modules[type(epoch_loop).__module__.partition(".")[0]]
        raise UnsupportedError(
            f"{package.__name__} {getattr(package, '__version__', '?')} has no {', '.join(missing)}, through which "
            "MemFit divides batches: this release changed them. Use Lightning 2.5 or 2.6, or set MEMFIT=off."
        )
    return loop


@functools.cache
def _closure_class(base: Any) -> Any:
    """A closure of the Trainer's own package around a ``_BatchStep``."""

    class SlicedClosure(base):  # type: ignore[misc]
        """Lightning's ``Closure`` for a batch that may be divided."""

        def __init__(self, step: _BatchStep) -> None:
            super().__init__()
            self._step = step

        @torch.enable_grad()
        def closure(self, *args: Any, **kwargs: Any) -> Any:
            return self._step.run()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._result = self.closure(*args, **kwargs)
            # Without any contribution there is nothing to unscale: a scaler skips the step on None. Beside other ranks
            # this one went backward with gradients of 0, and must step as they do.
            steps = self._step.window.true_weight > 0 or self._step.ranks.count > 1
            return self._result.loss if steps else None

    return SlicedClosure
