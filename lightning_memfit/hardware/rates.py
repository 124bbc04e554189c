"""How fast a device is: seconds of operators by kind, dtype and size. Plain data: no torch, no clock, no device."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_memfit.errors import ConfigurationError

RATES_VERSION = 1
"""Version of this structure in files, raised when kinds, or what is measured for one, change."""

Unit = Literal["flops", "bytes"]
Kind = Literal[
    "matmul",
    "thin_matmul",
    "batched_matmul",
    "attention",
    "attention_backward",
    "convolution",
    "convolution_backward",
    "depthwise_convolution",
    "depthwise_convolution_backward",
    "recurrent",
    "recurrent_backward",
    "elementwise",
    "transcendental",
    "cached_elementwise",
    "cached_transcendental",
    "copy",
    "cast",
    "fill",
    "reduction",
    "softmax",
    "masked_softmax",
    "softmax_backward",
    "log_softmax",
    "log_softmax_backward",
    "layer_norm",
    "layer_norm_backward",
    "batch_norm",
    "batch_norm_backward",
    "pooling",
    "random",
    "gather",
    "scatter",
    "fused_optimizer",
    "quantised_optimizer",
    "unquantised_optimizer",
]
UNITS: Mapping[str, Unit] = {
    "matmul": "flops",
    "batched_matmul": "flops",
    "attention": "flops",
    "attention_backward": "flops",
    "convolution": "flops",
    "convolution_backward": "flops",
    "recurrent": "flops",
    "recurrent_backward": "flops",
}
"""What the work of a kind is counted in; bytes moved where it is not named."""

_STAND_INS: Mapping[str, tuple[str, float, float]] = {
    # dtype: (the dtype whose rates stand in, seconds per FLOP and seconds per byte relative to it)
    "float64": ("float32", 2.0, 1.0),
    "float16": ("bfloat16", 1.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """Seconds of one call of a kind of operator, by the work of the call."""

    work: tuple[float, ...]
    """FLOPs or bytes of each measured call, rising."""
    seconds: tuple[float, ...]
    """Seconds of each measured call, called from Python without gradients."""

    def __post_init__(self) -> None:
        """Check that the points make a curve.

        Raises:
            ConfigurationError: if there are none, they do not rise, or a time is not positive.
        """
        if not self.work or len(self.work) != len(self.seconds):
            raise ConfigurationError(f"a rate has {len(self.work)} sizes and {len(self.seconds)} times. Measure again.")
        rising = all(before < after for before, after in zip(self.work, self.work[1:], strict=False))
        if not (rising and self.work[0] > 0 and all(math.isfinite(s) and s > 0 for s in self.seconds)):
            raise ConfigurationError(f"a rate has sizes {self.work} and times {self.seconds}. Measure again.")

    @property
    def fixed_seconds(self) -> float:
        """What a call takes however little it does."""
        return min(self.seconds)

    def seconds_of(self, work: float) -> float:
        """Seconds of one call: straight lines between the measured points, both axes logarithmic.

        Below the smallest point the time is that point's, since the fixed cost of a call is what is left there; above
        the largest, work per second is that point's.

        >>> curve = RateCurve(work=(10, 1000), seconds=(1.0, 10.0))
        >>> curve.seconds_of(1), round(curve.seconds_of(100), 6), curve.seconds_of(2000)
        (1.0, 3.162278, 20.0)
        """
        if work <= self.work[0]:
            return self.seconds[0]
        if work >= self.work[-1]:
            return self.seconds[-1] * work / self.work[-1]
        right = bisect.bisect_left(self.work, work)
        left = right - 1
        share = math.log(work / self.work[left]) / math.log(self.work[right] / self.work[left])
        return float(self.seconds[left] * (self.seconds[right] / self.seconds[left]) ** share)


@dataclass(frozen=True, kw_only=True)
class CallSeconds:
    """What a dispatched operator costs beside its kernel: Python, autograd, the optimizer's own loops."""

    forward: float
    """Seconds per operator of a forward, its part of modules and of the recorded graph included."""
    backward: float
    """Seconds per operator of a backward."""
    optimizer_step: float
    """Seconds per operator of a single-tensor optimizer step."""
    foreach_tensor: float
    """Seconds per tensor of an operator of a ``foreach`` step, in place of the kernel's own fixed cost."""
    fused_tensor: float
    """Seconds per tensor of a fused step, likewise."""
    recomputed_block: float
    """Seconds per call of a module whose activations are recomputed."""


@dataclass(frozen=True, kw_only=True)
class AllocatorRates:
    """What memory costs that the allocator must fetch from the system, and how much it keeps of what is freed."""

    seconds_per_new_byte: float
    """Seconds per byte that is touched for the first time."""
    largest_kept_block_bytes: int | None
    """Freed blocks above this size go back to the system at once; ``None``: they never do."""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """How fast one device is with one version of torch and one number of threads."""

    device: str
    """Name of the device."""
    threads: int
    """Threads that torch uses within an operator."""
    torch_version: str
    """Version of torch."""
    curves: Mapping[str, Mapping[str, RateCurve]]
    """Kind of operator to dtype to seconds per call."""
    calls: CallSeconds
    """Cost of operators beside their kernels."""
    allocator: AllocatorRates
    """Cost of new memory."""
    noise: float
    """Disturbance while it was measured: the median over all points of second fastest by fastest call, less one."""
    unmeasured: tuple[str, ...] = ()
    """Kinds with their dtypes that this build of torch computes otherwise or not at all, each with the reason."""

    def curve(self, kind: str, dtype: str) -> tuple[RateCurve, float]:
        """The curve for a kind and a dtype, and the factor on its seconds where another dtype's stands in.

        Integers and flags move as ``float32`` does; ``float64`` computes half as fast. A kind that was not measured
        counts as matrix product where its work is FLOPs, else as elementwise.
        """
        by_dtype = self.curves.get(kind) or self.curves["matmul" if UNITS.get(kind) == "flops" else "elementwise"]
        found = by_dtype.get(dtype)
        if found is not None:
            return found, 1.0
        stand_in, per_flop, per_byte = _STAND_INS.get(dtype, ("float32", 1.0, 1.0))
        factor = per_flop if UNITS.get(kind) == "flops" else per_byte
        return by_dtype.get(stand_in) or next(iter(by_dtype.values())), factor

    def to_dict(self) -> dict[str, Any]:
        """Plain data: dicts, lists, numbers and text."""
        return {"version": RATES_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceRates:
        """Rebuild rates from :meth:`to_dict`.

        Raises:
            ConfigurationError: if the version is not this one, or the data are no rates.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != RATES_VERSION:
            raise ConfigurationError(
                f"rates have version {version!r}; this release reads {RATES_VERSION}. Measure again."
            )
        try:
            curves = {
                str(kind): {
                    str(dtype): RateCurve(work=tuple(curve["work"]), seconds=tuple(curve["seconds"]))
                    for dtype, curve in by_dtype.items()
                }
                for kind, by_dtype in data["curves"].items()
            }
            if not (curves["elementwise"] and curves["matmul"]):
                raise KeyError("elementwise, matmul")
            return cls(
                device=str(data["device"]),
                threads=int(data["threads"]),
                torch_version=str(data["torch_version"]),
                curves=curves,
                calls=CallSeconds(**{name: float(value) for name, value in data["calls"].items()}),
                allocator=AllocatorRates(**data["allocator"]),
                noise=float(data["noise"]),
                unmeasured=tuple(str(reason) for reason in data["unmeasured"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"rates are incomplete or damaged: {error!r}. Measure again.") from error
