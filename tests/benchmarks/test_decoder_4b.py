"""The decoder taken apart, on a tiny one. Run: ``pytest tests/benchmarks/test_decoder_4b.py``."""

from __future__ import annotations

import pytest
import torch

from benchmarks.decoder_4b import (
    SHAPE,
    anatomy_of,
    as_json,
    as_markdown,
    data_of,
    length_needing,
    plans_of,
    step_of,
)
from benchmarks.llama import Llama, LlamaShape
from benchmarks.machine import this_machine

TINY = LlamaShape(width=32, depth=2, heads=4, key_value_heads=2, mlp_width=48, vocabulary=50, length=8)
# Products of each block: 32 x 32 twice, 32 x 16 twice, 32 x 48 three times; the head 32 x 50.
WEIGHTS_OF_PRODUCTS = 2 * (2 * 1024 + 2 * 512 + 3 * 1536) + 1600


def test_the_decoder_has_four_billion_parameters() -> None:
    with torch.device("meta"):
        module = Llama(SHAPE)
    assert sum(parameter.numel() for parameter in module.parameters()) == 4_022_049_792


@pytest.mark.parametrize(("total", "length"), [(1000, 100), (1009, 100), (1010, 101), (7000, 700), (60, 6)])
def test_the_length_is_the_greatest_that_needs_no_more(total: int, length: int) -> None:
    # 50 bytes whatever the length, then 10 for each token.
    assert length_needing(total, lambda tokens: max(50, 10 * tokens)) == length


def test_a_total_below_the_least_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1 tokens need 2\.0 GB, more than 1\.0 GB"):
        length_needing(10**9, lambda tokens: 2 * 10**9)


def test_autocast_copies_the_weights_of_products_once_and_autograd_keeps_them() -> None:
    anatomy = anatomy_of(data_of(TINY, 8))
    assert anatomy.cast_weights_bytes == pytest.approx(2 * WEIGHTS_OF_PRODUCTS, rel=0.05)
    assert sum(anatomy.by_category.values()) == anatomy.predicted_bytes == max(anatomy.by_phase.values())
    assert anatomy.length == 8


def test_the_tables_hold_what_was_found() -> None:
    data = data_of(TINY, 8)
    anatomy, step, plans = anatomy_of(data), step_of(data, "as-configured", "fused"), plans_of(data, ["l40s"])
    table = as_markdown(anatomy, [step], plans, this_machine())
    assert "| l40s |" in table and "assumed rates" in table and "| as-configured | fused |" in table
    assert [row.precision for row in plans] == ["auto"]
    assert as_json(anatomy, [step], plans, this_machine())["plans"][0]["gpu"] == "l40s"
