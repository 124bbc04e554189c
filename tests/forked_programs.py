"""Runs programs as processes of their own, each a fork of one that imported torch and Lightning: that takes seconds.

A program sees what it would see if it were started by itself: its arguments, folder, environment and output, and
``__main__`` as its name. Only what it imports may be there already.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class ForkedPrograms:
    """The process that has imported everything once; use it as a context.

    Args:
        python: the interpreter; that of the tests, with this repository to import from, unless another is given.
    """

    def __init__(self, python: Path | None = None) -> None:
        self._python = python

    def __enter__(self) -> ForkedPrograms:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        environment.pop("PYTHONPATH", None)
        if self._python is None:
            environment["PYTHONPATH"] = str(ROOT)
        self._server = subprocess.Popen(
            [str(self._python or sys.executable), str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def run(
        self, script: Path, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script with arguments in a folder, with these variables beside the others."""
        command = [str(script), *arguments]
        with tempfile.TemporaryDirectory() as captured:
            paths = [str(Path(captured) / name) for name in ("stdout", "stderr")]
            request = {"command": command, "folder": str(folder), "environment": environment or {}, "output": paths}
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            output, errors = (Path(path).read_text(encoding="utf-8") for path in paths)
        return subprocess.CompletedProcess(command, code, output, errors)


def _serve() -> None:
    import lightning.pytorch  # noqa: F401  # what every program imports, and nothing of this project

    gc.collect()
    gc.freeze()  # programs that collect garbage need not look through all of that again
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(request: Mapping[str, Any]) -> None:
    """Be the program that was asked for, to its end."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    for stream, path in zip((1, 2), request["output"], strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    code = _run(request["command"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: Sequence[str]) -> int:
    sys.argv = [*command]
    sys.path[0] = str(Path(command[0]).parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
