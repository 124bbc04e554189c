"""Rates of a GPU that is not here: what its vendor says it can do at most, and assumed shares of that.

No time that comes of it was measured, and how far it is off is not known. It ranks settings; a run on the device
measures them.

Source: Williams, Waterman and Patterson, Roofline: an insightful visual performance model (CACM 52/4, 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.rates import UNITS, AllocatorRates, CallSeconds, DeviceRates, Kind, RateCurve

SHARE_OF_PEAK_FLOPS = 0.7
"""Assumed, not measured: what large matrix products reach of the dense peak."""
SHARE_OF_BANDWIDTH = 0.8
"""Assumed, not measured: what operators that only move memory reach of the peak."""
_SHARES: Mapping[str, float] = {
    "attention": 0.5,
    "attention_backward": 0.4,
    "convolution": 0.5,
    "convolution_backward": 0.5,
    "recurrent": 0.3,
    "recurrent_backward": 0.3,
}
"""Assumed, not measured: kinds of operators that reach less of the peak than matrix products."""
_KERNEL_SECONDS = 5e-6
"""Assumed: the least that one kernel takes, its launch included."""
_LARGEST = 1e18
_DTYPES: Mapping[str, tuple[str, ...]] = {
    # torch's dtype: the entries of a vendor's table that it computes with, best first
    "float32": ("fp32",),
    "bfloat16": ("bf16", "fp32"),
    "float16": ("fp16", "fp32"),
}
_CONVOLUTIONS = ("convolution", "convolution_backward")


def roofline_rates(name: str, peak_flops: Mapping[str, int], bandwidth_bytes_per_second: int) -> DeviceRates:
    """Rates by the roofline model: an operator takes the time of its FLOPs, or of its bytes, or of a launch.

    Products of ``float32`` count at the peak of ``float32`` (torch's default), convolutions at that of TF32 where there
    is one (``torch.backends.cudnn.allow_tf32`` is on by default). ``bfloat16`` without hardware counts as ``float32``.

    Args:
        name: of the device.
        peak_flops: dense FLOP per second by ``fp32``, ``tf32``, ``fp16``, ``bf16``.
        bandwidth_bytes_per_second: peak of the device's memory.

    Raises:
        ConfigurationError: if the peak of ``fp32`` is not known.
    """
    if not peak_flops.get("fp32"):
        raise ConfigurationError(f"no rates of {name}: its peak of fp32 is not known. Plan with times on the device.")
    moving = _line(bandwidth_bytes_per_second * SHARE_OF_BANDWIDTH)
    curves: dict[str, dict[str, RateCurve]] = {}
    for kind in get_args(Kind):
        if UNITS.get(kind) != "flops":
            curves[kind] = dict.fromkeys(_DTYPES, moving)
            continue
        share = _SHARES.get(kind, SHARE_OF_PEAK_FLOPS)
        curves[kind] = {dtype: _line(_peak(kind, dtype, peak_flops) * share) for dtype in _DTYPES}
    nothing = CallSeconds(
        forward=0.0, backward=0.0, optimizer_step=0.0, foreach_tensor=0.0, fused_tensor=0.0, recomputed_block=0.0
    )
    return DeviceRates(
        device=name,
        threads=1,
        torch_version="none",
        curves=curves,
        calls=nothing,
        allocator=AllocatorRates(seconds_per_new_byte=0.0, largest_kept_block_bytes=None),
        noise=0.0,
        unmeasured=("everything: rates are assumed shares of the vendor's peaks",),
    )


def _peak(kind: str, dtype: str, peak_flops: Mapping[str, int]) -> int:
    if kind in _CONVOLUTIONS and dtype == "float32":
        return peak_flops.get("tf32") or peak_flops["fp32"]
    return next(peak_flops[name] for name in _DTYPES[dtype] if peak_flops.get(name))


def _line(per_second: float) -> RateCurve:
    """A launch for little work, then a straight line."""
    return RateCurve(work=(per_second * _KERNEL_SECONDS, _LARGEST), seconds=(_KERNEL_SECONDS, _LARGEST / per_second))
