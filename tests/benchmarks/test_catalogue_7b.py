"""The table of the catalogue on a tiny module. Run: ``pytest tests/benchmarks/test_catalogue_7b.py``."""

from __future__ import annotations

import pytest

from benchmarks.catalogue_7b import Workload, as_json, as_markdown, groups_of_alike, plan_group, row_of
from benchmarks.llama import LlamaShape
from benchmarks.machine import this_machine
from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.hardware.catalog import catalog, find_gpu
from lightning_memfit.units import GIB

TINY = LlamaShape(width=32, depth=2, heads=4, key_value_heads=2, mlp_width=48, vocabulary=50, length=8)


def test_every_gpu_is_in_one_group_of_those_that_follow_the_same_rules() -> None:
    groups = groups_of_alike(catalog())
    assert sorted(key for group in groups for key in group) == sorted(model.key for model in catalog())
    assert any({"a100-40gb", "a100-80gb", "mi300x"} <= set(group) for group in groups)
    assert not any({"t4", "a100-40gb"} <= set(group) for group in groups)
    assert len(groups[0]) == max(map(len, groups))


def test_what_fits_has_a_plan_with_seconds_and_a_share_of_the_peak() -> None:
    (row,) = plan_group(Workload(shape=TINY, loader_batch=2, effective_batch=4), ["a100-40gb"])
    assert row.fits and row.plan is not None and row.harm_tier == 0
    assert row.predicted_step_seconds is not None and row.predicted_share_of_peak is not None
    assert 0 < row.predicted_share_of_peak < 1
    assert row.predicted_reserved_bytes is not None
    assert 0 < row.predicted_bytes <= row.predicted_reserved_bytes < row.budget_bytes < row.total_bytes


def test_what_does_not_fit_says_what_the_smallest_plan_needs() -> None:
    row = row_of(find_gpu("t4"), NoFeasiblePlanError("no", budget_bytes=12 * GIB, best_peak_bytes=67 * GIB))
    assert (row.fits, row.plan, row.predicted_step_seconds) == (False, None, None)
    table = as_markdown([row], "7B", 100.0, this_machine())
    assert "| t4 | 14.56 GiB | 12.00 GiB | no | the smallest plan is too large | 67.00 GiB |  |  |" in table
    assert "assumed" in table
    assert as_json([row], "7B", 100.0, this_machine())["gpus"][0]["predicted_bytes"] == 67 * GIB


@pytest.mark.parametrize("key", ["rtx-3090", "h100-sxm"])
def test_a_row_names_its_gpu(key: str) -> None:
    error = NoFeasiblePlanError("no", budget_bytes=GIB, best_peak_bytes=2 * GIB)
    assert row_of(find_gpu(key), error).gpu == key
