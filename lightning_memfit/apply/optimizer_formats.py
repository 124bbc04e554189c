"""How torch's optimizers and bitsandbytes' name and store the same things: update rules, groups, running averages.

Adapter for the format of bitsandbytes' states (0.50): touches ``Optimizer8bit.optimizer_name``, ``name2qmap``,
``fill_qmap``, ``check_overrides`` and ``get_config``, and the names in saved states below ``QUANTISED``. Nothing here
imports bitsandbytes but :func:`quantised`: what was quantised is read back with torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.errors import UnsupportedError

QUANTISED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes nests the tensors of one parameter in a saved state; earlier releases did not nest them."""

BLOCK_SIZE = 256
"""Elements per scale, fixed in ``Optimizer2State.init_state``."""

_READABLE_BLOCK_SIZES = (BLOCK_SIZE, 2048)  # the second is that of earlier releases
_ELEMENTS_AT_ONCE = 1 << 20  # a multiple of every block size: bounds what dequantising needs beside its result


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """One update rule, and what each library calls its parts."""

    name: str
    """bitsandbytes' name."""
    moments: tuple[str, ...]
    """torch's names of the running averages, in the order of ``state1``, ``state2``."""
    counts_steps: bool = True
    """Whether torch's form keeps a step count per parameter."""
    betas: tuple[str, str] | None = None
    """torch's names of what bitsandbytes keeps as ``betas``; ``None`` where both say ``betas``."""
    has_torch_form: bool = True
    """Whether states outside of bitsandbytes can be read and written."""


RULES = {
    rule.name: rule
    for rule in (
        UpdateRule(name="adam", moments=("exp_avg", "exp_avg_sq")),
        UpdateRule(name="momentum", moments=("momentum_buffer",), counts_steps=False, betas=("momentum", "dampening")),
        UpdateRule(name="rmsprop", moments=("square_avg",), betas=("alpha", "momentum")),
        UpdateRule(name="lion", moments=("exp_avg",), counts_steps=False),
        UpdateRule(name="ademamix", moments=("state1", "state2"), has_torch_form=False),
    )
}
"""Source: ``bitsandbytes/optim/*.py`` 0.50.2 and ``torch/optim/{adam,sgd,rmsprop}.py`` 2.13."""

_TORCH_CLASSES = {"Adam": "adam", "SGD": "momentum", "RMSprop": "rmsprop"}

_ONLY_TORCH = frozenset((
    "foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "decoupled_weight_decay", "nesterov",
    "dampening", "momentum", "alpha", "centered",
))  # fmt: skip
_ONLY_BITSANDBYTES = frozenset(("betas", "eps", "alpha", "t_alpha", "t_beta3"))


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether the optimizer is one of bitsandbytes', or derived from one."""
    return any(cls.__module__.startswith("bitsandbytes.") for cls in type(optimizer).__mro__)


def update_rule(optimizer: Optimizer) -> UpdateRule | None:
    """The rule an optimizer follows; ``None`` for one that is not in :data:`RULES`."""
    if is_bitsandbytes(optimizer):
        return RULES.get(getattr(optimizer, "optimizer_name", ""))
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim.") and cls.__name__ in _TORCH_CLASSES:
            return RULES[_TORCH_CLASSES[cls.__name__]]
        if cls.__name__ == "Lion":  # torch has none; those of other libraries keep one "exp_avg"
            return RULES["lion"]
    return None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A running average of one parameter, in 32 bits or quantised."""

    values: Tensor
    """The average, or its codes (``uint8``)."""
    absmax: Tensor | None = None
    """Scale per block; ``None`` where it is not quantised."""
    qmap: Tensor | None = None
    """What the 256 codes mean, between -1 and 1; ``None`` where it is not quantised."""

    @property
    def is_quantised(self) -> bool:
        """Whether it is kept in 8 bits."""
        return self.values.dtype == torch.uint8

    @property
    def block_size(self) -> int | None:
        """Elements per scale; ``None`` if number and size of the blocks do not agree, or nothing is quantised."""
        if not self.is_quantised or self.absmax is None or self.qmap is None:
            return None
        # AdEMAMix keeps two averages in one tensor, quantised one by one.
        parts = self.absmax.shape[0] if self.absmax.ndim == 2 else 1
        elements = self.values.numel() // parts
        sizes = [size for size in _READABLE_BLOCK_SIZES if -(-elements // size) * parts == self.absmax.numel()]
        return sizes[0] if sizes else None


def dequantised(moment: Moment) -> Tensor:
    """The running average in 32 bits: code times the scale of its block. Equal to bitsandbytes' own, bit for bit.

    Raises:
        ValueError: if scales and codes do not belong together.
    """
    if not moment.is_quantised:
        return moment.values
    block_size = moment.block_size
    if block_size is None or moment.absmax is None or moment.qmap is None:
        raise ValueError("scales and codes do not belong together")
    if moment.absmax.ndim == 2:
        halves = zip(moment.values, moment.absmax, strict=True)
        return torch.stack([_dequantised(codes, absmax, moment.qmap, block_size) for codes, absmax in halves])
    return _dequantised(moment.values, moment.absmax, moment.qmap, block_size)


def _dequantised(codes: Tensor, absmax: Tensor, qmap: Tensor, block_size: int) -> Tensor:
    flat = codes.reshape(-1)
    result = torch.empty(flat.shape, dtype=torch.float32, device=codes.device)
    for start in range(0, flat.numel(), _ELEMENTS_AT_ONCE):
        part = flat[start : start + _ELEMENTS_AT_ONCE]
        first = start // block_size
        scales = absmax[first : first - (-part.numel() // block_size)].repeat_interleave(block_size)[: part.numel()]
        torch.mul(qmap[part.long()], scales, out=result[start : start + _ELEMENTS_AT_ONCE])
    return result.view(codes.shape)


def quantised(values: Tensor, qmap: Tensor, *, halves: bool = False) -> Moment:
    """Quantise a running average as a step of bitsandbytes does.

    Args:
        values: the average in 32 bits, of the parameter's shape; two of them stacked if ``halves``.
        qmap: what the 256 codes mean.
        halves: quantise the two halves one by one, as for AdEMAMix.

    Raises:
        ValueError: if a value is not finite.
    """
    from bitsandbytes.functional import quantize_blockwise

    parts = [
        quantize_blockwise(part.contiguous(), code=qmap, blocksize=BLOCK_SIZE)
        for part in (values.float() if halves else values.float()[None])
    ]
    if not all(torch.isfinite(state.absmax).all() for _, state in parts):
        raise ValueError("values that are not finite cannot be quantised")
    if not halves:
        return Moment(values=parts[0][0], absmax=parts[0][1].absmax, qmap=qmap)
    codes, scales = zip(*((codes, state.absmax) for codes, state in parts), strict=True)
    return Moment(values=torch.stack(codes), absmax=torch.stack(scales), qmap=qmap)


class StateFormat:
    """In what form a bitsandbytes optimizer keeps the states of each of its parameters."""

    def __init__(self, optimizer: Any) -> None:
        """Ask the optimizer, also for the overrides that it would otherwise find in its first step."""
        optimizer.check_overrides()
        self._optimizer = optimizer

    def is_quantised(self, group_index: int, index: int) -> bool:
        """Whether the states of a parameter are kept in 8 bits. Source: ``Optimizer2State.init_state`` 0.50.2."""
        group = self._optimizer.param_groups[group_index]
        config = self._optimizer.get_config(group_index, index, group)
        return bool(config["optim_bits"] == 8 and group["params"][index].numel() >= config["min_8bit_size"])

    def qmap(self, slot: int) -> Tensor:
        """What the codes of ``state1`` (slot 0, signed) or ``state2`` (slot 1, not negative) mean."""
        if "dynamic" not in self._optimizer.name2qmap:
            self._optimizer.fill_qmap()
        qmap: Tensor = self._optimizer.name2qmap[("dynamic", "udynamic")[slot]]
        return qmap


def torch_names(group: Mapping[str, Any], rule: UpdateRule) -> dict[str, Any]:
    """The hyperparameters of a group under torch's names.

    >>> torch_names({"lr": 0.1, "betas": (0.9, 0.0), "eps": 0.0, "weight_decay": 0}, RULES["momentum"])
    {'lr': 0.1, 'weight_decay': 0, 'momentum': 0.9, 'dampening': 0.0}
    """
    values = dict(group)
    if rule.betas is not None and "betas" in values:
        values.update(zip(rule.betas, values.pop("betas"), strict=True))
        if rule.name == "momentum":
            values.pop("eps", None)
    if rule.name == "lion":
        values.pop("eps", None)
    if rule.name == "adam":
        for name in ("alpha", "t_alpha", "t_beta3"):
            values.pop(name, None)
    return values


def bitsandbytes_names(group: Mapping[str, Any], rule: UpdateRule) -> dict[str, Any]:
    """The hyperparameters of a group under bitsandbytes' names, as plain numbers.

    >>> bitsandbytes_names({"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}, RULES["momentum"])
    {'lr': 0.1, 'nesterov': False, 'betas': (0.9, 0)}
    """
    values = {name: _plain(value) for name, value in group.items()}
    if rule.betas is not None and "betas" not in values:
        values["betas"] = tuple(values.pop(name, 0.0) for name in rule.betas)
    if "betas" in values:
        values["betas"] = tuple(_plain(beta) for beta in values["betas"])
    return values


def group_for(saved: Mapping[str, Any], configured: Mapping[str, Any], rule: UpdateRule, *, to: str) -> dict[str, Any]:
    """A saved group in the form of the configured one: the saved hyperparameters, and what only this form has.

    Args:
        saved: a group as it was saved, in either form.
        configured: the group of this run.
        rule: the rule that both follow.
        to: ``"torch"`` or ``"bitsandbytes"``.
    """
    named = torch_names(saved, rule) if to == "torch" else bitsandbytes_names(saved, rule)
    left_out = (_ONLY_BITSANDBYTES if to == "torch" else _ONLY_TORCH) - configured.keys()
    result = {name: value for name, value in configured.items() if name != "params"}
    result |= {name: _like(value, result.get(name)) for name, value in named.items() if name not in left_out}
    if to == "bitsandbytes" and rule.betas is not None:
        # Groups may keep torch's names beside, for schedules that write them.
        result |= {name: value for name, value in zip(rule.betas, result["betas"], strict=True) if name in result}
    return result


def is_in_form(group: Mapping[str, Any], optimizer: Optimizer) -> bool:
    """Whether a saved group has all that the groups of an optimizer have, and nothing else of bitsandbytes."""
    configured = optimizer.param_groups[0].keys() | optimizer.defaults.keys()
    return optimizer.defaults.keys() <= group.keys() and not (group.keys() & _ONLY_BITSANDBYTES) - configured


def without_form(group: Mapping[str, Any], rule: UpdateRule) -> str | None:
    """What a group of torch's asks for that bitsandbytes has no form of, as ``"name=value"``; ``None`` if nothing."""
    for name in ("amsgrad", "maximize", "nesterov", "centered"):
        if group.get(name):
            return f"{name}={group[name]}"
    ignored = {"momentum": "dampening", "rmsprop": "momentum"}.get(rule.name, "")
    if group.get(ignored) and "betas" not in group:
        return f"{ignored}={group[ignored]}"
    if rule.name == "adam" and group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
        return f"weight_decay={group['weight_decay']} that is not decoupled"
    return None


def moves_momentum(source: Optimizer, target: Optimizer) -> bool:
    """Whether ``group["momentum"]`` of the source is ``group["betas"][0]`` of the target."""
    rule = update_rule(target)
    return (
        "momentum" in source.defaults
        and "momentum" not in target.defaults
        and rule is not None
        and rule.betas is not None
        and rule.betas[0] == "momentum"
    )


def hyperparameters(optimizer: Optimizer, *, torch_form: bool) -> list[dict[str, Any]]:
    """What every group holds beside parameters, under torch's names where asked; tensors are copied."""
    rule = update_rule(optimizer)
    groups = []
    for group in optimizer.param_groups:
        values = torch_names(group, rule) if torch_form and rule is not None and is_bitsandbytes(optimizer) else group
        groups.append(
            {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in values.items()
                if name != "params"
            }
        )
    return groups


def check_same_parameters(source: Optimizer, target: Optimizer) -> None:
    """Check that two optimizers hold the same parameters in the same groups and order.

    Raises:
        UnsupportedError: with the first difference.
    """
    have, want = ([[id(p) for p in group["params"]] for group in each.param_groups] for each in (target, source))
    if have == want:
        return
    names = f"{type(target).__qualname__} cannot take the place of {type(source).__qualname__}"
    if [len(group) for group in have] != [len(group) for group in want]:
        counts = [" + ".join(str(len(group)) for group in groups) or "0" for groups in (have, want)]
        raise UnsupportedError(
            f"{names}: its groups hold {counts[0]} parameters, and {counts[1]} are needed. Make it with the same "
            "groups."
        )
    raise UnsupportedError(f"{names}: its parameters are other tensors, or in another order. Use those of the groups.")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _like(value: Any, example: Any) -> Any:
    """A number as a tensor where the configured one is a tensor."""
    if isinstance(example, Tensor) and not isinstance(value, Tensor):
        return torch.as_tensor(value, dtype=example.dtype, device=example.device)
    return value
