"""The message of :class:`~lightning_memfit.errors.NoFeasiblePlanError`: what was tried, what is missing, what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_memfit.plan import Budget, Candidate, Forecast, PassedOver, PlanRequest
from lightning_memfit.search.reasons import strategy_words
from lightning_memfit.search.strategies import STRATEGIES, Spread
from lightning_memfit.units import MIB, format_bytes

# Needed whatever the batch: neither slicing nor checkpointing makes these smaller.
_FLOOR = ("parameters", "gradients", "optimizer_states")
_SHOWN_REASONS = 3

_Tried = Sequence[tuple[Candidate, int | None]]


def no_fit_message(
    *,
    budget: Budget,
    best: Forecast,
    measured_peak_bytes: int | None,
    passed_over: Sequence[PassedOver],
    request: PlanRequest,
    slicing_reason: str | None = None,
    states_reason: str | None = None,
    checkpointing_reason: str | None = None,
    withheld: Forecast | None = None,
) -> str:
    """Say that nothing fits: the budget, by how much the smallest plan misses it, what was tried, what would help.

    Args:
        budget: what a plan might have used.
        best: the smallest plan found.
        measured_peak_bytes: its measured peak, allocated bytes; ``None`` if it was never run.
        passed_over: the other candidates.
        request: what the user asked for; levers that it rules out are named.
        slicing_reason: why the batch may not be sliced further, in words that end with a way out if there is one.
        states_reason: why the optimizer's states may not be quantised; ``None`` if they may.
        checkpointing_reason: why nothing may be recomputed, if a warm-up showed that it may not.
        withheld: what would fit with another strategy, where nobody asked for one; ``None`` if nothing would.

    Returns:
        Plain text of several lines, without markup.
    """
    peak = best.predicted_peak_bytes if measured_peak_bytes is None else measured_peak_bytes
    missing = max(0, peak - budget.budget_bytes)
    how = "predicted" if measured_peak_bytes is None else "measured"
    is_reserved = measured_peak_bytes is None and best.memory.minimum_feasible_bytes is not None
    statistic = "least reserved" if is_reserved else "allocated"
    tried = [(best.candidate, peak), *((passed.candidate, passed.predicted_peak_bytes) for passed in passed_over)]
    lines = [
        f"No plan fits the budget of {format_bytes(budget.budget_bytes)}: the smallest one found needs "
        f"{format_bytes(peak)} ({how}, {statistic}), {format_bytes(missing)} too much.",
        f"Budget: {budget.reason}.",
        f"Smallest plan: {best.candidate.label}. {_peak_words(best)}",
        *_floor_lines(budget, best),
        "Tried (smallest peak of each):",
        *(f"  - {line}" for line in _tried_lines(tried, request)),
        *_ruled_out_lines(passed_over),
        *((f"{checkpointing_reason[:1].upper()}{checkpointing_reason[1:]}.",) if checkpointing_reason else ()),
        "What would help:",
        *(f"  - {line}" for line in _other_strategy(best, withheld)),
        *(f"  - {line}" for line in _ways_out(budget, best, peak, request, slicing_reason, states_reason)),
    ]
    return "\n".join(lines)


def _peak_words(best: Forecast) -> str:
    memory = best.memory
    parts = sorted(memory.by_category.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts if size)
    where = f" at {memory.peak_op}" if memory.peak_op else ""
    where += f" in module {memory.peak_module}" if memory.peak_module else ""
    if memory.peak_phase is None:
        return f"Where its peak occurs is not known: {shown}."
    return f"Its predicted peak is in the {memory.peak_phase.replace('_', ' ')}{where}: {shown}."


def _floor_lines(budget: Budget, best: Forecast) -> Iterator[str]:
    floor = _floor_bytes(best)
    if floor <= budget.budget_bytes:
        return
    sizes = (f"{name.replace('_', ' ')} {format_bytes(best.memory.by_category.get(name, 0))}" for name in _FLOOR)
    yield (
        f"{' + '.join(sizes)} = {format_bytes(floor)} alone are {format_bytes(floor - budget.budget_bytes)} above the "
        "budget: no slice is small enough."
    )


def _floor_bytes(best: Forecast) -> int:
    return sum(best.memory.by_category.get(name, 0) for name in _FLOOR)


def _tried_lines(tried: _Tried, request: PlanRequest) -> Iterator[str]:
    if len({strategy_words(candidate) for candidate, _ in tried}) > 1:
        yield _lever_line("strategy", tried, strategy_words, False)
    pinned_size = request.micro_batch_size is not None
    yield _lever_line("micro_batch_size", tried, lambda candidate: candidate.split.micro_batch_size, pinned_size)
    pinned_checkpointing = request.activation_checkpointing != "auto"
    yield _lever_line("activation_checkpointing", tried, _checkpointing_words, pinned_checkpointing)
    yield _lever_line("zeroing gradients before or after the forward", tried, _zeroing_words, False)
    yield _lever_line("precision", tried, lambda candidate: candidate.precision, request.precision is not None)
    pinned_states = request.optimizer_states != "auto"
    if pinned_states or len({candidate.optimizer_states for candidate, _ in tried}) > 1:
        yield _lever_line("optimizer_states", tried, lambda candidate: candidate.optimizer_states, pinned_states)
    pinned_step = request.optimizer_implementation != "auto"
    if pinned_step or len({_implementation_words(candidate) for candidate, _ in tried}) > 1:
        yield _lever_line("optimizer_implementation", tried, _implementation_words, pinned_step)


def _zeroing_words(candidate: Candidate) -> str:
    return "before" if candidate.zero_gradients_early else "after"


def _implementation_words(candidate: Candidate) -> str:
    if candidate.optimizer_states != "as-configured":
        return f"that of {candidate.optimizer_states} states"
    return candidate.optimizer_implementation


def _checkpointing_words(candidate: Candidate) -> str:
    if candidate.activation_checkpointing == "none":
        return "none"
    return f"{len(candidate.checkpointed_modules)} modules"


def _lever_line(lever: str, tried: _Tried, value_of: Callable[[Candidate], str | int], pinned: bool) -> str:
    smallest: dict[str | int, int | None] = {}
    for candidate, peak in tried:
        known = smallest.setdefault(value_of(candidate), peak)
        if peak is not None and (known is None or peak < known):
            smallest[value_of(candidate)] = peak
    values = sorted(smallest.items(), key=lambda item: -(item[1] or 0))
    shown = [f"{value} ({'not forecast' if peak is None else format_bytes(peak)})" for value, peak in values]
    if len(shown) > 6:  # the ends of a long ladder tell enough
        shown = [*shown[:2], "...", *shown[-3:]]
    return f"{lever}: {', '.join(shown)}{'; pinned by you' if pinned else ''}"


def _ruled_out_lines(passed_over: Sequence[PassedOver]) -> Iterator[str]:
    reasons = list(dict.fromkeys(passed.reason for passed in passed_over if passed.predicted_peak_bytes is None))
    if not reasons:
        return
    yield "Ruled out without a forecast:"
    yield from (f"  - {reason}" for reason in reasons[:_SHOWN_REASONS])
    if len(reasons) > _SHOWN_REASONS:
        yield f"  - and {len(reasons) - _SHOWN_REASONS} more reasons"


def _ways_out(
    budget: Budget,
    best: Forecast,
    peak: int,
    request: PlanRequest,
    slicing_reason: str | None,
    states_reason: str | None,
) -> Iterator[str]:
    yield _larger_budget(budget, peak, request)
    sizes, temporaries = best.memory.by_category, best.memory.by_category.get("temporaries", 0)
    if best.memory.peak_phase == "optimizer_step":
        if temporaries and best.candidate.optimizer_implementation != "fused":
            yield (
                f"an optimizer step with smaller temporaries (such as fused=True): these hold "
                f"{format_bytes(temporaries)} of the peak"
            )
    elif _floor_bytes(best) <= budget.budget_bytes:
        yield from _unused_levers(best, request, slicing_reason)
        of_samples = sum(sizes.get(name, 0) for name in ("activations", "temporaries", "inputs"))
        yield (
            f"shorter sequences or smaller inputs: activations, temporaries and inputs hold {format_bytes(of_samples)} "
            f"of the peak with a micro-batch of {best.candidate.split.micro_batch_size}"
        )
    states = sizes.get("optimizer_states", 0)
    if states:
        yield _smaller_states(states, best, request, states_reason)
    yield from _smaller_model(budget, best)


def _other_strategy(best: Forecast, withheld: Forecast | None) -> Iterator[str]:
    if withheld is None:
        return
    candidate, now = withheld.candidate, best.candidate.sharding
    assert candidate.sharding is not None, "what is withheld is spread by an engine"
    if candidate.sharding.engine == "fsdp2":
        what = "FSDP2 (ModelParallelStrategy)"
    elif now is not None and now.zero_stage == candidate.sharding.zero_stage:
        what = 'offload="auto"'
    else:
        name = Spread.of(candidate).name
        what = f'strategy="{name}"' if name in STRATEGIES else f"strategy={name}"
    ranks = candidate.split.ranks
    needs = f"{format_bytes(withheld.predicted_peak_bytes)} {'here' if ranks == 1 else 'on each device'}"
    if withheld.host_bytes is not None:
        held = "the optimizer" if candidate.offload == "optimizer" else "optimizer and parameters"
        what += f", {held} on the host"
        needs += f", and {format_bytes(withheld.host_bytes * ranks)} of the host's memory"
    yield f"{what}: {needs} (predicted: {candidate.label})"


def _smaller_states(states: int, best: Forecast, request: PlanRequest, states_reason: str | None) -> str:
    held = f"these hold {format_bytes(states)} of the peak"
    if best.candidate.optimizer_states == "as-configured":
        if request.optimizer_states == "as-configured":
            return f'optimizer_states="auto" (you set "as-configured"), an optimizer with smaller states: {held}'
        if states_reason is not None:
            return f"an optimizer with smaller states: {held}, and could not be quantised ({states_reason})"
    return f"an optimizer with smaller states: {held}"


def _larger_budget(budget: Budget, peak: int, request: PlanRequest) -> str:
    could_hold = budget.capacity_bytes - budget.non_torch_bytes
    on_device = f"this device could hold {format_bytes(could_hold)} now"
    spare_mib = (could_hold - peak) // MIB
    if request.budget is not None and peak <= could_hold:
        # A headroom that was asked for comes off a given budget, so that it has to be asked for on top.
        whole_mib = -(-(peak + budget.headroom_bytes) // MIB)
        return f'budget="{whole_mib}MiB" or more ({on_device})'
    if request.budget is None and spare_mib > 0:
        return f'headroom="{spare_mib}MiB" or less: {format_bytes(budget.headroom_bytes)} are kept free now'
    return f"a device or a memory limit that leaves {format_bytes(peak)} to torch: {on_device}"


def _unused_levers(best: Forecast, request: PlanRequest, slicing_reason: str | None) -> Iterator[str]:
    activations = format_bytes(best.memory.by_category.get("activations", 0))
    largest = best.candidate.split.micro_batch_size
    if request.activation_checkpointing == "none":
        yield f'activation_checkpointing="auto" (you set "none"): activations hold {activations} of the peak'
    if largest > 1 and request.micro_batch_size is not None:
        yield f'micro_batch_size="auto" (you set {request.micro_batch_size}): smaller slices need less'
    elif largest > 1 and slicing_reason is not None:
        yield f"smaller slices need less, but the batch is {slicing_reason.rstrip('.')}"
    elif largest > 1 and not request.allow_inexact_slicing:
        yield (
            f"allow_inexact_slicing=True: slices stop at {largest} samples; smaller ones need less, but the result "
            "may differ from that of the undivided batch"
        )
    if request.precision == "32-true":
        yield f'precision="bf16-mixed": may halve part of the {activations} of activations'


def _smaller_model(budget: Budget, best: Forecast) -> Iterator[str]:
    floor, parameters = _floor_bytes(best), best.memory.num_parameters
    if parameters and floor > budget.budget_bytes:
        most = budget.budget_bytes * parameters // floor
        yield (
            f"a smaller model: {floor / parameters:.3g} bytes per parameter allow fewer than {most:,} parameters "
            f"(this one has {parameters:,})"
        )
