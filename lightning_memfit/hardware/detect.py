"""Finds out what this machine leaves to this process: memory, the cgroup limit, cores, name; and which device is meant.

For the host it reads the files of ``/proc`` and ``/sys/fs/cgroup``; where there is no ``/proc`` (macOS) it asks psutil.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.detect_cuda import Driver, detect_gpu, index_of
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.torch_driver import TorchDriver
from lightning_memfit.predict.allocator_settings import AllocatorSettings

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63; no machine has an exbibyte.
_NO_LIMIT = 2**60


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """One memory limit that applies to this process."""

    limit_bytes: int
    """The most that the control group may hold."""
    left_bytes: int
    """What it could still take: page cache counts as free."""
    source: str
    """The file that sets it."""


class _Memory(NamedTuple):
    total_bytes: int
    available_bytes: int
    process_bytes: int


def detect_device(which: str = "local", *, root: Path = Path("/"), driver: Driver | None = None) -> DeviceSpec:
    """Describe a device as it is now, or a GPU that is not in this machine.

    Args:
        which: ``"local"`` (torch's current GPU where there is one, else the host), ``"cpu"`` (the host), ``"cuda"`` or
            ``"cuda:1"`` (a GPU as torch counts them), or a GPU of the catalogue such as ``"a100-40gb"``, with
            the allocator set up as this environment says.
        root: the directory that holds ``proc`` and ``sys``.
        driver: whom to ask about GPUs; torch and NVML if ``None``.

    Returns:
        The device; all sizes in bytes.

    Raises:
        ConfigurationError: if ``which`` is nothing that is known, or a GPU that this machine does not have.
        UnsupportedError: if ``which`` is a GPU of this machine and torch finds none.
    """
    if not isinstance(which, str):
        raise ConfigurationError(
            f"device={which!r} must be text: 'local', 'cpu', 'cuda:0', or a GPU of the catalogue, such as 'a100-40gb'."
        )
    spelled = which.strip().lower()  # names of the catalogue are read so too
    if spelled in ("cpu", "local") or spelled.startswith("cuda"):
        which = spelled
    if which == "cpu":
        return _host(root)
    driver = TorchDriver(root=root) if driver is None else driver
    if which == "local":
        return _host(root) if driver.device_count() == 0 else detect_gpu(None, driver=driver, host=_host(root))
    if (cuda := re.fullmatch(r"cuda(?::([0-9]+))?", which)) is not None:
        if driver.device_count() == 0:
            raise UnsupportedError(
                f"device={which!r} is not there: torch finds no GPU that this process can use. Use 'cpu', or a GPU of "
                "the catalogue, such as 'a100-40gb', to plan for another machine."
            )
        return detect_gpu(None if cuda[1] is None else int(cuda[1]), driver=driver, host=_host(root))
    try:
        absent = catalog_device(which)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} For this machine use 'local', 'cpu' or 'cuda:0'.") from None
    return _with_settings(absent, driver.allocator_settings())


def _with_settings(device: DeviceSpec, text: str | None) -> DeviceSpec:
    """A GPU that is not here with the allocator that this environment sets up, and the share of memory it allows."""
    if text is None:
        return device
    allowed = AllocatorSettings.from_text(text).allowed_bytes(device.capacity_bytes)
    if allowed is None:
        return replace(device, allocator_settings=text)
    beside = device.context_high_bytes or 0  # a fraction limits torch's own bytes
    capacity = min(device.capacity_bytes, allowed + beside)
    return replace(
        device,
        allocator_settings=text,
        memory_fraction=allowed / device.capacity_bytes,
        capacity_bytes=capacity,
        available_bytes=capacity,
    )


def detect_again(device: DeviceSpec, *, root: Path = Path("/"), driver: Driver | None = None) -> DeviceSpec:
    """Describe the same device as it is now, such as just before a warm-up: neighbours come and grow.

    A GPU that is not in this machine stays what it was.

    Args:
        device: what was detected before.
        root: the directory that holds ``proc`` and ``sys``.
        driver: whom to ask about GPUs; torch and NVML if ``None``.

    Raises:
        ConfigurationError: if the GPU is gone.
    """
    if not device.is_present:
        return device
    if device.kind == "cpu":
        return _host(root)
    driver = TorchDriver(root=root) if driver is None else driver
    index = None if device.uuid is None else index_of(device.uuid, driver=driver)
    return detect_gpu(index, driver=driver, host=_host(root))


def _host(root: Path) -> DeviceSpec:
    """Describe the host.

    ``available_bytes`` is the smallest of what the system, and each control group of this process, could still give.
    What the process holds counts against each limit as a whole, so that ``capacity_bytes`` never exceeds a limit:
    mapped library files could be dropped, but the process would only read them again.

    Source: Linux ``Documentation/admin-guide/cgroup-v2.rst``, ``cgroup-v1/memory.rst`` and ``filesystems/proc.rst``.

    Ignores: swap, ``memory.high`` (which slows down and does not kill), other processes that grow later.
    """
    memory = _system_memory(root)
    available = min(memory.available_bytes, memory.total_bytes - memory.process_bytes)
    tightest: _Limit | None = None
    for limit in _memory_limits(root, memory.process_bytes):
        if tightest is None or limit.left_bytes < tightest.left_bytes:
            tightest = limit
    if tightest is not None:
        available = min(available, tightest.left_bytes)
    available = max(0, available)
    return DeviceSpec(
        name=_cpu_name(root),
        kind="cpu",
        capacity_bytes=available + memory.process_bytes,
        available_bytes=available,
        process_bytes=memory.process_bytes,
        limit_bytes=None if tightest is None else tightest.limit_bytes,
        limit_source=None if tightest is None else tightest.source,
        cores=_cores(root),
        supported_precisions=("32-true", "bf16-mixed"),
    )


def _system_memory(root: Path) -> _Memory:
    system = _sizes_in_kib(root / "proc/meminfo")
    process = _sizes_in_kib(root / "proc/self/status")
    try:
        return _Memory(system["MemTotal"], system["MemAvailable"], process["VmRSS"])
    except KeyError:
        return _psutil_memory()


def _psutil_memory() -> _Memory:
    # Imported here: Linux never needs it.
    import psutil

    system = psutil.virtual_memory()
    return _Memory(int(system.total), int(system.available), int(psutil.Process().memory_info().rss))


def _memory_limits(root: Path, process_bytes: int) -> Iterator[_Limit]:
    for version, group in _groups(root, "memory"):
        stat = _counters(group / "memory.stat")
        if version == 2:
            limits = {"memory.max": _number(group / "memory.max")}
            usage = _number(group / "memory.current")
            page_cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        else:
            # The second is the tightest limit of all parents; a container sees it where it cannot see the parents.
            limits = {
                "memory.limit_in_bytes": _number(group / "memory.limit_in_bytes"),
                "memory.stat hierarchical_memory_limit": stat.get("hierarchical_memory_limit"),
            }
            usage = _number(group / "memory.usage_in_bytes")
            page_cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
        held = process_bytes if usage is None else max(usage - page_cache, process_bytes)
        for source, limit in limits.items():
            if limit is not None and limit < _NO_LIMIT:
                yield _Limit(limit_bytes=limit, left_bytes=limit - held, source=source)


def _groups(root: Path, controller: str) -> Iterator[tuple[Literal[1, 2], Path]]:
    """Yield the control groups that this process is in, with the version of their files, innermost first."""
    mounts = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        # hierarchy id : controllers : path; "0::path" is version 2
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Beside version 1, version 2 is mounted at "unified".
            mount = mounts / "unified" if (mounts / "unified").is_dir() else mounts
            yield from ((2, group) for group in _group_and_parents(mount, path))
        elif controller in controllers.split(","):
            yield from ((1, group) for group in _group_and_parents(mounts / controller, path))


def _group_and_parents(mount: Path, path: str) -> Iterator[Path]:
    parts = PurePosixPath(path.lstrip("/")).parts
    if ".." in parts or not mount.joinpath(*parts).is_dir():
        # In a container the path may be the host's, while its own group is mounted as the root.
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _cores(root: Path) -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for version, group in _groups(root, "cpu"):
        microseconds, period = _quota(version, group)
        if microseconds > 0 and period > 0:
            cores = min(cores, max(1, -(-microseconds // period)))
    return cores


def _quota(version: int, group: Path) -> tuple[int, int]:
    """Microseconds of computing in each period of so many; -1 or 0 is no quota."""
    if version == 1:
        return _number(group / "cpu.cfs_quota_us") or 0, _number(group / "cpu.cfs_period_us") or 0
    quota, period = [*(_text(group / "cpu.max") or "max").split(), "0"][:2]
    return (0, 0) if quota == "max" else (int(quota), int(period))


def _cpu_name(root: Path) -> str:
    match = re.search(r"^model name\s*:\s*(\S.*?)\s*$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine() or "CPU"


def _sizes_in_kib(path: Path) -> dict[str, int]:
    """Read lines such as ``"MemAvailable:  24192320 kB"`` as bytes by name."""
    found = re.findall(r"^(\w+):\s+([0-9]+) kB$", _text(path) or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _counters(path: Path) -> dict[str, int]:
    """Read lines such as ``"inactive_file 4096"``."""
    found = re.findall(r"^(\w+) ([0-9]+)$", _text(path) or "", re.MULTILINE)
    return {name: int(number) for name, number in found}


def _number(path: Path) -> int | None:
    """Read a file that holds one number; ``None`` for ``"max"`` or where there is no such file."""
    text = (_text(path) or "max").strip()
    return None if text == "max" else int(text)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # absent, or not for this user: then it says nothing
        return None
