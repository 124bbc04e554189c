"""Optimizer states that were saved in one form go on in another: 32 bits of torch or bitsandbytes, and 8 bits.

Lightning calls the precision plugin's ``on_load_checkpoint`` when weights are restored and optimizers are not yet,
with the dictionary that they will be restored from, and ``on_save_checkpoint`` after optimizers were written into it:
:func:`adapt_optimizer_states` and :func:`as_configured_groups` belong there.

What is kept and what is lost: states in 32 bits and step counts are exact in every direction. Quantising rounds each
value to one of 256: by at most 0.71 % of the largest among its block of 256 values where values have a sign, 0.36 %
where they have not (the widest gaps of bitsandbytes' ``create_dynamic_map``, halved). Dequantising is exact.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.apply.optimizer_formats import (
    BLOCK_SIZE,
    QUANTISED,
    Moment,
    StateFormat,
    UpdateRule,
    dequantised,
    group_for,
    is_bitsandbytes,
    is_in_form,
    quantised,
    update_rule,
    without_form,
)
from lightning_memfit.errors import CheckpointFormatError

FLAGS = ("foreach", "fused")
"""What chooses the implementation of a step, and is written into every checkpoint."""

_SLOTS = ("state1", "state2")
_AS_CONFIGURED = "Resume with optimizer_states='as-configured'"


@dataclass(frozen=True, kw_only=True)
class _Place:
    """One parameter: where it is, what it is called in the checkpoint, and the optimizer that takes its states."""

    optimizer: Optimizer
    group_index: int
    index: int
    saved_id: Any

    @property
    def parameter(self) -> Tensor:
        tensor: Tensor = self.optimizer.param_groups[self.group_index]["params"][self.index]
        return tensor

    def error(self, what: str, remedy: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"The checkpoint's optimizer states cannot go on in {type(self.optimizer).__qualname__}: parameter "
            f"{self.index} of group {self.group_index} {what}. {remedy}."
        )


@dataclass(frozen=True, kw_only=True)
class _ParameterState:
    """What is kept for one parameter, in no library's form."""

    step: int | None
    moments: tuple[Moment, ...]


def adapt_optimizer_states(checkpoint: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Put the saved states of every optimizer into the form that it takes; nothing changes if one cannot be.

    Args:
        checkpoint: as ``on_load_checkpoint`` gets it, before optimizers are restored.
        optimizers: those of the Trainer.

    Raises:
        CheckpointFormatError: with the reason.
    """
    saved = checkpoint.get("optimizer_states", [])
    # Lightning pairs them in this way, and ignores what is left over.
    adapted = [adapt_saved_state(state, optimizer) for state, optimizer in zip(saved, optimizers, strict=False)]
    if any(new is not old for new, old in zip(adapted, saved, strict=False)):
        checkpoint["optimizer_states"] = [*adapted, *saved[len(adapted) :]]


def adapt_saved_state(saved_optimizer_state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved state in the form that an optimizer loads; the same object if it has that form already.

    32-bit states of torch or bitsandbytes become 8-bit ones where the optimizer keeps 8 bits, and the other way
    round. Hyperparameters are the saved ones, as in any resume, under the names of this optimizer; what only its form
    knows (``foreach``, ``fused``, ``nesterov``) is as in its groups now. Where the saved form counts no steps (SGD,
    Lion) and bitsandbytes does, the count goes on from 1: these rules ask only whether it is the first.

    Args:
        saved_optimizer_state: as ``optimizer.state_dict()`` returned it.
        optimizer: the optimizer that will load it, with its parameters on their device.

    Raises:
        CheckpointFormatError: if the states cannot go on in this optimizer, with the reason and the numbers.
    """
    saved = saved_optimizer_state
    if "param_groups" not in saved or "state" not in saved:
        return saved  # some optimizers write a form of their own
    to_bitsandbytes = is_bitsandbytes(optimizer)
    rule = update_rule(optimizer)
    if not to_bitsandbytes and not _is_from_bitsandbytes(saved, rule):
        return saved
    _check_counts(saved, optimizer)
    adapter = _Adapter(optimizer, rule)
    groups = adapter.groups(saved["param_groups"])
    state = dict(saved["state"])
    for place in _places(saved, optimizer):
        if place.saved_id in state:
            state[place.saved_id] = adapter.entry(state[place.saved_id], place)
    if groups is saved["param_groups"] and all(state[name] is entry for name, entry in saved["state"].items()):
        return saved
    return {
        **saved,
        "state": {name: entry for name, entry in state.items() if entry is not None},
        "param_groups": groups,
    }


def carry_states(source: Optimizer, target: Optimizer) -> None:
    """Give an optimizer the states of another one over the same parameters, each with tensors of its own.

    Args:
        source: keeps its states; without any, nothing happens.
        target: takes them in its own form; its flags stay as they are.

    Raises:
        CheckpointFormatError: if the states cannot go on in the target.
    """
    if not source.state:
        return
    saved = source.state_dict()
    adapted = as_configured_groups(adapt_saved_state(saved, target), implementation_flags(target))
    # torch's optimizers keep the tensors that they load.
    target.load_state_dict({**adapted, "state": copy.deepcopy(adapted["state"])})


def implementation_flags(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    """The flags of every group that choose the implementation of a step, to be kept before a lever changes them."""
    return tuple({name: group[name] for name in FLAGS if name in group} for group in optimizer.param_groups)


def as_configured_groups(saved_state: dict[str, Any], original_flags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A saved state whose groups carry given flags; the same object if they do already.

    On saving, with the flags as the user configured them, a lever does not leak into checkpoints. On loading, with
    those of the run, what was saved does not turn a lever off.

    Args:
        saved_state: as ``optimizer.state_dict()`` returned it; not changed.
        original_flags: as :func:`implementation_flags` gave them. Groups beyond them take the last ones.
    """
    groups = saved_state.get("param_groups")
    if not groups or not original_flags:
        return saved_state
    flags = [*original_flags, *[original_flags[-1]] * (len(groups) - len(original_flags))]
    wanted = [
        {**group, **{name: value for name, value in own.items() if name in group}}
        for group, own in zip(groups, flags, strict=False)
    ]
    unchanged = all(
        group[name] is new[name] for group, new in zip(groups, wanted, strict=True) for name in FLAGS if name in group
    )
    return saved_state if unchanged else {**saved_state, "param_groups": wanted}


def without_linked_momentum(saved_state: dict[str, Any]) -> dict[str, Any]:
    """A saved state of SGD in 8 bits whose groups keep the momentum in ``betas`` alone; any other is the same object.

    The groups have torch's ``momentum`` beside it, for schedules that write it. Saved, it would let torch's SGD load
    the state and go on without its momentum, and say nothing, since SGD makes a buffer that it does not find anew.
    Without the name it raises, as torch's other optimizers do for averages that they do not find. Where the state is
    resumed in 8 bits, ``link_momentum`` puts the name back.

    Args:
        saved_state: as ``optimizer.state_dict()`` returned it; not changed.
    """
    groups, state = saved_state.get("param_groups", []), saved_state.get("state", {})
    if not any(_has_linked_momentum(group) for group in groups):
        return saved_state
    if not any(_is_entry_of_bitsandbytes(entry) for entry in state.values()):
        return saved_state
    written = [
        {name: value for name, value in group.items() if name != "momentum" or not _has_linked_momentum(group)}
        for group in groups
    ]
    return {**saved_state, "param_groups": written}


def _has_linked_momentum(group: Mapping[str, Any]) -> bool:
    return "momentum" in group and "betas" in group and bool(group["betas"][0] == group["momentum"])


class _Adapter:
    """Turns groups and entries of a saved state into what one optimizer loads."""

    def __init__(self, optimizer: Optimizer, rule: UpdateRule | None) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._format = StateFormat(optimizer) if is_bitsandbytes(optimizer) else None
        self._qmaps: dict[tuple[int, torch.device], Tensor] = {}

    def groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved groups, or those that they become."""
        if all(is_in_form(group, self._optimizer) for group in saved):
            return saved
        rule = self._known_rule()
        to = "torch" if self._format is None else "bitsandbytes"
        pairs = list(zip(saved, self._optimizer.param_groups, strict=True))
        for index, (group, configured) in enumerate(pairs):
            lost = without_form(group if to == "bitsandbytes" else _only(configured, ("amsgrad", "centered")), rule)
            if lost is not None:
                self._refuse_group(index, lost, to)
        return [group_for(group, configured, rule, to=to) | {"params": group["params"]} for group, configured in pairs]

    def entry(self, saved: Mapping[str, Any], place: _Place) -> Any:
        """The states of one parameter: the same object, what it becomes, or ``None`` if it holds nothing yet."""
        if _is_entry_of_bitsandbytes(saved):
            state = _read_bitsandbytes(saved, place)
            self._check_moments(state, place)
            if self._format is not None and all(self._is_in_form(moment, place) for moment in state.moments):
                _check_shapes(state, place, self._rule)
                return saved
        else:
            state = _read_torch(saved, place, self._known_rule())
        _check_shapes(state, place, self._rule)
        if not state.moments:
            return None
        return self._write_torch(state, place) if self._format is None else self._write_bitsandbytes(state, place)

    def _check_moments(self, state: _ParameterState, place: _Place) -> None:
        if self._rule is not None and len(state.moments) != len(self._rule.moments):
            raise place.error(
                f"was saved with {len(state.moments)} running averages, and {len(self._rule.moments)} are needed: it "
                "comes from another optimizer",
                "Resume with the optimizer that the checkpoint was made with",
            )

    def _write_torch(self, state: _ParameterState, place: _Place) -> dict[str, Any]:
        rule = self._known_rule()
        if not rule.has_torch_form:
            raise place.error(
                f"holds states of bitsandbytes' {rule.name}, of which no other form is known",
                "Resume with optimizer_states='8bit'",
            )
        try:
            values = [dequantised(moment) for moment in state.moments]
        except ValueError as error:
            raise place.error(f"cannot be read: {error}", "The file is damaged: resume from another one") from error
        entry: dict[str, Any] = dict(zip(rule.moments, values, strict=True))
        if rule.counts_steps:
            entry["step"] = torch.tensor(float(state.step or 0))
        return entry

    def _write_bitsandbytes(self, state: _ParameterState, place: _Place) -> dict[str, Any]:
        tensors: dict[str, Tensor] = {}
        for slot, moment in enumerate(state.moments):
            try:
                kept = self._in_form(moment, slot, place)
            except ValueError as error:
                raise place.error(f"cannot be converted: {error}", _AS_CONFIGURED) from error
            tensors |= _named(kept, slot)
        # A first step of SGD takes the gradient as momentum, whatever was restored: any other count will do.
        return {"step": 1 if state.step is None else state.step, QUANTISED: tensors}

    def _in_form(self, moment: Moment, slot: int, place: _Place) -> Moment:
        if self._is_in_form(moment, place):
            return moment
        values = dequantised(moment).float()
        if not self._keeps_8bit(place):
            return Moment(values=values)
        return quantised(values, self._qmap(slot, values.device), halves=values.ndim > place.parameter.ndim)

    def _is_in_form(self, moment: Moment, place: _Place) -> bool:
        if not self._keeps_8bit(place):
            return moment.values.dtype == torch.float32
        return moment.is_quantised and moment.block_size == BLOCK_SIZE

    def _keeps_8bit(self, place: _Place) -> bool:
        assert self._format is not None
        return self._format.is_quantised(place.group_index, place.index)

    def _qmap(self, slot: int, device: torch.device) -> Tensor:
        assert self._format is not None
        if (slot, device) not in self._qmaps:
            self._qmaps[slot, device] = self._format.qmap(slot).to(device)
        return self._qmaps[slot, device]

    def _known_rule(self) -> UpdateRule:
        if self._rule is None:
            raise CheckpointFormatError(
                f"The checkpoint's optimizer states have another form than those of this run's "
                f"{type(self._optimizer).__qualname__}, and no conversion between them is known. Resume with the "
                "optimizer that the checkpoint was made with."
            )
        return self._rule

    def _refuse_group(self, index: int, lost: str, to: str) -> None:
        name = type(self._optimizer).__qualname__
        if to == "bitsandbytes":
            raise CheckpointFormatError(
                f"The checkpoint cannot go on in {name}: group {index} was saved with {lost}, which bitsandbytes does "
                f"not have. {_AS_CONFIGURED}."
            )
        raise CheckpointFormatError(
            f"The checkpoint cannot go on in {name}: group {index} is configured with {lost}, and the states for it "
            f"are not among those that bitsandbytes saved. Resume without {lost.partition('=')[0]}."
        )


def _read_bitsandbytes(saved: Mapping[str, Any], place: _Place) -> _ParameterState:
    tensors = saved.get(QUANTISED, saved)
    moments = []
    for number, slot in enumerate(_SLOTS, start=1):
        values = tensors.get(slot)
        if values is None:
            continue
        moment = Moment(values=values, absmax=tensors.get(f"absmax{number}"), qmap=tensors.get(f"qmap{number}"))
        if moment.is_quantised and moment.block_size is None:
            raise place.error(
                f"was saved with {values.numel()} codes in {slot} and scales that do not belong to them",
                "The file is damaged: resume from another one",
            )
        moments.append(moment)
    return _ParameterState(step=int(saved.get("step", 0)), moments=tuple(moments))


def _read_torch(saved: Mapping[str, Any], place: _Place, rule: UpdateRule) -> _ParameterState:
    held = {name: value for name, value in saved.items() if name != "step" and isinstance(value, Tensor)}
    if not rule.has_torch_form or held.keys() - set(rule.moments):
        raise place.error(
            f"was saved with {', '.join(sorted(held))}, and only {', '.join(rule.moments)} can go on in 8 bits",
            _AS_CONFIGURED,
        )
    if not held:
        return _ParameterState(step=None, moments=())
    missing = [name for name in rule.moments if name not in held]
    if missing:
        raise place.error(
            f"was saved without {', '.join(missing)}: it comes from another optimizer",
            "Resume with the optimizer that the checkpoint was made with",
        )
    step = int(saved["step"]) if rule.counts_steps and "step" in saved else None
    return _ParameterState(step=step, moments=tuple(Moment(values=held[name]) for name in rule.moments))


def _named(moment: Moment, slot: int) -> dict[str, Tensor]:
    tensors = {f"state{slot + 1}": moment.values}
    if moment.absmax is not None and moment.qmap is not None:
        tensors |= {f"qmap{slot + 1}": moment.qmap, f"absmax{slot + 1}": moment.absmax}
    return tensors


def _check_counts(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    have = [len(group["params"]) for group in saved["param_groups"]]
    want = [len(group["params"]) for group in optimizer.param_groups]
    if have != want:
        raise CheckpointFormatError(
            f"The checkpoint's optimizer states are for {len(have)} parameter groups of {have} parameters, and this "
            f"run's {type(optimizer).__qualname__} has {len(want)} of {want}. Resume with the model and the groups "
            "that the checkpoint was made with."
        )


def _check_shapes(state: _ParameterState, place: _Place, rule: UpdateRule | None) -> None:
    want = tuple(place.parameter.shape)
    for number, moment in enumerate(state.moments):
        halves = rule is not None and rule.name == "ademamix" and number == 0
        if tuple(moment.values.shape) != ((2, *want) if halves else want):
            raise place.error(
                f"has shape {want}, and its states were saved with shape {tuple(moment.values.shape)}",
                "Resume with the model that the checkpoint was made with",
            )


def _places(saved: Mapping[str, Any], optimizer: Optimizer) -> Iterator[_Place]:
    for group_index, group in enumerate(saved["param_groups"]):
        for index, saved_id in enumerate(group["params"]):
            yield _Place(optimizer=optimizer, group_index=group_index, index=index, saved_id=saved_id)


def _is_entry_of_bitsandbytes(entry: Any) -> bool:
    return isinstance(entry, Mapping) and (QUANTISED in entry or "state1" in entry)


def _is_from_bitsandbytes(saved: Mapping[str, Any], rule: UpdateRule | None) -> bool:
    if saved["state"]:
        return any(_is_entry_of_bitsandbytes(entry) for entry in saved["state"].values())
    groups = saved["param_groups"]  # before the first step there are only these
    renamed = rule is not None and rule.betas is not None
    return any("t_alpha" in group or (renamed and "betas" in group) for group in groups)


def _only(group: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: group[name] for name in names if name in group}
