"""The first guard against inexact slicing: does the loss of a batch equal the weighted mean over its parts?

Adapter for private names of torch: ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from lightning_memfit.batch_tree import batch_size_of, join_outputs
from lightning_memfit.errors import BatchStructureError
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.validate.warmup import silenced

_SAMPLES = 4
_RELATIVE_TOLERANCE = 2e-5
_ROUTER_FACTOR = "router_aux_loss_coef"
_WAY_OUT = "allow_inexact_slicing=True slices it all the same."

Split = Callable[[Any, Sequence[int]], list[Any]]
Join = Callable[[Sequence[Any], Sequence[int], Sequence[float]], Any]


@dataclass(frozen=True, kw_only=True)
class SplitVerdict:
    """Whether slices of a batch give the result of the undivided batch."""

    exact: bool
    """True if nothing was found that speaks against slicing."""
    reason: str
    """What was found, in words, with the way out where there is one."""
    undecided: bool = False
    """Whether a repeat of the undivided batch gave another loss, so that nothing can be told from slices."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    batch: Any
    samples: int
    weight: float


def has_train_mode_batch_norm(module: nn.Module) -> str | None:
    """Return the name of the first BatchNorm that uses the statistics of the batch it is given, or ``None``.

    SyncBatchNorm counts too. One in eval mode with running statistics does not, and InstanceNorm, which looks at each
    sample alone, does not.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            return name or type(layer).__name__
    return None


def batch_norm_obstacle(module: nn.Module) -> str | None:
    """Why a module's batches may not be sliced because of a BatchNorm, in words; ``None`` if it has none to say so."""
    batch_norm = has_train_mode_batch_norm(module)
    if batch_norm is None:
        return None
    return f"{batch_norm} normalises over the batch in train mode, so that slices would change the result."


def gradient_hook_obstacle(module: nn.Module) -> str | None:
    """Why a module's batches may not be sliced because of hooks on parameters, in words; ``None`` if it has none."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name} has a hook on its gradient, which would run for every slice."
    return None


class RouterLosses:
    """Sees, while it is entered, whether a model of transformers adds the loss by which routers balance their experts.

    It is a product of two means over all tokens of the batch, so that it couples them; beside the loss it is so small
    that no comparison of losses shows it, while the router's gradients do change.
    Source: ``load_balancing_loss_func`` of transformers 5, ``models/mixtral/modeling_mixtral.py``; arXiv:2101.03961,
    equations 4 to 6. Recognised by what the model returns: ``router_logits`` and ``aux_loss``, also of an encoder.
    """

    def __init__(self) -> None:
        self.found: str | None = None
        """What was seen, in words; ``None`` if nothing was."""
        self._unused: dict[int, torch.Tensor] = {}
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._handle = register_module_forward_hook(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Inner modules return first: what is around a model and hands its output on says nothing new.
        if self.found is not None or not isinstance(output, Mapping):
            return
        losses = {str(name): value for name, value in output.items() if isinstance(value, torch.Tensor)}
        losses = {
            name: loss for name, loss in losses.items() if name.endswith("aux_loss") and id(loss) not in self._unused
        }
        if not losses or not any(str(name).endswith("router_logits") for name in output):
            return
        factor = getattr(module, _ROUTER_FACTOR, None)
        if factor == 0:
            self._unused.update({id(loss): loss for loss in losses.values()})  # held, so that no other has its id
            return
        shown = "" if factor is None else f", {_ROUTER_FACTOR}={factor:g}"
        self.found = (
            f"{type(module).__name__} adds its router's auxiliary loss ({min(losses)}{shown}), which balances the "
            "experts over all tokens of the batch, so that slices would change it"
        )


def check_splittable(
    *,
    module: Any,
    batch: Any,
    split_by_sizes: Split,
    training_step: Callable[[Any], Any],
    weights: Callable[[Any], float],
    join: Join = join_outputs,
    batch_size: int | None = None,
    compared_samples: int = _SAMPLES,
) -> SplitVerdict:
    """Compare the loss of some samples with the weighted mean over their halves (of four: two and two).

    First in eval mode, so that dropout is no difference; then in the modes of the fit, since a layer of the user's own
    may normalise over the batch only while training. There a repeat that gives another loss (dropout, noise) ends the
    comparison. Without autocast and, unless the step itself needs them, without gradients. Everything is put back:
    module, batch and random generators. A batch of one sample is never sliced.

    Args:
        module: the LightningModule.
        batch: one collated batch.
        split_by_sizes: divides a batch into slices of the given numbers of samples.
        training_step: runs one batch or slice; a loss, or a mapping with ``"loss"``.
        weights: weight of a slice's mean loss, such as its samples or tokens.
        join: joins what the slices returned: outputs, samples and weights of each.
        batch_size: samples in ``batch``; ``None`` reads it off the batch.
        compared_samples: how many of them are compared with their halves; at most all.

    Ignores: layers that couple the samples of a batch in training mode only, beside dropout (BatchNorm apart), and
    coupling among more samples than are compared only.
    """
    coupled = has_train_mode_batch_norm(module)
    if coupled is not None:
        return _inexact(
            f"BatchNorm {coupled!r} is in training mode: it normalises over the samples it is given, so that slices "
            "differ from the undivided batch. Freeze it (eval mode), or use GroupNorm"
        )
    try:
        samples = batch_size_of(batch) if batch_size is None else batch_size
        if samples == 1:
            return SplitVerdict(exact=True, reason="A batch of one sample is never sliced.")
        whole, parts = _parts(batch, samples, min(compared_samples, samples), split_by_sizes, weights)
        return _compare(module, training_step, whole, parts, join)
    except BatchStructureError as error:
        return SplitVerdict(exact=False, reason=str(error))


def _parts(
    batch: Any, samples: int, taken: int, split: Split, weights: Callable[[Any], float]
) -> tuple[_Part, list[_Part]]:
    whole = batch if taken == samples else split(batch, (taken, samples - taken))[0]
    sizes = (taken - taken // 2, taken // 2)
    slices = split(whole, sizes)
    parts = [
        _Part(batch=part, samples=size, weight=float(weights(part))) for part, size in zip(slices, sizes, strict=True)
    ]
    return _Part(batch=whole, samples=taken, weight=float(weights(whole))), parts


def _compare(
    module: Any, training_step: Callable[[Any], Any], whole: _Part, parts: list[_Part], join: Join
) -> SplitVerdict:
    verdict, outputs = _compare_losses(module, training_step, whole, parts, evaluating=True)
    if not verdict.exact:
        return verdict
    join([_extras(output) for output in outputs], [part.samples for part in parts], [part.weight for part in parts])
    if any(layer.training for layer in module.modules()):
        coupled, _ = _compare_losses(module, training_step, whole, parts, evaluating=False)
        if not coupled.exact and not coupled.undecided:
            return replace(coupled, reason=f"In train mode: {coupled.reason}")
    return verdict


def _compare_losses(
    module: Any, training_step: Callable[[Any], Any], whole: _Part, parts: list[_Part], *, evaluating: bool
) -> tuple[SplitVerdict, list[Any]]:
    """The verdict in one mode, and what the parts returned; undecided where a repeat gives another loss."""
    with RouterLosses() as routers:
        first, second, *outputs = _run(module, training_step, [whole, whole, *parts], evaluating=evaluating)
    losses = [_loss_of(output) for output in (first, second, *outputs)]
    if routers.found is not None:
        return _inexact(routers.found), []
    if any(loss is None for loss in losses):
        return _inexact("training_step returned no loss, or one of more than one number: nothing can be compared"), []
    reference, again, *of_parts = [loss for loss in losses if loss is not None]
    shown = ", ".join(f"{loss:.7g}" for loss in (reference, again, *of_parts))
    if not all(map(math.isfinite, (reference, again, *of_parts))):
        return _inexact(f"The loss is not finite (undivided, repeated, slices: {shown}): nothing can be compared"), []
    tolerance = _tolerance(first) * max(abs(reference), torch.finfo(torch.float32).tiny)
    if abs(reference - again) > tolerance:
        return _inexact(
            f"The loss is not deterministic: cannot be compared. The same {whole.samples} samples gave "
            f"{reference:.7g} and {again:.7g} in eval mode",
            undecided=True,
        ), []
    total = math.fsum(part.weight for part in parts)
    if total <= 0:
        return _inexact(f"The weights of the slices add up to {total:g}: nothing can be compared"), []
    mean = math.fsum(part.weight * loss for part, loss in zip(parts, of_parts, strict=True)) / total
    sizes = " and ".join(str(part.samples) for part in parts)
    if abs(reference - mean) > tolerance:
        return _inexact(
            f"The loss of {whole.samples} samples is {reference:.7g}, the weighted mean over slices of {sizes} is "
            f"{mean:.7g}: the loss is no mean over samples (or its weight is another: see loss_weight)"
        ), []
    equal = f"The loss of {whole.samples} samples equals the weighted mean over slices of {sizes} ({reference:.7g})."
    return SplitVerdict(exact=True, reason=equal), outputs


def _run(module: Any, training_step: Callable[[Any], Any], parts: list[_Part], *, evaluating: bool) -> list[Any]:
    """What the step returns for each part, in eval mode or in the modes of the fit, and without a trace."""
    batches = [part.batch for part in parts]
    with take_snapshot(module, extra_roots=batches), _unseen(module), torch.autocast("cpu", enabled=False):
        if evaluating:
            module.eval()
        return [_forward(training_step, part) for part in parts]


def _forward(training_step: Callable[[Any], Any], part: _Part) -> Any:
    with take_snapshot(None, extra_roots=[part.batch], random_state=False):  # a step may change its batch in place
        try:
            with torch.no_grad():
                return training_step(part.batch)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        with torch.enable_grad():  # a step that differentiates inside, such as one with a gradient penalty
            return training_step(part.batch)


@contextmanager
def _unseen(module: Any) -> Iterator[None]:
    """Silence ``self.log``, which needs a running loop, and what else would be seen outside."""
    trainer = getattr(module, "_trainer", None)
    with unlogged(module), silenced(trainer) if trainer is not None else nullcontext():
        yield


def _loss_of(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _extras(output: Any) -> Any:
    return {key: value for key, value in output.items() if key != "loss"} if isinstance(output, Mapping) else {}


def _tolerance(output: Any) -> float:
    """Relative tolerance of a comparison; wider where the loss is computed in less than float32."""
    loss = output["loss"] if isinstance(output, Mapping) else output
    return max(_RELATIVE_TOLERANCE, 4 * torch.finfo(loss.dtype).eps)


def _inexact(what: str, *, undecided: bool = False) -> SplitVerdict:
    return SplitVerdict(exact=False, undecided=undecided, reason=f"{what}. {_WAY_OUT}")
