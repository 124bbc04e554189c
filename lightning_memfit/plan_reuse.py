"""Plans that were made before: given by the user, checked against the request, and carried in checkpoints."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_memfit.errors import ConfigurationError, PlanFileError
from lightning_memfit.plan import Budget, Measurement, Plan, PlanRequest
from lightning_memfit.plan_file import WAY_OUT, plain_data
from lightning_memfit.plan_schema import load_plan, read_plan
from lightning_memfit.units import format_bytes

CHECKPOINT_KEY = "MemFit"
"""Entry of a Lightning checkpoint that holds the plan. A plain Trainer does not look at it."""

_WAY_OUT = "Change the settings, or plan again: leave plan= out."


def given_plan(value: str | os.PathLike[str] | Plan | Mapping[str, Any]) -> Plan:
    """The plan that ``MemFit(plan=value)`` means.

    Args:
        value: a file that :meth:`Plan.save` or a run wrote (``~`` is the home folder), a plan, or its plain data.

    Raises:
        PlanFileError: if the file or the data is no plan; names the path, the field and the reason.
        ConfigurationError: if the value is none of these.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, Mapping):
        return read_plan(value, source="The mapping given as plan=")
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigurationError(
            f"plan={reprlib.repr(value)} is no plan. Pass the path of a plan.yaml, a Plan, or its plain data "
            "(Plan.to_dict()), or leave plan= out to plan anew."
        )
    return load_plan(_at_home(path))


def conflicts(plan: Plan, request: PlanRequest, *, budget: Budget | None = None) -> tuple[str, ...]:
    """What the settings pin and the plan does otherwise, by the name of the setting; empty if they agree.

    A setting that is left to MemFit (``None`` or ``"auto"``) agrees with any plan.

    Args:
        plan: a plan made earlier.
        request: what is asked for now.
        budget: formed for this run; without it, the request's own bytes less its headroom are compared.
    """
    return tuple(_conflicts(plan, request, budget))


def check_conflicts(plan: Plan, request: PlanRequest, *, source: str, budget: Budget | None = None) -> None:
    """Refuse a plan that the settings contradict.

    Args:
        plan: a plan made earlier.
        request: what is asked for now.
        source: where the plan is from, such as ``"plan='runs/plan.yaml'"``; begins the message.
        budget: formed for this run.

    Raises:
        ConfigurationError: naming every setting with both values.
    """
    found = conflicts(plan, request, budget=budget)
    if found:
        listed = "".join(f"\n  - {line}" for line in found)
        raise ConfigurationError(f"{source} and the settings contradict each other:{listed}\n{_WAY_OUT}")


def plan_into_checkpoint(checkpoint: dict[str, Any], plan: Plan, measurement: Measurement | None) -> None:
    """Put the plan and what proved it into a Lightning checkpoint, as plain data under :data:`CHECKPOINT_KEY`.

    Args:
        checkpoint: what Lightning is about to write; changed in place.
        plan: the plan in force.
        measurement: what its warm-up measured; ``None`` if none ran.
    """
    checkpoint[CHECKPOINT_KEY] = {"plan": plan.to_dict(), "measured": plain_data(measurement)}


def plan_from_checkpoint(checkpoint: Mapping[str, Any], *, source: str) -> tuple[Plan | None, str | None]:
    """The plan that a checkpoint carries, and a note where there is something to say.

    A resume never fails because of a plan: whatever is wrong with the entry becomes a note, and the run plans again.

    Args:
        checkpoint: as loaded.
        source: its path, for the note.

    Returns:
        The plan, or ``None`` if there is none or it cannot be used; and the note, ``None`` if all is well.
    """
    if CHECKPOINT_KEY not in checkpoint:
        return None, None
    entry = checkpoint[CHECKPOINT_KEY]
    try:
        if not isinstance(entry, dict) or "plan" not in entry:
            raise PlanFileError(f"the entry {CHECKPOINT_KEY!r} is {reprlib.repr(entry)}, no mapping with a plan")
        return read_plan(entry["plan"], source="the entry"), None
    except Exception as error:  # an entry that another program unpickled may raise anything when it is looked at
        words = f"{error}" if isinstance(error, PlanFileError) else f"{type(error).__name__}: {error}"
        words = words.removesuffix(WAY_OUT).rstrip(" .")
        return None, f"the plan in the checkpoint {source} is not used, and the run plans again: {words}"


def _at_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user: the path is taken as it is
        return Path(path)


def _conflicts(plan: Plan, request: PlanRequest, budget: Budget | None) -> Iterator[str]:
    planned: dict[str, object] = {"effective_batch_size": plan.split.effective_batch_size}
    planned |= {name: getattr(plan.candidate, name) for name in ("precision", "optimizer_states")}
    if plan.candidate.offload == "never" or plan.request.offload != "never":  # else the strategy itself moved it
        planned["offload"] = plan.candidate.offload
    if plan.candidate.optimizer_states == "as-configured":  # quantised states have an implementation of their own
        planned["optimizer_implementation"] = plan.candidate.optimizer_implementation
    for setting, value in planned.items():
        pinned = getattr(request, setting)
        if pinned not in (None, "auto", value):
            yield f"{setting}={pinned!r} is set, and the plan has {value!r}"
    yield from _checkpointing_conflict(plan, request)
    yield from _slicing_conflict(plan, request)
    yield from _length_conflict(plan, request)
    yield from _budget_conflict(plan, request, budget)


def _checkpointing_conflict(plan: Plan, request: PlanRequest) -> Iterator[str]:
    asked, planned = request.activation_checkpointing, plan.candidate.activation_checkpointing
    if asked in ("auto", planned, plan.request.activation_checkpointing):
        return
    if not isinstance(asked, tuple):
        yield f"activation_checkpointing={asked!r} is set, and the plan has {planned!r}"
        return
    before = plan.request.activation_checkpointing  # which modules other patterns match, the plan does not know
    made_with = list(before) if isinstance(before, tuple) else before
    yield f"activation_checkpointing={list(asked)!r} is set, and the plan was made with {made_with!r}"


def _slicing_conflict(plan: Plan, request: PlanRequest) -> Iterator[str]:
    split, pinned = plan.split, request.micro_batch_size
    if pinned is not None and split.num_slices != -(-split.loader_batch_size // pinned):
        yield (
            f"micro_batch_size={pinned} is set, and the plan has {split.micro_batch_size} "
            f"({split.num_slices} slices of the loader's {split.loader_batch_size} samples)"
        )
    if split.num_slices > 1 and plan.request.allow_inexact_slicing and not request.allow_inexact_slicing:
        yield (
            f"allow_inexact_slicing is False, and the plan's {split.num_slices} slices were not compared with the "
            "undivided batch: it was made with allow_inexact_slicing=True"
        )


def _length_conflict(plan: Plan, request: PlanRequest) -> Iterator[str]:
    planned, now = plan.request.max_length, request.max_length
    if planned is not None and (now is None or now > planned):
        asked = "left out" if now is None else f"{now} tokens"
        yield f"max_length is {asked}, and the plan is for sequences of at most {planned} tokens"


def _budget_conflict(plan: Plan, request: PlanRequest, budget: Budget | None) -> Iterator[str]:
    if budget is not None:
        allowed: int | None = budget.budget_bytes
    else:
        allowed = None if request.budget is None else request.budget - (request.headroom or 0)
    peak = plan.forecast.predicted_peak_bytes
    if allowed is not None and peak > allowed:
        yield (
            f"the budget is {format_bytes(allowed)}, and the plan's predicted peak is {format_bytes(peak)}, "
            f"{format_bytes(peak - allowed)} more"
        )
