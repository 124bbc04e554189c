"""Keeps standard output for what the command itself says: all else that is written there goes to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress

_OUTPUT, _ERRORS = 1, 2
"""The process's own descriptors, which C libraries write to and child processes get."""


@contextmanager
def kept_for_the_command() -> Iterator[None]:
    """Within it, what Python prints, C libraries and child processes write to standard output is on standard error."""
    with ExitStack() as ending:
        with suppress(OSError):  # one of them is closed
            sys.stdout.flush()
            kept = os.dup(_OUTPUT)
            ending.callback(os.close, kept)
            ending.callback(os.dup2, kept, _OUTPUT)
            os.dup2(_ERRORS, _OUTPUT)
        ending.enter_context(redirect_stdout(sys.stderr))
        ending.callback(sys.stderr.flush)
        yield
