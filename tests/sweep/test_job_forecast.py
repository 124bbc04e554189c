"""What forecasts say of the order of launches, and whether they come back from a file."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_memfit.sweep.job_forecast import JobForecast, forecast_from, launch_order
from tests.sweep.rowmaking import forecast


def test_the_cheapest_is_launched_first_and_what_is_not_known_last() -> None:
    unknown = JobForecast(verdict="cannot tell", reason="no model")
    found = {
        0: unknown,
        1: forecast(optimizer_steps=None),  # steps of 0.5 s
        2: forecast(optimizer_steps=30),  # 15 s
        3: forecast(peak_mib=120),  # does not fit
        4: forecast(predicted_step_seconds=0.1, optimizer_steps=100),  # 10 s
        5: forecast(predicted_step_seconds=0.2, optimizer_steps=None),
        6: unknown,
    }
    assert launch_order(found) == [4, 2, 5, 1, 0, 6]


def test_throughput_and_seconds_follow_from_a_step() -> None:
    # 8 samples in 0.5 s; 10 steps of 0.5 s.
    assert forecast().predicted_samples_per_second == 16.0
    assert forecast().predicted_training_seconds == 5.0
    assert forecast(predicted_step_seconds=None).predicted_samples_per_second is None


def test_a_forecast_comes_back_from_plain_data() -> None:
    assert forecast_from(dataclasses.asdict(forecast())) == forecast()


DAMAGED = {**dataclasses.asdict(forecast()), "predicted_peak_bytes": "50"}


@pytest.mark.parametrize("data", [None, [], {"verdict": "perhaps", "reason": ""}, {"verdict": "fits"}, DAMAGED])
def test_what_is_no_forecast_is_none(data: object) -> None:
    assert forecast_from(data) is None
