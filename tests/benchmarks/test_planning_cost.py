"""The planning benchmark's own arithmetic, its modules, and a real trace of the smallest kind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import planning_case, planning_cost
from benchmarks.child_process import ChildFailedError
from benchmarks.llama import SHAPES, Llama, LlamaShape, next_token_loss, rotate
from benchmarks.machine import this_machine
from benchmarks.planning_case import PlanCost, TraceCost
from benchmarks.planning_cost import PlanResult, SizeResult, as_json, as_markdown
from lightning_memfit.units import GIB, MIB

COST = TraceCost(
    seconds=3.0,
    cpu_seconds=2.5,
    peak_rss_bytes=500 * MIB,
    imported_rss_bytes=400 * MIB,
    num_operations=10_008,
    predicted_peak_bytes=100 * GIB,
    num_parameters=6_738_415_616,
)
PLAN = PlanCost(
    seconds=9.5,
    cpu_seconds=9.0,
    peak_rss_bytes=600 * MIB,
    imported_rss_bytes=400 * MIB,
    num_estimated=120,
    num_traced=1,
    budget_bytes=60 * GIB,
    predicted_peak_bytes=59 * GIB,
    chosen="2 slices of <= 4",
    num_parameters=6_738_415_616,
)
TINY = LlamaShape(width=32, depth=2, heads=4, key_value_heads=2, mlp_width=48, vocabulary=50, length=8)


def cost(**changes: Any) -> TraceCost:
    return TraceCost(**{**COST.__dict__, **changes})


def planned(**changes: Any) -> PlanResult:
    return PlanResult(size="7B", unconstrained_bytes=100 * GIB, plan=PlanCost(**{**PLAN.__dict__, **changes}))


@pytest.mark.parametrize(
    ("size", "parameters"),
    # By hand: 2 x vocabulary x width + depth x (2 x width^2 + 2 x width x kv + 3 x width x mlp + 2 x width) + width.
    # 7B: 262,144,000 + 32 x (67,108,864 + 135,266,304 + 8,192) + 4,096, the published 6,738,415,616.
    # 70B: 524,288,000 + 80 x (150,994,944 + 704,643,072 + 16,384) + 8,192, the published 68,976,648,192.
    [("7B", 6_738_415_616), ("70B", 68_976_648_192)],
)
def test_the_large_modules_have_the_published_number_of_parameters(size: str, parameters: int) -> None:
    with torch.device("meta"):
        module = Llama(SHAPES[size])
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


def test_a_small_llama_learns_and_looks_only_back() -> None:
    torch.manual_seed(0)
    module = Llama(TINY)
    ids = torch.randint(50, (2, 9))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = next_token_loss(module, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    changed = ids[:, :8].clone()
    changed[:, 5] = (changed[:, 5] + 1) % 50
    with torch.no_grad():
        before, after = module(ids[:, :8]), module(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    module = Llama(TINY)
    same = torch.randn(1, 1, 1, 8).expand(1, 1, 8, 8)
    turned = rotate(same, module.cosine, module.sine)[0, 0]
    assert torch.allclose(turned.norm(dim=-1), same[0, 0].norm(dim=-1))
    products = turned @ turned.T
    assert torch.allclose(products[0, 3], products[2, 5], atol=1e-5)


def test_a_trace_that_is_too_slow_or_too_large_is_named() -> None:
    assert SizeResult(size="7B", memfit=COST, mem_tracker=COST).missed == []
    slow = SizeResult(size="7B", memfit=cost(seconds=7.1), mem_tracker=COST)
    assert slow.missed == ["missed: one trace of 7B took 7.1 s, target 7 s"]
    large = SizeResult(size="125M", memfit=cost(seconds=99.0, peak_rss_bytes=2 * GIB), mem_tracker=COST)
    assert large.missed == ["missed: one trace of 125M held 2.000 GiB, target 1.000 GiB"]


def test_a_plan_that_is_too_slow_or_too_large_is_named() -> None:
    assert planned().missed == []
    assert planned(seconds=12.1).missed == ["missed: the whole plan of 7B took 12.1 s, target 12 s"]
    assert planned(peak_rss_bytes=2 * GIB).missed == ["missed: the whole plan of 7B held 2.000 GiB, target 1.000 GiB"]


def test_the_markdown_compares_the_peaks() -> None:
    rows = [
        SizeResult(size="7B", memfit=COST, mem_tracker=COST),
        SizeResult(size="7B", memfit=COST, mem_tracker=cost(seconds=40.0, predicted_peak_bytes=101 * GIB)),
        SizeResult(size="70B", memfit=COST, mem_tracker="timed out after 180 s"),
    ]
    lines = as_markdown(rows, [], {"precision": "bf16-mixed", "runs": 3}, this_machine()).splitlines()
    cells = "| 7B (6.74B parameters) | 10,008 | 100.0 GiB | 3.0 s | <= 7 s | 2.5 s | 500.0 MiB |"
    assert lines[2] == f"{cells} 3.0 s, the same peak |"
    assert lines[3] == f"{cells} 40.0 s, peak +1.00 % |"
    assert lines[4].endswith("| timed out after 180 s |")


def test_the_markdown_shows_what_was_planned_and_how() -> None:
    settings = {"precision": "bf16-mixed", "runs": 3}
    both = as_markdown([SizeResult(size="7B", memfit=COST, mem_tracker=COST)], [planned()], settings, this_machine())
    plan = as_markdown([], [planned()], settings, this_machine()).splitlines()
    assert plan[2] == (
        "| 7B (6.74B parameters) | 100.0 GiB | 60.00 GiB | 2 slices of <= 4 | 59.00 GiB | 120 | 1 | 9.5 s | <= 12 s | "
        "9.0 s | 600.0 MiB |"
    )
    assert plan[0].count("|") == plan[1].count("|") == plan[2].count("|")
    assert plan[2] in both.splitlines()


def test_everything_is_kept_as_plain_data() -> None:
    rows = [SizeResult(size="7B", memfit=cost(seconds=8.0), mem_tracker="timed out after 180 s")]
    data = as_json(rows, [planned(seconds=13.0)], {"runs": 3}, this_machine())
    assert data["sizes"][0]["mem_tracker"] == "timed out after 180 s"
    assert data["plans"][0]["plan"]["num_estimated"] == 120
    assert [line.split(" took")[0] for line in data["targets"]["missed"]] == [
        "missed: one trace of 7B", "missed: the whole plan of 7B",
    ]  # fmt: skip


def test_the_budget_is_a_share_of_what_the_step_needs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def child(module: str, arguments: list[str], **_: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {**(PLAN if "plan" in arguments else COST).__dict__}

    monkeypatch.setattr(planning_cost, "run_child", child)
    (result,) = planning_cost.measure_plans(["7B"], 2, 9, Console(quiet=True))
    assert asked[0][:5] == ["7B", "--precision", "32-true", "--tool", "unconstrained"]
    assert asked[1] == asked[2] and asked[1][:5] == ["7B", "--tool", "plan", "--budget", str(60 * GIB)]
    assert result.unconstrained_bytes == 100 * GIB and result.plan == PLAN


def test_a_whole_plan_is_made_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "125M", TINY)
    plain = planning_case._with_memfit("125M", "32-true", planning_case.PLANNED_BATCH).predicted_peak_bytes
    cost = planning_case._whole_plan("125M", plain * 9 // 10, tmp_path)
    assert cost.predicted_peak_bytes <= cost.budget_bytes == plain * 9 // 10
    assert cost.num_estimated >= 10 and 1 <= cost.num_traced <= 4
    assert "slices" in cost.chosen or "bf16" in cost.chosen or "zeroed early" in cost.chosen


def test_the_fastest_run_counts_and_a_run_given_up_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([5.0, 3.0, 4.0])
    monkeypatch.setattr(planning_cost, "run_child", lambda *a, **k: {**COST.__dict__, "seconds": next(seconds)})
    assert planning_cost._best(TraceCost, ["7B"], 3, 9, lambda: None) == cost(seconds=3.0)

    calls = []

    def never_ends(*arguments: Any, timeout_seconds: float) -> dict[str, Any]:
        calls.append(arguments)
        raise subprocess.TimeoutExpired("child", timeout_seconds)

    monkeypatch.setattr(planning_cost, "run_child", never_ends)
    assert planning_cost._best(TraceCost, ["7B"], 3, 9, lambda: None) == "timed out after 9 s"
    assert len(calls) == 1


def test_a_trace_of_our_own_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **settings: Any) -> dict[str, Any]:
        raise ChildFailedError("python -m x ended with code 1:\nTraceError: no")

    monkeypatch.setattr(planning_cost, "run_child", fails)
    with pytest.raises(ChildFailedError, match="7B: failed: TraceError: no"):
        planning_cost.measure(["7B"], "32-true", 1, 9, Console(quiet=True))
    with pytest.raises(ChildFailedError, match="7B: failed: TraceError: no"):
        planning_cost.measure_plans(["7B"], 1, 9, Console(quiet=True))
