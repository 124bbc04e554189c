"""Builds and drives the counting CPU allocator. Use it in a child process only: installing it cannot be taken back.

allocator = BudgetAllocator(build_allocator())
allocator.install()
allocator.set_limit(64 * 2**20)
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("budget_allocator.cpp")


def why_unavailable() -> str | None:
    """Why the allocator cannot be built here, for a skip; ``None`` if it can."""
    if not sys.platform.startswith("linux"):
        return f"the counting allocator is built for Linux only, this is {sys.platform}"
    if _compiler() is None:
        return "the counting allocator needs a C++ compiler: no g++ or clang++ on the path, and CXX is not set"
    return None


def build_allocator(directory: Path | None = None, *, source: Path = _SOURCE) -> Path:
    """Compile the allocator against the installed torch, once per source, torch build and compiler.

    Args:
        directory: where the library is kept; by default the user's cache directory.
        source: another extension to compile the same way.

    Returns:
        The path of the shared library.

    Raises:
        RuntimeError: if it cannot be built here, with the compiler's words.
    """
    reason = why_unavailable()
    compiler = _compiler()
    if reason is not None or compiler is None:
        raise RuntimeError(f"{reason}. Install g++ to run what needs it.")
    directory = _cache_directory() if directory is None else directory
    directory.mkdir(parents=True, exist_ok=True)
    command = _command(compiler, source)
    key = hashlib.sha256("\0".join([*command, torch.__version__, source.read_text()]).encode()).hexdigest()[:16]
    library = directory / f"{source.stem}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        unfinished = Path(scratch) / library.name
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} failed on {source.name} with exit code {done.returncode}:\n{done.stderr}")
        # Renaming is atomic: another process sees the whole library or none.
        unfinished.replace(library)
    return library


class BudgetAllocator:
    """The counting allocator of this process. Counts begin with ``install``; what existed before is not counted."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.memfit_set_limit.argtypes = [ctypes.c_int64]
        for name in ("memfit_live_bytes", "memfit_peak_bytes", "memfit_denied_count"):
            getattr(self._library, name).restype = ctypes.c_int64

    def install(self) -> None:
        """Allocate CPU tensors with it from now on, for the rest of the process."""
        self._library.memfit_install()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Let allocations above ``limit_bytes`` live bytes raise ``torch.OutOfMemoryError``; ``None`` lifts it."""
        if limit_bytes is None:
            self._library.memfit_clear_limit()
        else:
            self._library.memfit_set_limit(limit_bytes)

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return int(self._library.memfit_live_bytes())

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment since ``reset_peak``."""
        return int(self._library.memfit_peak_bytes())

    @property
    def denied_count(self) -> int:
        """Allocations refused so far."""
        return int(self._library.memfit_denied_count())

    def reset_peak(self) -> None:
        """Take the bytes alive now as the peak."""
        self._library.memfit_reset_peak()


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lightning_memfit" / "allocator"


def _command(compiler: str, source: Path) -> list[str]:
    torch_root = Path(torch.__file__).parent
    includes = (torch_root / "include", torch_root / "include" / "torch" / "csrc" / "api" / "include")
    libraries = torch_root / "lib"
    return [
        *compiler.split(),
        *("-shared", "-fPIC", "-O2", "-std=c++20"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in includes),
        str(source),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10"),
    ]
