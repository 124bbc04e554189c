"""Verdicts: what is certain, what only a range decides, and which exit code says the most."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.application import outcomes
from lightning_memfit.application.outcomes import Asked, Outcome, Verdict, outcome_on, outcomes_on
from lightning_memfit.application.subject import Subject
from lightning_memfit.cli.arguments import CANNOT_TELL, DOES_NOT_FIT, FITS
from lightning_memfit.cli.plan_command import exit_code_of
from lightning_memfit.errors import NoFeasiblePlanError, TraceError
from lightning_memfit.hardware.catalog import catalog_device, find_gpu
from lightning_memfit.plan import BatchSplit, Candidate, Forecast, MemoryBreakdown
from lightning_memfit.units import GIB

SUBJECT = Subject(words="a module", module=nn.Linear(1, 1), batch=torch.zeros(1, 1), on_meta=False)
SMALLEST = Forecast(
    candidate=Candidate(
        precision="32-true", split=BatchSplit(effective_batch_size=1, loader_batch_size=1, slice_sizes=(1,))
    ),
    memory=MemoryBreakdown(
        peak_allocated_bytes=10 * GIB,
        peak_reserved_bytes=12 * GIB,
        minimum_feasible_bytes=11 * GIB,
        peak_phase="backward",
        num_parameters=2,
    ),
)


def found(verdict: Verdict) -> Outcome:
    return Outcome(asked=Asked(name="t4", device=None), verdict=verdict, reason="")


def test_one_that_does_not_fit_says_more_than_one_that_cannot_be_told() -> None:
    fits, not_told, does_not = found("fits"), found("cannot tell"), found("does not fit")
    assert exit_code_of([fits, fits]) == FITS
    assert exit_code_of([fits, not_told]) == CANNOT_TELL
    assert exit_code_of([not_told, does_not, fits]) == DOES_NOT_FIT


def missing(bytes_missing: int, monkeypatch: pytest.MonkeyPatch, name: str = "t4", **arguments: Any) -> Outcome:
    """The outcome where the smallest plan misses the budget by so many bytes."""

    def nothing_fits(*positional: Any, devices: Sequence[str], **named: Any) -> dict[str, NoFeasiblePlanError]:
        error = NoFeasiblePlanError(
            "No plan fits.", budget_bytes=11 * GIB - bytes_missing, best_peak_bytes=11 * GIB, smallest=SMALLEST
        )
        return dict.fromkeys(devices, error)

    monkeypatch.setattr(outcomes, "make_plans", nothing_fits)
    return outcome_on(Asked(name=name, device=catalog_device(name)), SUBJECT, arguments)


def test_what_may_need_less_than_its_forecast_is_not_said_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = replace(SUBJECT, may_need_less_by=("memfit.allow_inexact_slicing",))
    monkeypatch.setattr(sys.modules[__name__], "SUBJECT", free)
    told = missing(GIB, monkeypatch, budget=10 * GIB)
    assert told.verdict == "cannot tell" and told.missing_bytes == GIB
    assert told.reason == (
        "1.000 GiB too much, but with memfit.allow_inexact_slicing, which no forecast counts with, it may need less."
    )


def test_what_misses_by_less_than_the_range_of_the_context_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = catalog_device("t4")
    assert device.context_high_bytes is not None and device.context_low_bytes is not None
    uncertain = device.context_high_bytes - device.context_low_bytes
    near = missing(uncertain, monkeypatch)
    assert near.verdict == "cannot tell" and near.missing_bytes == uncertain
    assert "context and total are known to 1.149 GiB only. Give --budget" in near.reason
    assert missing(uncertain + 1, monkeypatch).verdict == "does not fit"
    # Whoever gives a budget knows it.
    assert missing(1, monkeypatch, budget=10 * GIB).verdict == "does not fit"


def test_a_range_of_the_total_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device, total = catalog_device("rtx-3090"), find_gpu("rtx-3090").torch_total_bytes
    assert device.context_high_bytes is not None and device.context_low_bytes is not None
    uncertain = device.context_high_bytes - device.context_low_bytes + total.high - total.low
    assert total.high > total.low
    assert missing(uncertain, monkeypatch, name="rtx-3090").verdict == "cannot tell"
    assert missing(uncertain + 1, monkeypatch, name="rtx-3090").verdict == "does not fit"


def test_the_total_of_the_device_is_what_is_reserved_and_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    device = catalog_device("t4")
    assert device.context_high_bytes is not None and device.context_low_bytes is not None
    expected = (12 * GIB + device.context_low_bytes, 12 * GIB + device.context_high_bytes)
    assert missing(GIB, monkeypatch).device_total_bytes == expected
    assert missing(GIB, monkeypatch, name="mi300x").device_total_bytes is None


def test_gpus_with_room_are_those_whose_own_budget_is_enough_smallest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with_room = missing(2 * GIB, monkeypatch).catalogue_with_room
    # 11 GiB: a T4 leaves 14.56 - 1.416 - 0.728 = 12.42 GiB, a 3060 11.75 - 1.416 - 0.5875 = 9.75 GiB.
    assert with_room[0] == "t4" and "rtx-3060" not in with_room and with_room[-1] == "b200"
    # Where the budget was given, another device does not help.
    assert missing(2 * GIB, monkeypatch, budget=9 * GIB).catalogue_with_room == ()


def test_several_devices_are_planned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def nothing_fits(*positional: Any, devices: Sequence[str], **named: Any) -> dict[str, NoFeasiblePlanError]:
        calls.append(tuple(devices))
        return {
            name: NoFeasiblePlanError("No plan fits.", budget_bytes=1, best_peak_bytes=11 * GIB) for name in devices
        }

    monkeypatch.setattr(outcomes, "make_plans", nothing_fits)
    absent = Asked(name="cuda:0", device=None, obstacle="no GPU here")
    asked = [Asked(name="t4", device=catalog_device("t4")), absent, Asked(name="l4", device=catalog_device("l4"))]
    assert [each.verdict for each in outcomes_on(asked, SUBJECT, {})] == ["does not fit", "cannot tell", "does not fit"]
    assert calls == [("t4", "l4")]


def test_what_one_device_cannot_tell_another_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_l4(*positional: Any, devices: Sequence[str], **named: Any) -> dict[str, NoFeasiblePlanError]:
        if "t4" in devices:
            raise TraceError("needs values")
        return {
            name: NoFeasiblePlanError("No plan fits.", budget_bytes=1, best_peak_bytes=11 * GIB) for name in devices
        }

    monkeypatch.setattr(outcomes, "make_plans", only_the_l4)
    asked = [Asked(name=name, device=catalog_device(name)) for name in ("t4", "l4")]
    assert [each.verdict for each in outcomes_on(asked, SUBJECT, {})] == ["cannot tell", "does not fit"]
