"""Whether DeepSpeed's Adam for the host can be had here: tried in a child process before an offload is planned.

DeepSpeed compiles it when it is first used, for more than a minute. A build that is killed leaves a lock, and whoever
needs the extension next waits for it without an end. On a home folder that machines share, each of them finds the lock
of the one that builds: it is waited for, and the try comes after it.

Adapter for ``deepspeed.ops.adam.DeepSpeedCPUAdam`` (the name of its extension, ``cpu_adam``) and for the folder and the
lock of ``torch.utils.cpp_extension.load``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_EXTENSION = "cpu_adam"
_TRY = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
weight = torch.nn.Parameter(torch.zeros(8))
weight.grad = torch.ones(8)
DeepSpeedCPUAdam([weight], lr=1.0).step()
assert float(weight[0]) < 0
"""
DEFAULT_SECONDS = 300.0
"""How long a build may take: it takes 77 s on two cores."""
_OTHERS_MAY_BUILD_SECONDS = 600.0
_LOOK_AGAIN_SECONDS = 1.0
_WORDS = 600
_TAKE_TORCHS = (
    "Build it beforehand (python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()'), "
    "or offload with an optimizer of torch, which needs no extension and steps more slowly"
)


@dataclass(frozen=True, kw_only=True)
class CpuAdam:
    """What a try found."""

    works: bool
    """Whether an optimizer of it made a step."""
    reason: str
    """How that was found out, or what went wrong and what to do."""
    seconds: float
    """How long the try took, a build included."""


_found: dict[Path, CpuAdam] = {}


def find_cpu_adam(*, seconds: float = DEFAULT_SECONDS) -> CpuAdam:
    """Build DeepSpeed's Adam for the host and take a step with it, in a child process; once per process and folder.

    Args:
        seconds: after which the try is ended, and what it started with it; as long at most, before it, the lock of a
            build on another machine is waited for.
    """
    folder = extensions_folder()
    if folder in _found:
        return _found[folder]
    found, may_change = _try(folder, seconds)
    if not may_change:
        _found[folder] = found
    return found


def forget_cpu_adam() -> None:
    """Let the next call try again."""
    _found.clear()


def extensions_folder() -> Path:
    """Where torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or its folder for this Python and torch.

    Source: ``_get_build_directory`` in ``torch/utils/cpp_extension.py`` 2.13.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return Path(given)
    from torch.utils.cpp_extension import get_default_build_root

    version, hip, cuda = sys.version_info, torch.version.hip, torch.version.cuda
    device = f"rocm{hip.replace('.', '')}" if hip else f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return Path(get_default_build_root()) / f"py{version.major}{version.minor}{sys.abiflags}_{device}"


def _try(folder: Path, seconds: float) -> tuple[CpuAdam, bool]:
    """What a try finds, and whether the next may find something else: a build on another machine comes to its end."""
    begin = time.monotonic()
    lock = folder / _EXTENSION / "lock"
    blocked = _clear(lock)
    while blocked is not None and blocked.may_end and time.monotonic() - begin < seconds:
        time.sleep(_LOOK_AGAIN_SECONDS)
        blocked = _clear(lock)
    if blocked is not None:
        waited = f" It was waited for {seconds:.0f} s." if blocked.may_end else ""
        reason = f"{blocked.reason}{waited}"
        return CpuAdam(works=False, reason=reason, seconds=time.monotonic() - begin), blocked.may_end
    return _built(lock, seconds), False


def _built(lock: Path, seconds: float) -> CpuAdam:
    begin = time.monotonic()
    code, words = _run(seconds)
    taken = time.monotonic() - begin
    if code == 0:
        return CpuAdam(works=True, reason=f"DeepSpeedCPUAdam made a step after {taken:.0f} s", seconds=taken)
    if code is None:
        waited = f" while process {_words(_holders(lock))} held {lock}" if _holders(lock) else ""
        if not waited:  # the lock is that of the build that was ended here
            lock.unlink(missing_ok=True)
        reason = f"DeepSpeedCPUAdam was not ready after {seconds:.0f} s{waited}. {_TAKE_TORCHS}."
        return CpuAdam(works=False, reason=reason, seconds=taken)
    how = f"signal {-code}" if code < 0 else f"code {code}"
    reason = f"DeepSpeedCPUAdam cannot be had here: the try ended with {how}. {_TAKE_TORCHS}. Its last words:\n{words}"
    return CpuAdam(works=False, reason=reason, seconds=taken)


@dataclass(frozen=True, kw_only=True)
class _Blocked:
    """A lock that must stay."""

    reason: str
    """Why, and what to do."""
    may_end: bool
    """Whether it may go away, or become one that can be taken away, by itself."""


def _clear(lock: Path) -> _Blocked | None:
    """Take away a lock that nobody holds; why it must stay, where it must and would block for ever."""
    try:
        found = lock.stat()
    except OSError:
        return None
    holders = _holders(lock)
    if holders:
        return None  # someone builds: the try waits for him
    age = time.time() - found.st_mtime
    what = f"{lock} is {age:.0f} s old and was left by a build that nobody here runs"
    ours = hasattr(os, "getuid") and found.st_uid == os.getuid()
    if holders is None or not ours:
        reason = f"{what} as far as can be seen; another user may. Delete it if no build runs. {_TAKE_TORCHS}."
        return _Blocked(reason=reason, may_end=False)
    if age < _OTHERS_MAY_BUILD_SECONDS:
        reason = (
            f"{what}; a machine that shares the folder may, for {_OTHERS_MAY_BUILD_SECONDS:.0f} s. Delete it if there "
            f"is none, or wait. {_TAKE_TORCHS}."
        )
        return _Blocked(reason=reason, may_end=True)
    lock.unlink(missing_ok=True)
    return None


def _holders(lock: Path) -> list[int] | None:
    """Processes of this user that have a file open; ``None`` where the system does not tell."""
    table = Path("/proc")
    if not (table / "self" / "fd").exists():
        return None
    target, found = str(lock.resolve()), []
    for process in table.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to someone else
            if any(str(each.readlink()) == target for each in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _run(seconds: float) -> tuple[int | None, str]:
    """Exit status and last words of the child; ``None`` where it was ended."""
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _TRY],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env={name: value for name, value in os.environ.items() if name not in _OF_A_RANK},
            start_new_session=True,  # the compilers that it starts are ended with it
        )
        try:
            code: int | None = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        words.seek(0)
        return code, words.read()[-_WORDS:]


_OF_A_RANK = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _words(holders: list[int] | None) -> str:
    return ", ".join(map(str, holders or ()))
