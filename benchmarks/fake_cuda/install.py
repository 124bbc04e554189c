"""Puts the idle device into a process that has not imported torch yet."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def install(library: Path) -> None:
    """Load ``fake_cuda.cpp``, compiled by ``build_allocator(source=...)``, in front of torch.

    Raises:
        RuntimeError: if torch is imported already, or has a device of its own.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, too late for a device. Install it first in a new process.")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    for name in _LIBRARIES:
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    code = ctypes.CDLL(str(library)).memfit_fake_cuda_install()
    if code:
        reason = "there is a real device" if code == 1 else "torch has asked for devices before"
        raise RuntimeError(f"the idle device could not be installed: {reason}.")
