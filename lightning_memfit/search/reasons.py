"""Why each lever is set as it is, and why a candidate was not taken, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lightning_memfit.plan import Budget, Candidate, Choice, Forecast, Offload, PassedOver, PlanRequest
from lightning_memfit.search.levers import SearchSpace
from lightning_memfit.search.strategies import Spread
from lightning_memfit.sharding import Sharding
from lightning_memfit.units import format_bytes, format_seconds


def beyond_the_host(forecast: Forecast, host_budget_bytes: int | None) -> int:
    """By how many bytes all ranks of a forecast keep more on the host than they may; 0 where nobody knows."""
    if forecast.host_bytes is None or host_budget_bytes is None:
        return 0
    return max(0, forecast.host_bytes * forecast.candidate.split.ranks - host_budget_bytes)


def reason_passed_over(
    other: Forecast, chosen: Forecast, budget: Budget, *, host_budget_bytes: int | None = None
) -> str:
    """Why ``other`` was not taken.

    Args:
        other: a candidate that was not taken.
        chosen: the one that was.
        budget: what a plan may use on a device.
        host_budget_bytes: what all ranks may keep on the host; ``None`` where that is not known.
    """
    over = other.predicted_peak_bytes - budget.budget_bytes
    if over > 0:
        return f"does not fit: {format_bytes(over)} over the budget{_other_buckets(other, chosen)}"
    over = beyond_the_host(other, host_budget_bytes)
    if over:
        return (
            f"does not fit: {format_bytes(over)} more on the host than the {format_bytes(host_budget_bytes or 0)} given"
        )
    mine, taken = other.candidate, chosen.candidate
    if mine.harm_tier < taken.harm_tier:
        return f"estimated to fit, but nothing of harm tier {mine.harm_tier} did when it was forecast exactly"
    if mine.harm_tier > taken.harm_tier:
        return f"fits, but is of harm tier {mine.harm_tier} where tier {taken.harm_tier} fits"
    if mine.kept_on_host > taken.kept_on_host:
        # Parameters are looked at there only where nothing else of the tier fits.
        return "fits, but moves the optimizer to the host, which the plan does without"
    seconds, fastest = other.predicted_step_seconds, chosen.predicted_step_seconds
    sends_more = (other.exchanged_bytes or 0) > (chosen.exchanged_bytes or 0)
    if sends_more and not other.seconds_count_exchanges:
        return (
            f"fits, but sends more: {format_bytes(other.exchanged_bytes or 0)} per rank and step, the plan "
            f"{format_bytes(chosen.exchanged_bytes or 0)}; how fast the link is, is not known"
        )
    if seconds is not None and fastest is not None:
        compared = f"predicted {format_seconds(seconds)} per step, the plan {format_seconds(fastest)}"
        if seconds > fastest:
            return f"fits, but is slower: {compared}"
        return f"fits, but is not enough faster to depart from the run as it is: {compared}"
    if mine.split.num_slices > taken.split.num_slices:
        return f"fits, but divides the batch into {mine.split.num_slices} slices instead of {taken.split.num_slices}"
    if len(mine.checkpointed_modules) > len(taken.checkpointed_modules):
        return "fits, but recomputes more"
    return "fits, but departs further from what the run does today"


def choices_of(
    request: PlanRequest,
    budget: Budget,
    space: SearchSpace,
    chosen: Forecast,
    others: Sequence[Forecast],
    *,
    ruled_out: Sequence[PassedOver] = (),
) -> tuple[Choice, ...]:
    """Every lever's value with its reason and its cost.

    Args:
        request: what the user asked for.
        budget: what it may use.
        space: what could be chosen.
        chosen: the candidate that was taken.
        others: the forecasts that it was compared with.
        ruled_out: what was not forecast, because of what lies on a device all the time.
    """
    return (
        _batch_choice(request, chosen),
        *_strategy_choices(budget, space, chosen, others, ruled_out),
        _precision_choice(request, space, chosen, others),
        _checkpointing_choice(request, budget, space, chosen, others),
        _slicing_choice(space, chosen, others),
        _zeroing_choice(space, chosen),
        _states_choice(request, space, chosen),
        _implementation_choice(request, space, chosen, others),
    )


def _batch_choice(request: PlanRequest, chosen: Forecast) -> Choice:
    split = chosen.candidate.split
    asked = "as asked" if request.effective_batch_size is not None else "what the run does today"
    ranks = "1 rank" if split.ranks == 1 else f"{split.ranks} ranks"
    return Choice(
        lever="effective_batch_size",
        value=str(split.effective_batch_size),
        reason=(
            f"{asked}: {ranks} x accumulate_grad_batches {split.accumulate_grad_batches} x loader batch "
            f"{split.loader_batch_size}"
        ),
    )


def _strategy_choices(
    budget: Budget,
    space: SearchSpace,
    chosen: Forecast,
    others: Sequence[Forecast],
    ruled_out: Sequence[PassedOver],
) -> Iterator[Choice]:
    """The strategy, what lies on the host and the buckets; nothing on one device."""
    candidate = chosen.candidate
    if candidate.sharding is None:
        return
    if space.strategies.given or _offload_is_asked_for(space):
        reason = "as given"
        changed = _changed_of_the_given(space.strategies.spreads[0].sharding, candidate.sharding)
        if changed is not None:
            reason += f" but for {changed}: {_why_not_less(budget, space, chosen, others, ruled_out)}"
    elif (candidate.sharding, candidate.offload) == (space.strategies.spreads[0].sharding, "never"):
        reason = "departs least from a run on one device, and fits"
    else:
        reason = _why_not_less(budget, space, chosen, others, ruled_out)
    if chosen.exchanged_bytes:
        reason += f"; each rank sends {format_bytes(chosen.exchanged_bytes)} per step"
    yield Choice(lever="strategy", value=strategy_words(candidate), reason=reason)
    if candidate.offload != "never":
        ranks = candidate.split.ranks
        held = (chosen.host_bytes or 0) * ranks
        available = space.host_budget_bytes
        known = "how much the host has is not known" if available is None else f"of {format_bytes(available)} there"
        who = f"{ranks} ranks keep" if ranks > 1 else who_keeps(candidate.offload)
        why = _why_on_host(space, candidate)
        yield Choice(
            lever="offload",
            value=candidate.offload,
            reason=f"tier 2: {why}; {who} {format_bytes(held)} in the host's memory, {known}",
        )
    if candidate.sharding.zero_stage is not None:
        size = candidate.sharding.reduce_bucket_elements
        reason = space.strategies.bucket_reasons.get(size or 0, "as the strategy has them")
        value = _bucket_words(candidate.sharding)
        yield Choice(lever="buckets", value=value, reason=reason)


def _changed_of_the_given(given: Sharding | None, chosen: Sharding) -> str | None:
    """What MemFit set otherwise in a strategy of the user's, beside what has a choice of its own."""
    if given is None:
        return None
    if given.gradient_as_bucket_view != chosen.gradient_as_bucket_view:
        return "the gradients"
    return "when gradients are exchanged" if given.synchronisation != chosen.synchronisation else None


def who_keeps(offload: Offload) -> str:
    """Subject and verb of what one rank has on the host."""
    return "optimizer and parameters keep" if offload == "parameters" else "the optimizer keeps"


def _why_on_host(space: SearchSpace, candidate: Candidate) -> str:
    """Why as much is on the host as there is; ``"as given"`` where no way was searched that keeps less there."""
    less = {spread.offload for spread in space.strategies.spreads}
    if candidate.offload == space.strategies.spreads[0].offload:
        return "as given"
    devices = f"the {'GPUs' if candidate.split.ranks > 1 else 'GPU'} alone"
    if candidate.offload == "optimizer" or "optimizer" not in less:
        return f"nothing fits on {devices}"
    if "never" not in less:
        return "nothing fits with the optimizer alone on the host"
    return f"nothing fits on {devices}, or with the optimizer alone on the host"


def _offload_is_asked_for(space: SearchSpace) -> bool:
    """Whether nothing is searched that keeps the optimizer on the device."""
    return all(spread.offload != "never" for spread in space.strategies.spreads)


def _why_not_less(
    budget: Budget,
    space: SearchSpace,
    chosen: Forecast,
    others: Sequence[Forecast],
    ruled_out: Sequence[PassedOver],
) -> str:
    """Against the least departure: what it would need, or how long it would take."""
    least = space.strategies.spreads[0]
    plain = [other for other in others if Spread.of(other.candidate) == least]
    if not plain:
        return next((each.reason.removeprefix("does not fit: ") for each in ruled_out), "fits")
    fitting = [other for other in plain if other.predicted_peak_bytes <= budget.budget_bytes]
    if not fitting:
        smallest = min(other.predicted_peak_bytes for other in plain)
        name = "one device without offload" if least.sharding is None else least.sharding.label
        return f"{name} needs {format_bytes(smallest)} at the least"
    best = min(fitting, key=lambda other: other.predicted_step_seconds or 0.0)
    if best.candidate.harm_tier < chosen.candidate.harm_tier:
        return f"{strategy_words(best.candidate)} was estimated to fit, and did not when it was forecast exactly"
    if best.predicted_step_seconds is None or chosen.predicted_step_seconds is None:
        return "recomputes or divides less than DDP"
    return (
        f"faster: {format_seconds(chosen.predicted_step_seconds)} per step predicted, "
        f"{strategy_words(best.candidate)} {format_seconds(best.predicted_step_seconds)}"
    )


def _other_buckets(other: Forecast, chosen: Forecast) -> str:
    """What a label does not tell of two candidates of ZeRO."""
    mine, taken = other.candidate.sharding, chosen.candidate.sharding
    if mine is None or taken is None or mine.zero_stage is None or mine.zero_stage != taken.zero_stage:
        return ""
    same = mine.reduce_bucket_elements == taken.reduce_bucket_elements
    return "" if same else f", with buckets of {_bucket_words(mine)}"


def _bucket_words(sharding: Sharding) -> str:
    size = sharding.reduce_bucket_elements
    return "DeepSpeed's own size" if size is None else f"{size:,} elements"


def strategy_words(candidate: Candidate) -> str:
    """A strategy in words, such as ``"ZeRO-3 over 8, optimizer on the host"``."""
    if candidate.sharding is None:
        return "one device"
    words = candidate.sharding.label
    if candidate.sharding.gradient_as_bucket_view:
        words += ", gradients as views of the buckets"
    if candidate.sharding.engine == "fsdp2" and candidate.sharding.synchronisation == "slice":
        words += ", gradients exchanged after every slice"
    held = {"optimizer": ", optimizer on the host", "parameters": ", optimizer and parameters on the host"}
    return words + held.get(candidate.offload, "")


def _precision_choice(request: PlanRequest, space: SearchSpace, chosen: Forecast, others: Iterable[Forecast]) -> Choice:
    value = chosen.candidate.precision
    if request.precision is not None:
        reason = "as given"
    elif len(space.precisions) == 1:
        reason = space.precision_reason or "the only one that this device offers"
    else:
        reason = _against_rivals(chosen, others, lambda candidate: candidate.precision)
    return Choice(lever="precision", value=value, reason=reason)


def _against_rivals(chosen: Forecast, others: Iterable[Forecast], value_of: Callable[[Candidate], str]) -> str:
    """Compare with the fastest candidate that has another value of a lever."""
    mine = value_of(chosen.candidate)
    rivals = [other for other in others if value_of(other.candidate) != mine]
    timed = [rival for rival in rivals if rival.predicted_step_seconds is not None]
    if not timed or chosen.predicted_step_seconds is None:
        return "departs least from the run as it is" if rivals else "nothing else was looked at"
    best = min(timed, key=lambda rival: rival.predicted_step_seconds or 0.0)
    compared = (
        f"{format_seconds(chosen.predicted_step_seconds)} per step predicted, {value_of(best.candidate)} "
        f"{format_seconds(best.predicted_step_seconds or 0.0)}"
    )
    if best.predicted_step_seconds is not None and best.predicted_step_seconds < chosen.predicted_step_seconds:
        return f"departs least from the run as it is, and the other is not clearly faster or does not fit: {compared}"
    return f"faster: {compared}"


def _checkpointing_choice(
    request: PlanRequest, budget: Budget, space: SearchSpace, chosen: Forecast, others: Sequence[Forecast]
) -> Choice:
    candidate = chosen.candidate
    if candidate.activation_checkpointing == "none":
        reason = _why_nothing_is_recomputed(request, space)
        return Choice(lever="activation_checkpointing", value="none", reason=reason)
    if request.activation_checkpointing != "auto":
        reason = "as given"
    elif any(
        not other.candidate.checkpointed_modules and other.predicted_peak_bytes <= budget.budget_bytes
        for other in others
    ):
        reason = "faster than more slices"
    else:
        reason = "does not fit without, at any slice size"
    if chosen.flops and chosen.recomputed_flops is not None:
        share = chosen.recomputed_flops / max(1, chosen.flops - chosen.recomputed_flops)
        reason += f"; costs {share:.0%} more FLOPs"
    value = _modules(candidate.checkpointed_modules)
    return Choice(lever="activation_checkpointing", value=value, reason=reason)


def _why_nothing_is_recomputed(request: PlanRequest, space: SearchSpace) -> str:
    if len(space.checkpointing) > 1:
        return "fits without recomputing anything"
    ruled_out = "as given" if request.activation_checkpointing == "none" else space.checkpointing_reason
    anyway = f"the model itself recomputes {_modules(space.recomputed_anyway)}" if space.recomputed_anyway else None
    return "; ".join(why for why in (ruled_out, anyway) if why is not None) or "no repeated blocks found"


def note_on_recomputation(names: tuple[str, ...]) -> str:
    """What the user should know of blocks that the model recomputes by itself."""
    return (
        f"the model recomputes activations of {_modules(names)} by itself: that is left as it is and part of the "
        "forecast, and MemFit does not recompute them a second time"
    )


def _modules(names: tuple[str, ...]) -> str:
    return f"{len(names)} module{'' if len(names) == 1 else 's'} ({_abbreviated(names)})"


def _abbreviated(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


def _slicing_choice(space: SearchSpace, chosen: Forecast, others: Sequence[Forecast]) -> Choice:
    split = chosen.candidate.split
    fewer = [
        other
        for other in others
        if other.candidate.split.num_slices < split.num_slices and _differs_in_slices_only(other, chosen)
    ]
    value = f"{split.micro_batch_size}" + ("" if split.num_slices == 1 else f" ({split.num_slices} slices per batch)")
    if space.slicing_reason:
        reason = space.slicing_reason
    elif split.num_slices == 1:
        reason = "the whole batch fits"
    elif fewer:
        nearest = min(fewer, key=lambda forecast: forecast.predicted_peak_bytes)
        reason = (
            f"the fewest slices that fit: {nearest.candidate.split.num_slices} would need "
            f"{format_bytes(nearest.predicted_peak_bytes)}; costs {split.num_slices} smaller passes per batch"
        )
    else:
        reason = f"costs {split.num_slices} smaller passes per batch"
    return Choice(lever="micro_batch_size", value=value, reason=reason)


def _differs_in_slices_only(other: Forecast, chosen: Forecast) -> bool:
    return _other_levers(other.candidate) == _other_levers(chosen.candidate)


def _other_levers(candidate: Candidate) -> tuple[object, ...]:
    return (
        candidate.precision,
        candidate.checkpointed_modules,
        candidate.optimizer_states,
        candidate.optimizer_implementation,
        candidate.sharding,
        candidate.offload,
    )


def _zeroing_choice(space: SearchSpace, chosen: Forecast) -> Choice:
    if chosen.candidate.zero_gradients_early:
        reason = "the old gradients would not fit beside the next forward; costs nothing"
        return Choice(lever="zero_gradients_early", value="before the forward", reason=reason)
    if space.gradients_reason is not None:
        return Choice(lever="zero_gradients_early", value="as in training_step", reason=space.gradients_reason)
    return Choice(lever="zero_gradients_early", value="after the forward", reason="Lightning's own order fits")


def _states_choice(request: PlanRequest, space: SearchSpace, chosen: Forecast) -> Choice:
    if chosen.candidate.optimizer_states == "8bit":
        reason = "as given" if request.optimizer_states == "8bit" else "nothing fits with the states as configured"
        tier = chosen.candidate.harm_tier
        left = "" if space.states_left is None else f"; left as configured: {space.states_left}"
        return Choice(
            lever="optimizer_states",
            value="8bit",
            reason=f"{reason}; tier {tier}: states are rounded to 8 bits in blocks of 256, and the loss curve may "
            f"differ{left}",
        )
    if request.optimizer_states == "as-configured":
        reason = "as given"
    elif space.states_reason is not None:
        reason = f"fits; could not be quantised: {space.states_reason}"
    else:
        reason = "fits without quantising them"
    return Choice(lever="optimizer_states", value="as-configured", reason=reason)


def _implementation_choice(
    request: PlanRequest, space: SearchSpace, chosen: Forecast, others: Iterable[Forecast]
) -> Choice:
    value = chosen.candidate.optimizer_implementation
    if chosen.candidate.optimizer_states != "as-configured":
        reason = "quantised states have one implementation"
    elif chosen.candidate.offload != "never":
        reason = space.host_implementation_reason or "the host steps, with an optimizer of DeepSpeed's"
    elif request.optimizer_implementation != "auto":
        reason = "as given"
    elif len(space.optimizer_implementations) == 1:
        reason = "the optimizer offers no other"
    else:
        reason = _against_rivals(chosen, others, lambda candidate: candidate.optimizer_implementation)
    return Choice(lever="optimizer_implementation", value=value, reason=reason)
