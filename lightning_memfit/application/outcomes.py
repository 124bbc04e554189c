"""Whether a subject fits on a device: the plan, or why there is none, or why that cannot be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_memfit.application.subject import Subject
from lightning_memfit.errors import NoFeasiblePlanError, TraceError, UnsupportedError, first_line
from lightning_memfit.forecasting import make_plans
from lightning_memfit.hardware.catalog import catalog, catalog_device, find_gpu
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Forecast, Plan, PlanRequest
from lightning_memfit.predict.budget import form_budget
from lightning_memfit.units import format_bytes

Verdict = Literal["fits", "does not fit", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A device that was asked for."""

    name: str
    """As it was written."""
    device: DeviceSpec | None
    """What it is; ``None`` where that cannot be told."""
    obstacle: str = ""
    """Why it cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found for one device. Every number in it is predicted."""

    asked: Asked
    """The device."""
    verdict: Verdict
    """Whether training fits."""
    reason: str
    """By how much, or why it cannot be told; one line."""
    plan: Plan | None = None
    """The plan that was found."""
    smallest: Forecast | None = None
    """Where nothing fits, the forecast that needs least."""
    budget_bytes: int | None = None
    """What a plan may use of torch's allocator, in bytes; ``None`` where that was not found out."""
    missing_bytes: int = 0
    """What the smallest plan needs beyond the budget, in bytes."""
    explanation: str | None = None
    """What was tried, what is missing, and what would make it fit; several lines."""
    catalogue_with_room: tuple[str, ...] = ()
    """Where nothing fits, GPUs of the catalogue that leave as much as the smallest plan needs here, smallest first."""

    @property
    def forecast(self) -> Forecast | None:
        """That of the plan, or the smallest one found."""
        return self.smallest if self.plan is None else self.plan.forecast

    @property
    def device_total_bytes(self) -> tuple[int, int] | None:
        """Least and most that the GPU holds for this process where there is room: reserved bytes and the context.

        ``None`` on a host, and where the context is not known.
        """
        device, forecast = self.asked.device, self.forecast
        if device is None or forecast is None or forecast.memory.peak_reserved_bytes is None:
            return None
        if device.context_low_bytes is None or device.context_high_bytes is None:
            return None
        reserved = forecast.memory.peak_reserved_bytes
        return reserved + device.context_low_bytes, reserved + device.context_high_bytes


def asked_for(name: str) -> Asked:
    """The device of that name, or why it cannot be told what it is.

    Raises:
        ConfigurationError: if there is none of that name.
    """
    try:
        return Asked(name=name, device=detect_device(name))
    except UnsupportedError as error:
        return Asked(name=name, device=None, obstacle=str(error))


def outcome_on(asked: Asked, subject: Subject, arguments: Mapping[str, Any], *, real_option: str = "--real") -> Outcome:
    """Plan a subject for a device.

    Args:
        asked: the device.
        subject: what is planned.
        arguments: of ``make_plans``, beside those of the subject.
        real_option: what makes modules for real, for messages.

    Raises:
        ConfigurationError: if a setting cannot be used.
    """
    if asked.device is None:
        return Outcome(asked=asked, verdict="cannot tell", reason=asked.obstacle)
    try:
        (found,) = _plans((asked.name,), subject, arguments)
    except UnsupportedError as error:
        return Outcome(asked=asked, verdict="cannot tell", reason=str(error))
    except TraceError as error:
        reason = f"one training step cannot be traced without running it: {str(error).rstrip('.')}."
        if subject.on_meta:
            reason += f" On the meta device its module has no values; if that is why, {real_option} makes it for real."
        return Outcome(asked=asked, verdict="cannot tell", reason=reason)
    return _outcome(asked, asked.device, found, arguments, subject)


def outcomes_on(asked: Sequence[Asked], subject: Subject, arguments: Mapping[str, Any]) -> list[Outcome]:
    """As :func:`outcome_on` for each device; what does not depend on the device is traced once.

    Raises:
        ConfigurationError: if a setting cannot be used.
    """
    known = [(each, each.device) for each in asked if each.device is not None]
    found: dict[str, Outcome] = {}
    if len(known) > 1:
        # What one of them cannot tell, another may: then each is asked by itself.
        with suppress(UnsupportedError, TraceError):
            plans = _plans([each.name for each, _ in known], subject, arguments)
            found = {
                each.name: _outcome(each, device, plan, arguments, subject)
                for (each, device), plan in zip(known, plans, strict=True)
            }
    return [found.get(each.name) or outcome_on(each, subject, arguments) for each in asked]


def _plans(devices: Sequence[str], subject: Subject, arguments: Mapping[str, Any]) -> list[Plan | NoFeasiblePlanError]:
    plans = make_plans(
        subject.module,
        subject.batch,
        devices=devices,
        loss=subject.loss,
        optimizer=subject.optimizer,
        **arguments,
    )
    return list(plans.values())


def _outcome(
    asked: Asked,
    device: DeviceSpec,
    found: Plan | NoFeasiblePlanError,
    arguments: Mapping[str, Any],
    subject: Subject,
) -> Outcome:
    has_budget = arguments.get("budget", "auto") != "auto"
    if isinstance(found, NoFeasiblePlanError):
        outcome = _without_a_plan(asked, device, found, has_budget=has_budget)
        if not subject.may_need_less_by:
            return outcome
        settings = ", ".join(subject.may_need_less_by)
        reason = f"{outcome.reason.rstrip('.')}, but with {settings}, which no forecast counts with, it may need less."
        return replace(outcome, verdict="cannot tell", reason=reason)
    return _with_a_plan(asked, device, found, has_budget=has_budget)


def _with_a_plan(asked: Asked, device: DeviceSpec, plan: Plan, *, has_budget: bool) -> Outcome:
    needs, budget = plan.forecast.predicted_peak_bytes, plan.budget.budget_bytes
    if device.kind == "cuda" and device.context_high_bytes is None and not has_budget:
        return Outcome(
            asked=asked,
            verdict="cannot tell",
            reason=(
                f"what the context takes on {device.name} is not known; without it the plan leaves "
                f"{format_bytes(budget - needs)} of {format_bytes(budget)}. Give --budget: what torch may reserve."
            ),
            plan=plan,
            budget_bytes=budget,
        )
    return Outcome(
        asked=asked,
        verdict="fits",
        reason=f"{format_bytes(needs)} of {format_bytes(budget)} budget",
        plan=plan,
        budget_bytes=budget,
    )


def _without_a_plan(asked: Asked, device: DeviceSpec, error: NoFeasiblePlanError, *, has_budget: bool) -> Outcome:
    missing, uncertain = error.missing_bytes, 0 if has_budget else _uncertain_bytes(device)
    beyond_the_host = error.smallest is not None and error.best_peak_bytes <= error.budget_bytes
    within = error.smallest is not None and missing <= uncertain and not beyond_the_host
    suggests = not beyond_the_host and device.kind == "cuda" and error.smallest is not None and not has_budget
    reason = first_line(error) if beyond_the_host else f"{format_bytes(missing)} too much"
    if within:
        reason = (
            f"{format_bytes(missing)} too much for the least that {device.name} may offer, and context and total are "
            f"known to {format_bytes(uncertain)} only. Give --budget: what torch may reserve."
        )
    return Outcome(
        asked=asked,
        verdict="cannot tell" if within else "does not fit",
        reason=reason,
        smallest=error.smallest,
        budget_bytes=error.budget_bytes,
        missing_bytes=missing,
        explanation=str(error),
        catalogue_with_room=_with_room(error.best_peak_bytes) if suggests else (),
    )


def _with_room(needed_bytes: int) -> tuple[str, ...]:
    """GPUs of the catalogue whose own budget is at least so many bytes; none of which the context is not known."""
    rooms = {}
    for model in catalog():
        device = catalog_device(model.key)
        if device.context_high_bytes is not None:
            rooms[model.key] = form_budget(device, PlanRequest(), resident_bytes=0).budget_bytes
    return tuple(key for key, room in sorted(rooms.items(), key=lambda item: item[1]) if room >= needed_bytes)


def _uncertain_bytes(device: DeviceSpec) -> int:
    """By how much the budget might be larger: the ranges of the context and, of a GPU elsewhere, of its total."""
    low, high = device.context_low_bytes, device.context_high_bytes
    uncertain = 0 if low is None or high is None else high - low
    if not device.is_present and device.key is not None:
        total = find_gpu(device.key).torch_total_bytes
        uncertain += total.high - total.low
    return uncertain
