"""Schedules stand still for a while. Run: ``pytest tests/observe/test_schedules_at_rest.py``."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_memfit.observe.schedules_at_rest import schedules_at_rest


class OfNoAttributes:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_no_step_is_taken_within_and_every_step_after_also_after_an_error() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedules: list[LRScheduler] = [StepLR(optimizer, 1), OneCycleLR(optimizer, 0.1, total_steps=2)]
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    before = [vars(each).copy() for each in (*schedules, plateau)]
    with pytest.raises(LookupError), schedules_at_rest([*schedules, plateau]):
        for _ in range(5):  # more than there are
            for each in schedules:
                each.step()
            plateau.step(1.0)
        raise LookupError
    assert [vars(each) for each in (*schedules, plateau)] == before
    optimizer.step()
    schedules[0].step()
    assert schedules[0].last_epoch == 1


def test_a_schedule_without_attributes_goes_on() -> None:
    schedule = OfNoAttributes()
    with schedules_at_rest([schedule]):
        schedule.step()
    assert schedule.steps == 1
