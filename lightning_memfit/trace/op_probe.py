"""Bytes that an operator takes inside, which dispatch cannot see: run each distinct call once on the real device.

Low by 1-7 % for convolutions and 21-40 % for LSTMs without probing (measured on torch 2.13, CPU). The calls run in a
process of their own (``op_probe_worker.py``), at full shapes because tiny ones do not extrapolate, with as many threads
as here because some operators keep a buffer per thread, and on a GPU with the same choice of kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from lightning_memfit.trace import op_probe_worker
from lightning_memfit.trace.timeline import ProbeResult, Signature, TensorShape

_WORKER = Path(op_probe_worker.__file__)
_CHOICES = (
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cuda.matmul.fp32_precision",
)
"""What decides under ``torch.backends`` which kernels a GPU runs, and so what they take inside."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Results by signature number, and what could not be probed."""

    results: Mapping[int, ProbeResult]
    """By index into :attr:`Timeline.signatures`."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Operator name to the reason why it has no result."""
    remarks: tuple[str, ...] = ()
    """What else is to be known of the results, in words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, and the failures in words."""
        return self.remarks + tuple(
            f"{op} could not be probed ({reason}); temporaries inside it are not in the forecast"
            for op, reason in self.failures.items()
        )


class OperatorProber:
    """Probes operators in a child process that is started on first need, and remembers the results.

    Args:
        cache_dir: directory of the results' file; ``None`` keeps them in this process only.
        largest_bytes: arguments above this size are not allocated for a probe.
        device: where operators are run: ``"cpu"``, or a GPU of this machine such as ``"cuda:0"``.
        uuid: the driver's identifier of that GPU, by which the process finds it; ``None`` where it is not known.
        seconds: the most that is waited for answers, all calls together; ``None`` for no limit.
    """

    def __init__(
        self,
        *,
        cache_dir: Path | None = None,
        largest_bytes: int = 2**34,
        device: str = "cpu",
        uuid: str | None = None,
        seconds: float | None = None,
    ) -> None:
        self._cache_file = None if cache_dir is None else cache_dir / f"operators-{_environment_key(device)}.json"
        self._largest_bytes = largest_bytes
        self._device, self._uuid = device, uuid
        self._seconds, self._waited = seconds, 0.0
        self._known: dict[str, Any] = _read_cache(self._cache_file)
        self._fresh: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child process now, so that it is ready when the first trace is done."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": _python_path(),
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            )
            assert self._process.stdin is not None
            settings = {
                "threads": torch.get_num_threads(),
                "largest_bytes": self._largest_bytes,
                "device": self._device,
                "uuid": self._uuid,
                "backends": {} if self._device == "cpu" else _choices(),
            }
            op_probe_worker.write_message(self._process.stdin, settings)

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """Results for every signature, from memory where the same call was probed before."""
        keys = _keys(signatures)
        if any(key not in self._known for key in keys):
            self._run(signatures, keys)
        results, failures = {}, {}
        for number, key in enumerate(keys):
            known = self._known[key]
            if isinstance(known, str):
                failures[signatures[number].op] = known
            else:
                peak, outputs, _ = known
                results[number] = ProbeResult(
                    peak_bytes=peak, output_bytes={int(index): size for index, size in outputs.items()}
                )
        return Probes(results=results, failures=failures)

    def end_process(self) -> None:
        """End the child process, so that it holds nothing of the device; what is asked next starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """Write new results to the cache file and end the child process."""
        self.end_process()
        if self._cache_file is not None and self._fresh:
            with contextlib.suppress(OSError):  # a folder that cannot be written costs a second of probing
                _write_cache(self._cache_file, self._fresh)
            self._fresh = {}

    def __enter__(self) -> OperatorProber:
        """Return itself; the child process starts on first need."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def _run(self, signatures: Sequence[Signature], keys: Sequence[str]) -> None:
        missing = [number for number, key in enumerate(keys) if key not in self._known]
        wanted = sorted({*missing, *_needed_makers(signatures, missing)})

        def encode(value: Any) -> Any:
            if isinstance(value, TensorShape):
                return ("tensor", *self._resolved(value, keys, wanted))
            if isinstance(value, tuple):
                return [encode(item) for item in value]
            if isinstance(value, dict):
                return {name: encode(item) for name, item in value.items()}
            return value

        requests = [
            (n, signatures[n].op, encode(signatures[n].args), encode(dict(signatures[n].kwargs))) for n in wanted
        ]
        answers = self._ask(requests)
        for number in missing:
            self._known[keys[number]] = self._fresh[keys[number]] = answers.get(number, "no answer")

    def _resolved(self, shape: TensorShape, keys: Sequence[str], wanted: Sequence[int]) -> TensorShape:
        # Makers that are not run again have told the real shapes of their outputs before.
        if shape.origin is None or shape.origin[0] in wanted:
            return shape
        known = self._known.get(keys[shape.origin[0]])
        real = None if known is None or isinstance(known, str) else known[2].get(str(shape.origin[1]))
        if real is None:
            return shape._replace(origin=None)
        real = (real[0], tuple(real[1]), tuple(real[2]))
        return TensorShape(*op_probe_worker.real_shape(shape[:3], real), None)

    def _ask(self, requests: list[Any]) -> dict[int, Any]:
        """Send all requests; if the child dies, find out by halves which call killed it."""
        if self._is_out_of_time:
            return self._untold(requests, "")
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answer, obstacle = None, None
        with contextlib.suppress(BrokenPipeError), self._waiting_for(process):
            obstacle = self._obstacle(process)
            if obstacle is None:
                op_probe_worker.write_message(process.stdin, requests)
                answer = op_probe_worker.read_message(process.stdout)
        if answer is not None:
            return {number: _as_json(found) for number, found in answer.items()}
        died = f"the probing process ended with code {process.wait()}" if obstacle is None else None
        self.end_process()
        if obstacle is not None or len(requests) == 1 or self._is_out_of_time:
            return self._untold(requests, obstacle or died or "")
        middle = len(requests) // 2
        return {**self._ask(requests[:middle]), **self._ask(requests[middle:])}

    @property
    def _is_out_of_time(self) -> bool:
        return self._seconds is not None and self._waited >= self._seconds

    def _untold(self, requests: list[Any], reason: str) -> dict[int, Any]:
        if self._is_out_of_time:
            reason = f"not run within {self._seconds:.0f} seconds"
        return {number: reason for number, *_ in requests}

    def _obstacle(self, process: subprocess.Popen[bytes]) -> str | None:
        """Why a process takes no requests; ``None`` once it does."""
        assert process.stdout is not None
        if getattr(process, "memfit_ready", False):
            return None
        said = op_probe_worker.read_message(process.stdout)
        if said == "ready":
            process.memfit_ready = True  # type: ignore[attr-defined]
            return None
        return str(said) if said is not None else f"the probing process ended with code {process.wait()}"

    @contextlib.contextmanager
    def _waiting_for(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Count the seconds within, and kill the process when they are more than are left."""
        begin = time.monotonic()
        timer = None if self._seconds is None else threading.Timer(self._seconds - self._waited, process.kill)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._waited += time.monotonic() - begin


def _python_path() -> str:
    """Where the child process finds this package too, if it was never installed."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_WORKER.parents[2]))))


def _shapes_in(value: Any) -> list[TensorShape]:
    if isinstance(value, TensorShape):
        return [value]
    if isinstance(value, tuple):
        return [shape for item in value for shape in _shapes_in(item)]
    if isinstance(value, dict):
        return [shape for item in value.values() for shape in _shapes_in(item)]
    return []


def _needed_makers(signatures: Sequence[Signature], missing: Sequence[int]) -> set[int]:
    """Operators to run again because an operator that is missing reads their opaque outputs."""
    shapes = [s for n in missing for s in _shapes_in((signatures[n].args, dict(signatures[n].kwargs)))]
    return {s.origin[0] for s in shapes if s.origin is not None and "rnn_layer" in signatures[s.origin[0]].op}


def _keys(signatures: Sequence[Signature]) -> list[str]:
    """One key per signature that says everything its result depends on, the makers of its arguments included."""
    keys: list[str] = []
    for signature in signatures:
        shapes = _shapes_in((signature.args, dict(signature.kwargs)))
        makers = [
            (keys[shape.origin[0]], shape.origin[1]) if shape.origin and shape.origin[0] < len(keys) else None
            for shape in shapes
        ]
        text = repr((signature.op, _bare(signature.args), _bare(dict(signature.kwargs)), makers))
        keys.append(hashlib.sha256(text.encode()).hexdigest()[:24])
    return keys


def _bare(value: Any) -> Any:
    if isinstance(value, TensorShape):
        return value[:3]
    if isinstance(value, tuple):
        return tuple(_bare(item) for item in value)
    if isinstance(value, dict):
        return {name: _bare(item) for name, item in value.items()}
    return value


def _choices() -> dict[str, Any]:
    return {name: attrgetter(name)(torch.backends) for name in _CHOICES}


def _environment_key(device: str = "cpu") -> str:
    parts: tuple[str, ...] = (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        str(torch._C._has_mkldnn),
        _version_of("bitsandbytes"),  # whose operators are probed too
    )
    if device != "cpu":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        parts += (torch.cuda.get_device_name(device), str(torch.version.cuda), str(cudnn), str(_choices()))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _as_json(found: Any) -> Any:
    """An answer in the form in which the cache file gives it back."""
    if isinstance(found, str):
        return found
    peak, outputs, shapes = found
    return [peak, {str(index): size for index, size in outputs.items()}, {str(i): shape for i, shape in shapes.items()}]


def _read_cache(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # ValueError: neither UTF-8 nor JSON
        return {}  # a damaged cache costs a second of probing, nothing else
    return {key: found for key, found in data.items() if _is_answer(found)} if isinstance(data, dict) else {}


def _is_answer(found: Any) -> bool:
    return (
        isinstance(found, list)
        and len(found) == 3
        and isinstance(found[0], int)
        and all(isinstance(part, dict) for part in found[1:])
    )


def _write_cache(path: Path, fresh: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        merged = {**_read_cache(path), **{key: value for key, value in fresh.items() if not isinstance(value, str)}}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(merged), encoding="utf-8")
        temporary.replace(path)
