"""``memfit plan``: what is planned, for which devices, and what was found."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning_memfit.application.outcomes import Asked, Outcome, asked_for, outcomes_on
from lightning_memfit.application.subject import Subject
from lightning_memfit.batch_tree import batch_size_of
from lightning_memfit.cache_folder import default_cache_dir
from lightning_memfit.cli.arguments import CANNOT_TELL, DOES_NOT_FIT, FITS
from lightning_memfit.cli.documents import plan_document
from lightning_memfit.cli.plan_text import print_outcomes
from lightning_memfit.cli.subject import subject_of
from lightning_memfit.plan import PlanRequest
from lightning_memfit.units import parse_bytes

_LEVERS = (
    "effective_batch_size", "micro_batch_size", "precision", "activation_checkpointing", "optimizer_states",
    "optimizer_implementation", "budget", "headroom", "num_devices", "strategy", "offload", "host_memory",
)  # fmt: skip
_CHECKED_LATER = ("budget", "headroom", "precision", "num_devices", "strategy", "host_memory")


def run_plan(arguments: Namespace, *, say: Any) -> tuple[int, str | None]:
    """Plan for every device.

    Args:
        arguments: the command line.
        say: a rich console for text.

    Returns:
        The exit code, and the JSON document if that was asked for.

    Raises:
        ConfigurationError: if the request cannot be used.
    """
    if arguments.device:
        _devices(arguments.device)  # before models are made, like everything that can be wrong with the levers
    given = _given(arguments)
    PlanRequest(**{name: value for name, value in given.items() if name not in _CHECKED_LATER})
    with subject_of(arguments) as subject:
        settings = {**subject.settings, **given}
        settings.setdefault("effective_batch_size", batch_size_of(subject.batch) * settings.get("num_devices", 1))
        settings.setdefault("cache_dir", default_cache_dir())
        asked, notes = _devices(arguments.device or [subject.device or "local"])
        outcomes = outcomes_on(asked, subject, settings)
        return _said(subject, outcomes, notes, arguments, say)


def exit_code_of(outcomes: Sequence[Outcome]) -> int:
    """The exit code that says the most: that something does not fit, then that something cannot be told."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if "does not fit" in verdicts:
        return DOES_NOT_FIT
    return CANNOT_TELL if "cannot tell" in verdicts else FITS


def _said(
    subject: Subject, outcomes: Sequence[Outcome], notes: Sequence[str], arguments: Namespace, say: Any
) -> tuple[int, str | None]:
    code = exit_code_of(outcomes)
    if arguments.json:
        return code, plan_document(subject, outcomes, notes, exit_code=code)
    print_outcomes(subject, outcomes, notes, console=say)
    return code, None


def _devices(names: Sequence[str]) -> tuple[list[Asked], tuple[str, ...]]:
    """The devices in the order asked for, each once.

    Raises:
        ConfigurationError: if one is not known.
    """
    asked: dict[object, Asked] = {}
    notes = []
    for name in names:
        each = asked_for(name)
        device = each.device
        same = name if device is None else (device.key or device.name, device.is_present, device.uuid)
        if same in asked:
            notes.append(f"{name!r} is {asked[same].name!r}, asked for twice: planned once")
        else:
            asked[same] = each
    return list(asked.values()), tuple(notes)


def _given(arguments: Namespace) -> dict[str, Any]:
    """The levers that were given as options, as ``make_plan`` takes them."""
    given = {name: getattr(arguments, name) for name in _LEVERS if getattr(arguments, name) is not None}
    if "host_memory" in given:
        given["host_memory"] = parse_bytes(given["host_memory"], setting="--host-memory")
    for name in ("budget", "headroom"):
        if name in given and given[name] not in ("auto", "0"):
            given[name] = parse_bytes(given[name], setting=f"--{name}")
        elif name == "headroom" and given.get(name) == "0":
            given[name] = 0
    if "activation_checkpointing" in given:
        patterns = tuple(given["activation_checkpointing"])
        is_word = len(patterns) == 1 and patterns[0] in ("auto", "none", "blocks")
        given["activation_checkpointing"] = patterns[0] if is_word else patterns
    return given
