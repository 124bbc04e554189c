"""Settings of a strategy on two real ranks: they make another run, are refused by name, or change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.conftest import Once
from tests.ranks.launch import results, run_on_ranks
from tests.ranks.settings_programs import run_settings, run_zero_settings


@pytest.fixture(scope="module")
def ranks(once: Once) -> list[dict[str, Any]]:
    return once("settings", lambda: results(run_on_ranks(run_settings)))


def test_a_plan_kept_of_ddp_with_other_buckets_is_not_taken(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [rank[f"views {view}"].gradient_as_bucket_view for view in (False, True)] == [False, True]


def test_gradients_as_views_fit_into_what_they_were_measured_to_take(ranks: list[dict[str, Any]]) -> None:
    """A step without an exchange, in which they are tensors beside the buckets, does not count."""
    for rank in ranks:
        sharding, peak = rank["at its own peak"]
        assert sharding.gradient_as_bucket_view and peak == rank["views measured"]


def test_gradients_as_views_are_told_and_are_as_given_only_where_they_are(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        given, chosen = (rank[f"{name}, in words"] for name in ("views measured", "views where nothing else fits"))
        assert given[0].endswith("DDP over 2, gradients as views") and chosen[0].endswith(
            "DDP over 2, gradients as views"
        )
        assert given[1].startswith("as given; each rank sends")
        assert chosen[1].startswith("as given but for the gradients: DDP over 2 needs ")


def test_a_static_graph_is_refused_before_torch_fails_in_the_warm_up(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["static graph"].startswith("UnsupportedError: DDPStrategy(static_graph=True) with MemFit: ")


def test_a_fused_step_that_divided_parameters_cannot_have_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["fused"].startswith(
            "ConfigurationError: optimizer_implementation='fused' cannot be had for torch.optim.SGD under fully_shard: "
        )


def test_a_module_that_fit_has_sharded_is_validated(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["validated"] == second["validated"] and first["validated"][0]["loss"] > 0
    assert first["unchanged"] and second["unchanged"]


@pytest.mark.slow
def test_stages_of_deepspeed_have_plans_of_their_own_and_manual_optimization_trains() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lightning-memfit[deepspeed]")
    for rank in results(run_on_ranks(run_zero_settings, environment={"DS_ACCELERATOR": "cpu"})):
        assert [rank[f"stage {stage}"].zero_stage for stage in (1, 2, 3)] == [1, 2, 3]
        assert rank["steps of manual optimization"] == 4
        assert rank["a plan of another stage"].startswith("StalePlanError: ")
        assert "sharding: planned for ZeRO-3 over 2" in rank["a plan of another stage"]
