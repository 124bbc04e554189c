"""Measure the torch allocator's peak on the CPU, temporaries inside operators included.

Adapter for torch's profiler: touches ``_prepare_profiler``, ``_enable_profiler``, ``_disable_profiler`` and
``_profiler_enabled`` of ``torch._C._autograd``, the event tree's ``Allocation`` records, and the log-level flag
``FLAGS_caffe2_log_level`` of ``libc10``.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import OperatorCost

_SAMPLING_SECONDS = 0.01
_COSTLIEST = 5
_LOG_ONLY_ERRORS = 2  # c10's severities: 0 info, 1 warning, 2 error


class Meter(Protocol):
    """What the warm-up needs of a meter; one for another device has the same face."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes alive at one moment, resident ones included."""
        ...

    @property
    def peak_rss_bytes(self) -> int | None:
        """Highest resident set size seen; ``None`` where the system does not tell."""
        ...

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Most bytes that a caching allocator held; ``None`` on a host."""
        ...

    @property
    def device_total_bytes(self) -> int | None:
        """What the driver called used on the device at the end; ``None`` on a host."""
        ...

    @property
    def costliest_ops(self) -> tuple[OperatorCost, ...]:
        """The operators that took the most time."""
        ...

    def __enter__(self) -> Self:
        """Start."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemoryEvent:
    """One call of the allocator."""

    time_ns: int
    """When, in nanoseconds."""
    address: int
    """Address of the block."""
    num_bytes: int
    """Bytes of the block; negative where it is freed."""


def peak_of(events: Iterable[MemoryEvent]) -> int:
    """Return the most bytes alive at one moment, of the blocks that were allocated within ``events``.

    Events of one time keep the order they are given in. A block freed without having been allocated here is not
    counted: torch's table of block sizes keeps entries of blocks that outlived an earlier recording, so that such a
    record can carry a size that is not the block's.

    >>> events = [(0, 16, 8), (1, 32, 4), (1, 16, -8), (2, 48, 6), (3, 99, -100)]
    >>> peak_of(MemoryEvent(time_ns=t, address=a, num_bytes=n) for t, a, n in events)
    12
    """
    live: dict[int, int] = {}
    total = peak = 0
    for event in sorted(events, key=lambda event: event.time_ns):  # a stable sort: ties keep their order
        total -= live.pop(event.address, 0)
        if event.num_bytes > 0:
            live[event.address] = event.num_bytes
            total += event.num_bytes
            peak = max(peak, total)
    return peak


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind ``tensors``; views and tied tensors count once.

    Of a tensor that is spread over several ranks, the part that this one holds.

    Ignores: meta tensors, and sparse ones beyond their indices and values.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if is_traceable_wrapper_subclass(tensor):  # what it says of its own storage is the size of the whole
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return tuple(part for each in inner if isinstance(each, torch.Tensor) for part in _dense_parts(each))
    if tensor.device.type == "meta":
        return ()
    if is_traceable_wrapper_subclass(tensor):  # such as a distributed one, of which this rank has a part
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return tuple(part for each in inner if isinstance(each, torch.Tensor) for part in _dense_parts(each))
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return (tensor,) if tensor.layout == torch.strided else ()


class AllocationMeter:
    """Measure the CPU allocator between enter and exit.

    Blocks that are alive before the start are known to the meter only as ``resident_bytes``, and it takes them to live
    until the end: a block that is freed inside is still counted (gradients should be ``None`` before the start).

    Args:
        resident_bytes: bytes of the torch allocator that are alive at the start and belong to what is measured.

    Ignores: memory that does not come from torch's CPU allocator (NumPy arrays, mapped files, oneDNN's own buffers).
    """

    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None

    def __init__(self, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self._events: list[MemoryEvent] = []
        self._costliest: tuple[OperatorCost, ...] = ()
        self._rss = _RssSampler()
        self._quiet = contextlib.ExitStack()

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes alive at one moment, resident ones included."""
        return self.resident_bytes + peak_of(self._events)

    @property
    def peak_rss_bytes(self) -> int | None:
        """Highest resident set size seen; ``None`` where the system does not tell."""
        return self._rss.peak_bytes

    @property
    def costliest_ops(self) -> tuple[OperatorCost, ...]:
        """The five operators that took the most time in themselves."""
        return self._costliest

    def __enter__(self) -> Self:
        """Start recording.

        Raises:
            UnsupportedError: if another torch profiler is recording.
        """
        if _profiler_enabled():
            raise UnsupportedError(
                "A torch profiler is recording already, and torch allows one at a time: the memory warm-up cannot "
                "measure. Take away Trainer(profiler=...) or the profiler around fit, or set MEMFIT=off for that run."
            )
        gc.collect()  # garbage of earlier work that dies inside would change nothing counted, but the resident set
        self._quiet.enter_context(_only_errors_logged())
        try:
            _start_profiler()
        except BaseException:
            self._quiet.close()
            raise
        self._rss.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop recording and read the events."""
        self._rss.stop()
        try:
            tree = _stop_profiler()
        finally:
            self._quiet.close()
        self._events, self._costliest = _read(tree)


def _profiler_enabled() -> bool:
    from torch._C._autograd import _profiler_enabled as enabled

    return bool(enabled())


def _start_profiler() -> None:
    from torch._C._autograd import _enable_profiler, _prepare_profiler
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    activities = {ProfilerActivity.CPU}
    # In order: state, record shapes, profile memory, stacks, FLOPs, modules, experimental configuration.
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    with _standard_error_closed():
        _prepare_profiler(config, activities)
        _enable_profiler(config, activities)


def _stop_profiler() -> list[Any]:
    from torch._C._autograd import _disable_profiler

    with _standard_error_closed():
        return list(_disable_profiler().experimental_event_tree())


def _read(tree: list[Any]) -> tuple[list[MemoryEvent], tuple[OperatorCost, ...]]:
    """Walk the event tree once, in the order in which torch recorded it."""
    memory: list[MemoryEvent] = []
    nanoseconds: dict[str, int] = {}
    calls: dict[str, int] = {}
    stack = list(reversed(tree))
    while stack:
        event = stack.pop()
        children = event.children
        stack.extend(reversed(children))
        kind = event.tag.name
        if kind == "Allocation":
            fields = event.extra_fields
            if fields.device.type == "cpu":
                memory.append(MemoryEvent(time_ns=event.start_time_ns, address=fields.ptr, num_bytes=fields.alloc_size))
        elif kind == "TorchOp" and _is_operator(event.name):
            own = event.duration_time_ns - sum(child.duration_time_ns for child in children)
            nanoseconds[event.name] = nanoseconds.get(event.name, 0) + max(0, own)
            calls[event.name] = calls.get(event.name, 0) + 1
    costliest = sorted(nanoseconds, key=lambda name: nanoseconds[name], reverse=True)[:_COSTLIEST]
    return memory, tuple(
        OperatorCost(name=name, self_seconds=nanoseconds[name] / 1e9, calls=calls[name]) for name in costliest
    )


def _is_operator(name: str) -> bool:
    """Whether a record is an operator, and no annotation such as ``Optimizer.step#AdamW.step`` or a graph node."""
    return "::" in name and not name.startswith("autograd::")


@contextlib.contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Keep "Memory block of unknown size was allocated before the profiling started" off the terminal.

    c10 writes it to the standard error of the process, past Python's warnings; only its own flag silences it. On a
    system where the library or the flag has another name the message is shown, and nothing else changes.
    """
    name = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        flag = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before = flag.value
    flag.value = max(before, _LOG_ONLY_ERRORS)
    try:
        yield
    finally:
        flag.value = before


@contextlib.contextmanager
def _standard_error_closed() -> Iterator[None]:
    """Send file descriptor 2 nowhere while the profiler starts or stops: kineto announces both there."""
    try:
        before = os.dup(2)
    except OSError:  # a process without a standard error
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(nowhere)
        os.close(before)


class _RssSampler:
    """Sample this process's resident set size from a thread.

    The kernel's own mark (``VmHWM``) counts from the start of the process. Resetting it would change what the user's
    monitoring sees, so it is used only where it rises while sampling.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._mark = 0
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._started = False

    def start(self) -> None:
        resident = _resident_set()
        if resident is None:
            return
        self.peak_bytes, self._mark = resident, _high_water_mark()
        self._stopping, self._ended = threading.Event(), threading.Event()
        # Not a threading.Thread: its start() waits for ever for a thread that finds no memory for its first frame.
        with contextlib.suppress(RuntimeError):  # no memory for its stack: the kernel's mark alone is read
            _thread.start_new_thread(self._run, (self._stopping, self._ended))
        self._started = True

    def stop(self) -> None:
        if not self._started:
            return
        self._stopping.set()
        self._ended.wait(_SAMPLING_SECONDS * 10)
        self._started = False
        self._sample()
        mark = _high_water_mark()
        if mark > self._mark:
            self.peak_bytes = max(self.peak_bytes or 0, mark)

    def _run(self, stopping: threading.Event, ended: threading.Event) -> None:
        while not stopping.wait(_SAMPLING_SECONDS):
            self._sample()
        ended.set()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes or 0, _resident_set() or 0)


def _resident_set() -> int | None:
    """Resident set size of this process in bytes; ``None`` where the system does not tell."""
    try:
        import psutil  # here, so that forecasts do without it
    except ImportError:
        return None
    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return None


def _high_water_mark() -> int:
    """Peak resident set size of the process so far in bytes; 0 where the kernel does not tell."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
