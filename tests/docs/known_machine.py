"""A machine whose speed is known: what pages show is then the same everywhere, and seconds are not spent on clocks.

Everything else happens as it does for a reader. How fast a device is, and which of several plans, is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_memfit import planning, preparation
from lightning_memfit.hardware.rates import AllocatorRates, CallSeconds, DeviceRates, RateCurve


def _straight(per_second: float) -> RateCurve:
    return RateCurve(work=(1e3, 1e9), seconds=(1e3 / per_second, 1e9 / per_second))


RATES = DeviceRates(
    device="a host",
    threads=1,
    torch_version="any",
    curves={
        "matmul": {"float32": _straight(5e10), "bfloat16": _straight(2e10)},
        "elementwise": {"float32": _straight(1e10), "bfloat16": _straight(5e9)},
    },
    calls=CallSeconds(
        forward=1e-5,
        backward=1e-5,
        optimizer_step=1e-5,
        foreach_tensor=1e-6,
        fused_tensor=1e-6,
        recomputed_block=1e-4,
    ),
    allocator=AllocatorRates(seconds_per_new_byte=0.0, largest_kept_block_bytes=None),
    noise=0.0,
)
"""A host that is slower in ``bfloat16`` than in ``float32``."""


def pretend(replace: Callable[[Any, str, Any], None]) -> None:
    """Let this be that machine: its rates are not measured, and plans are not timed against each other.

    Args:
        replace: ``setattr``, or the same of a ``MonkeyPatch``.
    """
    replace(preparation, "measure_rates", lambda **settings: RATES)
    replace(planning, "MOST_CONTENDERS", 1)
