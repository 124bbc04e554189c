"""Rates of GPUs that are not here. Run: ``pytest tests/hardware/test_roofline.py``."""

from __future__ import annotations

from typing import get_args

import pytest

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.rates import Kind
from lightning_memfit.hardware.roofline import SHARE_OF_BANDWIDTH, SHARE_OF_PEAK_FLOPS, roofline_rates

A100 = {
    "fp32": 19_500_000_000_000,
    "tf32": 156_000_000_000_000,
    "fp16": 312_000_000_000_000,
    "bf16": 312_000_000_000_000,
}


def test_products_take_the_time_of_their_flops_at_a_share_of_the_peak() -> None:
    rates = roofline_rates("A100", A100, 1_555_000_000_000)
    curve, factor = rates.curve("matmul", "bfloat16")
    assert factor == 1.0
    # 1e15 FLOPs at 0.7 of 312 TFLOP/s.
    assert curve.seconds_of(1e15) == pytest.approx(1e15 / (312e12 * SHARE_OF_PEAK_FLOPS))
    assert rates.curve("matmul", "float32")[0].seconds_of(1e15) == pytest.approx(1e15 / (19.5e12 * SHARE_OF_PEAK_FLOPS))


def test_convolutions_of_float32_count_as_tf32_and_products_do_not() -> None:
    rates = roofline_rates("A100", A100, 1_555_000_000_000)
    assert rates.curve("convolution", "float32")[0].seconds_of(1e15) == pytest.approx(1e15 / (156e12 * 0.5))


def test_what_only_moves_memory_takes_the_time_of_its_bytes() -> None:
    rates = roofline_rates("A100", A100, 1_555_000_000_000)
    assert rates.curve("elementwise", "float32")[0].seconds_of(1e12) == pytest.approx(
        1e12 / (1.555e12 * SHARE_OF_BANDWIDTH)
    )


def test_little_work_takes_a_launch() -> None:
    rates = roofline_rates("A100", A100, 1_555_000_000_000)
    assert rates.curve("elementwise", "float32")[0].seconds_of(1) == 5e-6


def test_there_is_a_rate_for_every_kind_and_none_counts_as_measured() -> None:
    rates = roofline_rates("A100", A100, 1_555_000_000_000)
    assert set(rates.curves) == set(get_args(Kind))
    assert rates.unmeasured == ("everything: rates are assumed shares of the vendor's peaks",)


def test_bfloat16_without_units_counts_as_float32() -> None:
    t4 = {"fp32": 8_100_000_000_000, "fp16": 65_000_000_000_000}
    rates = roofline_rates("T4", t4, 320_000_000_000)
    same = rates.curve("matmul", "float32")[0].seconds_of(1e12)
    assert rates.curve("matmul", "bfloat16")[0].seconds_of(1e12) == same


def test_without_a_peak_there_are_no_rates() -> None:
    with pytest.raises(ConfigurationError, match="its peak of fp32 is not known"):
        roofline_rates("unknown", {}, 1)
