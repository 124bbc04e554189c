"""The arithmetic of the effective batch: it is formed exactly, or an error names the nearest values that can be.

E = ``effective_batch_size``, R = ranks, L = the loader's batch size, A = ``accumulate_grad_batches``: E = R x A x L.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_memfit.errors import BatchArithmeticError


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """What the loader and the accumulation must be so that the effective batch is exact."""

    effective_batch_size: int
    """Samples per optimizer step over all ranks."""
    loader_batch_size: int
    """Samples per Lightning batch on one rank."""
    accumulate_grad_batches: int
    """Lightning batches per optimizer step."""
    rebuilt: bool
    """Whether the loader must be rebuilt because its batch size changes."""
    reason: str
    """Why, in words."""

    @property
    def rebuilt_batch_size(self) -> int | None:
        """Batch size with which the loader is rebuilt; ``None`` if it stays as it is."""
        return self.loader_batch_size if self.rebuilt else None


def resolve_loader(
    *,
    effective_batch_size: int | None,
    ranks: int,
    loader_batch_size: int,
    accumulate_grad_batches: int,
    can_rebuild: bool,
    has_batch_norm: bool,
    allow_inexact_slicing: bool,
    rebuild_obstacle: str | None = None,
) -> LoaderPlan:
    """Find the loader's batch size and the accumulation that form the effective batch exactly.

    Args:
        effective_batch_size: samples per optimizer step over all ranks; ``None`` keeps what the run does today.
        ranks: devices that each take a share.
        loader_batch_size: samples per Lightning batch on one rank, as the user's loader yields them.
        accumulate_grad_batches: Lightning batches per optimizer step, as the Trainer was told.
        can_rebuild: whether the loader can be rebuilt with another batch size.
        has_batch_norm: whether the model has normalisation over the batch in train mode, whose statistics change
            with the loader's batch size.
        allow_inexact_slicing: whether the user allows results that differ from those of the loader's own batch.
        rebuild_obstacle: why the loader cannot be rebuilt, for the message.

    Raises:
        BatchArithmeticError: if the effective batch cannot be formed; the message names the nearest values that can.

    >>> plan = resolve_loader(effective_batch_size=256, ranks=1, loader_batch_size=32, accumulate_grad_batches=1,
    ...                       can_rebuild=True, has_batch_norm=False, allow_inexact_slicing=False)
    >>> plan.loader_batch_size, plan.accumulate_grad_batches, plan.rebuilt
    (32, 8, False)
    """
    step_samples = ranks * accumulate_grad_batches * loader_batch_size
    if effective_batch_size is None or (accumulate_grad_batches != 1 and step_samples == effective_batch_size):
        return LoaderPlan(
            effective_batch_size=step_samples,
            loader_batch_size=loader_batch_size,
            accumulate_grad_batches=accumulate_grad_batches,
            rebuilt=False,
            reason=_kept_reason(effective_batch_size, ranks, accumulate_grad_batches, loader_batch_size),
        )
    if accumulate_grad_batches != 1:
        raise BatchArithmeticError(
            f"effective_batch_size={effective_batch_size} samples, but Trainer(accumulate_grad_batches="
            f"{accumulate_grad_batches}) x loader batch {loader_batch_size} x {_ranks(ranks)} makes {step_samples} "
            "samples per optimizer step. Leave accumulate_grad_batches at 1, so that MemFit can set it, or ask for "
            f"effective_batch_size={step_samples}."
        )
    if effective_batch_size % ranks:
        raise BatchArithmeticError(
            f"effective_batch_size={effective_batch_size} samples cannot be shared equally by {ranks} ranks. "
            f"{_nearest(effective_batch_size, multiple=ranks, fits=_ranks(ranks))}"
        )
    rank_samples = effective_batch_size // ranks
    if rank_samples % loader_batch_size == 0:
        accumulate = rank_samples // loader_batch_size
        return LoaderPlan(
            effective_batch_size=effective_batch_size,
            loader_batch_size=loader_batch_size,
            accumulate_grad_batches=accumulate,
            rebuilt=False,
            reason=(
                f"the loader stays as it is: {_ranks(ranks)} x {accumulate} batches x {loader_batch_size} samples = "
                f"{effective_batch_size}"
            ),
        )
    return _rebuilt_plan(
        effective_batch_size=effective_batch_size,
        ranks=ranks,
        loader_batch_size=loader_batch_size,
        can_rebuild=can_rebuild,
        has_batch_norm=has_batch_norm,
        allow_inexact_slicing=allow_inexact_slicing,
        rebuild_obstacle=rebuild_obstacle,
    )


def largest_divisor(number: int, *, at_most: int) -> int:
    """Largest divisor of ``number`` that is not above ``at_most``, both at least 1.

    >>> largest_divisor(100, at_most=32)
    25
    """
    return max(divisor for divisor in _divisors(number) if divisor <= at_most)


def optimizer_steps_per_epoch(num_batches: int | None, accumulate: int) -> int | None:
    """Optimizer steps in one epoch: the last, short window also steps, as Lightning does at the end of an epoch.

    Args:
        num_batches: Lightning batches per epoch on one rank; ``None`` where the loader has no length.
        accumulate: Lightning batches per optimizer step.

    >>> optimizer_steps_per_epoch(10, 4)
    3
    """
    return None if num_batches is None else -(-num_batches // accumulate)


def last_window_is_short(num_batches: int | None, accumulate: int) -> bool | None:
    """Whether the last optimizer step of an epoch has fewer Lightning batches than the others.

    ``None`` where the loader has no length and more than one batch is accumulated, so that nobody can tell.

    >>> last_window_is_short(10, 4), last_window_is_short(12, 4), last_window_is_short(None, 1)
    (True, False, False)
    """
    if accumulate == 1:
        return False
    return None if num_batches is None else num_batches % accumulate != 0


def _rebuilt_plan(
    *,
    effective_batch_size: int,
    ranks: int,
    loader_batch_size: int,
    can_rebuild: bool,
    has_batch_norm: bool,
    allow_inexact_slicing: bool,
    rebuild_obstacle: str | None,
) -> LoaderPlan:
    rank_samples = effective_batch_size // ranks
    problem = (
        f"effective_batch_size={effective_batch_size} samples make {rank_samples} per rank, which is not a multiple of "
        f"the loader's batch of {loader_batch_size}"
    )
    nearest = _nearest(effective_batch_size, multiple=ranks * loader_batch_size, fits="this loader")
    if not can_rebuild:
        raise BatchArithmeticError(
            f"{problem}, and the loader cannot be rebuilt with another batch size"
            f"{f' ({rebuild_obstacle})' if rebuild_obstacle else ''}. {nearest} Or give the loader a batch size that "
            f"divides {rank_samples}, such as {largest_divisor(rank_samples, at_most=loader_batch_size)}."
        )
    divisor = largest_divisor(rank_samples, at_most=loader_batch_size)
    objection = _objection(divisor, loader_batch_size, has_batch_norm)
    if objection is not None and not allow_inexact_slicing:
        raise BatchArithmeticError(
            f"{problem}. Rebuilding the loader with {divisor} samples per batch would form it, but {objection}. "
            f"{nearest} Or pass allow_inexact_slicing=True to rebuild the loader all the same."
        )
    accumulate = rank_samples // divisor
    return LoaderPlan(
        effective_batch_size=effective_batch_size,
        loader_batch_size=divisor,
        accumulate_grad_batches=accumulate,
        rebuilt=True,
        reason=(
            f"the loader is rebuilt with batches of {divisor} instead of {loader_batch_size}, the largest size that "
            f"divides {rank_samples} (same sampler, same order of samples): {_ranks(ranks)} x {accumulate} batches x "
            f"{divisor} samples = {effective_batch_size}"
            f"{f'; allow_inexact_slicing=True permits it although {objection}' if objection else ''}"
        ),
    )


def _objection(divisor: int, loader_batch_size: int, has_batch_norm: bool) -> str | None:
    if has_batch_norm:
        return "the model normalises over the batch, so that its statistics would change"
    if 2 * divisor < loader_batch_size:
        return f"that is less than half of the loader's batch of {loader_batch_size}"
    return None


def _kept_reason(asked: int | None, ranks: int, accumulate: int, loader_batch_size: int) -> str:
    product = f"{_ranks(ranks)} x {accumulate} batches x {loader_batch_size} samples = "
    product += str(ranks * accumulate * loader_batch_size)
    if asked is None:
        return f"effective_batch_size was left out, so the run keeps its own: {product}"
    return f"the loader and accumulate_grad_batches stay as they are: {product}"


def _ranks(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def _nearest(effective_batch_size: int, *, multiple: int, fits: str) -> str:
    below = effective_batch_size // multiple * multiple
    above = below + multiple
    if below == 0:
        return f"The smallest effective_batch_size that works with {fits} is {above}."
    return f"The nearest effective_batch_size values that work with {fits} are {below} and {above}."


def _divisors(number: int) -> Iterable[int]:
    candidate = 1
    while candidate * candidate <= number:
        if number % candidate == 0:
            yield candidate
            yield number // candidate
        candidate += 1
