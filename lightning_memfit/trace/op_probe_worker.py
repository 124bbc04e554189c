"""The probing process: runs operators on stand-ins and reports what each allocated. Starts with torch and nothing else.

Started as a script by ``op_probe.py``, so that an operator that crashes on stand-ins takes only this process along.
Each message on standard input is a pickled list of ``(number, op, args, kwargs)``; each answer on standard output is a
pickled dict of number to :class:`Answer` as a tuple, or to a text that says why it failed.

On a GPU the caching allocator tells each call's peak instead of the profiler, and no more than a share of what is free
there is taken. That has not been run on one yet.

Adapter for private names of torch: the profiler's ``_prepare_profiler``, ``_enable_profiler``, ``_disable_profiler``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple
from unittest import mock

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

_MARK = "memfit_probe_"

# Namespaces of operators that a library registers when it is imported: namespace to library. Nothing else is imported
# on the word of a request.
_REGISTERED_BY = {"bitsandbytes": "bitsandbytes", "fsdp": "torch.distributed.fsdp"}

SHARE_OF_FREE = 0.9
"""Of what is free on a GPU: the most that this process takes for tensors. A call that needs more is not run."""

Shape = tuple[str, tuple[int, ...], tuple[int, ...]]
"""dtype, size and stride of a tensor."""


class Answer(NamedTuple):
    """What one operator did."""

    peak_bytes: int
    """Most bytes alive within the call beyond those alive before it."""
    output_bytes: dict[int, int]
    """Bytes of each output that has a storage of its own, by its position."""
    shapes: dict[int, Shape]
    """The real shape of each output."""


def real_shape(claimed: Shape, real: Shape) -> Shape:
    """The shape of an argument whose maker gave ``real`` where the fake run claimed something else."""
    if 0 in claimed[1] and 0 not in real[1]:
        return real  # a workspace that fakes leave empty
    if claimed[1] == real[1]:
        return (real[0], *claimed[1:])  # statistics that the CPU keeps in another dtype than fakes do
    return claimed


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


class Prober:
    """Runs the signatures of one request in order; later ones may refer to the real outputs of earlier ones.

    Args:
        largest_bytes: arguments above this size are not allocated.
        device: where they are allocated: ``"cpu"`` or a GPU.
    """

    def __init__(self, largest_bytes: int, device: str = "cpu") -> None:
        self._largest_bytes = largest_bytes
        self._device = device
        self._gpu_peaks: dict[int, int] = {}
        self._shapes: dict[tuple[int, int], Shape] = {}
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def run(self, requests: list[tuple[int, str, Any, Any]]) -> dict[int, Any]:
        """Probe every signature of ``requests``, on a CPU within one profile."""
        if self._device != "cpu":
            return self._run_on_gpu(requests)
        found: dict[int, Any] = {}
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        activities = {ProfilerActivity.CPU}
        _prepare_profiler(config, activities)
        _enable_profiler(config, activities)
        try:
            with torch.enable_grad():
                for number, op, args, kwargs in requests:
                    found[number] = self._probe(number, op, args, kwargs)
        finally:
            result = _disable_profiler()
            self._kept.clear()
        return self._answers(found, _peaks(result.events()))

    def _run_on_gpu(self, requests: list[tuple[int, str, Any, Any]]) -> dict[int, Any]:
        with torch.enable_grad():
            found = {number: self._probe(number, op, args, kwargs) for number, op, args, kwargs in requests}
        self._kept.clear()
        torch.cuda.empty_cache()  # while it waits this process holds its context alone
        peaks, self._gpu_peaks = self._gpu_peaks, {}
        return self._answers(found, peaks)

    def _answers(self, found: dict[int, Any], peaks: dict[int, int]) -> dict[int, Any]:
        answers: dict[int, Any] = {number: text for number, text in found.items() if isinstance(text, str)}
        for number, peak in peaks.items():
            if number not in answers:
                shapes = {index: shape for (maker, index), shape in self._shapes.items() if maker == number}
                answers[number] = tuple(Answer(peak, found[number], shapes))
        self._shapes.clear()
        return answers

    def _probe(self, number: int, op: str, args: Any, kwargs: Any) -> dict[int, int] | str:
        try:
            function = _operator(op)
            args, kwargs = self._stand_in(args), self._stand_in(kwargs)
            seen = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            out = self._called(number, function, args, kwargs)
            allocated: dict[int, int] = {}
            for index, tensor in enumerate(tensors_in(out)):
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._shapes[number, index] = (dtype, tuple(tensor.shape), tuple(tensor.stride()))
                if tensor.untyped_storage()._cdata not in seen:
                    seen.add(tensor.untyped_storage()._cdata)
                    allocated[index] = self._counted(tensor.untyped_storage().nbytes())
                if "rnn_layer" in op:
                    # The backward of an RNN reads the opaque workspace of its forward: only the real one will do.
                    self._kept[number, index] = tensor
            return allocated
        except Exception as error:  # any operator may refuse stand-ins: the parent reports it by name
            return _words(error)

    def _called(self, number: int, function: Any, args: Any, kwargs: Any) -> Any:
        if self._device == "cpu":
            with torch.profiler.record_function(f"{_MARK}{number}"):
                return function(*args, **kwargs)
        function(*args, **kwargs)  # what libraries keep from their first call on belongs to no call
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(*args, **kwargs)
        torch.cuda.synchronize()
        self._gpu_peaks[number] = torch.cuda.max_memory_allocated() - before
        return out

    def _counted(self, num_bytes: int) -> int:
        """A size as the device's allocator counts it: on a GPU in blocks of 512 bytes."""
        return num_bytes if self._device == "cpu" else -(-num_bytes // 512) * 512

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 5 and value[0] == "tensor":
            return self._tensor(value[1:4], value[4])
        if isinstance(value, (list, tuple)):
            return [self._stand_in(item) for item in value]
        if isinstance(value, dict):
            return {name: self._stand_in(item) for name, item in value.items()}
        if isinstance(value, torch.device) and self._device != "cpu":
            return torch.device(self._device)  # fakes live on the CPU, whatever they stand for
        return value

    def _tensor(self, shape: Shape, origin: tuple[int, int] | None) -> torch.Tensor:
        if origin is not None and origin in self._kept and _is_whole(shape, self._kept[origin]):
            return self._kept[origin]
        if origin is not None and origin in self._shapes:
            shape = real_shape(shape, self._shapes[origin])
        dtype, size, stride = getattr(torch, shape[0]), shape[1], shape[2]
        extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if extent * dtype.itemsize > self._largest_bytes:
            raise MemoryError(f"an argument of {extent * dtype.itemsize} bytes is more than a probe may allocate")
        return torch.zeros(extent, dtype=dtype, device=self._device).as_strided(size, stride)


def set_up_gpu(device: str, uuid: str | None, backends: dict[str, Any]) -> str:
    """Use one GPU, with the parent's choice of kernels, and leave some of what is free on it to others.

    Args:
        device: the parent's name of the GPU; its index may be another one here.
        uuid: the driver's identifier of the GPU; ``None`` where it is not known, so that the name counts.
        backends: names below ``torch.backends`` to their values.

    Returns:
        The GPU's name in this process.

    Raises:
        RuntimeError: if there is no such GPU.
    """
    if uuid is not None:
        seen = [str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(torch.cuda.device_count())]
        if uuid not in seen:
            raise RuntimeError(f"the GPU {uuid} is not among those that this process sees: {', '.join(seen) or 'none'}")
        device = f"cuda:{seen.index(uuid)}"
    torch.cuda.set_device(device)  # whose allocator is asked for peaks
    for name, value in backends.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, torch.backends), last, value)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(SHARE_OF_FREE * free / total)
    return device


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


def _is_whole(shape: Shape, maker: torch.Tensor) -> bool:
    """Whether an argument is the output itself, not a view of it; fakes leave opaque workspaces empty."""
    return 0 in shape[1] or (shape[1], shape[2]) == (tuple(maker.shape), maker.stride())


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    if namespace in _REGISTERED_BY:
        with _without_compiling():
            importlib.import_module(_REGISTERED_BY[namespace])
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


@contextlib.contextmanager
def _without_compiling() -> Iterator[None]:
    """Let ``torch.compile`` return what it is given: setting it up costs two seconds, for operators not probed here."""

    def same(function: Any = None, **options: Any) -> Any:
        return same if function is None else function

    with mock.patch.object(torch, "compile", same):
        yield


def _peaks(events: Any) -> dict[int, int]:
    memory: list[tuple[int, int]] = []
    marks: list[tuple[int, int, int]] = []
    for event in events:
        name = event.name()
        if name == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            start = event.start_ns()
            marks.append((start, start + event.duration_ns(), int(name.removeprefix(_MARK))))
    memory.sort(key=lambda pair: pair[0])
    marks.sort()
    peaks: dict[int, int] = {}
    position = 0
    for start, end, number in marks:
        live = peak = 0
        while position < len(memory) and memory[position][0] < start:
            position += 1
        while position < len(memory) and memory[position][0] <= end:
            live += memory[position][1]
            peak = max(peak, live)
            position += 1
        peaks[number] = peak
    return peaks


def read_message(stream: IO[bytes]) -> Any:
    """Read one length-prefixed pickled message; ``None`` at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))


def write_message(stream: IO[bytes], message: Any) -> None:
    """Write one length-prefixed pickled message."""
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def main() -> None:
    """Answer requests until standard input ends."""
    answers_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever operators print must not get between the messages
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if the host runs out of memory, this process goes first
    settings = read_message(sys.stdin.buffer)
    torch.set_num_threads(settings["threads"])
    device = settings.get("device", "cpu")
    if device != "cpu":
        try:
            device = set_up_gpu(device, settings.get("uuid"), settings.get("backends", {}))
        except Exception as error:  # the GPU may be gone, full, or another process's alone
            write_message(answers_to, _words(error))
            return
    prober = Prober(settings["largest_bytes"], device)
    write_message(answers_to, "ready")
    while (requests := read_message(sys.stdin.buffer)) is not None:
        write_message(answers_to, prober.run(requests))


if __name__ == "__main__":
    main()
