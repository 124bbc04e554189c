"""The first guard against inexact slicing: are loss and gradients of a batch the weighted mean over its parts?

Adapter for private names of torch: ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memfit.batch_tree import batch_size_of, detach_tensors, join_outputs
from lightning_memfit.errors import BatchStructureError
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.observe.uncompiled import uncompiled
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.validate.gradient_sketch import GradientSketch, differing_gradient, not_finite, sketch_gradients
from lightning_memfit.validate.router_losses import RouterLosses
from lightning_memfit.validate.state_changes import StateMarks, changed_between, mark_state
from lightning_memfit.validate.warmup import silenced

_SAMPLES = 4
_RELATIVE_TOLERANCE = 2e-5
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
    sums: bool = False,
    gradients: bool = False,
    computed_in: torch.dtype | None = None,
) -> SplitVerdict:
    """Compare the loss of some samples with the weighted mean over their halves (of four: two and two).

    First in eval mode, so that dropout is no difference; then in the modes of the fit, since a layer of the user's own
    may normalise over the batch only while training. There a repeat that gives another loss (dropout, noise) ends the
    comparison. Without autocast. Everything is put back: module, batch and random generators. A batch of one sample is
    never sliced.

    Args:
        module: the LightningModule.
        batch: one collated batch.
        split_by_sizes: divides a batch into slices of the given numbers of samples.
        training_step: runs one batch or slice; a loss, or a mapping with ``"loss"``.
        weights: weight of a slice's mean loss, such as its samples or tokens.
        join: joins what the slices returned: outputs, samples and weights of each.
        batch_size: samples in ``batch``; ``None`` reads it off the batch.
        compared_samples: how many of them are compared with their halves; at most all.
        sums: the loss is a sum over samples, and losses of slices are added.
        gradients: compare the gradient of every parameter, too.
        computed_in: dtype of forward and backward, where neither loss nor parameters tell it: that of a mixed-precision
            policy of ``fully_shard``.

    What the step changes by itself, run after run (a teacher's moving average, a queue, a counter among the buffers),
    is a difference, too: slices would change it once each.

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
        comparison = _Comparison(
            module, training_step, whole, parts, sums=sums, gradients=gradients, computed_in=computed_in
        )
        return comparison.verdict(join)
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
    # Slices without weight, such as those of ignored labels alone, go backward neither here nor in training.
    weighing = [part for part in parts if part.weight] or parts
    return _Part(batch=whole, samples=taken, weight=float(weights(whole))), weighing


class _Ran(NamedTuple):
    """What one run of the step gave."""

    output: Any
    gradients: GradientSketch | None
    state: StateMarks
    """Of the module, behind it."""


@dataclass(frozen=True)
class _Comparison:
    """One batch against its parts."""

    module: Any
    training_step: Callable[[Any], Any]
    whole: _Part
    parts: list[_Part]
    _: KW_ONLY
    sums: bool
    gradients: bool
    computed_in: torch.dtype | None

    def verdict(self, join: Join) -> SplitVerdict:
        verdict, outputs = self._of_losses(evaluating=True)
        if not verdict.exact:
            return verdict
        samples, weights = [part.samples for part in self.parts], [part.weight for part in self.parts]
        join([_extras(output) for output in outputs], samples, weights)
        if any(layer.training for layer in self.module.modules()):
            coupled, _ = self._of_losses(evaluating=False)
            if not coupled.exact and not coupled.undecided:
                return replace(coupled, reason=f"In train mode: {coupled.reason}")
        return verdict

    def _of_losses(self, *, evaluating: bool) -> tuple[SplitVerdict, list[Any]]:
        """The verdict in one mode, and what the parts returned; undecided where a repeat gives another loss."""
        whole = self.whole
        with RouterLosses() as routers:
            ran = self._run([whole, whole, *self.parts], evaluating=evaluating)
        if routers.found is not None:
            return _inexact(routers.found), []
        # What the first run changes and the second does not is a cache.
        changed = changed_between(ran[0].state, ran[1].state)
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return _inexact(
                f"training_step changes {changed[0]}{more} by itself, as a moving average or a counter does, and would "
                "do so once for every slice"
            ), []
        first, _, *of_slices = (each.output for each in ran)
        losses = [_loss_of(each.output) for each in ran]
        if any(loss is None for loss in losses):
            return _inexact(
                "training_step returned no loss, or one of more than one number: nothing can be compared"
            ), []
        reference, again, *of_parts = [loss for loss in losses if loss is not None]
        shown = ", ".join(f"{loss:.7g}" for loss in (reference, again, *of_parts))
        if not all(map(math.isfinite, (reference, again, *of_parts))):
            return _inexact(
                f"The loss is not finite (undivided, repeated, slices: {shown}): nothing can be compared"
            ), []
        tolerance = _tolerance(first, self.computed_in) * max(abs(reference), torch.finfo(torch.float32).tiny)
        if abs(reference - again) > tolerance:
            return _inexact(
                f"The loss is not deterministic: cannot be compared. The same {whole.samples} samples gave "
                f"{reference:.7g} and {again:.7g} in eval mode",
                undecided=True,
            ), []
        total = math.fsum(part.weight for part in self.parts)
        if total <= 0:
            return _inexact(f"The weights of the slices add up to {total:g}: nothing can be compared"), []
        shares = [1.0 if self.sums else part.weight / total for part in self.parts]
        joined = math.fsum(share * loss for share, loss in zip(shares, of_parts, strict=True))
        sizes = " and ".join(str(part.samples) for part in self.parts)
        what = f"the {'sum' if self.sums else 'weighted mean'} over slices of {sizes}"
        if abs(reference - joined) > tolerance:
            why = "no mean over samples (or its weight is another: see loss_weight)"
            if self.sums:
                why = "no sum over samples, as loss_weight='sum' says"
            return _inexact(
                f"The loss of {whole.samples} samples is {reference:.7g}, {what} is {joined:.7g}: the loss is {why}"
            ), []
        broken = not_finite(each.gradients for each in ran if each.gradients is not None)
        if broken is not None:
            return _inexact(
                f"The gradient of {broken} is not finite, of the undivided batch or of a slice: nothing can be compared"
            ), []
        found = self._differing_gradient(ran, shares)
        if found is not None:
            name, share = found
            return _inexact(
                f"The loss of {whole.samples} samples equals {what}, but the gradient of {name} differs by {share:.2g} "
                "of its size: it depends on the other samples of the batch"
            ), []
        equal = f"The loss of {whole.samples} samples equals {what} ({reference:.7g})."
        return SplitVerdict(exact=True, reason=equal), of_slices

    def _differing_gradient(self, ran: list[_Ran], shares: list[float]) -> tuple[str, float] | None:
        sketches = [each.gradients for each in ran if each.gradients is not None]
        if len(sketches) < len(ran):
            return None
        first, again, *of_parts = sketches
        dtypes = {_dtype(ran[0].output), *(each.dtype for each in self.module.parameters() if each.requires_grad)}
        if self.computed_in is not None:
            dtypes.add(self.computed_in)
        eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        return differing_gradient(first, again, of_parts, shares, eps)

    def _run(self, parts: list[_Part], *, evaluating: bool) -> list[_Ran]:
        """What the step gives for each part, in eval mode or in the modes of the fit, and without a trace."""
        batches = [part.batch for part in parts]
        with (
            take_snapshot(self.module, extra_roots=batches),
            _unseen(self.module),
            uncompiled(),
            torch.autocast("cpu", enabled=False),
        ):
            if evaluating:
                self.module.eval()
            return [self._run_one(part, backward=self.gradients) for part in parts]

    def _run_one(self, part: _Part, *, backward: bool) -> _Ran:
        with take_snapshot(None, extra_roots=[part.batch], random_state=False):  # a step may change its batch in place
            output, gradients = self._with_gradients(part) if backward else (_forward(self.training_step, part), None)
            return _Ran(output, gradients, mark_state(self.module))

    def _with_gradients(self, part: _Part) -> tuple[Any, GradientSketch | None]:
        parameters = list(self.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        try:
            with torch.enable_grad():
                output = self.training_step(part.batch)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    return output, None
                torch.autograd.backward(loss)
            return detach_tensors(output), sketch_gradients(self.module)
        finally:
            for parameter in parameters:
                parameter.grad = None


def _forward(training_step: Callable[[Any], Any], part: _Part) -> Any:
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


def _tolerance(output: Any, computed_in: torch.dtype | None) -> float:
    """Relative tolerance of a comparison; wider where the loss is computed in less than float32."""
    dtypes = [_dtype(output)] if computed_in is None else [_dtype(output), computed_in]
    return max(_RELATIVE_TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in dtypes))


def _dtype(output: Any) -> torch.dtype:
    loss = output["loss"] if isinstance(output, Mapping) else output
    assert isinstance(loss, torch.Tensor)
    return loss.dtype


def _inexact(what: str, *, undecided: bool = False) -> SplitVerdict:
    return SplitVerdict(exact=False, undecided=undecided, reason=f"{what}. {_WAY_OUT}")
