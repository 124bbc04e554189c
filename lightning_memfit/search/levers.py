"""The space that is searched: which settings of each lever the request, the module and the batch allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_memfit.errors import BatchArithmeticError, ConfigurationError
from lightning_memfit.plan import (
    BatchSplit,
    Candidate,
    Checkpointing,
    OptimizerImplementation,
    OptimizerStates,
    PlanRequest,
    Precision,
    balanced_slices,
)
from lightning_memfit.search.strategies import ONE_DEVICE, Considered, Spread

_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class CheckpointingOption:
    """One way to set activation checkpointing."""

    kind: Checkpointing
    """``"none"``, ``"blocks"`` or ``"patterns"``."""
    modules: tuple[str, ...] = ()
    """Qualified names of the modules that are recomputed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Every lever but the number of slices and the moment at which gradients are zeroed."""

    precision: Precision
    """Precision in Lightning's words."""
    optimizer_states: OptimizerStates
    """Format of the optimizer's states."""
    optimizer_implementation: OptimizerImplementation
    """Implementation of the optimizer's step."""
    checkpointing: CheckpointingOption
    """What is recomputed."""
    spread: Spread = Spread()  # noqa: RUF009 - a frozen value
    """Over which devices it runs, and what lies on the host."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be chosen. Each lever's values begin with what departs least from the run as it is."""

    precisions: tuple[Precision, ...]
    """Precisions that device and user allow."""
    whole: BatchSplit
    """The effective batch with one slice per Lightning batch."""
    checkpointing: tuple[CheckpointingOption, ...]
    """In the order of recomputed work, least first."""
    num_slices: tuple[int, ...]
    """Numbers of slices per Lightning batch, fewest first; each gives another micro-batch size."""
    optimizer_states: tuple[OptimizerStates, ...] = ("as-configured",)
    """Formats of the optimizer's states."""
    optimizer_implementations: tuple[OptimizerImplementation, ...] = ("as-configured",)
    """Implementations of the optimizer's step; quantised states have one of their own."""
    host_implementation: OptimizerImplementation = "as-configured"
    """Implementation of the step where the optimizer is kept on the host."""
    host_implementation_reason: str | None = None
    """Why it is that one, if it was looked for."""
    strategies: Considered = ONE_DEVICE
    """Ways to spread training over several devices."""
    host_budget_bytes: int | None = None
    """What all ranks of a node may keep in the host's memory; ``None`` where that is not known."""
    recomputed_anyway: tuple[str, ...] = ()
    """Qualified names of the blocks that the model recomputes by itself; they are not recomputed a second time."""
    precision_reason: str | None = None
    """Why there is only one precision, if it is not the device."""
    slicing_reason: str | None = None
    """Why only one slice is allowed, if it is; or why the number is fixed."""
    states_reason: str | None = None
    """Why the states may not be quantised, if they may not."""
    states_left: str | None = None
    """Which of several optimizers keep their states when others' are quantised, and why."""
    gradients_reason: str | None = None
    """Why gradients may not be zeroed early, if they may not."""
    checkpointing_reason: str | None = None
    """Why nothing may be recomputed, if a warm-up showed that it may not."""

    def built(self, candidate: Candidate) -> SearchSpace:
        """The same space with what an engine that was built for a candidate holds fast."""
        space = replace(self, strategies=replace(self.strategies, spreads=(Spread.of(candidate),)))
        if candidate.sharding is None or candidate.sharding.engine != "deepspeed":
            return space
        return replace(
            space,
            precisions=(candidate.precision,),
            optimizer_states=(candidate.optimizer_states,),
            optimizer_implementations=(candidate.optimizer_implementation,),
            host_implementation=candidate.optimizer_implementation,
        )

    def with_host_implementation(self, implementation: OptimizerImplementation, reason: str) -> SearchSpace:
        """The same space with an optimizer on the host stepped in a given way, and why."""
        return replace(self, host_implementation=implementation, host_implementation_reason=reason)

    def without_recomputation(self, reason: str) -> SearchSpace:
        """The same space with nothing recomputed."""
        return replace(self, checkpointing=(CheckpointingOption(kind="none"),), checkpointing_reason=reason)

    def settings(self, tier: int) -> Iterator[Setting]:
        """The settings of one harm tier; of equal ones, those that recompute least come first."""
        for spread, precision, states in itertools.product(
            self.strategies.spreads, self.precisions, self.optimizer_states
        ):
            if spread.obstacle(states) is not None:
                continue
            for implementation, option in itertools.product(
                self._implementations(spread, precision, states), self.checkpointing
            ):
                setting = Setting(
                    precision=precision,
                    optimizer_states=states,
                    optimizer_implementation=implementation,
                    checkpointing=option,
                    spread=spread,
                )
                if self.candidate(setting, self.num_slices[0], zero_gradients_early=False).harm_tier == tier:
                    yield setting

    def _implementations(
        self, spread: Spread, precision: Precision, states: OptimizerStates
    ) -> tuple[OptimizerImplementation, ...]:
        if states != "as-configured":
            return ("as-configured",)
        if spread.offload != "never":
            return (self.host_implementation,)
        if precision == "bf16-true":  # in 16 bits implementations are not equal
            return self.optimizer_implementations[:1]
        return self.optimizer_implementations

    def candidate(self, setting: Setting, num_slices: int, *, zero_gradients_early: bool) -> Candidate:
        """The candidate at one point of the space."""
        sizes = balanced_slices(self.whole.loader_batch_size, num_slices)
        return Candidate(
            precision=setting.precision,
            activation_checkpointing=setting.checkpointing.kind,
            checkpointed_modules=setting.checkpointing.modules,
            split=replace(self.whole, slice_sizes=sizes),
            zero_gradients_early=zero_gradients_early,
            optimizer_states=setting.optimizer_states,
            optimizer_implementation=setting.optimizer_implementation,
            offload=setting.spread.offload,
            sharding=setting.spread.sharding,
        )

    def is_of_another_engine(self, candidate: Candidate) -> bool:
        """Whether another engine spreads a candidate over devices than the one that departs least from a plain run.

        On one device: whether it is another than the first stage of ZeRO. The third has hooks around every module.
        """
        spread = (each.sharding for each in self.strategies.spreads if each.sharding is not None)
        least = next(spread, None)
        if least is None or candidate.sharding is None:
            return False
        if least.ranks == 1:
            return candidate.sharding.zero_stage != least.zero_stage
        return candidate.sharding.engine != least.engine

    def departures(self, candidate: Candidate) -> int:
        """How many levers a candidate sets otherwise than the least that the space allows."""
        least, least_spread = self.checkpointing[0], self.strategies.spreads[0]
        return sum(
            (
                candidate.precision != self.precisions[0],
                candidate.optimizer_states != self.optimizer_states[0],
                candidate.optimizer_implementation != self.optimizer_implementations[0],
                candidate.checkpointed_modules != least.modules,
                candidate.split.num_slices != self.num_slices[0],
                candidate.zero_gradients_early,
                (candidate.sharding, candidate.offload) != (least_spread.sharding, least_spread.offload),
            )
        )


TIERS = (0, 1, 2, 3)
"""Harm tiers, least harmful first."""


def search_space(
    request: PlanRequest,
    whole: BatchSplit,
    *,
    blocks: tuple[str, ...],
    matched: tuple[str, ...] = (),
    recomputed_anyway: tuple[str, ...] = (),
    slicing_reason: str | None = None,
    precisions: tuple[Precision, ...] = ("32-true",),
    precision_reason: str | None = None,
    implementations: tuple[OptimizerImplementation, ...] = (),
    states_reason: str | None = "not looked at",
    states_left: str | None = None,
    gradients_reason: str | None = None,
    strategies: Considered = ONE_DEVICE,
    host_budget_bytes: int | None = None,
) -> SearchSpace:
    """Put the space together.

    Args:
        request: what the user asked for.
        whole: the effective batch with one slice per Lightning batch.
        blocks: repeated blocks found in the module.
        matched: modules that the user's patterns match, without those that are recomputed anyway.
        recomputed_anyway: blocks that the model recomputes by itself.
        slicing_reason: why the batch may not be sliced; ``None`` if it may.
        precisions: what ``precision="auto"`` may choose from, what a plain Trainer does first.
        precision_reason: why there is only one, if it is not the device.
        implementations: what ``optimizer_implementation="auto"`` may choose from beside the configured one.
        states_reason: why the optimizer's states cannot be quantised; ``None`` if they can.
        states_left: which of several optimizers keep their states when others' are quantised, and why.
        gradients_reason: why gradients cannot be zeroed early; ``None`` if they can.
        strategies: ways to spread training over several devices, where there is a choice.
        host_budget_bytes: what all ranks of a node may keep in the host's memory; ``None`` where that is not known.

    Raises:
        BatchArithmeticError: if ``micro_batch_size`` cannot be had.
        ConfigurationError: if blocks were asked for and there are none, or 8-bit states cannot be had.
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
    asked = request.optimizer_implementation
    return SearchSpace(
        precisions=precisions if request.precision is None else (request.precision,),
        whole=whole,
        checkpointing=_checkpointing_options(request, blocks, matched, recomputed_anyway),
        recomputed_anyway=recomputed_anyway,
        num_slices=counts,
        optimizer_states=_states(request, states_reason),
        optimizer_implementations=_implementations(implementations, strategies) if asked == "auto" else (asked,),
        host_implementation="as-configured" if asked == "auto" else asked,
        precision_reason=precision_reason,
        slicing_reason=reason,
        states_reason=states_reason,
        states_left=states_left,
        gradients_reason=gradients_reason,
        strategies=strategies,
        host_budget_bytes=host_budget_bytes,
    )


def _implementations(
    offered: tuple[OptimizerImplementation, ...], strategies: Considered
) -> tuple[OptimizerImplementation, ...]:
    """Of several strategies, each would be followed with each: ``fused`` takes no more than tensors one by one.

    Those that step on the host have an optimizer of their own.
    """
    if sum(spread.offload == "never" for spread in strategies.spreads) > 1 and "fused" in offered:
        offered = tuple(each for each in offered if each != "single-tensor")
    return ("as-configured", *offered)


def _states(request: PlanRequest, obstacle: str | None) -> tuple[OptimizerStates, ...]:
    asked = request.optimizer_states
    if asked == "8bit":
        if request.optimizer_implementation not in ("auto", "as-configured"):
            raise ConfigurationError(
                f"optimizer_implementation={request.optimizer_implementation!r} cannot be had with "
                "optimizer_states='8bit': quantised states have one implementation. Leave one of the two out."
            )
        if obstacle is not None:
            raise ConfigurationError(
                f"optimizer_states='8bit' cannot be had: {obstacle.rstrip('.')}. Use optimizer_states='auto', which "
                "leaves such an optimizer as it is, or change the optimizer."
            )
        return ("8bit",)
    if asked == "auto" and obstacle is None:
        return ("as-configured", "8bit")
    return ("as-configured",)


def _pinned_count(micro_batch_size: int, samples: int, slicing_reason: str | None) -> int:
    if micro_batch_size > samples:
        raise BatchArithmeticError(
            f"micro_batch_size={micro_batch_size} is more than the {samples} samples of the loader's batch. "
            f"Use at most {samples}, or make the loader's batch larger."
        )
    count = -(-samples // micro_batch_size)
    if count > 1 and slicing_reason:
        raise BatchArithmeticError(
            f"micro_batch_size={micro_batch_size} would divide the loader's batch of {samples} samples, but "
            f"{slicing_reason.removeprefix('not sliced: ').rstrip('.')}. Use micro_batch_size={samples}"
            f"{', or allow_inexact_slicing=True' if 'allow_inexact_slicing' in slicing_reason else ''}."
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
    request: PlanRequest, blocks: tuple[str, ...], matched: tuple[str, ...], recomputed_anyway: tuple[str, ...]
) -> tuple[CheckpointingOption, ...]:
    none = CheckpointingOption(kind="none")
    every_block = CheckpointingOption(kind="blocks", modules=blocks)
    asked = request.activation_checkpointing
    if isinstance(asked, tuple) and matched:
        return (CheckpointingOption(kind="patterns", modules=matched),)
    if asked == "none" or isinstance(asked, tuple):
        return (none,)
    if asked == "blocks":
        if not blocks and recomputed_anyway:
            return (none,)
        if not blocks:
            raise ConfigurationError(
                "activation_checkpointing='blocks' found no repeated blocks: no ModuleList or Sequential of the model "
                "has two members of equal structure. Name modules by patterns, such as ('encoder.layers.*',)."
            )
        return (every_block,)
    return (none, *_first_blocks(blocks), every_block) if blocks else (none,)


def _first_blocks(blocks: tuple[str, ...]) -> Iterator[CheckpointingOption]:
    """The first quarter, half and three quarters of the blocks.

    The first ones, because the last are recomputed while everything else is still saved, so that they save least.
    """
    counts = sorted({len(blocks) * part // _PARTS for part in range(1, _PARTS)} - {0, len(blocks)})
    for count in counts:
        yield CheckpointingOption(kind="blocks", modules=blocks[:count])
