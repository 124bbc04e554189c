"""Times samples of operators and makes curves of them.

Every sample is called in several rounds over all of them, so that another process that runs for a moment disturbs no
kind in all of its rounds; the fastest call counts. How much work a call does is read off the call itself by the tracer,
so that it is counted as in a prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_memfit.hardware.rate_samples import Call, Halves, Sample
from lightning_memfit.hardware.rates import RateCurve
from lightning_memfit.predict.operator_kinds import work_of
from lightning_memfit.trace.timeline import Operation
from lightning_memfit.trace.tracer import StepTracer

Clock = Callable[[], float]
"""Tells seconds."""

_ROUNDS = 4
_FEWEST_ROUNDS = 2
_FURTHER_ROUNDS = 4
"""For kinds of which every call was held up at one of the first sizes, so that larger ones are missing."""
_LONGEST_SECONDS = 2.0
"""No round begins later than this after the first."""
_SHORT_CALL_SECONDS = 2e-5
"""Calls below this are repeated. Longer ones find their arguments where a real step leaves them, out of the nearest
caches; for short ones that is part of what an operator costs beside its kernel."""
_SAMPLE_SECONDS = 1.5e-4
"""Short calls are repeated until they take this long together."""
_LONGEST_CALL_SECONDS = 1.5e-3
"""A kind gets no larger size once a call takes this long."""
_FEWEST_SIZES = 3
"""Sizes that a kind gets unless a call takes this many times longer still."""
_PRODUCTS_BY_BYTES = ("thin_matmul", "depthwise_convolution", "depthwise_convolution_backward")
"""Operators of other kinds at shapes where moving memory takes longer than computing."""
_HELD_UP_SHARE = 8
"""A call that takes more than this many times what the next smaller one's rate says was held up."""
_LONGEST_SMALLEST_SECONDS = 2e-3
"""The smallest call of a kind that takes longer was held up."""
_KEPT_BYTES = 2**21
"""Calls on less than this are prepared once, others in every round."""


@dataclass(frozen=True, kw_only=True)
class SampledCurves:
    """What was found."""

    curves: Mapping[str, Mapping[str, RateCurve]]
    """Kind to dtype to seconds."""
    noise: float
    """The median over all points of second fastest by fastest call, less one."""
    unmeasured: tuple[str, ...]
    """Kinds with their dtypes that this build of torch computes otherwise or not at all, each with the reason."""
    held_up: float = 0.0
    """Share of the points that were left out, or missed, because another process held calls up in every round."""


@dataclass
class _Point:
    """One kind and dtype at one size."""

    work: float
    """FLOPs or bytes of one step of the call."""
    moved_bytes: int
    """Bytes of the call's arguments and results."""
    steps: int = 1
    """Steps that the call takes one after the other."""
    cached: bool = False
    """Whether the arguments are to be found in the caches, however long the call takes."""
    repeats: int | None = None
    """Calls that are timed together; ``None`` until the first was timed."""
    seconds: list[float] = field(default_factory=list)
    """Of one step, in every round."""

    @property
    def call_seconds(self) -> float:
        """The fastest call."""
        return min(self.seconds) * self.steps


def seconds_of(call: Call, repeats: int, clock: Clock) -> float:
    """Mean seconds of a call."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def operations_of(tracer: StepTracer) -> list[Operation]:
    """The operators that a tracer saw."""
    return [event for event in tracer.events if isinstance(event, Operation)]


def sampled_curves(halves: Halves, chosen: Sequence[Sample], clock: Clock) -> SampledCurves:
    """Time the samples at all their sizes.

    Args:
        halves: the tensors they run on.
        chosen: what is timed.
        clock: seconds.
    """
    tables = [_Table(sample, dtype) for sample in chosen for dtype in sample.dtypes]
    start = clock()
    for number in range(_ROUNDS + _FURTHER_ROUNDS):
        late = number >= _FEWEST_ROUNDS and clock() - start > _LONGEST_SECONDS
        repeated = [table for table in tables if table.is_cut_short] if late or number >= _ROUNDS else tables
        for table in repeated:
            table.sample(halves, clock)
    curves: dict[str, dict[str, RateCurve]] = {}
    for table in tables:
        curve = table.curve()
        if curve is not None:
            curves.setdefault(table.kind, {})[table.dtype] = curve
    points = [point for table in tables for point in table.points.values()]
    return SampledCurves(
        curves=curves,
        noise=statistics.median([_disturbance(point) for point in points if len(point.seconds) > 1] or [0.0]),
        unmeasured=tuple(f"{table.kind} {table.dtype}: {table.failure}" for table in tables if table.failure),
        held_up=sum(table.held_up for table in tables) / max(1, len(points)),
    )


class _Table:
    """One kind and dtype over its sizes."""

    def __init__(self, sample: Sample, dtype: torch.dtype) -> None:
        self.kind = sample.kind
        self.dtype = str(dtype).removeprefix("torch.")
        self.points: dict[int, _Point] = {}
        self.failure: str | None = None
        self.held_up = 0
        self._sample, self._dtype = sample, dtype
        self._kept: dict[int, Call] = {}

    def sample(self, halves: Halves, clock: Clock) -> None:
        """Time every size once."""
        for number, size in enumerate(self._sample.sizes, start=1):
            if self.failure is not None:
                break
            try:
                call = self._kept.get(size) or self._sample.make(halves, size, self._dtype)
                if size not in self.points:
                    self.points[size] = self._counted(call)
            except (AttributeError, LookupError, NotImplementedError, RuntimeError) as error:
                # An operator that this build does not have, or not for this dtype: other kinds do not depend on it.
                self.failure = (str(error).strip().splitlines() or [type(error).__name__])[0]
                break
            self._time(size, call, halves, clock)
            # Of all rounds so far: a call that was held up in one does not keep larger sizes from the next.
            longest = _LONGEST_CALL_SECONDS * (1 if number >= _FEWEST_SIZES else _FEWEST_SIZES)
            if self.points[size].call_seconds > longest:
                break

    @property
    def is_cut_short(self) -> bool:
        """Whether so few sizes were timed that larger ones would be guessed from what a small one costs at least."""
        return self.failure is None and len(self.points) < min(_FEWEST_SIZES, len(self._sample.sizes))

    def curve(self) -> RateCurve | None:
        """The fastest call of every size that was not held up; ``None`` if every one was."""
        found = sorted({point.work: min(point.seconds) for point in self.points.values()}.items())
        kept = not_held_up(found)
        self.held_up = len(found) - len(kept) + (len(self._sample.sizes) if self.is_cut_short else 0)
        if not kept and (not found or self.kind != "elementwise"):
            self.failure = self.failure or "another process held up every call"
            return None  # it counts as elementwise, which there must be
        kept = kept or found[:1]
        return RateCurve(work=tuple(work for work, _ in kept), seconds=tuple(seconds for _, seconds in kept))

    def _time(self, size: int, call: Call, halves: Halves, clock: Clock) -> None:
        point = self.points[size]
        if point.moved_bytes <= _KEPT_BYTES:
            self._kept[size] = call
        with torch.no_grad():
            if point.repeats is None:
                seconds = seconds_of(call, 1, clock)
                short = seconds < _SHORT_CALL_SECONDS or point.cached
                point.repeats = max(2, min(100, int(_SAMPLE_SECONDS / max(seconds, 1e-9)))) if short else 1
            if point.repeats == 1:
                halves.flush()
            point.seconds.append(seconds_of(call, point.repeats, clock) / point.steps)

    def _counted(self, call: Call) -> _Point:
        """Run the call under the tracer, which counts its work as it would in a trace."""
        tracer = StepTracer({}, collect_signatures=False)
        with torch.no_grad(), tracer:
            call()
        cached = self.kind.startswith("cached")
        for operation in operations_of(tracer):
            work, moved = work_of(operation), operation.moved_bytes
            if self.kind in _PRODUCTS_BY_BYTES:
                if operation.flops:
                    return _Point(work=moved, moved_bytes=moved)
            elif cached or work.kind == self.kind:
                return _Point(work=work.amount, steps=work.steps, moved_bytes=moved, cached=cached)
        raise LookupError(f"no such operator was called: torch {torch.__version__} computes it otherwise")


def not_held_up(found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of (work, seconds), by rising work, that can be the device's own.

    On a busy machine a call may be held up for a whole time slice in every round, so that it takes hundreds of times
    what its work asks for. No device is that much slower per unit of work at a larger size.

    >>> not_held_up([(1e3, 1e-6), (1e5, 2e-2), (1e6, 9e-4)])
    [(1000.0, 1e-06), (1000000.0, 0.0009)]
    """
    kept: list[tuple[float, float]] = []
    for work, seconds in found:
        limit = _HELD_UP_SHARE * kept[-1][1] * max(1.0, work / kept[-1][0]) if kept else _LONGEST_SMALLEST_SECONDS
        if seconds <= limit:
            kept.append((work, seconds))
    return kept


def _disturbance(point: _Point) -> float:
    fastest, second = sorted(point.seconds)[:2]
    return second / fastest - 1
