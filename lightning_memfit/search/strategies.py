"""Which ways to spread training over devices of one kind are considered, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import Candidate, Offload, OptimizerStates, PlanRequest
from lightning_memfit.predict.ddp import BUCKET_BYTES
from lightning_memfit.predict.zero_layout import (
    DEEPSPEED_BUCKET_ELEMENTS,
    LIGHTNING_BUCKET_ELEMENTS,
    lightning_sharding,
)
from lightning_memfit.sharding import Sharding, ZeroStage

STRATEGIES = (
    "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload", "deepspeed_stage_3",
    "deepspeed_stage_3_offload", "fsdp2",
)  # fmt: skip
"""Names of strategies, as Lightning's registry has them, and ``"fsdp2"`` for its ``ModelParallelStrategy``.

Source: ``register_strategies`` in ``lightning/pytorch/strategies/deepspeed.py`` 2.6: the optimizer is on the host under
``deepspeed_stage_2_offload``, optimizer and parameters under ``deepspeed_stage_3_offload``.
"""
_ON_HOST: dict[str, Offload] = {"deepspeed_stage_2_offload": "optimizer", "deepspeed_stage_3_offload": "parameters"}
_ZERO_STAGES: tuple[ZeroStage, ...] = (1, 2, 3)
_STAGES_THAT_OFFLOAD = ("deepspeed_stage_2", "deepspeed_stage_3")
_ASKS_FOR_THE_HOST = ("_offload'", "'optimizer'", "'parameters'")
_OF_ONE_DEVICE = ("deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
_ON_CUDA_ALONE = "Lightning's DeepSpeedStrategy runs on CUDA GPUs alone"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where a step runs: over which devices, and what lies on the host."""

    sharding: Sharding | None = None
    """How training is spread over several devices; ``None`` on one."""
    offload: Offload = "never"
    """What is kept on the host."""

    @classmethod
    def of(cls, candidate: Candidate) -> Spread:
        """That of a candidate."""
        return cls(sharding=candidate.sharding, offload=candidate.offload)

    @property
    def name(self) -> str | None:
        """One of :data:`STRATEGIES`, or the call that makes it where Lightning has no name; ``None`` on one device."""
        if self.sharding is None:
            return None
        if self.sharding.engine != "deepspeed":
            return self.sharding.engine
        stage = self.sharding.zero_stage
        named = f"deepspeed_stage_{stage}" + ("" if self.offload == "never" else "_offload")
        if _ON_HOST.get(named, "never") == self.offload:
            return named
        return f"DeepSpeedStrategy(stage={stage}, offload_optimizer=True)"

    def is_asked_for(self, request: PlanRequest, strategy: str) -> bool:
        """Whether it is what the user named; the stage's name and what is offloaded may be given apart."""
        if request.offload not in ("auto", "never", self.offload):
            return False
        if strategy == "auto" or self.name == strategy:
            return True
        stage = None if self.sharding is None else self.sharding.zero_stage
        return request.offload == self.offload != "never" and strategy == f"deepspeed_stage_{stage}"

    def obstacle(self, states: OptimizerStates) -> str | None:
        """Why the optimizer's states cannot be of a format here; ``None`` if they can."""
        if states == "as-configured" or self.sharding is None or self.sharding.engine == "ddp":
            return None
        if self.sharding.engine == "fsdp2":
            return "bitsandbytes steps no shards of fully_shard (bitsandbytes-foundation/bitsandbytes#1633)"
        return "DeepSpeed makes the optimizer's parameters anew, so that MemFit does not quantise its states"


@dataclass(frozen=True, kw_only=True)
class Considered:
    """The ways that are searched, and why."""

    spreads: tuple[Spread, ...]
    """What departs least from a plain run first."""
    bucket_reasons: Mapping[int, str] = field(default_factory=dict)
    """Why DeepSpeed's buckets have so many elements, by that number; those that are not here are the strategy's own."""
    left_out: tuple[str, ...] = ()
    """Ways that are not considered, each with its reason."""
    withheld: tuple[Spread, ...] = ()
    """Ways that nobody asked for and that cost more than those that are searched: an error says which of them fits."""
    given: bool = False
    """Whether the user named the strategy."""


ONE_DEVICE = Considered(spreads=(Spread(),))


def considered_strategies(
    request: PlanRequest,
    *,
    num_devices: int,
    device_kind: str,
    strategy: str = "auto",
    blocks: Sequence[str] = (),
    parameter_elements: Sequence[int] = (),
    zero_obstacle: str | None = None,
) -> Considered:
    """The ways to spread training over equal devices.

    DDP departs least: every rank is as on one device. The others divide more and more; what lies on the host is of
    tier 2, the optimizer first and then the parameters of stage 3 with it. On one GPU there is that alone beside the
    plain run: ZeRO-2 and 3 over one rank. There is nothing to divide then; stage 3 does without one of two buckets and
    a copy of the largest gradient.

    Args:
        request: what the user asked for.
        num_devices: devices of one kind, one process each.
        device_kind: ``"cpu"`` or ``"cuda"``.
        strategy: one of :data:`STRATEGIES`, or ``"auto"``.
        blocks: repeated blocks of the module, which FSDP2 gathers one by one.
        parameter_elements: elements of each trainable parameter.
        zero_obstacle: why the optimizer cannot be divided by ZeRO; ``None`` if it can.

    Raises:
        ConfigurationError: if the number of devices, the strategy or what is offloaded cannot be had.
    """
    _check(num_devices, strategy, request)
    _check_deepspeed(num_devices, strategy, request, device_kind, zero_obstacle)
    bucket, bucket_reason = bucket_elements(parameter_elements)
    if num_devices == 1:
        return _on_one_device(request, device_kind, strategy, (bucket, bucket_reason), zero_obstacle)
    left_out = []
    spreads = [*_ddp(num_devices)]
    if zero_obstacle is not None:
        left_out.append(f"DeepSpeed: {zero_obstacle}")
    elif device_kind == "cuda":
        spreads += _zero(num_devices, bucket, request)
    else:
        left_out.append(f"DeepSpeed: {_ON_CUDA_ALONE}")
    spreads += _fsdp2(num_devices, blocks)
    spreads = [spread for spread in spreads if spread.is_asked_for(request, strategy)]
    if strategy == "auto" and request.offload == "never":
        left_out.append("offload to the host: offload='never'")
    if request.optimizer_states == "8bit":
        spreads = _with_quantised_states(spreads, strategy, request)
    uses_buckets = any(spread.sharding is not None and spread.sharding.zero_stage for spread in spreads)
    return Considered(
        spreads=tuple(spreads),
        bucket_reasons={bucket: bucket_reason} if uses_buckets else {},
        left_out=tuple(left_out),
        given=strategy != "auto",
    )


def _on_one_device(
    request: PlanRequest,
    device_kind: str,
    strategy: str,
    buckets: tuple[int, str],
    zero_obstacle: str | None,
) -> Considered:
    """The plain run, and DeepSpeed with its optimizer on the host: behind it, instead of it, or withheld."""
    bucket, bucket_reason = buckets
    reasons = {bucket: bucket_reason}
    offloaded = tuple(_offloaded([_staged(stage, 1, bucket) for stage in (2, 3)]))
    if _asks_for_deepspeed(strategy, request):
        spreads = [spread for spread in offloaded if spread.is_asked_for(request, strategy)]
        if request.optimizer_states == "8bit":
            spreads = _with_quantised_states(spreads, strategy, request)
        return Considered(spreads=tuple(spreads), bucket_reasons=reasons, given=strategy != "auto")
    obstacle = f"the device is the host, and {_ON_CUDA_ALONE}" if device_kind != "cuda" else zero_obstacle
    if obstacle is None and request.optimizer_states == "8bit":
        obstacle = offloaded[0].obstacle("8bit")
    if request.offload == "never":
        return ONE_DEVICE if obstacle else replace(ONE_DEVICE, bucket_reasons=reasons, withheld=offloaded)
    if obstacle is not None:
        return replace(ONE_DEVICE, left_out=(f"offload to the host: {obstacle}",))
    return Considered(spreads=(*ONE_DEVICE.spreads, *offloaded), bucket_reasons=reasons)


def ways_of_a_run(
    sharding: Sharding | None,
    offload: Offload,
    parameter_elements: Sequence[int],
    *,
    asked: Literal["never", "auto", "optimizer", "parameters"] = "never",
) -> Considered:
    """The ways in which the strategy that a Trainer has may spread a run.

    As it is set up; with smaller buckets; under DeepSpeed with the optimizer on the host, where the user allows it;
    under FSDP2 also with gradients that are exchanged in the last slice of a batch alone, which keeps them whole until
    then.

    Args:
        sharding: as it is set up; ``None`` on one device without an engine.
        offload: what it keeps on the host.
        parameter_elements: elements of each parameter that is trained.
        asked: what the user lets MemFit keep on the host: ``"never"`` leaves it as it is set up, ``"auto"`` may move
            the optimizer there, and in stage 3 the parameters too; ``"optimizer"`` and ``"parameters"`` must. What the
            strategy itself keeps there stays.
    """
    if sharding is None:
        return ONE_DEVICE
    spreads, reasons = [Spread(sharding=sharding, offload=offload)], dict[int, str]()
    if sharding.engine == "ddp" and not sharding.gradient_as_bucket_view:
        spreads.append(Spread(sharding=replace(sharding, gradient_as_bucket_view=True)))
    if sharding.engine == "fsdp2" and sharding.synchronisation == "slice":
        spreads.append(Spread(sharding=replace(sharding, synchronisation="step")))
    if sharding.engine == "deepspeed":
        for most, why in (bucket_elements(parameter_elements), least_bucket_elements(parameter_elements)):
            reasons.setdefault(most, why)
        sizes = dict.fromkeys((sharding, *(_with_buckets(sharding, most) for most in reasons)))  # without doubles
        reasons.pop(sharding.reduce_bucket_elements or 0, None)
        places = _places(sharding, offload, asked)
        spreads = [Spread(sharding=size, offload=place) for place in places for size in sizes]
    return Considered(spreads=tuple(spreads), bucket_reasons=reasons, given=True)


def _places(
    sharding: Sharding, offload: Offload, asked: Literal["never", "auto", "optimizer", "parameters"]
) -> tuple[Offload, ...]:
    """What may be on the host, the least first."""
    if asked == "never":
        return (offload,)
    if asked != "auto":
        return (asked,)
    most: Offload = "parameters" if sharding.zero_stage == 3 else "optimizer"
    known: tuple[Offload, ...] = get_args(Offload)
    return known[known.index(offload) : known.index(most) + 1]


def _with_buckets(sharding: Sharding, most: int) -> Sharding:
    """The same with buckets of at most so many elements."""
    reduced, gathered = (
        min(DEEPSPEED_BUCKET_ELEMENTS if size is None else size, most)
        for size in (sharding.reduce_bucket_elements, sharding.allgather_bucket_elements)
    )
    return replace(sharding, reduce_bucket_elements=reduced, allgather_bucket_elements=gathered)


def other_strategies(
    sharding: Sharding | None,
    offload: Offload,
    *,
    ranks: int,
    device_kind: str,
    blocks: Sequence[str] = (),
    parameter_elements: Sequence[int] = (),
    zero_obstacle: str | None = None,
) -> tuple[Spread, ...]:
    """The ways in which a run could be spread if its Trainer had another strategy, or its optimizer were on the host.

    None for a run under FSDP2, whose module is sharded already.

    Args:
        sharding: as the Trainer's strategy spreads it; ``None`` on one device.
        offload: what that strategy keeps on the host.
        ranks: devices of the run.
        device_kind: ``"cpu"`` or ``"cuda"``.
        blocks: repeated blocks of the module.
        parameter_elements: elements of each parameter that is trained.
        zero_obstacle: why the optimizer cannot be divided by ZeRO; ``None`` if it can.
    """
    if sharding is not None and sharding.engine == "fsdp2":
        return ()
    stage = None if sharding is None else sharding.zero_stage
    if stage is None:
        considered = considered_strategies(
            PlanRequest(offload="auto"),
            num_devices=ranks,
            device_kind=device_kind,
            blocks=blocks,
            parameter_elements=parameter_elements,
            zero_obstacle=zero_obstacle,
        )
        return tuple(each for each in considered.spreads if each.sharding is not None and each.sharding.engine != "ddp")
    bucket, _ = bucket_elements(parameter_elements)
    higher = [_staged(each, ranks, bucket) for each in _ZERO_STAGES if each > stage]
    here = [] if offload != "never" or ranks == 1 else [Spread(sharding=each) for each in higher]
    own, places = _staged(stage, ranks, bucket), get_args(Offload)
    as_it_is = Spread(sharding=own, offload=offload)
    away = [each for each in _offloaded([own, *higher]) if places.index(each.offload) >= places.index(offload)]
    return (*here, *(each for each in away if each != as_it_is))


def _with_quantised_states(spreads: Sequence[Spread], strategy: str, request: PlanRequest) -> list[Spread]:
    possible = [spread for spread in spreads if spread.obstacle("8bit") is None]
    if not possible:
        asked = f"strategy={strategy!r}" if strategy != "auto" else f"offload={request.offload!r}"
        ranks = max((spread.sharding.ranks for spread in spreads if spread.sharding is not None), default=1)
        other = "strategy='ddp'" if ranks > 1 else "offload='never'"
        raise ConfigurationError(
            f"optimizer_states='8bit' cannot be had with {asked}: {spreads[0].obstacle('8bit')}. Choose "
            f"{other}, or optimizer_states='as-configured'."
        )
    return possible


def bucket_elements(parameter_elements: Sequence[int]) -> tuple[int, str]:
    """Elements of DeepSpeed's buckets, and why.

    A bucket is taken whole whatever is in it. It holds the largest parameter and as much as DDP's (25 MiB in 16 bits),
    and no more than Lightning's default.

    >>> bucket_elements([8_000_000, 300])[0], bucket_elements([262_000_000])[0]
    (13107200, 200000000)
    """
    least, largest = BUCKET_BYTES // 2, max(parameter_elements, default=0)
    chosen = min(LIGHTNING_BUCKET_ELEMENTS, max(least, largest))
    if chosen == LIGHTNING_BUCKET_ELEMENTS:
        return chosen, f"Lightning's own {chosen:,} elements: the largest parameter has {largest:,}"
    what = f"the largest parameter, {largest:,}," if largest >= least else f"as much as DDP's, {least:,} elements,"
    return chosen, (
        f"a bucket takes its whole size whatever is in it: {chosen:,} elements hold {what} and Lightning's own are "
        f"{LIGHTNING_BUCKET_ELEMENTS:,}"
    )


def least_bucket_elements(parameter_elements: Sequence[int]) -> tuple[int, str]:
    """The fewest elements of buckets in which every parameter finds room, and why one would have them.

    >>> least_bucket_elements([8_000, 300])[0]
    8000
    """
    largest = max(1, *parameter_elements) if parameter_elements else 1
    return (
        largest,
        f"the largest parameter and no more: larger ones do not fit; {largest:,} elements are sent at a time",
    )


def check_num_devices(num_devices: object) -> None:
    """Refuse what is no number of devices.

    Raises:
        ConfigurationError: with what was given.
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ConfigurationError(f"num_devices={num_devices!r} must be a whole number of at least 1.")


def _check(num_devices: int, strategy: str, request: PlanRequest) -> None:
    check_num_devices(num_devices)
    known = ", ".join(map(repr, ("auto", *STRATEGIES)))
    if strategy not in ("auto", *STRATEGIES):
        raise ConfigurationError(f"strategy={strategy!r} is not known. Choose one of: {known}.")
    apart = request.offload in ("optimizer", "parameters") and strategy in _STAGES_THAT_OFFLOAD
    if num_devices == 1 and strategy not in ("auto", *_OF_ONE_DEVICE) and not apart:
        raise ConfigurationError(
            f"strategy={strategy!r} is planned for several devices, and num_devices=1. Give num_devices=2 or more, or "
            f"leave it out; for one there are {' and '.join(map(repr, _OF_ONE_DEVICE))}."
        )
    if strategy.endswith("_offload") and request.offload == "never":
        raise ConfigurationError(f"strategy={strategy!r} offloads, and offload='never' forbids it. Leave one out.")
    if request.offload not in ("optimizer", "parameters") or strategy == "auto":
        return
    if not strategy.endswith("_offload") and not apart:
        raise ConfigurationError(
            f"strategy={strategy!r} keeps everything on the devices, and offload={request.offload!r} asks for the "
            "host. Leave one out."
        )
    if request.offload == "parameters" and "_3" not in strategy:
        raise ConfigurationError(
            f"strategy={strategy!r} with offload='parameters': DeepSpeed divides parameters, and keeps them on the "
            "host, in stage 3 alone. Choose 'deepspeed_stage_3_offload', or offload='optimizer'."
        )
    if _ON_HOST.get(strategy, request.offload) != request.offload:
        raise ConfigurationError(
            f"strategy={strategy!r} keeps the parameters on the host too, as Lightning's does, and "
            f"offload={request.offload!r} the optimizer alone. Leave one out, or give strategy='deepspeed_stage_3' "
            "with it."
        )


def _asks_for_deepspeed(strategy: str, request: PlanRequest) -> bool:
    return strategy.startswith("deepspeed") or request.offload in ("optimizer", "parameters")


def _check_deepspeed(
    num_devices: int, strategy: str, request: PlanRequest, device_kind: str, zero_obstacle: str | None
) -> None:
    if not _asks_for_deepspeed(strategy, request):
        return
    asked = f"strategy={strategy!r}" if strategy != "auto" else f"offload={request.offload!r}"
    if device_kind != "cuda":
        host = ", and the host is the device" if asked.endswith(_ASKS_FOR_THE_HOST) else ""
        other = "Choose 'ddp' or 'fsdp2'" if num_devices > 1 and strategy != "auto" else "Leave it out"
        raise ConfigurationError(f"{asked} cannot be had on a CPU: {_ON_CUDA_ALONE}{host}. {other}, or plan for a GPU.")
    if zero_obstacle is not None:
        raise ConfigurationError(f"{asked} cannot be had: {zero_obstacle}")


def _ddp(ranks: int) -> list[Spread]:
    plain = Sharding(engine="ddp", ranks=ranks)
    return [Spread(sharding=plain), Spread(sharding=replace(plain, gradient_as_bucket_view=True))]


def _zero(ranks: int, bucket: int, request: PlanRequest) -> list[Spread]:
    staged = [_staged(stage, ranks, bucket) for stage in _ZERO_STAGES]
    spreads = [Spread(sharding=each) for each in staged]
    return spreads if request.offload == "never" else [*spreads, *_offloaded(staged[1:])]


def _offloaded(staged: Sequence[Sharding]) -> list[Spread]:
    """The optimizer on the host in each stage, then the parameters of stage 3 with it."""
    places: tuple[Offload, ...] = ("optimizer", "parameters")
    return [
        Spread(sharding=each, offload=place)
        for place in places
        for each in staged
        if place == "optimizer" or each.zero_stage == 3
    ]


def _staged(stage: ZeroStage, ranks: int, bucket: int) -> Sharding:
    return replace(lightning_sharding(stage, ranks), reduce_bucket_elements=bucket, allgather_bucket_elements=bucket)


def _fsdp2(ranks: int, blocks: Sequence[str]) -> list[Spread]:
    once = Sharding(engine="fsdp2", ranks=ranks, shard_groups=("", *blocks))
    return [Spread(sharding=once), Spread(sharding=replace(once, synchronisation="slice"))]
