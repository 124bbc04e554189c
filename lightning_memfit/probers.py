"""Who tells what operators take inside: a process on the host, one on the GPU of the run, or formulas.

Nothing here has been run on a GPU yet: tests use stand-ins for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_memfit.hardware.detect_cuda import index_of
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.torch_driver import TorchDriver
from lightning_memfit.targets import CudaTarget, FormulaProber, Prober, Target
from lightning_memfit.trace.op_probe import OperatorProber, Probes
from lightning_memfit.trace.timeline import ProbeResult, Signature

SECONDS_ON_GPU = 60.0
"""The most that one fit waits for operators that are run on its GPU; formulas stand for those that are left."""
_BY_VALUES = frozenset(
    {"embedding_dense_backward", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
    | {"nonzero", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
)
"""Operators whose need hangs on the values of their arguments: stand-ins are zeros, and may show too little."""


class GpuProber:
    """Runs operators on the GPU of the run, in a process of its own, and asks formulas where that tells nothing.

    Whatever the process fails at, formulas answer and a remark says so: no error of it ends the run. Of operators whose
    need hangs on values the larger of both counts.

    Args:
        process: runs them on that GPU.
        formulas: answer for what could not be run.
    """

    def __init__(self, process: OperatorProber, formulas: FormulaProber) -> None:
        self._process = process
        self._formulas = formulas
        self._obstacle: str | None = None
        """Why nothing is run any more."""

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """Results for the signatures that were run, or that a formula covers."""
        told, seen = self._formulas.probe(signatures), self._run(signatures)
        if seen is None:
            return Probes(results=told.results, failures=told.failures, remarks=(_nothing_run(self._obstacle),))
        not_run = {signatures[number].op for number in range(len(signatures)) if number not in seen.results}
        return Probes(
            results={**told.results, **seen.results, **_larger_by_formula(signatures, told, seen)},
            failures={op: reason for op, reason in told.failures.items() if op in not_run},
            remarks=_some_not_run({op: seen.failures.get(op, "no answer") for op in sorted(not_run)}),
        )

    def end_process(self) -> None:
        """Let go of the GPU's memory; what is asked next is run in another process."""
        self._process.end_process()

    def close(self) -> None:
        """Write new results to the cache file and end the process."""
        self._process.close()

    def _run(self, signatures: Sequence[Signature]) -> Probes | None:
        if self._obstacle is not None or not signatures:
            return None if signatures else Probes(results={})
        try:
            found = self._process.probe(signatures)
        except Exception as error:  # a process that cannot be started, an answer that cannot be read
            found, self._obstacle = None, f"{type(error).__name__}: {error}"
        if found is not None and not found.results:
            self._obstacle = next(iter(found.failures.values()), "no answer")
        if self._obstacle is not None:
            self._process.end_process()
            return None
        return found


def _larger_by_formula(signatures: Sequence[Signature], told: Probes, seen: Probes) -> dict[int, ProbeResult]:
    return {
        number: by_formula
        for number, by_formula in told.results.items()
        if signatures[number].op.split(".")[1] in _BY_VALUES
        and number in seen.results
        and by_formula.temporary_bytes > seen.results[number].temporary_bytes
    }


def _nothing_run(reason: str | None) -> str:
    return f"operators could not be run on the GPU ({reason}): formulas stand for what they take inside"


def _some_not_run(reasons: dict[str, str]) -> tuple[str, ...]:
    if not reasons:
        return ()
    words = ", ".join(f"{op} ({reason})" for op, reason in reasons.items())
    return (f"could not be run on the GPU, so that formulas stand for what they take inside: {words}",)


MakeProcess = Callable[[DeviceSpec, Path | None], OperatorProber]
"""(GPU, directory of the results' file) to the process that runs operators there."""


def process_on(device: DeviceSpec, cache_dir: Path | None) -> OperatorProber:
    """Who runs operators on a GPU of this machine; nothing is started yet.

    Raises:
        ConfigurationError: if the GPU is gone.
    """
    driver = TorchDriver()
    index = driver.current_index() if device.uuid is None else index_of(device.uuid, driver=driver)
    return OperatorProber(cache_dir=cache_dir, device=f"cuda:{index}", uuid=device.uuid, seconds=SECONDS_ON_GPU)


def gpu_prober(
    device: DeviceSpec, target: CudaTarget, *, cache_dir: Path | None, make_process: MakeProcess | None = None
) -> GpuProber | FormulaProber:
    """Who tells what operators take inside on a GPU: it does where it is here, formulas where it is not.

    Args:
        device: the GPU.
        target: the same, as forecasts see it.
        cache_dir: keeps what was measured; ``None`` keeps nothing.
        make_process: makes what runs operators on it; :func:`process_on` by default.
    """
    formulas = FormulaProber(target.architecture)
    if not device.is_present:
        return formulas
    try:
        return GpuProber((make_process or process_on)(device, cache_dir), formulas)
    except Exception as error:  # of a driver that answers no more: forecasts go on without it
        return FormulaProber(target.architecture, remarks=(_nothing_run(f"{type(error).__name__}: {error}"),))


class Probers:
    """The probing processes of one fit: one on the host, or one on the GPU where the fit runs on one.

    Args:
        cache_dir: keeps what was measured of operators; ``None`` keeps nothing.
    """

    def __init__(self, *, cache_dir: Path | None) -> None:
        self._cache_dir = cache_dir
        self._host = OperatorProber(cache_dir=cache_dir)
        self._on_gpu: GpuProber | FormulaProber | None = None

    def start(self) -> None:
        """Start the host's process now, so that it is ready when the first trace is done."""
        self._host.start()

    def of(self, device: DeviceSpec, target: Target) -> Prober:
        """Who probes for a device."""
        if not isinstance(target, CudaTarget):
            return self._host
        self._on_gpu = gpu_prober(device, target, cache_dir=self._cache_dir)
        return self._on_gpu

    def leave_gpu(self) -> None:
        """End the process on the GPU, if there is one: its context and tensors are not the run's."""
        if isinstance(self._on_gpu, GpuProber):
            self._on_gpu.end_process()

    def close(self) -> None:
        """Write new results to the cache files and end the processes. Calling it twice is harmless."""
        if isinstance(self._on_gpu, GpuProber):
            self._on_gpu.close()
        self._host.close()
