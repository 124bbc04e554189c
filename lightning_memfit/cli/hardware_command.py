"""``memfit hardware``: this machine's devices and the GPUs of the catalogue, as a table or as JSON."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

from rich.table import Table
from rich.text import Text

from lightning_memfit.cli.documents import hardware_document
from lightning_memfit.hardware.catalog import catalog, catalog_sources
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.torch_driver import TorchDriver
from lightning_memfit.report.device_words import UNKNOWN_WORDS, device_words
from lightning_memfit.report.pieces import facts_table, title
from lightning_memfit.units import format_bytes

_OVERRIDE = "hardware="
"""How the other commands name a device."""
_ASSUMED = ", assumed"


def run_hardware(arguments: Namespace, *, say: Any) -> tuple[int, str | None]:
    """Describe devices.

    Args:
        arguments: the command line.
        say: a rich console for text.

    Returns:
        The exit code, and the JSON document if that was asked for.

    Raises:
        ConfigurationError: if a name is not known.
        UnsupportedError: if a GPU of this machine was asked for, and there is none.
    """
    names = list(dict.fromkeys(name.removeprefix(_OVERRIDE) for name in arguments.names)) or _here()
    if arguments.all:
        names = [*names, *(model.key for model in catalog() if model.key not in names)]
    devices = [(name, detect_device(name)) for name in names]
    if arguments.json:
        entries = [_entry(name, device, with_sources=arguments.sources) for name, device in devices]
        return 0, hardware_document(entries)
    if arguments.all:
        say.print(_overview([device for _, device in devices]))
        if arguments.sources:
            for name, device in devices:
                _print_one(name, device, say, with_sources=True)
        return 0, None
    for name, device in devices:
        _print_one(name, device, say, with_sources=arguments.sources)
    return 0, None


def _here() -> list[str]:
    """This machine's devices: its GPUs, and the host."""
    return [*(f"cuda:{index}" for index in range(TorchDriver().device_count())), "cpu"]


def _entry(name: str, device: DeviceSpec, *, with_sources: bool) -> dict[str, Any]:
    entry = {"asked": name, **dataclasses.asdict(device)}
    if with_sources:
        entry["sources"] = {} if device.key is None else dict(catalog_sources(device.key))
    return entry


def _print_one(name: str, device: DeviceSpec, say: Any, *, with_sources: bool) -> None:
    say.print(title(name))
    facts = facts_table()
    for label, words in _rows(device):
        facts.add_row(label, Text(words))
    if with_sources and device.key is not None:
        for number, source in catalog_sources(device.key).items():
            facts.add_row(f"source: {number}", Text(source))
    say.print(facts)
    say.print()


def _rows(device: DeviceSpec) -> list[tuple[str, str]]:
    rows = [("device", device_words(device))]
    what = "available, or held by this process" if device.is_present else "all of it, as if nothing else ran there"
    rows.append(("capacity", f"{format_bytes(device.capacity_bytes)} ({what})"))
    if device.limit_bytes is not None:
        rows.append(("limit", f"{format_bytes(device.limit_bytes)} ({device.limit_source})"))
    rows.append(("precisions", ", ".join(device.supported_precisions)))
    if device.kind == "cpu":
        return rows
    rows += [
        ("context", f"{_context_words(device)} (the runtime and its libraries, outside torch's allocator)"),
        ("peaks", _peak_words(device)),
        ("bandwidth", f"{_rate(device.bandwidth_bytes_per_second, 1e9)} GB/s (vendor)"),
        ("attention", ", ".join(device.attention_backends) or "unknown"),
        ("unknown", ", ".join(UNKNOWN_WORDS.get(word, word) for word in device.unknowns) or "nothing of these"),
    ]
    return rows


def _context_words(device: DeviceSpec) -> str:
    low, high = device.context_low_bytes, device.context_high_bytes
    if low is None or high is None:
        return "unknown"
    words = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return f"{words}{_ASSUMED}" if "context" in device.unknowns else words


def _peak_words(device: DeviceSpec) -> str:
    if not device.peak_flops:
        return "unknown"
    peaks = (f"{dtype} {rate / 1e12:g}" for dtype, rate in device.peak_flops.items())
    return f"{', '.join(peaks)} TFLOP/s (vendor, dense)"


def _rate(rate: int | None, unit: float) -> str:
    return "unknown" if rate is None else f"{rate / unit:,.0f}"


def _overview(devices: list[DeviceSpec]) -> Table:
    """One line for each device: FLOPs in 16 bits and bandwidth as the vendor says."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("device", no_wrap=True)
    for header in ("capacity", "capability", "bf16", "TFLOP/s", "GB/s"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("context", no_wrap=True)
    table.add_column("unknown", overflow="fold")
    for device in devices:
        fastest = max((device.peak_flops.get(dtype, 0) for dtype in ("fp16", "bf16")), default=0)
        table.add_row(
            Text(device.key or device.name),
            format_bytes(device.capacity_bytes),
            "-" if device.compute_capability is None else ".".join(map(str, device.compute_capability)),
            "yes" if "bf16-mixed" in device.supported_precisions else "no",
            f"{fastest / 1e12:,.0f}" if fastest else "-",
            _rate(device.bandwidth_bytes_per_second, 1e9) if device.kind == "cuda" else "-",
            _context_words(device).removesuffix(_ASSUMED) if device.kind == "cuda" else "-",
            ", ".join(device.unknowns),
        )
    return table
