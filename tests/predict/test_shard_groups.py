"""What groups of ``fully_shard`` hold, whole and as shares, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.predict.shard_groups import innermost, item_bytes, shard_groups, shares_by_storage
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import ParameterLayout, Timeline


def timeline(*parameters: ParameterLayout, gradient_of: dict[int, int] | None = None) -> Timeline:
    return Timeline(
        residents=(), events=(), categories={}, signatures=(), num_parameters=0, num_operations=0, flops=0,
        recomputed_flops=0, parameters=parameters, gradient_of=gradient_of or {},
    )  # fmt: skip


def over(ranks: int, *groups: str, **policy: Any) -> Sharding:
    return Sharding(engine="fsdp2", ranks=ranks, shard_groups=groups, **policy)


EMBEDDING = ParameterLayout("embed.weight", 0, "float32", (10, 6), True)
WEIGHT = ParameterLayout("blocks.1.up.weight", 1, "bfloat16", (7, 6), True)
BIAS = ParameterLayout("blocks.1.up.bias", 2, "float32", (7,), False)
ALIKE = ParameterLayout("blocks.10.weight", 3, "float32", (1, 2), True)


def test_a_parameter_belongs_to_the_innermost_group_around_it() -> None:
    names = ("blocks.1", "blocks.1.up", "")
    assert innermost("blocks.1.up.weight", names) == "blocks.1.up"
    assert innermost("blocks.1.down.weight", names) == "blocks.1"
    assert innermost("blocks.10.weight", names) == ""  # not of blocks.1, whose name it begins with
    assert innermost("embed.weight", ("blocks.1",)) is None


def test_shares_are_whole_rows_and_all_of_them_are_gathered() -> None:
    block, root = shard_groups(timeline(EMBEDDING, WEIGHT, BIAS, ALIKE), over(4, "blocks.1", ""))
    weight, bias = block.parameters
    # 7 rows of 6 bfloat16 over 4 ranks: 2 rows of 12 bytes each, 8 rows together.
    assert (weight.index, weight.share_bytes, weight.whole_bytes, weight.is_filled_up) == (1, 24, 96, True)
    assert (bias.share_bytes, bias.whole_bytes, bias.trainable) == (8, 32, False)
    assert block.whole_bytes == 96 + 32
    embedding, alike = root.parameters
    # 10 rows of 24 bytes: 3 on each rank; a single row of 8 is there four times.
    assert (embedding.share_bytes, alike.whole_bytes) == (72, 32)
    assert not shard_groups(timeline(EMBEDDING), over(5, ""))[0].parameters[0].is_filled_up
    assert block.holds("blocks.1.up") and not block.holds("blocks.10") and root.holds("anything")


def test_a_policy_gathers_and_adds_up_in_dtypes_of_its_own() -> None:
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    (group,) = shard_groups(timeline(EMBEDDING, WEIGHT), over(4, "", **policy))
    embedding, weight = group.parameters
    # 3 of 10 rows of 6 on each rank: 18 elements, 72 together.
    assert (embedding.share_bytes, embedding.cast_bytes, embedding.whole_bytes) == (72, 36, 144)
    assert (embedding.sent_bytes, embedding.sum_bytes) == (288, 240)  # filled up, and the 60 elements that there are
    # Kept in 2 bytes already, so that nothing is cast; 2 of 7 rows on each rank: 12 elements, 48 together.
    assert (weight.share_bytes, weight.cast_bytes, weight.whole_bytes) == (24, 0, 96)
    assert (weight.sent_bytes, weight.sum_bytes) == (192, 168)
    (plain,) = shard_groups(timeline(EMBEDDING), over(4, ""))
    assert plain.parameters[0].sent_bytes == plain.whole_bytes == 288 and plain.cast_bytes == 0


def test_parameters_and_gradients_have_the_same_share() -> None:
    step = timeline(EMBEDDING, WEIGHT, gradient_of={17: 0, 18: 1})
    assert shares_by_storage(step, shard_groups(step, over(2, ""))) == {0: 120, 1: 48, 17: 120, 18: 48}
    assert shares_by_storage(step, shard_groups(step, over(2, "blocks.1"))) == {1: 48, 18: 48}


def test_what_cannot_be_divided_is_refused() -> None:
    scale = ParameterLayout("scale", 0, "float32", (), True)
    with pytest.raises(UnsupportedError, match="divides parameters by their rows, and scale is a single number"):
        shard_groups(timeline(scale), over(2, ""))
    with pytest.raises(UnsupportedError, match="Parameters of dtype complex64 are not forecast under fully_shard"):
        item_bytes("complex64")
