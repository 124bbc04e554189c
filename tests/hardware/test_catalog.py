"""The catalogue of GPUs: every number sourced, nothing contradictory, names found and never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import yaml

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.catalog import (
    GpuModel,
    any_context_bytes,
    attention_backends_of,
    catalog,
    catalog_device,
    catalog_sources,
    cublas_bytes,
    find_gpu,
    supports_bf16,
)
from lightning_memfit.units import GIB, MIB

DATA: Any = yaml.safe_load(
    resources.files("lightning_memfit.hardware").joinpath("catalog.yaml").read_text(encoding="utf-8")
)
REQUIRED = {
    "t4", "v100-16gb", "v100-32gb", "rtx-2080-ti", "rtx-3060", "rtx-3090", "rtx-4060", "rtx-4090", "rtx-5090", "a10",
    "a10g", "l4", "l40s", "a40", "a100-40gb", "a100-40gb-pcie", "a100-80gb", "a100-80gb-pcie", "rtx-6000-ada",
    "h100-pcie", "h100-sxm", "h100-nvl", "h200", "b200", "mi250x", "mi300x",
}  # fmt: skip


def unsourced(value: Any, path: str = "") -> Iterator[str]:
    """Where a number stands outside a mapping that names a known source."""
    if isinstance(value, dict):
        if value.get("source") in DATA["sources"]:
            return
        for name, item in value.items():
            yield from unsourced(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unsourced(item, f"{path}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def test_every_number_names_a_source_and_every_source_has_a_document_and_a_date() -> None:
    assert list(unsourced({name: item for name, item in DATA.items() if name != "sources"})) == []
    for name, source in DATA["sources"].items():
        assert set(source) == {"document", "date"} and source["document"], name
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}", source["date"]), name


def test_the_check_of_sources_can_fail() -> None:
    assert list(unsourced({"a": 3, "b": [{"value": 4, "source": "hearsay"}]})) == [".a", ".b[0].value"]


def test_no_source_is_left_over() -> None:
    text = resources.files("lightning_memfit.hardware").joinpath("catalog.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"source: ([\w-]+)", text))
    assert named == set(DATA["sources"])


def test_every_gpu_that_people_ask_for_is_there_once() -> None:
    keys = [model.key for model in catalog()]
    assert sorted(keys) == sorted(set(keys))
    assert set(keys) >= REQUIRED


@pytest.mark.parametrize("model", catalog(), ids=lambda model: model.key)
def test_no_entry_contradicts_itself(model: GpuModel) -> None:
    assert (model.compute_capability is None) == (model.vendor == "amd") == (model.gfx is not None)
    # The smallest is the RTX 4060 with 8 GiB, the largest the MI300X with 192 GiB.
    assert 7 * GIB < model.torch_total_bytes.low <= model.torch_total_bytes.high <= 192 * GIB
    if model.nvml_total_bytes is not None:
        assert model.torch_total_bytes.low <= model.nvml_total_bytes
    assert 20 <= model.multiprocessors <= 304
    assert 200e9 < model.bandwidth_bytes_per_second <= 8e12
    peak = model.peak_flops
    assert 8e12 < peak["fp32"] < 170e12
    assert set(peak) <= {"fp32", "tf32", "fp16", "bf16", "fp8"}
    rising = [peak[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in peak]
    assert rising == sorted(rising)
    # Tensor cores do fp16 and bf16 alike wherever there is bf16 at all.
    assert "bf16" not in peak or peak["bf16"] == peak["fp16"]
    assert "bf16" not in peak or model.supports_bf16
    assert "fp8" not in peak or model.supports_fp8
    assert model.supports_bf16 == ("flash" in model.attention_backends)
    if model.context_bytes is not None:
        assert 256 * MIB < model.context_bytes.low <= model.context_bytes.high < 2 * GIB


def test_bf16_comes_with_compute_capability_8() -> None:
    assert {model.key for model in catalog() if not model.supports_bf16} == {
        "t4",
        "v100-16gb",
        "v100-32gb",
        "rtx-2080-ti",
    }


@pytest.mark.parametrize(
    ("capability", "backends"),
    [
        ((3, 7), ("math",)),
        ((5, 0), ("efficient", "math")),
        ((7, 5), ("efficient", "math")),
        ((8, 0), ("flash", "efficient", "cudnn", "math")),
        ((12, 1), ("flash", "efficient", "cudnn", "math")),
        ((12, 2), ("math",)),
    ],
)
def test_attention_backends_are_those_of_the_compute_capability(
    capability: tuple[int, int], backends: tuple[str, ...]
) -> None:
    assert attention_backends_of(capability) == backends


def test_amds_units_are_told_by_the_instruction_set() -> None:
    assert supports_bf16(None, gfx="gfx1100") and not supports_bf16(None, gfx="gfx906")
    assert attention_backends_of(None, gfx="gfx942") == ("flash", "efficient", "math")
    assert attention_backends_of(None, gfx="gfx1100") == ("math",)


def test_the_range_of_contexts_holds_every_measurement() -> None:
    # pytorch/pytorch#86509: 273.8 MiB with lazy loading; GPUMemNet: 1450 MiB with an older driver
    assert any_context_bytes().low == int(273.8 * MIB)
    assert any_context_bytes().high == 1450 * MIB
    # GPUMemNet: 1237 MiB without cuBLAS, 1435 to 1450 MiB with it
    assert (cublas_bytes().low, cublas_bytes().high) == (198 * MIB, 213 * MIB)
    for model in catalog():
        if model.context_bytes is not None:
            assert any_context_bytes().low <= model.context_bytes.low
            assert model.context_bytes.high <= any_context_bytes().high


@pytest.mark.parametrize("model", catalog(), ids=lambda model: model.key)
def test_every_gpu_is_found_by_key_alias_and_the_drivers_names(model: GpuModel) -> None:
    for name in (model.key, *model.names, *model.aliases):
        assert find_gpu(name) is model


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("rtx3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("RTX_2080_Ti", "rtx-2080-ti"),
        ("nvidia a10", "a10"),
        ("A10G", "a10g"),
        ("H100 SXM", "h100-sxm"),
        ("nvidia_h100_80gb_hbm3", "h100-sxm"),
        ("AMD MI300X", "mi300x"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("A100 40GB", "a100-40gb"),
        ("a100 80gb pcie", "a100-80gb-pcie"),
    ],
)
def test_names_are_forgiven_their_spelling(name: str, key: str) -> None:
    assert find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v100", "device='v100' could mean 2 GPUs of the catalogue. Use 'v100-16gb' or 'v100-32gb'."),
        (
            "A100",
            "device='A100' could mean 4 GPUs of the catalogue. "
            "Use one of 'a100-40gb', 'a100-40gb-pcie', 'a100-80gb', 'a100-80gb-pcie'.",
        ),
        (
            "NVIDIA H100",
            "device='NVIDIA H100' could mean 3 GPUs of the catalogue. Use one of 'h100-pcie', 'h100-sxm', 'h100-nvl'.",
        ),
        ("rtx 2080", "device='rtx 2080' is not in the catalogue of GPUs. Use 'rtx-2080-ti'."),
        ("rtx 3091", "device='rtx 3091' is not in the catalogue of GPUs. Use"),
        ("", "device='' is not in the catalogue of GPUs. Use one of 't4', 'v100-16gb', "),
    ],
)
def test_an_ambiguous_or_unknown_name_is_refused_with_the_nearest_keys(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_gpu(name)
    assert str(caught.value).startswith(message)


def test_a_laptop_gpu_is_not_taken_for_the_desktop_one() -> None:
    with pytest.raises(ConfigurationError, match="is not in the catalogue"):
        find_gpu("NVIDIA GeForce RTX 4060 Laptop GPU")


def test_a_device_of_the_catalogue_is_absent_and_empty() -> None:
    device = catalog_device("NVIDIA A100-SXM4-40GB")
    assert (device.kind, device.key, device.is_present) == ("cuda", "a100-40gb", False)
    # bottlerocket-os/bottlerocket#3873: 42298834944 bytes
    assert device.capacity_bytes == device.available_bytes == device.total_bytes == 42298834944
    assert device.process_bytes == 0 and device.neighbours == ()
    assert (device.context_low_bytes, device.context_high_bytes) == (1435 * MIB, 1450 * MIB)
    assert device.unknowns == ()
    assert device.supported_precisions == ("32-true", "16-mixed", "bf16-mixed", "bf16-true")
    assert device.attention_backends == ("flash", "efficient", "cudnn", "math")


def test_what_the_catalogue_does_not_know_is_told() -> None:
    a40 = catalog_device("a40")
    assert a40.unknowns == ("context", "total")
    # 0.91 of 48 GiB, rounded down
    assert a40.capacity_bytes == 48 * GIB * 91 // 100
    assert a40.context_high_bytes == any_context_bytes().high


def test_amds_context_stays_unknown() -> None:
    device = catalog_device("mi300x")
    assert device.context_high_bytes is None
    assert device.compute_capability is None
    assert device.unknowns == ("context",)


def test_without_bf16_units_bf16_is_not_offered() -> None:
    assert catalog_device("t4").supported_precisions == ("32-true", "16-mixed")


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_the_sources_of_a_gpu_are_documents_with_their_dates(key: str) -> None:
    sources = catalog_sources(key)
    assert {"torch_total_bytes", "bandwidth_bytes_per_second", "peak_flops"} <= set(sources)
    assert all(re.search(r"\(\d{4}(-\d{2})*\)$", words) for words in sources.values())


def test_a_context_that_is_assumed_names_what_it_is_assumed_from() -> None:
    assert "pytorch/pytorch#86509" in catalog_sources("t4")["context_bytes"]
    assert "context_bytes" not in catalog_sources("mi300x")


def test_links_are_of_one_direction_and_of_what_joins_a_whole_node() -> None:
    # A100-SXM4: 600 GB/s of NVLink in both directions together; its PCIe board is joined in pairs, and else by 64 GB/s.
    assert find_gpu("a100-80gb").link_bytes_per_second == 300 * 10**9
    assert find_gpu("a100-80gb-pcie").link_bytes_per_second == 32 * 10**9
    assert find_gpu("rtx-4060").link_bytes_per_second == find_gpu("t4").link_bytes_per_second == 16 * 10**9
    assert find_gpu("a10g").link_bytes_per_second is None  # nothing was found
    assert catalog_device("h100-sxm").link_bytes_per_second == 450 * 10**9
