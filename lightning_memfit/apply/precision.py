"""The precision that MemFit stands in front of: made, forwarded to, and given a moment to rescale gradients.

Adapter for Lightning's precision plugins: touches ``Precision._after_closure`` (between unscaling and the hook
``on_before_optimizer_step``). Everything else is the plugins' public interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.apply.deepspeed_config import is_deepspeed, make_deepspeed_delegate
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.undo import Undo, set_instance_attribute
from lightning_memfit.upstream import NAMESPACES, namespace_of


def make_delegate(precision: str, *, device_type: str, namespace: str, strategy: Any = None) -> Any:
    """Make Lightning's own plugin for a precision.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` or ``"bf16-true"``.
        device_type: torch device type that autocast runs on, such as ``"cpu"``.
        namespace: the package the user's Trainer comes from, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        strategy: the run's, where it is known: DeepSpeed's engine scales and clips by itself.

    Raises:
        ConfigurationError: if the precision is not one of these.
        UnsupportedError: if the namespace is not one of these.
    """
    if namespace not in NAMESPACES:
        raise UnsupportedError(f"The Trainer comes from {namespace!r}. MemFit works with: {', '.join(NAMESPACES)}.")
    if is_deepspeed(strategy):
        return make_deepspeed_delegate(precision, namespace=namespace)
    plugins = importlib.import_module(f"{namespace}.plugins.precision")
    if precision == "32-true":
        return plugins.Precision()
    if precision in ("bf16-mixed", "16-mixed"):
        return plugins.MixedPrecision(precision, device=device_type)
    if precision == "bf16-true":
        return plugins.HalfPrecision(precision)
    raise ConfigurationError(
        f"precision={precision!r} is not known. Choose one of: '32-true', 'bf16-mixed', '16-mixed', 'bf16-true'."
    )


def exchange_delegate(trainer: Any, precision: str) -> Undo:
    """Let the Trainer's precision plugin forward to Lightning's plugin for another precision.

    Args:
        trainer: the Trainer; its precision plugin is a ``DelegatingPrecision``.
        precision: in Lightning's words; the present one changes nothing, so that a gradient scaler keeps its state.
    """
    plugin = trainer.precision_plugin
    if plugin.delegate.precision == precision:
        return lambda: None
    namespace, device_type = namespace_of(trainer), trainer.strategy.root_device.type
    return set_instance_attribute(
        plugin,
        "delegate",
        make_delegate(precision, device_type=device_type, namespace=namespace, strategy=trainer.strategy),
    )


def install_rescale(delegate: Any, rescale: Callable[[Any], None]) -> Undo:
    """Run ``rescale(optimizer)`` on final gradients: after the closure and unscaling, before hooks and clipping.

    Args:
        delegate: the precision plugin whose ``optimizer_step`` runs.
        rescale: changes the gradients of the optimizer in place.

    Raises:
        UnsupportedError: if this release of Lightning has no such moment.
    """
    after_closure = getattr(delegate, "_after_closure", None)
    if after_closure is None:
        raise UnsupportedError(
            f"{type(delegate).__module__}.{type(delegate).__qualname__} has no method `_after_closure`, in which "
            "MemFit rescales gradients: this release changed it. Use Lightning 2.5 or 2.6, or MEMFIT=off."
        )

    def rescale_then_continue(model: Any, optimizer: Any) -> None:
        rescale(optimizer)
        after_closure(model, optimizer)

    return set_instance_attribute(delegate, "_after_closure", rescale_then_continue)


class BackwardHooks:
    """Which of Lightning's two backward hooks fire: both by default, so that an undivided batch is not different.

    Attributes:
        before: whether ``on_before_backward`` fires before the next backward.
        after: whether ``on_after_backward`` fires after the next backward.
    """

    def __init__(self) -> None:
        self.before = True
        self.after = True

    @contextmanager
    def firing(self, *, before: bool, after: bool) -> Iterator[None]:
        """Fire only these hooks inside the ``with`` block."""
        kept = (self.before, self.after)
        self.before, self.after = before, after
        try:
            yield
        finally:
            self.before, self.after = kept


class DelegatingPrecision:
    """Forwards the hooks of a precision plugin to the delegate.

    ``convert_module`` and ``connect`` are left to the subclass. Has no Lightning base, so that it can stand in front of
    either package's own: ``class Plugin(DelegatingPrecision, Precision)``.

    Attributes:
        delegate: the plugin that does the work; may be exchanged before optimizers exist.
        backward_hooks: which backward hooks fire for the slice at hand.
    """

    delegate: Any
    backward_hooks: BackwardHooks

    def __init__(self, delegate: Any) -> None:
        super().__init__()
        self.delegate = delegate
        self.backward_hooks = BackwardHooks()

    @property
    def precision(self) -> Any:
        """The delegate's precision, in Lightning's words."""
        return self.delegate.precision

    @property
    def scaler(self) -> Any:
        """The delegate's gradient scaler; ``None`` where it has none."""
        return getattr(self.delegate, "scaler", None)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Dtype of new tensors."""
        return self._context("tensor_init_context")

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Dtype of new modules."""
        return self._context("module_init_context")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around any forward."""
        return self._context("forward_context")

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Around ``training_step``."""
        return self._context("train_step_context")

    def val_step_context(self) -> AbstractContextManager[Any]:
        """Around ``validation_step``."""
        return self._context("val_step_context")

    def test_step_context(self) -> AbstractContextManager[Any]:
        """Around ``test_step``."""
        return self._context("test_step_context")

    def predict_step_context(self) -> AbstractContextManager[Any]:
        """Around ``predict_step``."""
        return self._context("predict_step_context")

    def convert_input(self, data: Any) -> Any:
        """Convert a batch."""
        return self.delegate.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Convert a forward's output."""
        return self.delegate.convert_output(data)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss, always; fire ``on_before_backward`` unless another slice of this batch has."""
        if self.backward_hooks.before:
            return self.delegate.pre_backward(tensor, module)
        return tensor if self.scaler is None else self.scaler.scale(tensor)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward."""
        self.delegate.backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Detach the loss; fire ``on_after_backward`` unless more slices of this batch follow."""
        return self.delegate.post_backward(tensor, module) if self.backward_hooks.after else tensor.detach()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, clip and step."""
        return self.delegate.optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Parameters whose gradients are clipped."""
        parameters: Iterable[Tensor] = self.delegate.main_params(optimizer)
        return parameters

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide gradients by the loss scale."""
        self.delegate.unscale_gradients(optimizer)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip gradients as the Trainer is set."""
        self.delegate.clip_gradients(optimizer, *args, **kwargs)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every element."""
        self.delegate.clip_grad_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the norm over all parameters."""
        self.delegate.clip_grad_by_norm(optimizer, clip_val)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the state is written under the delegate's key, so that checkpoints load in a plain Trainer."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the state is read in ``on_load_checkpoint``."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the delegate's state under the delegate's key, as a plain Trainer would."""
        state = self.delegate.state_dict()
        if state:
            checkpoint[type(self.delegate).__qualname__] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the delegate's state, also one that a plain Trainer wrote."""
        state = checkpoint.get(type(self.delegate).__qualname__)
        if state:
            self.delegate.load_state_dict(state)

    def teardown(self) -> None:
        """Release what the delegate holds."""
        self.delegate.teardown()

    def _context(self, name: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = getattr(self.delegate, name)()
        return context
