"""DeepSpeed's engine under MemFit's slices: when gradients are exchanged, what a loss counts, who steps.

Adapter for Lightning's ``DeepSpeedStrategy.handles_gradient_accumulation`` and ``block_backward_sync``, for
``fit_loop._should_accumulate``, and of DeepSpeed for ``DeepSpeedEngine.set_gradient_accumulation_boundary``,
``managed_gradient_accumulation`` and ``step``, and for
``ZeROOptimizer.override_loss_scale``, ``loss_scale``, ``custom_loss_scaler`` and ``external_loss_scale``.

Left alone, Lightning divides each loss by A and DeepSpeed does once more, and a last window of fewer than A batches is
never stepped. So the engine is told of an accumulation of 1 (``deepspeed_config.write_config``), Lightning's loop that
the strategy accumulates nothing, and the engine, slice by slice, whether a step follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.undo import Undo, set_instance_attribute

_ENGINE_NAMES = (
    "set_gradient_accumulation_boundary", "managed_gradient_accumulation", "step", "optimizer",
)  # fmt: skip
_OPTIMIZER_NAMES = ("override_loss_scale", "loss_scale", "custom_loss_scaler", "external_loss_scale")


class ZeroExchange:
    """ZeRO: in stage 1 once an optimizer step, in stages 2 and 3 in the backward of every slice.

    Stages 2 and 3 divide gradients as they come, so that each backward is one of all ranks.
    """

    settles = False
    alone_takes_more = False
    # The other ranks wait in stages 2 and 3; in all of them a slice behind the last backward would take the step back.
    in_every_slice = True

    def __init__(self, strategy: Any) -> None:
        """Of a strategy whose model is, or will be, DeepSpeed's engine."""
        self._strategy = strategy
        self._forget_factor: Undo = lambda: None

    @contextmanager
    def around_slice(self, *, is_last: bool) -> Iterator[None]:
        """Tell the engine whether the optimizer steps behind this slice.

        Raises:
            UnsupportedError: if the engine's accumulation is not one that can be told.
        """
        self._forget_factor()  # of a step that was left out: the backward would multiply by its scale
        engine = engine_of(self._strategy)
        trainer = self._strategy.lightning_module.trainer
        engine.set_gradient_accumulation_boundary(is_last and not trainer.fit_loop._should_accumulate())
        try:
            yield
        except BaseException:
            engine.set_gradient_accumulation_boundary(None)  # the engine counts by itself again
            raise

    def never(self) -> AbstractContextManager[Any] | None:
        """There is no step of one rank alone."""
        return None

    def held_bytes(self) -> int:
        """Nothing beside what a walk through the engine finds, its buckets among it."""
        return 0

    def rescale(self, optimizer: Any, factor: float) -> None:
        """Multiply all gradients of the step at hand, wherever the engine keeps them.

        It divides them by the loss scale while it steps, and takes the clipped norm of what comes out: for this one
        step the scale is another. Where no step follows, the next slice is multiplied as ever.

        Args:
            optimizer: of no interest: the gradients are the engine's.
            factor: above 0.
        """
        self._forget_factor()
        engine = engine_of(self._strategy)
        inner = engine.optimizer
        scale, was_custom, step = inner.loss_scale, inner.custom_loss_scaler, engine.step
        external = inner.external_loss_scale
        inner.override_loss_scale(scale / factor)

        def step_once(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                forget()

        restore_step = set_instance_attribute(engine, "step", step_once)

        def forget() -> None:
            inner.custom_loss_scaler, inner.external_loss_scale = was_custom, external
            restore_step()
            self._forget_factor = lambda: None

        self._forget_factor = forget


def engine_of(strategy: Any) -> Any:
    """DeepSpeed's engine, once the strategy has built it.

    Raises:
        UnsupportedError: if this release of DeepSpeed has other names, or its accumulation is the caller's.
    """
    engine = strategy.model
    missing = [f"DeepSpeedEngine.{name}" for name in _ENGINE_NAMES if not hasattr(engine, name)]
    if not missing:
        missing = [f"ZeROOptimizer.{name}" for name in _OPTIMIZER_NAMES if not hasattr(engine.optimizer, name)]
    if missing:
        raise UnsupportedError(
            f"{type(engine).__module__}.{type(engine).__qualname__} has no {', '.join(missing)}, by which MemFit tells "
            "when gradients are complete: this release of DeepSpeed changed it, or the engine is not built yet. Use "
            "DeepSpeed 0.19, or set MEMFIT=off."
        )
    if not engine.managed_gradient_accumulation():
        raise UnsupportedError(
            "managed_gradient_accumulation=false in your DeepSpeed configuration: the engine cannot be told when "
            "gradients are complete. Leave it out."
        )
    return engine


def let_lightning_accumulate(strategy: Any) -> Undo:
    """Let Lightning's loop count batches: it steps on every A-th and on the last one, and on no other.

    The strategy's class is exchanged for one of the same name, which says so and no longer asks the engine for
    ``no_sync``: stages 2 and 3 have none.

    Args:
        strategy: Lightning's for DeepSpeed.

    Raises:
        UnsupportedError: if this release of Lightning has no such property.
    """
    kind = type(strategy)
    if not isinstance(getattr(kind, "handles_gradient_accumulation", None), property):
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__qualname__} has no property handles_gradient_accumulation, by which Lightning "
            "leaves steps to DeepSpeed: this release changed it. Use Lightning 2.5 or 2.6, or set MEMFIT=off."
        )
    counted = strategy.__class__ = _counted_by_lightning(kind)

    def undo() -> None:
        if type(strategy) is counted:
            strategy.__class__ = kind

    return undo


def _counted_by_lightning(kind: type[Any]) -> type[Any]:
    namespace = {
        "handles_gradient_accumulation": property(lambda strategy: False, doc="Lightning's loop does."),
        # Around batches that only accumulate: what is exchanged there, ZeroExchange tells the engine.
        "block_backward_sync": lambda strategy: nullcontext(),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), namespace)
