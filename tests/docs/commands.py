"""Commands of a page, run as a reader would: in a folder, each in a process of its own.

Importing Lightning takes seconds, so that ``memfit`` and ``python`` are forks of one server that has imported it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.docs.known_machine import pretend

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["lightning_memfit.plugin", "lightning_memfit.cli.command", "hydra"])
_SECONDS = 300
_SHELL = set("|&;<>$`")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command did."""

    code: int
    """Exit code."""
    out: str
    """Standard output."""
    err: str
    """Standard error."""


def run(command: str, folder: Path, environment: Mapping[str, str], *, last_code: int = 0) -> Ran:
    """Run one command line.

    Args:
        command: as it is typed.
        folder: where.
        environment: the whole environment.
        last_code: what ``$?`` is.
    """
    words = shlex.split(command, comments=True)
    if words[0] in ("memfit", "python") and not _SHELL & set("".join(words)):
        return _forked(words, folder, environment)
    done = subprocess.run(
        ["bash", "-c", f"(exit {last_code}); {command}"],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)


def _forked(words: list[str], folder: Path, environment: Mapping[str, str]) -> Ran:
    out, err = folder / ".stdout", folder / ".stderr"
    process = _SERVER.Process(target=_become, args=(words, folder, dict(environment), out, err))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    ran = Ran(code=-1 if code is None else code, out=out.read_text(), err=err.read_text())
    out.unlink()
    err.unlink()
    return ran


def _become(words: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    """In the fork: be the program that a command names."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
    pretend(setattr)
    program, *arguments = words
    if program == "memfit":
        from lightning_memfit.cli import main

        sys.exit(main(arguments))
    sys.argv, sys.path[:0] = arguments, [str(folder)]
    runpy.run_path(arguments[0], run_name="__main__")
