"""What a plan was made for, in named parts of plain text, and whether a run is still that.

Values, random states and addresses have no part in it: two processes that build the same model get the same text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memfit._version import __version__
from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.errors import StalePlanError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Offload, Plan, PlanRequest
from lightning_memfit.sharding import Sharding

MODEL_PARTS = ("model", "parameters", "trainable parameters", "buffers")
MUST_EQUAL = (
    *MODEL_PARTS,
    "batch",
    "effective_batch_size",
    "loader batch size",
    "ranks",
    "optimizer",
    "device",
    "torch",
)
"""Parts that make a plan stale where they differ or are not recorded; of ``torch`` only the minor version counts."""
MAY_DIFFER = ("precision", "cores", "lightning", "lightning_memfit", "python")
"""Parts of which a difference is told and no more; a pinned ``precision`` is compared with the plan by the request."""

_SHOWN_TENSORS = 8
_SHOWN_CHARACTERS = 300
_MOST_DIGITS = 30
# Settings of an optimizer's group that say nothing of memory or of the update rule, or that a scheduler adds.
_UNTOLD_SETTING = re.compile(r"params|param_names|lr|.*_lr|(max|base|min)_momentum")
_LIGHTNING = ("lightning", "pytorch-lightning")
_WAY_OUT = "Plan again: leave plan= out. Or give the run back what the plan was made for."


def fingerprint_of(
    module: nn.Module,
    batch: Any,
    *,
    device: DeviceSpec,
    request: PlanRequest,
    optimizer: str | None,
    loader_batch_size: int,
    accumulate_grad_batches: int = 1,
    ranks: int = 1,
    trainer_facts: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Describe what a plan is made for.

    Args:
        module: the model as the user built it, before any lever is applied; its values are not looked at.
        batch: the batch that is planned for.
        device: where the plan runs; its capacity is not part, since the budget is checked by the proof.
        request: what the user asks for.
        optimizer: what :func:`optimizer_words` says of the optimizer as configured; ``None`` if it is not known.
        loader_batch_size: samples per Lightning batch on one rank, as the user's loader yields them.
        accumulate_grad_batches: Lightning batches per optimizer step, as the Trainer was told.
        ranks: devices that each take a share.
        trainer_facts: further parts, such as :func:`trainer_facts_of` gives.

    Returns:
        Text by part, in the order in which differences are told.
    """
    effective = request.effective_batch_size or ranks * accumulate_grad_batches * loader_batch_size
    parts = {
        **_model_parts(module),
        "batch": _short(_structure(batch)),
        "batch shapes": _shapes(batch),
        "effective_batch_size": str(effective),
        "loader batch size": str(loader_batch_size),
        "ranks": str(ranks),
        "precision": request.precision or "auto",
    }
    if optimizer is not None:
        parts["optimizer"] = optimizer
    return {
        **parts,
        **(trainer_facts or {}),
        "device": f"{device.name} ({device.kind})",
        "cores": str(device.cores),
        "torch": str(torch.__version__),
        **_other_versions(),
    }


def optimizer_words(optimizer: Optimizer) -> str:
    """An optimizer's class, what it updates, and the settings that change its memory or its rule.

    Flags and words are told by value. Of numbers only whether they are 0 is told (a momentum of 0 keeps no state), of
    tuples their length, and of learning rates nothing.

    >>> words = optimizer_words(torch.optim.SGD([torch.zeros(3)], lr=0.1, momentum=0.9))
    >>> words.split(", ")[0], words.split(", ")[5:7]
    ('SGD of 3 elements in 1 tensor(s) (dampening 0', ['momentum not 0', 'nesterov False'])
    """
    groups = []
    for group in optimizer.param_groups:
        tensors = list(group["params"])
        settings = sorted(name for name in group if not _UNTOLD_SETTING.fullmatch(name))
        told = ", ".join(f"{name} {_setting_words(group[name])}" for name in settings)
        groups.append(f"{_elements(tensors):,} elements in {len(tensors)} tensor(s) ({told})")
    return _short(f"{type(optimizer).__qualname__} of {'; '.join(groups)}")


def trainer_facts_of(trainer: Any) -> dict[str, str]:
    """What a Trainer adds to the fingerprint; its public attributes only.

    The threshold of gradient clipping is no part of it: it changes neither memory nor time.
    """
    algorithm = trainer.gradient_clip_algorithm
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_val != 0
    return {
        "gradient clipping": f"by {getattr(algorithm, 'value', algorithm) or 'norm'}" if clips else "off",
        "strategy": type(trainer.strategy).__qualname__,
    }


def sharding_facts(sharding: Sharding | None, offload: Offload = "never") -> dict[str, str]:
    """What the strategy's own settings add: the name of its class tells neither stage nor buckets nor groups.

    Args:
        sharding: how the run is spread over devices as it was configured; ``None`` on one device without an engine.
        offload: what the strategy keeps on the host by itself.

    >>> sharding_facts(Sharding(engine="ddp", ranks=2, gradient_as_bucket_view=True))
    {'sharding': 'DDP over 2, gradient_as_bucket_view True'}
    """
    if sharding is None:
        return {}
    told_by_label = ("engine", "ranks", "zero_stage")
    settings = [
        f"{field.name} {getattr(sharding, field.name)}"
        for field in dataclasses.fields(sharding)
        if field.name not in told_by_label and getattr(sharding, field.name) != field.default
    ]
    kept = [] if offload == "never" else [f"{offload} on the host"]
    return {"sharding": _short(", ".join([sharding.label, *settings, *kept]))}


def fingerprint_key(fingerprint: Mapping[str, str]) -> str:
    """Sixteen hexadecimal digits that stand for a whole fingerprint, whatever the order of its parts."""
    return _digest([json.dumps(sorted(fingerprint.items()))], digits=16)


def stale_reasons(plan: Plan, fingerprint: Mapping[str, str]) -> tuple[str, ...]:
    """Why the plan is not one for this run: one line per difference that matters; empty if there is none.

    Args:
        plan: a plan made earlier, perhaps elsewhere.
        fingerprint: what :func:`fingerprint_of` says of this run.
    """
    return tuple(line for line, stale in _differences(plan.fingerprint, fingerprint) if stale)


def harmless_differences(plan: Plan, fingerprint: Mapping[str, str]) -> tuple[str, ...]:
    """What differs from what the plan was made for and only needs saying, since the proof covers it."""
    return tuple(line for line, stale in _differences(plan.fingerprint, fingerprint) if not stale)


def check_fresh(plan: Plan, fingerprint: Mapping[str, str], *, source: str) -> tuple[str, ...]:
    """Refuse a plan that was made for something else.

    Args:
        plan: a plan made earlier, perhaps elsewhere.
        fingerprint: what :func:`fingerprint_of` says of this run.
        source: where the plan is from, such as ``"plan='runs/plan.yaml'"``; begins the message.

    Returns:
        :func:`harmless_differences`, for the report.

    Raises:
        StalePlanError: naming every part that differs, as planned and as it is now.
    """
    reasons = stale_reasons(plan, fingerprint)
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise StalePlanError(f"{source} was not made for this run:{listed}\n{_WAY_OUT}", reasons=reasons)
    return harmless_differences(plan, fingerprint)


# Comparison


def _differences(planned: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Lines about parts that differ, each with whether it makes the plan stale."""
    if not planned:
        yield "nothing is recorded of the model, batch and device that the plan was made for", True
        return
    for part, present in now.items():
        before = planned.get(part)
        if before is None:
            yield f"{part}: not recorded in the plan, now {present}", part in MUST_EQUAL
        elif part == "batch shapes":
            yield from _shape_differences(before, present)
        elif before != present and part != "precision":
            yield f"{part}: planned for {_told(before)}, now {present}", _makes_stale(part, before, present)
    for part, before in planned.items():
        if part not in now:
            yield f"{_told(part)}: planned for {_told(before)}, now not known", False


def _makes_stale(part: str, before: str, present: str) -> bool:
    return _minor(before) != _minor(present) if part == "torch" else part not in MAY_DIFFER


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _shape_differences(before: str, present: str) -> Iterator[tuple[str, bool]]:
    """A batch that is smaller in every way fits where the planned one did; one that is larger anywhere may not."""
    if before == present:
        return
    line = f"batch shapes: planned for {_told(before)}, now {present}"
    (planned, planned_elements), (now, now_elements) = _sizes(before), _sizes(present)
    comparable = [len(shape) for shape in planned] == [len(shape) for shape in now]
    sizes = zip(itertools.chain(*planned), itertools.chain(*now), strict=True) if comparable else ()
    if now_elements > planned_elements or any(new > old for old, new in sizes):
        yield f"{line}, which is larger: plan for the largest batch that occurs", True
    else:
        yield f"{line}, which is no larger", False


def _sizes(shapes: str) -> tuple[list[list[int]], int]:
    """The shapes and the number of elements that :func:`_shapes` wrote."""
    listed, _, elements = shapes.rpartition(";")
    found = [re.findall(r"[0-9]{1,18}", shape) for shape in re.findall(r"\([0-9, ]*\)", listed)]
    digits = "".join(re.findall(r"[0-9]", elements))[:_MOST_DIGITS]  # the text may be from a hostile file
    return [[int(size) for size in shape] for shape in found], int(digits or 0)


# Model


def _model_parts(module: nn.Module) -> dict[str, str]:
    modules = list(module.named_modules(remove_duplicate=False))
    parameters = list(module.named_parameters(remove_duplicate=False))
    tree = [f"{name}: {type(each).__qualname__} {_whole_number_settings(each)}" for name, each in modules]
    return {
        "model": f"{type(module).__qualname__} of {len(modules):,} modules [{_digest(sorted(tree))}]",
        "parameters": _tensor_words(parameters),
        "trainable parameters": _tensor_words([(name, each) for name, each in parameters if each.requires_grad]),
        "buffers": _tensor_words(list(module.named_buffers(remove_duplicate=False))),
    }


def _whole_number_settings(module: nn.Module) -> str:
    """Settings of torch's own modules that shapes do not tell, such as a stride or the number of heads.

    Those of the user's modules are left out: a counter among them would make every plan stale.
    """
    if not type(module).__module__.startswith("torch.nn."):
        return ""
    return ", ".join(
        f"{name}={value}"
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training" and _is_whole(value)
    )


def _is_whole(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_whole(each) for each in value)
    return value is None or isinstance(value, (int, str))


def _tensor_words(named: Sequence[tuple[str, Tensor]]) -> str:
    """Number, elements and dtypes, and a digest of names, shapes and what is tied to what."""
    if not named:
        return "none"
    first: dict[int, str] = {}
    lines = [
        f"{name}: {_dtype(each)} {_shape(each)} is {first.setdefault(id(each), name)}"
        for name, each in sorted(named, key=lambda pair: pair[0])
    ]
    distinct = list({id(each): each for _, each in named}.values())
    dtypes = ", ".join(sorted({_dtype(each) for each in distinct}))
    return f"{_elements(distinct):,} elements of {dtypes} in {len(distinct):,} tensor(s) [{_digest(lines)}]"


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(0 if is_lazy(each) else each.numel() for each in tensors)


def _shape(tensor: Tensor) -> str:
    """A lazy parameter has no shape yet, and the parts of a nested tensor each have their own."""
    return "(?)" if is_lazy(tensor) or tensor.is_nested else str(tuple(tensor.shape))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Batch


def _structure(node: Any) -> str:
    """Containers, dtypes and numbers of dimensions, without any size: equal neighbours in a list are told once."""
    if isinstance(node, Tensor):
        return f"{_dtype(node)} of {node.dim()} dimension(s)"
    parts = _parts(node)
    entries = [f"{name}: {_structure(part)}" if name else _structure(part) for name, part in parts]
    listed = [entry for entry, _ in itertools.groupby(entries)]
    return f"{type(node).__qualname__}({', '.join(listed)})" if listed else type(node).__qualname__


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    else:
        for _, part in _parts(node):
            yield from _tensors(part)


def _parts(node: Any) -> list[tuple[str, Any]]:
    """What a container holds, by name where it has names; nothing for a leaf."""
    if isinstance(node, Mapping):
        named = [(repr(key) if isinstance(key, (str, int)) else type(key).__qualname__, node[key]) for key in node]
        return sorted(named, key=lambda pair: pair[0])
    if isinstance(node, (list, tuple)):
        names = getattr(node, "_fields", None) or [""] * len(node)
        return list(zip(names, node, strict=True))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(spec.name, getattr(node, spec.name)) for spec in dataclasses.fields(node)]
    return [("", tensor) for tensor in tensors_of(node)]


def _shapes(batch: Any) -> str:
    tensors = list(_tensors(batch))
    shown = ", ".join(_shape(tensor) for tensor in tensors[:_SHOWN_TENSORS])
    more = f" and {len(tensors) - _SHOWN_TENSORS} more" if len(tensors) > _SHOWN_TENSORS else ""
    return f"{shown}{more}; {_elements(tensors):,} elements"


# Words


def _setting_words(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, (int, float)):
        return "0" if value == 0 else "not 0"
    if isinstance(value, (tuple, list)):
        return f"of {len(value)}"
    return f"a {type(value).__qualname__}"


def _other_versions() -> dict[str, str]:
    versions = {"lightning_memfit": __version__, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for distribution in _LIGHTNING:  # users have it under one of two names; both are released together
        try:
            return {"lightning": metadata.version(distribution), **versions}
        except metadata.PackageNotFoundError:
            continue
    return versions


def _short(text: str, most: int = _SHOWN_CHARACTERS) -> str:
    """Text of bounded length; what is cut off counts by its digest."""
    return text if len(text) <= most else f"{text[:most]}... [{_digest([text])}]"


def _told(text: str) -> str:
    """What a plan's file says, as it is unless somebody made it longer than any part can be."""
    return _short(text, most=2 * _SHOWN_CHARACTERS)


def _digest(lines: Iterable[str], *, digits: int = 12) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:digits]
