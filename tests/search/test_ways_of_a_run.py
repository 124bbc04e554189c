"""Ways in which the strategy that a Trainer has may spread a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_memfit.plan import BatchSplit
from lightning_memfit.search.levers import CheckpointingOption, SearchSpace
from lightning_memfit.search.strategies import ONE_DEVICE, Considered, Spread, other_strategies, ways_of_a_run
from lightning_memfit.sharding import Sharding

SIZES = (1000, 16)
DDP = Sharding(engine="ddp", ranks=2)
FSDP2 = Sharding(engine="fsdp2", ranks=2, shard_groups=("",), synchronisation="slice")
ZERO = Sharding(
    engine="deepspeed",
    ranks=2,
    zero_stage=2,
    reduce_bucket_elements=200_000_000,
    allgather_bucket_elements=200_000_000,
)
LEAST = 1000  # of the largest parameter
SMALL = 13_107_200  # as many elements as DDP's 25 MiB hold in 16 bits: the largest parameter has fewer


def smaller(sharding: Sharding) -> list[Sharding]:
    return [replace(sharding, reduce_bucket_elements=most, allgather_bucket_elements=most) for most in (SMALL, LEAST)]


def test_one_device_spreads_nothing() -> None:
    assert ways_of_a_run(None, "never", SIZES) is ONE_DEVICE


def test_ddp_runs_as_it_is_set_up_or_with_gradients_in_its_buckets() -> None:
    ways = ways_of_a_run(DDP, "never", SIZES).spreads
    assert ways == (Spread(sharding=DDP), Spread(sharding=replace(DDP, gradient_as_bucket_view=True)))
    views = replace(DDP, gradient_as_bucket_view=True)
    assert ways_of_a_run(views, "never", SIZES).spreads == (Spread(sharding=views),)


def test_fsdp2_exchanges_after_every_slice_or_once() -> None:
    ways = ways_of_a_run(FSDP2, "never", SIZES).spreads
    assert ways == (Spread(sharding=FSDP2), Spread(sharding=replace(FSDP2, synchronisation="step")))


def test_zero_keeps_its_offload_and_its_buckets_or_has_smaller_ones() -> None:
    ways = ways_of_a_run(ZERO, "optimizer", SIZES)
    assert ways.spreads == tuple(Spread(sharding=each, offload="optimizer") for each in (ZERO, *smaller(ZERO)))
    assert list(ways.bucket_reasons) == [SMALL, LEAST] and "13,107,200 elements" in ways.bucket_reasons[SMALL]


def test_zero_offloads_where_it_may_behind_what_it_is_and_where_it_must_in_its_place() -> None:
    away = tuple(Spread(sharding=each, offload="optimizer") for each in (ZERO, *smaller(ZERO)))
    here = tuple(Spread(sharding=each) for each in (ZERO, *smaller(ZERO)))
    assert ways_of_a_run(ZERO, "never", SIZES, asked="auto").spreads == here + away
    assert ways_of_a_run(ZERO, "never", SIZES, asked="optimizer").spreads == away
    # What the strategy itself keeps on the host stays there.
    assert ways_of_a_run(ZERO, "optimizer", SIZES, asked="auto").spreads == away


def test_stage_3_may_have_its_parameters_on_the_host_too() -> None:
    third = replace(ZERO, zero_stage=3)
    at = {
        offload: tuple(Spread(sharding=each, offload=offload) for each in (third, *smaller(third)))
        for offload in ("never", "optimizer", "parameters")
    }
    assert ways_of_a_run(third, "never", SIZES, asked="auto").spreads == sum(at.values(), ())
    assert ways_of_a_run(third, "optimizer", SIZES, asked="auto").spreads == at["optimizer"] + at["parameters"]
    assert ways_of_a_run(third, "never", SIZES, asked="parameters").spreads == at["parameters"]
    for asked in ("never", "auto", "parameters"):
        assert ways_of_a_run(third, "parameters", SIZES, asked=asked).spreads == at["parameters"]  # type: ignore[arg-type]


def test_what_cannot_offload_is_spread_as_ever() -> None:
    for sharding in (None, DDP, FSDP2):
        assert ways_of_a_run(sharding, "never", SIZES, asked="auto") == ways_of_a_run(sharding, "never", SIZES)


def named(*given: Any, kind: str = "cuda", **settings: Any) -> list[str | None]:
    return list(dict.fromkeys(each.name for each in other_strategies(*given, device_kind=kind, **settings)))


def test_a_run_that_does_not_fit_is_told_of_the_strategies_that_its_trainer_does_not_have() -> None:
    third = "DeepSpeedStrategy(stage=3, offload_optimizer=True)"
    offloaded = ["deepspeed_stage_2_offload", third, "deepspeed_stage_3_offload"]
    assert named(None, "never", ranks=1) == offloaded
    assert named(None, "never", ranks=1, kind="cpu") == []
    assert named(DDP, "never", ranks=2, kind="cpu") == ["fsdp2"]
    stages = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
    assert named(DDP, "never", ranks=2) == [*stages, *offloaded, "fsdp2"]
    assert named(DDP, "never", ranks=2, zero_obstacle="it looks at matrices") == ["fsdp2"]
    assert named(ZERO, "never", ranks=2) == ["deepspeed_stage_3", *offloaded]
    assert named(ZERO, "optimizer", ranks=2) == [third, "deepspeed_stage_3_offload"]
    assert named(replace(ZERO, zero_stage=3), "optimizer", ranks=2) == ["deepspeed_stage_3_offload"]
    assert named(replace(ZERO, zero_stage=3), "parameters", ranks=2) == []
    assert named(FSDP2, "never", ranks=2) == []


def test_an_optimizer_on_the_host_is_stepped_in_one_way_whatever_the_device_offers() -> None:
    space = replace(
        space_of(Spread(sharding=ZERO), Spread(sharding=ZERO, offload="optimizer")),
        optimizer_implementations=("as-configured", "fused"),
    )
    assert [each.optimizer_implementation for each in space.settings(2)] == ["as-configured"] * 2  # two precisions
    found = space.with_host_implementation("cpu-adam", "it was built")
    assert [each.optimizer_implementation for each in found.settings(2)] == ["cpu-adam"] * 2
    assert [each.optimizer_implementation for each in found.settings(0)] == ["as-configured", "fused"] * 2
    built = found.built(found.candidate(next(found.settings(2)), 1, zero_gradients_early=False))
    assert [each.optimizer_implementation for each in built.settings(2)] == ["cpu-adam"]


def test_buckets_that_are_small_already_stay() -> None:
    small = replace(ZERO, reduce_bucket_elements=1000, allgather_bucket_elements=1000)
    assert ways_of_a_run(small, "never", SIZES).spreads == (Spread(sharding=small),)


def test_buckets_that_a_configuration_leaves_out_are_deepspeeds_own_half_a_billion_and_may_be_smaller() -> None:
    unsaid = replace(ZERO, reduce_bucket_elements=None, allgather_bucket_elements=1000)
    sizes = [
        each.sharding.reduce_bucket_elements for each in ways_of_a_run(unsaid, "never", SIZES).spreads if each.sharding
    ]
    assert sizes == [None, SMALL, LEAST]


def test_buckets_are_no_smaller_than_the_largest_parameter_and_of_one_size_where_that_is_large() -> None:
    sizes = [
        each.sharding.reduce_bucket_elements
        for each in ways_of_a_run(ZERO, "never", (10**8, 5)).spreads
        if each.sharding
    ]
    assert sizes == [200_000_000, 10**8]


def space_of(*spreads: Spread) -> SearchSpace:
    return SearchSpace(
        precisions=("32-true", "bf16-mixed"),
        whole=BatchSplit(effective_batch_size=8, ranks=2, loader_batch_size=4, slice_sizes=(4,)),
        checkpointing=(CheckpointingOption(kind="none"),),
        num_slices=(1, 2),
        optimizer_implementations=("as-configured", "fused"),
        strategies=Considered(spreads=spreads),
    )


def test_what_an_engine_was_built_for_holds_precision_and_optimizer_fast_under_deepspeed_alone() -> None:
    for sharding, precisions, implementations in (
        (ZERO, ("bf16-mixed",), ("as-configured",)),
        (DDP, ("32-true", "bf16-mixed"), ("as-configured", "fused")),
    ):
        spreads = ways_of_a_run(sharding, "never", SIZES).spreads
        space = space_of(*spreads)
        setting = next(s for s in space.settings(0) if s.precision == "bf16-mixed" and s.spread == spreads[1])
        built = space.built(space.candidate(setting, 2, zero_gradients_early=False))
        assert built.strategies.spreads == (spreads[1],)
        assert (built.precisions, built.optimizer_implementations) == (precisions, implementations)
        assert built.num_slices == (1, 2)  # slices can change at any time
