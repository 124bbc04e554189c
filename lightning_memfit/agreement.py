"""What the ranks of a run must have in common before one plan is made for all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_memfit.errors import RanksDisagreeError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Budget, PlanRequest
from lightning_memfit.units import format_bytes

OF_ONE_RANK = ("batch shapes", "cores")
"""Parts of a fingerprint that may differ between ranks: each reads its own share of the data, on its own node."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank tells the others of itself."""

    request: PlanRequest
    """What it was asked for."""
    fingerprint: Mapping[str, str]
    """What a plan for it is made for."""
    num_batches: int | None
    """Lightning batches per epoch; ``None`` if unknown."""
    device: DeviceSpec
    """Its device."""
    budget: Budget
    """What it may use."""
    batch_bytes: int
    """Bytes of the largest batch that it found."""
    batch_shapes: str
    """Its shapes, in words."""
    host_budget_bytes: int | None = None
    """Bytes that the run may keep in the memory of its hosts, if all have as much as this one; ``None``: unknown."""


def check_agreement(facts: Sequence[RankFacts]) -> None:
    """Refuse a run whose ranks are about to do different things, before anything is exchanged in training.

    Args:
        facts: by rank.

    Raises:
        RanksDisagreeError: naming what differs, and what each of the two ranks has.
    """
    differences = list(_differences(facts))
    if differences:
        listed = "".join(f"\n  - {line}" for line in differences)
        raise RanksDisagreeError(
            f"The {len(facts)} ranks of this run are not about to train the same:{listed}\nOne plan is made for all of "
            "them. Build model, optimizer, loader and MemFit alike on every rank, whatever its rank is."
        )


def check_evaluations(batches: Sequence[int | None]) -> None:
    """Refuse evaluations of different lengths where each step of one gathers parameters from every rank.

    Args:
        batches: by rank: batches of all validation loaders, before Lightning's sampler shares them among ranks; 0
            where it does not validate, ``None`` if unknown.

    Raises:
        RanksDisagreeError: naming two ranks and what each has.
    """
    known = [(rank, count) for rank, count in enumerate(batches) if count is not None]
    for rank, count in known[1:]:
        first, expected = known[0]
        if count != expected:
            raise RanksDisagreeError(
                f"Validation loaders of {expected} batches on rank {first} and of {count} on rank {rank}, before ranks "
                "share them: each step gathers parameters from all ranks, so that one of them would wait for ever. "
                "Give every rank the same loaders, or set limit_val_batches=."
            )


def _differences(facts: Sequence[RankFacts]) -> list[str]:
    found: dict[str, str] = {}
    first = facts[0]
    for rank, other in enumerate(facts[1:], start=1):
        if other.request != first.request:
            found.setdefault("request", f"settings of MemFit: {_settings(first, other, rank)}")
        parts = dict.fromkeys((*first.fingerprint, *other.fingerprint))
        for part in parts:
            here, there = first.fingerprint.get(part), other.fingerprint.get(part)
            if part not in OF_ONE_RANK and here != there:
                found.setdefault(part, f"{part}: rank 0 has {here}, rank {rank} has {there}")
        if None not in (first.num_batches, other.num_batches) and first.num_batches != other.num_batches:
            found.setdefault(
                "batches",
                f"batches per epoch: rank 0 has {first.num_batches}, rank {rank} has {other.num_batches}, so that one "
                "of them would wait for ever at the end of the epoch. Use Lightning's DistributedSampler "
                "(use_distributed_sampler=True), or limit_train_batches=",
            )
    return list(found.values())


def _settings(first: RankFacts, other: RankFacts, rank: int) -> str:
    names = [name for name in vars(first.request) if getattr(first.request, name) != getattr(other.request, name)]
    return ", ".join(
        f"{name}={getattr(first.request, name)!r} on rank 0 and {getattr(other.request, name)!r} on rank {rank}"
        for name in names
    )


def poorest(facts: Sequence[RankFacts]) -> tuple[int, Budget]:
    """The rank that may use the least, and its budget, which every plan must keep to.

    Args:
        facts: by rank.
    """
    rank = min(range(len(facts)), key=lambda each: facts[each].budget.budget_bytes)
    budget, most = facts[rank].budget, max(each.budget.budget_bytes for each in facts)
    if most == budget.budget_bytes:
        return rank, budget
    words = f"that of rank {rank}, which has the least of {len(facts)} (the most is {format_bytes(most)})"
    return rank, replace(budget, reason=f"{budget.reason}; {words}")


def least_host_budget(facts: Sequence[RankFacts]) -> int | None:
    """Bytes that the run may keep in the memory of its hosts; ``None`` where no rank knows.

    Args:
        facts: by rank.
    """
    return min((each.host_budget_bytes for each in facts if each.host_budget_bytes is not None), default=None)


def most_demanding(facts: Sequence[RankFacts]) -> int | None:
    """The rank with the largest batch; ``None`` where all have the same shapes, so that each keeps its own."""
    if len({each.batch_shapes for each in facts}) == 1:
        return None
    return max(range(len(facts)), key=lambda each: facts[each].batch_bytes)
