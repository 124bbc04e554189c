"""The planning benchmark's own arithmetic, its modules, and a real trace of the smallest kind."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import planning_cost
from benchmarks.child_process import ChildFailedError
from benchmarks.llama import SHAPES, Llama, LlamaShape, next_token_loss, rotate
from benchmarks.machine import this_machine
from benchmarks.planning_case import TraceCost
from benchmarks.planning_cost import SizeResult, as_markdown
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
TINY = LlamaShape(width=32, depth=2, heads=4, key_value_heads=2, mlp_width=48, vocabulary=50, length=8)


def cost(**changes: Any) -> TraceCost:
    return TraceCost(**{**COST.__dict__, **changes})


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
    assert slow.missed == ["missed: 7B took 7.1 s, target 7 s"]
    large = SizeResult(size="125M", memfit=cost(seconds=99.0, peak_rss_bytes=2 * GIB), mem_tracker=COST)
    assert large.missed == ["missed: 125M held 2.000 GiB, target 1.000 GiB"]


def test_the_markdown_compares_the_peaks() -> None:
    rows = [
        SizeResult(size="7B", memfit=COST, mem_tracker=COST),
        SizeResult(size="7B", memfit=COST, mem_tracker=cost(seconds=40.0, predicted_peak_bytes=101 * GIB)),
        SizeResult(size="70B", memfit=COST, mem_tracker="timed out after 180 s"),
    ]
    lines = as_markdown(rows, {"precision": "bf16-mixed", "runs": 3}, this_machine()).splitlines()
    cells = "| 7B (6.74B parameters) | 10,008 | 100.0 GiB | 3.0 s | <= 7 s | 2.5 s | 500.0 MiB |"
    assert lines[2] == f"{cells} 3.0 s, the same peak |"
    assert lines[3] == f"{cells} 40.0 s, peak +1.00 % |"
    assert lines[4].endswith("| timed out after 180 s |")


def test_the_fastest_run_counts_and_a_run_given_up_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([5.0, 3.0, 4.0])
    monkeypatch.setattr(planning_cost, "run_child", lambda *a, **k: {**COST.__dict__, "seconds": next(seconds)})
    assert planning_cost._best("7B", "32-true", "memfit", 3, 9, lambda: None) == cost(seconds=3.0)

    calls = []

    def never_ends(*arguments: Any, timeout_seconds: float) -> dict[str, Any]:
        calls.append(arguments)
        raise subprocess.TimeoutExpired("child", timeout_seconds)

    monkeypatch.setattr(planning_cost, "run_child", never_ends)
    assert planning_cost._best("7B", "32-true", "mem_tracker", 3, 9, lambda: None) == "timed out after 9 s"
    assert len(calls) == 1


def test_a_trace_of_our_own_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **settings: Any) -> dict[str, Any]:
        raise ChildFailedError("python -m x ended with code 1:\nTraceError: no")

    monkeypatch.setattr(planning_cost, "run_child", fails)
    with pytest.raises(ChildFailedError, match="7B: failed: TraceError: no"):
        planning_cost.measure(["7B"], "32-true", 1, 9, Console(quiet=True))
