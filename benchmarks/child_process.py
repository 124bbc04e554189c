"""Runs a benchmark's work in processes of their own: an allocator cannot be taken out, and memory must start at zero.

A child is a module with ``main``; it prints one JSON object a line. What else it says on standard output is ignored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class ChildFailedError(RuntimeError):
    """A child process ended with an error; the message has its last words."""


def run_child(module: str, arguments: Sequence[str], *, timeout_seconds: float | None = None) -> dict[str, Any]:
    """Run ``python -m module arguments`` and return the last JSON object it prints.

    Raises:
        ChildFailedError: if it fails or prints none.
        subprocess.TimeoutExpired: if it runs longer than ``timeout_seconds``; it is ended then.
    """
    done = subprocess.run(
        _command(module, arguments),
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=timeout_seconds,
        check=False,
    )
    objects = list(_objects(done.stdout.splitlines()))
    if done.returncode != 0 or not objects:
        raise ChildFailedError(_failure(module, arguments, done.returncode, done.stderr))
    return objects[-1]


def stream_child(
    module: str, arguments: Sequence[str], *, allowed_codes: Collection[int] = (0,)
) -> Iterator[dict[str, Any]]:
    """Run ``python -m module arguments`` and yield the JSON objects as they come.

    Raises:
        ChildFailedError: if it ends with a code that is not allowed.
    """
    # Into a file: a pipe that nobody reads meanwhile would fill up and stop the child.
    with (
        tempfile.TemporaryFile("w+") as words,
        subprocess.Popen(
            _command(module, arguments), stdout=subprocess.PIPE, stderr=words, text=True, env=_environment()
        ) as child,
    ):
        assert child.stdout is not None
        try:
            yield from _objects(child.stdout)
            child.wait()
        finally:
            if child.poll() is None:  # the reader stopped early
                child.terminate()
        words.seek(0)
        if child.returncode not in allowed_codes:
            raise ChildFailedError(_failure(module, arguments, child.returncode, words.read()))


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", module, *arguments]


def _environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)}


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            yield found


def _failure(module: str, arguments: Sequence[str], code: int, words: str) -> str:
    last = "\n".join(words.strip().splitlines()[-15:])
    return f"python -m {module} {' '.join(arguments)} ended with code {code}:\n{last}"
