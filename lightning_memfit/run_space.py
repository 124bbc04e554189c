"""What a run may choose from: levers that its optimizer, engine, precision and blocks allow."""

from __future__ import annotations

from dataclasses import replace

from lightning_memfit.apply import fsdp2
from lightning_memfit.apply.deepspeed_config import frozen_on_the_device, is_deepspeed
from lightning_memfit.apply.optimizer_levers import OptimizerFacts
from lightning_memfit.errors import TraceError
from lightning_memfit.forecasting import device_precisions
from lightning_memfit.plan import Precision
from lightning_memfit.preparation import Preparation
from lightning_memfit.search.checkpointing import recomputable
from lightning_memfit.search.levers import SearchSpace, search_space
from lightning_memfit.search.strategies import Considered, other_strategies, ways_of_a_run

MANUAL_ZEROING = "manual optimization: training_step itself zeroes gradients"
"""Why gradients are not zeroed early there."""
SAVED_PRECISION = "that of the checkpoint: DeepSpeed opens its optimizer states in no other"
"""Why a run that is resumed keeps its precision."""


def space_of(prepared: Preparation, slicing_obstacle: str | None) -> SearchSpace:
    """What may be chosen for a run.

    Args:
        prepared: what was looked at.
        slicing_obstacle: why its batches may not be sliced; ``None`` if they may.

    Raises:
        ConfigurationError: if a pinned lever cannot be had.
    """
    if prepared.sharding is not None and prepared.request.precision is not None:
        prepared.sharding.check_precision(prepared.request.precision)
    facts = _optimizer_facts(prepared)
    implementations, states_reason = facts.implementations, facts.quantisation_obstacle
    if prepared.sharding is not None and prepared.sharding.engine == "deepspeed":
        implementations = ()
        states_reason = states_reason or "DeepSpeed makes an optimizer of its own of the user's"
    if prepared.gathers:
        fsdp2.check_steppable(facts.name, prepared.request.optimizer_implementation)
        implementations = fsdp2.steppable_implementations(facts.name, implementations)
        states_reason = states_reason or fsdp2.reason_states_not_quantised(prepared.sharding)
    found = recomputable(prepared.module, prepared.request.activation_checkpointing, prepared.recomputed)
    mixing_obstacle = fsdp2.reason_precision_kept(prepared.sharding)
    if mixing_obstacle is None and prepared.trainer.gradient_clip_val and facts.unscales_by_itself:
        mixing_obstacle = "in mixed precision Lightning refuses to clip the gradients of a fused optimizer"
    return search_space(
        prepared.request,
        prepared.whole,
        blocks=found.blocks,
        matched=found.matched,
        recomputed_anyway=found.anyway,
        slicing_reason=slicing_obstacle,
        precisions=_precisions(prepared, mixing_obstacle),
        precision_reason=_precision_reason(prepared) or mixing_obstacle,
        implementations=implementations,
        states_reason=states_reason,
        states_left=facts.left_as_configured,
        gradients_reason=None if prepared.module.automatic_optimization else MANUAL_ZEROING,
        strategies=_ways(prepared, found.blocks, facts.zero_obstacle),
        host_budget_bytes=prepared.host_budget_bytes,
    )


def _ways(prepared: Preparation, blocks: tuple[str, ...], zero_obstacle: str | None) -> Considered:
    elements = [parameter.numel() for parameter in prepared.module.parameters() if parameter.requires_grad]
    ways = ways_of_a_run(prepared.sharding, prepared.offload, elements, asked=prepared.request.offload)
    if is_deepspeed(prepared.trainer.strategy) and frozen_on_the_device(prepared.trainer.strategy, prepared.module):
        ways = replace(ways, spreads=tuple(each for each in ways.spreads if each.offload != "parameters"))
    others = other_strategies(
        prepared.sharding,
        ways.spreads[-1].offload,
        ranks=prepared.num_ranks,
        device_kind=prepared.device.kind,
        blocks=blocks,
        parameter_elements=elements,
        zero_obstacle=zero_obstacle,
    )
    return replace(ways, withheld=others)


def cpu_adam_obstacle(prepared: Preparation) -> str | None:
    """Why the optimizer cannot be exchanged for DeepSpeed's on the host, in words; ``None`` if it can."""
    return _optimizer_facts(prepared).cpu_adam_obstacle


def _precisions(prepared: Preparation, mixing_obstacle: str | None) -> tuple[Precision, ...]:
    fixed = prepared.saved_precision or prepared.engine_precision
    if fixed is not None:
        return (fixed,)
    return ("32-true",) if mixing_obstacle else device_precisions(prepared.device)


def _precision_reason(prepared: Preparation) -> str | None:
    if prepared.saved_precision is not None:
        return SAVED_PRECISION
    return None if prepared.engine_precision is None else "that of your DeepSpeed configuration"


def _optimizer_facts(prepared: Preparation) -> OptimizerFacts:
    try:
        return prepared.forecaster.facts
    except TraceError as error:
        obstacle = f"the optimizer could not be made before training begins ({error})"
        return OptimizerFacts(
            name="the optimizer", implementations=(), quantisation_obstacle=obstacle, cpu_adam_obstacle=obstacle
        )
