"""A device in one line, with what is particular about it: for reports."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.report.pieces import count
from lightning_memfit.units import format_bytes

UNKNOWN_WORDS = {
    "context": "bytes of the context",
    "total": "total as torch reports it",
    "rates": "rates",
    "neighbours": "bytes of other processes",
}
"""What :attr:`DeviceSpec.unknowns` are, in words."""


def device_words(device: DeviceSpec) -> str:
    """Name the device, and say what decides how much of it there is.

    >>> device_words(DeviceSpec(name="EPYC", kind="cpu", capacity_bytes=2, available_bytes=1, process_bytes=1, cores=2))
    'EPYC (cpu, 2 cores)'
    """
    if device.kind == "cpu":
        return f"{device.name} (cpu, {count(device.cores, 'core')})"
    return f"{device.name} ({', '.join(_gpu_facts(device))})"


def _gpu_facts(device: DeviceSpec) -> Iterator[str]:
    yield "cuda" if device.is_present else "not in this machine"
    if device.total_bytes is not None:
        yield f"{format_bytes(device.total_bytes)} in all"
    if device.compute_capability is not None:
        yield f"compute capability {'.'.join(map(str, device.compute_capability))}"
    if device.mig_profile is not None:
        yield f"MIG {device.mig_profile}"
    if device.unified_memory:
        yield "memory shared with the host"
    if device.spills:
        yield "the driver moves what does not fit to the host instead of failing"
    if device.neighbours:
        yield _neighbours_words(device)
    if device.unknowns:
        yield f"not known: {', '.join(UNKNOWN_WORDS.get(word, word) for word in device.unknowns)}"


def _neighbours_words(device: DeviceSpec) -> str:
    neighbours = device.neighbours or ()
    held = sum(each.held_bytes or 0 for each in neighbours)
    number = len(neighbours)
    words = f"{number} other process{'' if number == 1 else 'es'} on it"
    if any(each.held_bytes is None for each in neighbours):
        return f"{words} with at least {format_bytes(held)}" if held else words
    return f"{words} with {format_bytes(held)}"
