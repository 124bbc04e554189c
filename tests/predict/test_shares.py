"""What one rank holds and sends, by hand. Run: ``pytest tests/predict/test_shares.py``."""

from __future__ import annotations

import pytest

from lightning_memfit.predict.shares import exchanged_bytes, groups_of, shard_bytes, shares_of
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import ParameterLayout

# 1200 + 800 elements of two blocks, 400 of the root, and 100 that are not trained.
PARAMETERS = (
    ParameterLayout("embed", 0, "float32", (40, 10), True),
    ParameterLayout("blocks.0.w", 1, "float32", (120, 10), True),
    ParameterLayout("blocks.1.w", 2, "float32", (80, 10), True),
    ParameterLayout("blocks.1.frozen", 3, "float32", (10, 10), False),
)
HALVES = tuple(parameter._replace(dtype="bfloat16") for parameter in PARAMETERS)


def zero(stage: int, ranks: int = 4) -> Sharding:
    return Sharding(
        engine="deepspeed", ranks=ranks, zero_stage=stage, reduce_bucket_elements=50, overlap_communication=True
    )  # type: ignore[arg-type]


def fsdp2(**settings: object) -> Sharding:
    return Sharding(engine="fsdp2", ranks=4, shard_groups=("", "blocks.0", "blocks.1"), **settings)  # type: ignore[arg-type]


def test_zero_divides_what_its_stage_says_and_steps_copies_of_four_bytes() -> None:
    first, second, third = (shares_of(HALVES, zero(stage)) for stage in (1, 2, 3))
    assert (first.parameters_bytes, second.parameters_bytes, third.parameters_bytes) == (5000, 5000, 1250)
    assert (first.gradients_bytes, second.gradients_bytes, third.gradients_bytes) == (4800, 1200, 1200)
    # 2400 trained elements over 4 ranks, 4 bytes each.
    assert {each.masters_bytes for each in (first, second, third)} == {2400}
    assert {each.step_gradients_bytes for each in (first, second, third)} == {2400}
    # Two buckets of 50 elements in 2 bytes, one of which is reduced, and the largest gradient, 1200 elements.
    assert first.backward_bytes == second.backward_bytes == 2 * 50 * 2 + 2400
    assert third.forward_bytes == 2 * 2500  # everything stays gathered that is used again within 10^9 elements


def test_what_is_offloaded_lies_on_the_host() -> None:
    optimizer = shares_of(HALVES, zero(3), offload="optimizer")
    assert optimizer.masters_bytes == optimizer.step_gradients_bytes == optimizer.gradients_bytes == 0
    # Copies of 600 parameters and gradients in 4 bytes, and of gradients that arrive in 2.
    assert optimizer.host_bytes == 2 * 2400 + 1200
    parameters = shares_of(HALVES, zero(3), offload="parameters")
    assert parameters.parameters_bytes == 0 and parameters.host_bytes == 2 * 2400 + 1200 + 1250
    # In stage 2 a buffer of the largest gradient, 1200 elements, on either side; of several slices gradients that are
    # added up there, a quarter and one that is cut.
    one, several = (shares_of(HALVES, zero(2), offload="optimizer", micro_steps=count) for count in (1, 3))
    assert one.host_bytes == 2 * 2400 + 1200 + 2400 and one.always_bytes == 2400
    assert several.host_bytes == one.host_bytes + 2 * (600 + 1200)


def test_fsdp2_gathers_a_group_at_a_time_and_its_root_for_good() -> None:
    shares = shares_of(PARAMETERS, fsdp2())
    assert shares.parameters_bytes == (10 + 30 + 20 + 3) * 10 * 4  # rows are not divided: 10 frozen ones make 3
    assert shares.gradients_bytes == 60 * 10 * 4
    assert shares.forward_bytes == 1600 + 2 * 4800  # the root, and the larger group beside its buffer
    # The next group, frozen parameters included, and the gradients of both.
    assert shares.backward_bytes == 1600 + 4800 + 3600 + 4800 + 3200


def test_fsdp2_keeps_whole_gradients_between_slices_unless_it_exchanges_after_each() -> None:
    whole = 2400 * 4
    step, each = shares_of(PARAMETERS, fsdp2(), micro_steps=2), shares_of(
        PARAMETERS, fsdp2(synchronisation="slice"), micro_steps=2
    )  # fmt: skip
    assert step.backward_bytes == 1600 + 4800 + 3600 + whole
    assert each.backward_bytes == 1600 + 4800 + 3600 + 4800 + 3200


def test_a_policy_gathers_in_its_dtype_adds_up_in_another_and_keeps_shares_in_their_own() -> None:
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    plain, shares = shares_of(PARAMETERS, fsdp2()), shares_of(PARAMETERS, fsdp2(**policy))
    assert (shares.parameters_bytes, shares.gradients_bytes) == (plain.parameters_bytes, plain.gradients_bytes)
    # In 2 bytes: the root, the larger group beside its buffer, and a quarter of it, which is cast meanwhile.
    assert shares.forward_bytes == 800 + 2 * 2400 + 600
    # The next group, whole gradients in 2 bytes, and those of the other group on their way in 4.
    assert shares.backward_bytes == 800 + 2400 + 1800 + 600 + 2400 + 3200
    # What waits is all of it in 4 bytes, beside the gradients of a group's slice in 2.
    waiting = shares_of(PARAMETERS, fsdp2(**policy), micro_steps=2)
    assert waiting.backward_bytes == 800 + 2400 + 1800 + 600 + 2400 * 4 + 2400
    in_16_bits = shares_of(PARAMETERS, fsdp2(param_dtype="bfloat16"), micro_steps=2)
    assert in_16_bits.backward_bytes == 800 + 2400 + 1800 + 600 + 2400 * 2


def test_without_resharding_everything_stays_gathered() -> None:
    assert shares_of(PARAMETERS, fsdp2(reshard_after_forward=False)).forward_bytes == 2500 * 4


def test_parameters_belong_to_the_innermost_group() -> None:
    groups = groups_of(PARAMETERS, ("", "blocks", "blocks.1"))
    assert {name: len(members) for name, members in groups.items()} == {"": 1, "blocks": 1, "blocks.1": 2}


def test_a_number_is_held_by_the_first_rank() -> None:
    assert shard_bytes(ParameterLayout("scale", 0, "float32", (), True), 8) == 4
    assert shard_bytes(ParameterLayout("none", 0, "float32", (0, 3), True), 8) == 0


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        # 9600 bytes of gradients, 10000 of parameters; 3/4 of each goes over the wire, an all-reduce twice.
        (Sharding(engine="ddp", ranks=4), 2 * 7200),
        (zero(1), 7200 + 7500),
        (zero(2), 3 * 7200 + 7500),  # three slices, reduced after each
        (zero(3), 3 * 7200 + 3 * 2 * 7500),
        (fsdp2(), 7200 + 3 * 2 * 7500),
        (fsdp2(synchronisation="slice"), 3 * 7200 + 3 * 2 * 7500),
        (fsdp2(reshard_after_forward=False), 7200 + 3 * 7500),
        # Parameters in 2 bytes, and gradients in 4 or 2.
        (fsdp2(param_dtype="bfloat16", reduce_dtype="float32"), 7200 + 3 * 2 * 3750),
        (fsdp2(param_dtype="bfloat16"), 3600 + 3 * 2 * 3750),
        (fsdp2(reduce_dtype="bfloat16"), 3600 + 3 * 2 * 7500),
        (None, None),
    ],
)
def test_bytes_that_a_rank_sends_in_a_step_of_three_slices(sharding: Sharding | None, expected: int | None) -> None:
    assert exchanged_bytes(PARAMETERS, sharding, micro_steps=3) == expected
