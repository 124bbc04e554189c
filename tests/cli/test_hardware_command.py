"""``memfit hardware``: devices in words and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_memfit.cli.arguments import BAD_REQUEST, CANNOT_TELL, FITS
from lightning_memfit.hardware.catalog import catalog, find_gpu

Memfit = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


def test_without_a_name_it_is_this_machine(memfit: Memfit) -> None:
    ran = memfit("hardware", "--json")
    assert ran.code == FITS, ran.err
    (device,) = ran.document["devices"]
    assert device["asked"] == "cpu" and device["kind"] == "cpu" and device["capacity_bytes"] > 0
    assert "available, or held by this process" in memfit("hardware").out


def test_a_gpu_of_the_catalogue_is_described_with_its_sources(memfit: Memfit) -> None:
    text = memfit("hardware", "a100-40gb", "--sources").out
    for words in ("39.39 GiB", "8.0", "bf16 312", "1,555 GB/s (vendor)", "flash", "source: context_bytes", "GPUMemNet"):
        assert words in text
    (device,) = memfit("hardware", "A100 SXM4 40GB", "--sources", "--json").document["devices"]
    assert device["key"] == "a100-40gb" and device["is_present"] is False
    assert set(device["sources"]) >= {"torch_total_bytes", "peak_flops", "bandwidth_bytes_per_second"}


def test_what_is_not_known_is_said_to_be_unknown(memfit: Memfit) -> None:
    text = memfit("hardware", "mi300x").out
    assert "context     unknown" in text
    (device,) = memfit("hardware", "mi300x", "--json").document["devices"]
    assert device["context_low_bytes"] is None


def test_all_of_the_catalogue_is_a_line_each(memfit: Memfit) -> None:
    ran = memfit("hardware", "--all")
    shown = {line.split()[0] for line in ran.out.splitlines()}
    assert {model.key for model in catalog()} <= shown
    assert len(memfit("hardware", "--all", "--json").document["devices"]) == len(catalog()) + 1
    fastest = max(find_gpu("t4").peak_flops[dtype] for dtype in ("fp16",))
    assert f"{fastest / 1e12:.0f}" in next(line for line in ran.out.splitlines() if line.startswith("t4 "))


def test_a_name_that_is_not_known_is_two_with_the_nearest(memfit: Memfit) -> None:
    ran = memfit("hardware", "a100-40", "--json")
    assert ran.code == BAD_REQUEST
    assert ran.document["error"]["kind"] == "ConfigurationError"
    assert "'a100-40gb'" in ran.document["error"]["message"] and "'a100-40gb'" in ran.err


def test_a_gpu_of_this_machine_that_is_not_there_is_three(memfit: Memfit) -> None:
    ran = memfit("hardware", "cuda:0")
    assert ran.code == CANNOT_TELL and "torch finds no GPU" in ran.err
