"""How predictions are held against published measurements: constants, errors, brackets, targets.

A device total holds bytes that no allocator knows: the CUDA context and loaded libraries. Where the source did not
measure or subtract them by itself they are one constant, the median of measured less predicted over rows that are not
judged by it: rows of even number in their group give the constant for rows of odd number; where the group says so,
those of odd number also give one for the even.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published_case import PublishedPrediction
from benchmarks.published_rows import LISTED, PublishedRow, Setting
from lightning_memfit.units import MIB

NAIVE_BYTES_PER_PARAMETER = 20
"""fp32 parameters, gradients, two states and the temporaries of a step over lists of tensors, nothing else."""
SMALL_BYTES = 250 * MIB
"""Rows with less above the context are judged by absolute error."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of one source, and what is asked of their predictions."""

    title: str
    """In tables."""
    how_judged: str
    """In words, for below the table."""
    context: str = "none"
    """``"none"``, ``"half"`` (even rows fit, odd ones are judged), ``"crossed"`` (each half fits the other)."""
    known_context_bytes: int = 0
    """What the process held beside torch, where the source measured it by itself."""
    above_context: bool = False
    """Errors are shares of the bytes above the context instead of all."""
    median_target: float | None = None
    """Of the sizes of the errors."""
    percentile_95_target: float | None = None
    """Of the sizes of the errors."""
    largest_target: float | None = None
    """Of every error's size."""
    small_target_bytes: int | None = None
    """Of every small row's absolute error."""


GROUPS: Mapping[str, Group] = {
    "mlp": Group(
        title="MLPs, A100 (GPUMemNet)",
        how_judged="one constant from the rows of even number; shares of the bytes above it; rows of less than 250 MiB "
        "above it by absolute error",
        context="half",
        above_context=True,
        median_target=0.02,
        percentile_95_target=0.06,
        small_target_bytes=16 * MIB,
    ),
    "xmem": Group(
        title="CNNs and distilgpt2, RTX 3060 and 4060 (xMem)",
        how_judged="no constant: the source's first reading was taken when the context existed, and is subtracted",
        median_target=0.025,
    ),
    "xmem_loop": Group(
        title="gpt2 and distilgpt2 at other batches (xMem)",
        how_judged="as the rows above; these, which no target is asked of, told which version of the loop was measured",
    ),
    "transformers": Group(
        title="gpt2 and bert-base (optimum-benchmark)",
        how_judged="bytes of torch's allocator, no constant; reserved bytes may be off by twice the target",
        largest_target=0.01,
    ),
    "bert_large": Group(
        title="bert-large, V100 (transformers)",
        how_judged="the constant is what the source measured after making one tiny tensor: 1343 MiB",
        known_context_bytes=1343 * MIB,
    ),
    "lora": Group(
        title="LoRA, A100 (litgpt)",
        how_judged="bytes of torch's allocator, no constant",
        largest_target=0.05,
    ),
    "cnn": Group(
        title="CNNs, A100 (GPUMemNet, torchvision)",
        how_judged="rows of even number give the constant for those of odd number and the other way round",
        context="crossed",
    ),
    "timm": Group(
        title="vision models, A100 (GPUMemNet, timm)",
        how_judged="constants as for the CNNs of GPUMemNet; the flags of the script are assumed",
        context="crossed",
    ),
    "oom": Group(
        title="runs out of memory",
        how_judged="right if the least in which the step survives is more than the device's nominal size",
    ),
}
"""By the name in the data."""


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """A row with what is predicted of it."""

    id: str
    """Of the row."""
    group: str
    """Of the row."""
    title: str
    """Of the row."""
    statistic: str
    """What was measured, and is therefore predicted."""
    measured_bytes: int | None
    """``None`` for a run that died for want of memory."""
    predicted_bytes: int
    """Of the same statistic, the context added where it is in the measurement."""
    context_bytes: int
    """The constant that was added."""
    bracket_bytes: tuple[int, int]
    """Least in which the step survives, and what it takes when nothing presses; both with the constant."""
    naive_bytes: int
    """20 bytes per parameter, with the constant."""
    peer_predicted_bytes: int | None
    """What the source's own estimator said."""
    capacity_bytes: int
    """Nominal size of the device."""
    judged: bool
    """Whether it counts; not if the constant comes from it alone."""
    above_context: bool
    """Whether the group is judged by the bytes above the context."""
    cause: str
    """Why it is off by more than a tenth, where that is understood."""

    @property
    def error(self) -> float | None:
        """Share of the measured bytes; negative where too little was predicted."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1

    @property
    def error_above_context(self) -> float | None:
        """Share of the measured bytes above the context."""
        if self.measured_bytes is None or self.measured_bytes <= self.context_bytes:
            return None
        return (self.predicted_bytes - self.measured_bytes) / (self.measured_bytes - self.context_bytes)

    @property
    def judged_error(self) -> float | None:
        """The one that the group is judged by."""
        return self.error_above_context if self.above_context else self.error

    @property
    def is_small(self) -> bool:
        """Whether it is judged by its absolute error."""
        return (
            self.above_context
            and self.measured_bytes is not None
            and self.measured_bytes - self.context_bytes < SMALL_BYTES
        )

    @property
    def in_bracket(self) -> bool:
        """Whether the measured bytes lie within the bracket; for a run that died, whether its lower end is too much."""
        low, high = self.bracket_bytes
        return low > self.capacity_bytes if self.measured_bytes is None else low <= self.measured_bytes <= high

    @property
    def verdict(self) -> str:
        """Whether the prediction agrees that the step does not fit, or that it does."""
        predicted_to_fit = self.bracket_bytes[0] <= self.capacity_bytes
        says = "predicted to fit" if predicted_to_fit else "predicted not to fit"
        return f"{says}: {'right' if predicted_to_fit == (self.measured_bytes is not None) else 'wrong'}"


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """Sizes of the errors of one group's judged rows in one statistic."""

    group: str
    """Key of :data:`GROUPS`."""
    statistic: str
    """What was measured."""
    context_bytes: tuple[int, ...]
    """The constants used."""
    judged: int
    """Rows that count."""
    median: float | None
    """Of the errors' sizes over the rows that are not small; ``None`` without any."""
    percentile_95: float | None
    """Likewise; the nearest rank."""
    largest: float | None
    """Likewise."""
    largest_small_bytes: int | None
    """The largest absolute error of a small row; ``None`` without any."""
    in_bracket: int | None
    """Rows whose measurement lies in the bracket, or which rightly do not fit; ``None`` where allocated bytes were
    measured, which are no capacity."""
    right_verdicts: int
    """Rows for which the prediction says rightly whether they fit the device."""
    naive_median: float | None
    """Median of 20 bytes per parameter on the same rows."""
    peer_median: float | None
    """Median error of the source's own estimator on the same rows."""


def judge(rows: Sequence[PublishedRow], predictions: Mapping[Setting, PublishedPrediction]) -> list[JudgedRow]:
    """Put predictions beside the rows that were rebuilt."""
    rebuilt = [row for row in rows if row.group != LISTED]
    bases = {row.id: _predicted(row, predictions) for row in rebuilt}
    return [_judged(row, predictions, bases[row.id], _context(row, rebuilt, bases)) for row in rebuilt]


def number_of(row: PublishedRow) -> int:
    """The row's number in its group."""
    return int(row.id.rpartition("-")[2])


def fitting_rows(row: PublishedRow, rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """The rows whose constant is used for this one; never itself where it is judged."""
    rule = GROUPS[row.group].context
    if rule == "none":
        return []
    parity = 0 if rule == "half" else 1 - number_of(row) % 2
    return [other for other in rows if other.group == row.group and number_of(other) % 2 == parity]


def is_judged(row: PublishedRow) -> bool:
    """Whether the row counts: all do but those of a half that only fits."""
    return GROUPS[row.group].context != "half" or number_of(row) % 2 == 1


def summarise(judged: Sequence[JudgedRow]) -> list[GroupSummary]:
    """One summary per group and statistic, in the order of the rows."""
    keys = dict.fromkeys((row.group, row.statistic) for row in judged)
    return [
        _summary(group, statistic, [row for row in judged if (row.group, row.statistic) == (group, statistic)])
        for group, statistic in keys
    ]


def missed_targets(summaries: Sequence[GroupSummary]) -> list[str]:
    """The targets that were missed, in words; none if all were met."""
    return [line for summary in summaries for line in _missed(summary)]


def _predicted(row: PublishedRow, predictions: Mapping[Setting, PublishedPrediction]) -> int:
    """The statistic that the row measured, without a context."""
    assert row.setting is not None
    prediction = predictions[row.setting]
    if row.statistic == "peak_allocated" or prediction.peak_reserved_bytes is None:
        return prediction.peak_allocated_bytes
    return prediction.peak_reserved_bytes


def _context(row: PublishedRow, rows: Sequence[PublishedRow], bases: Mapping[str, int]) -> int:
    fitting = fitting_rows(row, rows)
    if not fitting:
        return GROUPS[row.group].known_context_bytes
    return round(statistics.median((other.measured_bytes or 0) - bases[other.id] for other in fitting))


def _judged(
    row: PublishedRow, predictions: Mapping[Setting, PublishedPrediction], base: int, context: int
) -> JudgedRow:
    assert row.setting is not None and row.capacity_bytes is not None
    prediction = predictions[row.setting]
    reserved = prediction.peak_reserved_bytes or prediction.peak_allocated_bytes
    least = prediction.minimum_feasible_bytes or prediction.peak_allocated_bytes
    return JudgedRow(
        id=row.id,
        group=row.group,
        title=row.title,
        statistic=row.statistic,
        measured_bytes=row.measured_bytes,
        predicted_bytes=base + context,
        context_bytes=context,
        bracket_bytes=(least + context, reserved + context),
        naive_bytes=NAIVE_BYTES_PER_PARAMETER * prediction.num_parameters + context,
        peer_predicted_bytes=row.peer_predicted_bytes,
        capacity_bytes=row.capacity_bytes,
        judged=is_judged(row),
        above_context=GROUPS[row.group].above_context,
        cause=row.cause,
    )


def _summary(group: str, statistic: str, rows: Sequence[JudgedRow]) -> GroupSummary:
    judged = [row for row in rows if row.judged]
    large = [row for row in judged if not row.is_small and row.judged_error is not None]
    errors = sorted(abs(row.judged_error or 0) for row in large)
    small = [abs(row.predicted_bytes - (row.measured_bytes or 0)) for row in judged if row.is_small]
    naive = [abs(_share(row, row.naive_bytes)) for row in large]
    peers = [
        abs(row.peer_predicted_bytes / row.measured_bytes - 1)
        for row in judged
        if row.peer_predicted_bytes is not None and row.measured_bytes is not None
    ]
    return GroupSummary(
        group=group,
        statistic=statistic,
        context_bytes=tuple(sorted({row.context_bytes for row in judged})),
        judged=len(judged),
        median=statistics.median(errors) if errors else None,
        percentile_95=errors[-(-95 * len(errors) // 100) - 1] if errors else None,
        largest=errors[-1] if errors else None,
        largest_small_bytes=max(small, default=None),
        in_bracket=None if statistic == "peak_allocated" else sum(row.in_bracket for row in judged),
        right_verdicts=sum(row.verdict.endswith("right") for row in judged),
        naive_median=statistics.median(naive) if naive else None,
        peer_median=statistics.median(peers) if peers else None,
    )


def _share(row: JudgedRow, guess: int) -> float:
    """The error of another guess, by the group's measure."""
    assert row.measured_bytes is not None
    whole = row.measured_bytes - (row.context_bytes if row.above_context else 0)
    return (guess - row.measured_bytes) / whole


def _missed(summary: GroupSummary) -> list[str]:
    target, name = GROUPS[summary.group], f"{GROUPS[summary.group].title} ({summary.statistic})"
    largest = target.largest_target
    if largest is not None and summary.statistic == "peak_reserved":
        largest *= 2  # what the allocator holds depends on more than the step
    checks = (
        ("median", summary.median, target.median_target),
        ("95th percentile", summary.percentile_95, target.percentile_95_target),
        ("largest", summary.largest, largest),
    )
    missed = [
        f"missed: {name}: {word} {100 * value:.2f} %, target {100 * limit:.2f} %"
        for word, value, limit in checks
        if value is not None and limit is not None and value > limit
    ]
    small, limit = summary.largest_small_bytes, target.small_target_bytes
    if small is not None and limit is not None and small > limit:
        missed.append(f"missed: {name}: a small row is off by {small / MIB:.1f} MiB, target {limit / MIB:.0f} MiB")
    if summary.peer_median is not None and summary.median is not None and summary.median >= summary.peer_median:
        missed.append(
            f"missed: {name}: median {100 * summary.median:.2f} % is not below the source's own "
            f"{100 * summary.peer_median:.2f} %"
        )
    if summary.group == "oom" and summary.right_verdicts < summary.judged:
        missed.append(f"missed: {name}: {summary.judged - summary.right_verdicts} of {summary.judged} said to fit")
    return missed
