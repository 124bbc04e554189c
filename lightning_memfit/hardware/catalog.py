"""Known GPUs: what vendors and public reports say of them, each number with its source in ``catalog.yaml``."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.device import AttentionBackend, DeviceSpec
from lightning_memfit.plan_file import parse_plain

_MAKERS = ("nvidia", "geforce", "tesla", "quadro", "amd", "instinct")
# CDNA 2 and later, RDNA 3 and later (AMD's instruction set guides: MFMA and WMMA on bf16).
_GFX_WITH_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_GFX_WITH_FP8 = ("gfx94", "gfx95")
_GFX_WITH_AOTRITON = ("gfx90a", "gfx94", "gfx95")


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """A number of bytes, or the range it lies in."""

    low: int
    """At least so many bytes."""
    high: int
    """At most so many; the same where the number itself is known."""


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """What is known of one model of GPU before one is at hand."""

    key: str
    """The short name, such as ``"a100-40gb"``."""
    names: tuple[str, ...]
    """What drivers call it."""
    aliases: tuple[str, ...]
    """What else people call it."""
    vendor: Literal["nvidia", "amd"]
    """Who makes it."""
    architecture: str
    """The vendor's word, such as ``"Ampere"``."""
    compute_capability: tuple[int, int] | None
    """Major and minor; ``None`` on AMD's."""
    gfx: str | None
    """AMD's name of the instruction set, such as ``"gfx942"``; ``None`` on NVIDIA's."""
    torch_total_bytes: ByteRange
    """What torch reports as ``total_memory``: for AMD's MI250X, that of one of its two dies, which is one device."""
    nvml_total_bytes: int | None
    """What NVML and ``nvidia-smi`` report as the total, more than torch's; ``None`` where no report was found."""
    multiprocessors: int
    """Streaming multiprocessors, or AMD's compute units."""
    peak_flops: Mapping[str, int] = field(hash=False)
    """Dense FLOP per second by ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``; a dtype that is not named is unknown
    or unsupported."""
    bandwidth_bytes_per_second: int
    """Peak of the device's memory."""
    link_bytes_per_second: int | None
    """What it can send to the other GPUs of its node at most, one direction; ``None`` where that is not known."""
    context_bytes: ByteRange | None
    """What a process holds outside torch's allocator once CUDA and cuBLAS are loaded; ``None`` where nobody said."""

    @property
    def supports_bf16(self) -> bool:
        """Whether there are bf16 units; torch emulates bf16 elsewhere, slowly."""
        return supports_bf16(self.compute_capability, gfx=self.gfx)

    @property
    def supports_fp8(self) -> bool:
        """Whether there are fp8 units: compute capability 8.9 and later, CDNA 3."""
        if self.gfx is not None:
            return self.gfx.startswith(_GFX_WITH_FP8)
        return self.compute_capability is not None and self.compute_capability >= (8, 9)

    @property
    def attention_backends(self) -> tuple[AttentionBackend, ...]:
        """Backends of ``scaled_dot_product_attention`` that it can run, whatever the shapes and dtypes."""
        return attention_backends_of(self.compute_capability, gfx=self.gfx)


def catalog() -> tuple[GpuModel, ...]:
    """Every known GPU, by generation."""
    return _read()[0]


def any_context_bytes() -> ByteRange:
    """The range of all public measurements of a CUDA context with cuBLAS: what is assumed where nothing is known."""
    return _read()[1]


def cublas_bytes() -> ByteRange:
    """What cuBLAS adds to the context when it is first used."""
    return _read()[2]


def find_gpu(name: str) -> GpuModel:
    """The GPU that a person or a driver means by ``name``.

    Case, spaces, underscores and the makers' words (NVIDIA, GeForce, Tesla, AMD, Instinct) do not matter. A name that
    fits several is never resolved by guessing.

    Raises:
        ConfigurationError: if no GPU or several have this name; names the nearest keys.

    >>> find_gpu("NVIDIA A100-SXM4-40GB").key, find_gpu("rtx 3090").key
    ('a100-40gb', 'rtx-3090')
    """
    wanted = _compact(name)
    for model in catalog():
        if wanted and wanted in {_compact(known) for known in (model.key, *model.names, *model.aliases)}:
            return model
    keys = [model.key for model in catalog()]
    nearest = [key for key in keys if wanted and _words(name) <= _words(key)]
    if len(nearest) > 1:
        raise ConfigurationError(
            f"device={name!r} could mean {len(nearest)} GPUs of the catalogue. Use {_any_of(nearest)}."
        )
    nearest = nearest or difflib.get_close_matches(name.lower().replace(" ", "-"), keys, n=3) or keys
    raise ConfigurationError(f"device={name!r} is not in the catalogue of GPUs. Use {_any_of(nearest)}.")


def catalog_device(name: str) -> DeviceSpec:
    """A GPU of the catalogue that is not in this machine, as if nothing else ran on it.

    The capacity is the least that torch is reported to call its total; what a context takes of it is a range.

    Args:
        name: as :func:`find_gpu` takes it.

    Raises:
        ConfigurationError: if no GPU or several have this name.

    Ignores: neighbours, a display, ECC where reports have it off.
    """
    model = find_gpu(name)
    total = model.torch_total_bytes.low
    context = model.context_bytes or (any_context_bytes() if model.vendor == "nvidia" else None)
    unknowns: list[str] = [] if model.context_bytes is not None else ["context"]
    if model.torch_total_bytes.low != model.torch_total_bytes.high:
        unknowns.append("total")
    return DeviceSpec(
        name=model.names[0],
        kind="cuda",
        capacity_bytes=total,
        available_bytes=total,
        process_bytes=0,
        supported_precisions=precisions_of(has_bf16=model.supports_bf16),
        key=model.key,
        is_present=False,
        compute_capability=model.compute_capability,
        multiprocessors=model.multiprocessors,
        total_bytes=total,
        context_low_bytes=None if context is None else context.low,
        context_high_bytes=None if context is None else context.high,
        neighbours=(),
        bandwidth_bytes_per_second=model.bandwidth_bytes_per_second,
        link_bytes_per_second=model.link_bytes_per_second,
        peak_flops=model.peak_flops,
        attention_backends=model.attention_backends,
        unknowns=tuple(unknowns),
    )


def supports_bf16(compute_capability: tuple[int, ...] | None, *, gfx: str | None = None) -> bool:
    """Whether a GPU has bf16 units: NVIDIA's from compute capability 8.0, AMD's from CDNA 2 and RDNA 3.

    Not ``torch.cuda.is_bf16_supported()``, which also says yes where bf16 is emulated.

    Source: NVIDIA CUDA C++ Programming Guide, arithmetic instructions by compute capability; AMD's instruction set
    guides of CDNA 2 and RDNA 3.
    """
    if gfx is not None:
        return gfx.startswith(_GFX_WITH_BF16)
    return compute_capability is not None and compute_capability >= (8, 0)


def precisions_of(*, has_bf16: bool) -> tuple[str, ...]:
    """Precisions that run at the device's own speed, in Lightning's words."""
    return ("32-true", "16-mixed", "bf16-mixed", "bf16-true") if has_bf16 else ("32-true", "16-mixed")


def attention_backends_of(
    compute_capability: tuple[int, ...] | None, *, gfx: str | None = None
) -> tuple[AttentionBackend, ...]:
    """Backends of ``scaled_dot_product_attention`` that a GPU can run, in no order of preference.

    Source: pytorch/pytorch ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``@001f694: flash and cuDNN for
    compute capability 8.0 to 12.1, memory-efficient for 5.0 to 12.1; on ROCm flash and memory-efficient
    where AOTriton is not experimental.

    Ignores: shapes, dtypes and masks, by which each backend refuses calls; what the environment variable
    ``TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL`` adds.
    """
    if gfx is not None:
        return ("flash", "efficient", "math") if gfx.startswith(_GFX_WITH_AOTRITON) else ("math",)
    if compute_capability is None or not (5, 0) <= compute_capability <= (12, 1):
        return ("math",)
    return ("flash", "efficient", "cudnn", "math") if compute_capability >= (8, 0) else ("efficient", "math")


def catalog_sources(key: str) -> Mapping[str, str]:
    """Where the numbers of a GPU come from: by the name of the number, a document or a public report with its date.

    Args:
        key: the catalogue's key, such as ``"a100-40gb"``.
    """
    data = _read_data()
    entry = next(each for each in data["gpus"] if each["key"] == key)
    sources = {
        number: value["source"] for number, value in entry.items() if isinstance(value, Mapping) and "source" in value
    }
    if entry["context_bytes"] is None and entry["vendor"] == "nvidia":
        sources["context_bytes"] = data["any_context_bytes"]["source"]
    return {
        number: f"{data['sources'][source]['document']} ({data['sources'][source]['date']})"
        for number, source in sources.items()
    }


def _any_of(keys: list[str]) -> str:
    return " or ".join(repr(key) for key in keys) if len(keys) < 3 else "one of " + ", ".join(map(repr, keys))


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _MAKERS)


def _compact(name: str) -> str:
    """A name without what does not matter, such as ``"a100sxm440gb"``."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _MAKERS]
    return "".join(words).removeprefix("rtx")


@functools.cache
def _read_data() -> Any:
    text = resources.files("lightning_memfit.hardware").joinpath("catalog.yaml").read_text(encoding="utf-8")
    return parse_plain(text, source="The catalogue of GPUs")


@functools.cache
def _read() -> tuple[tuple[GpuModel, ...], ByteRange, ByteRange]:
    data = _read_data()
    gpus = tuple(_model(entry) for entry in data["gpus"])
    return gpus, _range(data["any_context_bytes"]), _range(data["cublas_bytes"])


def _model(entry: Mapping[str, Any]) -> GpuModel:
    capability, gfx, nvml = entry["compute_capability"], entry["gfx"], entry["nvml_total_bytes"]
    context = entry["context_bytes"]
    return GpuModel(
        key=entry["key"],
        names=tuple(entry["names"]),
        aliases=tuple(entry["aliases"]),
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        compute_capability=None if capability is None else _capability(capability["value"]),
        gfx=None if gfx is None else gfx["value"],
        torch_total_bytes=_range(entry["torch_total_bytes"]),
        nvml_total_bytes=None if nvml is None else nvml["value"],
        multiprocessors=entry["multiprocessors"]["value"],
        peak_flops={dtype: rate for dtype, rate in entry["peak_flops"].items() if dtype != "source"},
        bandwidth_bytes_per_second=entry["bandwidth_bytes_per_second"]["value"],
        link_bytes_per_second=None
        if entry["link_bytes_per_second"] is None
        else entry["link_bytes_per_second"]["value"],
        context_bytes=None if context is None else _range(context),
    )


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _range(entry: Mapping[str, Any]) -> ByteRange:
    low = entry["low"] if "low" in entry else entry["value"]
    return ByteRange(low=low, high=entry.get("high", low))
