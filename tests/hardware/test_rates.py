"""Curves between measured points, stand-ins for what was not measured, and the form on disk."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.rates import AllocatorRates, CallSeconds, DeviceRates, RateCurve

CALLS = CallSeconds(
    forward=1e-5, backward=2e-5, optimizer_step=3e-6, foreach_tensor=1e-6, fused_tensor=2e-6, recomputed_block=1e-4
)


def curve(seconds: float) -> RateCurve:
    return RateCurve(work=(1.0,), seconds=(seconds,))


def rates(**curves: dict[str, RateCurve]) -> DeviceRates:
    return DeviceRates(
        device="a processor",
        threads=2,
        torch_version="2.13.0",
        curves={"elementwise": {"float32": curve(1.0)}, "matmul": {"float32": curve(2.0)}, **curves},
        calls=CALLS,
        allocator=AllocatorRates(seconds_per_new_byte=2e-10, largest_kept_block_bytes=2**25),
        noise=0.01,
        unmeasured=("recurrent bfloat16: not implemented",),
    )


def test_between_points_a_curve_is_a_straight_line_on_logarithmic_axes() -> None:
    # From (1e3, 1e-6) to (1e6, 1e-4): a third of the way in work is a third of the way in time, both logarithmic.
    found = RateCurve(work=(1e3, 1e6), seconds=(1e-6, 1e-4))
    assert found.seconds_of(1e4) == pytest.approx(1e-6 * 100 ** (1 / 3))
    assert found.seconds_of(1e3) == 1e-6
    assert found.seconds_of(1e6) == 1e-4


def test_below_the_smallest_point_the_fixed_cost_is_left_and_above_the_largest_the_rate() -> None:
    found = RateCurve(work=(1e3, 1e6), seconds=(1e-6, 1e-4))
    assert found.seconds_of(0) == found.seconds_of(1) == 1e-6
    assert found.seconds_of(5e6) == pytest.approx(5e-4)
    assert found.fixed_seconds == 1e-6


@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.floats(0, 1e15),
)
def test_every_amount_of_work_takes_a_time_within_those_of_its_neighbours(
    points: list[tuple[float, float]], work: float
) -> None:
    points.sort()
    found = RateCurve(work=tuple(w for w, _ in points), seconds=tuple(s for _, s in points))
    seconds = found.seconds_of(work)
    assert math.isfinite(seconds) and seconds > 0
    if points[0][0] <= work <= points[-1][0]:
        around = [s for w, s in points if w <= work][-1:] + [s for w, s in points if w >= work][:1]
        assert min(around) * (1 - 1e-9) <= seconds <= max(around) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((2.0, 1.0), (1.0, 1.0)),
        ((1.0,), (0.0,)),
        ((1.0,), (math.nan,)),
        ((0.0,), (1.0,)),
    ],
)
def test_points_that_make_no_curve_are_refused(work: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"^a rate has .* Measure again\.$"):
        RateCurve(work=work, seconds=seconds)


def test_a_dtype_without_a_curve_is_stood_in_for() -> None:
    both = {"float32": curve(4.0), "bfloat16": curve(3.0)}
    found = rates(convolution=both, softmax=both)
    assert found.curve("convolution", "bfloat16") == (curve(3.0), 1.0)
    assert found.curve("convolution", "float16") == (curve(3.0), 1.0)
    # Twice the width: half as many numbers at once; but a byte is a byte.
    assert found.curve("convolution", "float64") == (curve(4.0), 2.0)
    assert found.curve("softmax", "float64") == (curve(4.0), 1.0)
    assert found.curve("softmax", "int64") == (curve(4.0), 1.0)


def test_a_kind_without_a_curve_counts_as_a_product_or_as_elementwise() -> None:
    assert rates().curve("recurrent", "float32") == (curve(2.0), 1.0)
    assert rates().curve("cached_elementwise", "bfloat16") == (curve(1.0), 1.0)


def test_rates_come_back_from_json_as_they_were() -> None:
    found = rates(softmax={"bfloat16": RateCurve(work=(1.0, 2.5), seconds=(1e-6, 2e-6))})
    assert DeviceRates.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    "spoil",
    [
        {"version": 0},
        {"curves": {"elementwise": {}}},
        {"curves": {"matmul": {"float32": {"work": [1.0], "seconds": [1.0]}}}},
        {"curves": {"elementwise": {"float32": {"work": [1.0], "seconds": ["fast"]}}}},
        {"curves": []},
        {"calls": {"forward": 1.0}},
        {"calls": {"forward": "slow"}},
        {"allocator": None},
        {"noise": None},
        {"threads": "many"},
        {"unmeasured": None},
    ],
)
def test_damaged_rates_are_refused_with_the_reason(spoil: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"^(rates|a rate) (have|has|are) .*Measure again\.$"):
        DeviceRates.from_dict({**rates().to_dict(), **spoil})


def test_rates_without_a_field_are_refused() -> None:
    data = rates().to_dict()
    del data["device"]
    with pytest.raises(ConfigurationError, match="'device'"):
        DeviceRates.from_dict(data)
