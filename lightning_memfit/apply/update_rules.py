"""Which optimizers bitsandbytes has in 8 bits with the same update rule, and where it silently does something else.

Each rule was compared in 32 bits: bitsandbytes' own 32-bit optimizer against the original, over 24 steps on a CPU, with
weight decay, a falling learning rate and gradients that depend on the parameters. Where the rule is the same they
agree to 3e-6 of the distance that the parameters covered; where it is not, :data:`MEASURED_DIFFERENCES` says how far
apart they ended. Versions: torch 2.13, bitsandbytes 0.50.2, lion_pytorch 0.2.5, timm 1.0.31, pytorch_optimizer 4.1.0.

Ignores: that torch rounds states and updates of 16-bit parameters to 16 bits, and bitsandbytes to 32. The rule is the
same, and bitsandbytes' result is nearer to that of 32-bit parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.apply.optimizer_formats import is_bitsandbytes
from lightning_memfit.apply.optimizer_implementation import runs_step_of

MEASURED_DIFFERENCES: Mapping[str, float] = {
    "Adam weight_decay=0.1": 0.15,
    "Adam amsgrad": 0.079,
    "Adam maximize": 2.0,
    "SGD nesterov": 0.045,
    "SGD dampening=0.1": 0.093,
    "RMSprop momentum=0.9": 0.79,
    "RMSprop centered": 0.017,
    "timm caution": 0.15,
    "timm corrected_weight_decay": 0.033,
    "lion_pytorch decoupled_weight_decay": 0.99,
    "pytorch_optimizer weight_decouple=False": 0.20,
    "pytorch_optimizer fixed_decay": 0.99,
}
"""Distance between the parameters of both over the distance that the original's covered, after 24 steps."""


@dataclass(frozen=True, kw_only=True)
class EightBitForm:
    """bitsandbytes' optimizer with 8-bit states that follows the same rule."""

    class_name: str
    """Its name in ``bitsandbytes.optim``."""
    first_beta: str | None = None
    """The hyperparameter that bitsandbytes calls ``betas[0]``; ``None`` where both say ``betas``."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """An optimizer whose rule was compared: what its options mean for bitsandbytes."""

    form: EightBitForm
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that may not be on, in groups or on the instance, and what bitsandbytes does there."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Options that may not be off, and why."""
    carried: frozenset[str] = frozenset({"lr", "betas", "eps", "weight_decay"})
    """Hyperparameters that bitsandbytes takes over."""
    neutral: frozenset[str] = frozenset({"foreach", "fused"})
    """Options that do not change the result."""
    decouples_by_default: bool = True
    """Whether weight decay is decoupled from the gradient where no option says so."""


def _measured(difference: str) -> str:
    percent = 100 * MEASURED_DIFFERENCES[difference]
    return f"measured: {percent:.{0 if percent > 10 else 1}f} % off after 24 steps"


_MAXIMIZE = {"maximize": f"bitsandbytes only minimises ({_measured('Adam maximize')})"}
_TORCH = {
    **_MAXIMIZE,
    "capturable": "bitsandbytes counts its steps outside of a captured graph",
    "differentiable": "bitsandbytes' step cannot be differentiated",
}
_ADAM = {**_TORCH, "amsgrad": f"bitsandbytes ignores it ({_measured('Adam amsgrad')})"}
_COUPLED = f"bitsandbytes decouples weight decay from the gradient ({_measured('Adam weight_decay=0.1')})"
_OPTIONS_OF_ADAM = frozenset({"foreach", "fused", "decoupled_weight_decay"})
_LION = EightBitForm(class_name="Lion8bit")

_OTHERS: Mapping[str, _Known] = {
    "torch.optim.AdamW": _Known(form=EightBitForm(class_name="AdamW8bit"), refused=_ADAM, neutral=_OPTIONS_OF_ADAM),
    "torch.optim.Adam": _Known(
        form=EightBitForm(class_name="Adam8bit"),
        refused=_ADAM,
        neutral=_OPTIONS_OF_ADAM,
        decouples_by_default=False,
    ),
    "torch.optim.SGD": _Known(
        form=EightBitForm(class_name="SGD8bit", first_beta="momentum"),
        refused={
            **_TORCH,
            "nesterov": f"bitsandbytes ignores it ({_measured('SGD nesterov')})",
            "dampening": f"bitsandbytes ignores it ({_measured('SGD dampening=0.1')})",
        },
        required={"momentum": "without momentum there are no states"},
    ),
    "torch.optim.RMSprop": _Known(
        form=EightBitForm(class_name="RMSprop8bit", first_beta="alpha"),
        refused={
            **_TORCH,
            "momentum": f"bitsandbytes ignores it ({_measured('RMSprop momentum=0.9')})",
            "centered": f"bitsandbytes has no such form ({_measured('RMSprop centered')})",
        },
        required={"alpha": "bitsandbytes refuses it"},
    ),
    "lion_pytorch.lion_pytorch.Lion": _Known(
        form=_LION,
        refused={
            "decoupled_wd": "bitsandbytes multiplies weight decay by the learning rate "
            f"({_measured('lion_pytorch decoupled_weight_decay')})",
        },
    ),
    "timm.optim.lion.Lion": _Known(
        form=_LION,
        refused={
            **_MAXIMIZE,
            "caution": f"bitsandbytes has no such form ({_measured('timm caution')})",
            "corrected_weight_decay": f"bitsandbytes has no such form ({_measured('timm corrected_weight_decay')})",
        },
        neutral=frozenset({"foreach", "max_lr_snapshot"}),
    ),
    "pytorch_optimizer.optimizer.lion.Lion": _Known(
        form=_LION,
        refused={
            **_MAXIMIZE,
            "fixed_decay": f"bitsandbytes has no such form ({_measured('pytorch_optimizer fixed_decay')})",
            "use_gc": "bitsandbytes does not centralise gradients",
        },
        required={
            "weight_decouple": "bitsandbytes decouples weight decay from the gradient "
            f"({_measured('pytorch_optimizer weight_decouple=False')})",
        },
        neutral=frozenset({"foreach"}),
    ),
}
_OF_BITSANDBYTES: Mapping[str, tuple[str, ...]] = {
    "Adam8bit": ("Adam", "Adam32bit", "PagedAdam", "PagedAdam32bit"),
    "AdamW8bit": ("AdamW", "AdamW32bit", "PagedAdamW", "PagedAdamW32bit"),
    "Lion8bit": ("Lion", "Lion32bit", "PagedLion", "PagedLion32bit"),
    "SGD8bit": ("SGD", "SGD32bit"),
    "RMSprop8bit": ("RMSprop", "RMSprop32bit"),
    "AdEMAMix8bit": ("AdEMAMix", "PagedAdEMAMix"),
}
_NORM = "bitsandbytes' 8-bit step leaves out the norm of the update on a CPU"
_DIFFERENT: Mapping[str, str] = {
    "bitsandbytes.optim.LAMB": _NORM,
    "bitsandbytes.optim.LAMB32bit": _NORM,
    "bitsandbytes.optim.LARS": _NORM,
    "bitsandbytes.optim.LARS32bit": _NORM,
    "bitsandbytes.optim.AdEMAMix32bit": "its states hold one of the two momenta, so that its own step fails",
    "bitsandbytes.optim.PagedAdEMAMix32bit": "its states hold one of the two momenta, so that its own step fails",
    "pytorch_optimizer.optimizer.ademamix.AdEMAMix": (
        "it counts steps per group, and bitsandbytes per parameter: parameters without a gradient in some step differ"
    ),
}
_KNOWN: Mapping[str, _Known] = {
    **_OTHERS,
    **{
        f"bitsandbytes.optim.{name}": _Known(
            form=EightBitForm(class_name=class_name),
            carried=frozenset({"lr", "betas", "eps", "weight_decay", "alpha", "t_alpha", "t_beta3"}),
        )
        for class_name, names in _OF_BITSANDBYTES.items()
        for name in names
    },
}


def eight_bit_form(optimizer: Optimizer) -> EightBitForm | None:
    """The form that bitsandbytes has of an optimizer's rule; ``None`` for one that is not known."""
    known = _find(optimizer)
    return None if known is None else known[1].form


def public_name(cls: type[Any]) -> str:
    """The name under which a class is imported, such as ``"torch.optim.AdamW"``."""
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    if cls.__module__.startswith("bitsandbytes.optim."):
        return f"bitsandbytes.optim.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def rule_obstacle(optimizer: Optimizer) -> str | None:
    """Why bitsandbytes' 8-bit form would not follow the same rule, in words with the name; ``None`` if it does."""
    name = public_name(type(optimizer))
    if is_bitsandbytes(optimizer) and _optim_bits(optimizer) == 8:
        return f"{name} has 8-bit states already"
    found = _find(optimizer)
    if found is None:
        reason = next((_DIFFERENT[n] for n in map(public_name, type(optimizer).__mro__) if n in _DIFFERENT), None)
        return f"{name} cannot be quantised: {reason or 'no 8-bit form is known to follow its update rule'}"
    cls, known = found
    added = _added_by_subclass(optimizer, cls)
    if added:
        return f"{name} cannot be quantised: {added} would be lost, {public_name(cls)} is what would be replaced"
    for index, group in enumerate(optimizer.param_groups):
        for option, reason in _differences(optimizer, group, known):
            place = f" in group {index}" if len(optimizer.param_groups) > 1 else ""
            return f"{name} with {option}{place} cannot be quantised: {reason}"
    return None


def _optim_bits(optimizer: Any) -> int | None:
    return getattr(getattr(optimizer, "args", None), "optim_bits", None)


def _find(optimizer: Optimizer) -> tuple[type[Any], _Known] | None:
    for cls in type(optimizer).__mro__:
        name = public_name(cls)
        if name in _KNOWN:
            return cls, _KNOWN[name]
        if name in _DIFFERENT:
            return None
    return None


def _added_by_subclass(optimizer: Optimizer, known: type[Any]) -> str:
    """What a class of the user's adds to the known one, which another class cannot have; empty if nothing."""
    if not runs_step_of(optimizer, known):
        return "a step of its own"
    own = type(optimizer).__mro__[: type(optimizer).__mro__.index(known)]
    added = {
        name
        for cls in own
        for name, value in vars(cls).items()
        if name not in ("__init__", "step") and (inspect.isroutine(value) or isinstance(value, property))
    }
    return ", ".join(sorted(added))


def _differences(optimizer: Optimizer, group: Mapping[str, Any], known: _Known) -> Iterator[tuple[str, str]]:
    """Options with their values, and what bitsandbytes does there."""
    for option, reason in known.refused.items():
        value = group.get(option, getattr(optimizer, option, None))
        if value:
            yield f"{option}={value}", reason
    for option, reason in known.required.items():
        if not group.get(option):
            yield f"{option}={group.get(option)}", reason
    weight_decay = group.get("weight_decay")
    if weight_decay and not group.get("decoupled_weight_decay", known.decouples_by_default):
        yield f"weight_decay={weight_decay}", _COUPLED
    for option, value in group.items():
        if option not in ("params", "lr") and _has_tensors(value) and option in known.carried | {known.form.first_beta}:
            yield f"a tensor for {option}", "bitsandbytes takes numbers"
    understood = known.carried | known.neutral | known.refused.keys() | known.required.keys()
    for option in optimizer.defaults:
        if option not in understood and option != known.form.first_beta and group.get(option):
            yield f"{option}={group[option]}", "bitsandbytes does not know that option"


def _has_tensors(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) for each in values)
