"""The space that is searched: which settings of each lever the request, the module and the batch allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import BatchSplit, Candidate, Checkpointing, PlanRequest, Precision, balanced_slices


@dataclass(frozen=True, kw_only=True)
class CheckpointingOption:
    """One way to set activation checkpointing."""

    kind: Checkpointing
    """``"none"``, ``"blocks"`` or ``"patterns"``."""
    modules: tuple[str, ...] = ()
    """Qualified names of the modules that are recomputed."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be chosen."""

    precision: Precision
    """Given, or the default."""
    whole: BatchSplit
    """The effective batch with one slice per Lightning batch."""
    checkpointing: tuple[CheckpointingOption, ...]
    """In the order of recomputed work, least first."""
    num_slices: tuple[int, ...]
    """Numbers of slices per Lightning batch, fewest first; each gives another micro-batch size."""
    slicing_reason: str | None = None
    """Why only one slice is allowed, if it is; or why the number is fixed."""

    def candidate(self, option: CheckpointingOption, num_slices: int, *, zero_gradients_early: bool) -> Candidate:
        """The candidate at one point of the space."""
        sizes = balanced_slices(self.whole.loader_batch_size, num_slices)
        return Candidate(
            precision=self.precision,
            activation_checkpointing=option.kind,
            checkpointed_modules=option.modules,
            split=replace(self.whole, slice_sizes=sizes),
            zero_gradients_early=zero_gradients_early,
        )


def search_space(
    request: PlanRequest,
    whole: BatchSplit,
    *,
    blocks: tuple[str, ...],
    matched: tuple[str, ...] = (),
    slicing_reason: str | None = None,
) -> SearchSpace:
    """Put the space together.

    Args:
        request: what the user asked for.
        whole: the effective batch with one slice per Lightning batch.
        blocks: repeated blocks found in the module.
        matched: modules that the user's patterns match.
        slicing_reason: why the batch may not be sliced; ``None`` if it may.

    Raises:
        ConfigurationError: if ``micro_batch_size`` cannot be had, or blocks were asked for and there are none.
    """
    samples = whole.loader_batch_size
    if request.micro_batch_size is None:
        counts = (1,) if slicing_reason else _distinct_counts(samples)
        reason = slicing_reason
    else:
        counts, reason = (
            (_pinned_count(request.micro_batch_size, samples, slicing_reason),),
            "micro_batch_size is given",
        )
    return SearchSpace(
        precision=request.precision or "32-true",
        whole=whole,
        checkpointing=_checkpointing_options(request, blocks, matched),
        num_slices=counts,
        slicing_reason=reason,
    )


def _pinned_count(micro_batch_size: int, samples: int, slicing_reason: str | None) -> int:
    if micro_batch_size > samples:
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size} is more than the {samples} samples of the loader's batch. "
            f"Use at most {samples}, or make the loader's batch larger."
        )
    count = -(-samples // micro_batch_size)
    if count > 1 and slicing_reason:
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size} would divide the loader's batch of {samples} samples, but "
            f"{slicing_reason.removeprefix('not sliced: ').rstrip('.')}. Use micro_batch_size={samples}, or "
            "allow_inexact_slicing=True."
        )
    return count


def _distinct_counts(samples: int) -> tuple[int, ...]:
    """Numbers of slices that each give another largest slice, fewest first.

    >>> _distinct_counts(6)
    (1, 2, 3, 6)
    """
    counts: list[int] = []
    largest = samples + 1
    for count in range(1, samples + 1):
        size = -(-samples // count)
        if size < largest:
            counts.append(count)
            largest = size
    return tuple(counts)


def _checkpointing_options(
    request: PlanRequest, blocks: tuple[str, ...], matched: tuple[str, ...]
) -> tuple[CheckpointingOption, ...]:
    none = CheckpointingOption(kind="none")
    every_block = CheckpointingOption(kind="blocks", modules=blocks)
    asked = request.activation_checkpointing
    if isinstance(asked, tuple):
        return (CheckpointingOption(kind="patterns", modules=matched),)
    if asked == "none":
        return (none,)
    if asked == "blocks":
        if not blocks:
            raise ConfigurationError(
                "activation_checkpointing='blocks' found no repeated blocks: no ModuleList or Sequential of the model "
                "has two members of equal structure. Name modules by patterns, such as ('encoder.layers.*',)."
            )
        return (every_block,)
    return (none, every_block) if blocks else (none,)
