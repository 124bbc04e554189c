"""Keeps standard output for what the command itself says: all else that is written there goes to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout


@contextmanager
def kept_for_the_command() -> Iterator[None]:
    """Within it, what Python prints, C libraries and child processes write to standard output is on standard error."""
    with ExitStack() as ending:
        descriptors = _descriptors()
        if descriptors is not None:
            output, errors = descriptors
            sys.stdout.flush()
            kept = os.dup(output)
            ending.callback(os.close, kept)
            ending.callback(os.dup2, kept, output)
            os.dup2(errors, output)
        ending.enter_context(redirect_stdout(sys.stderr))
        ending.callback(sys.stderr.flush)
        yield


def _descriptors() -> tuple[int, int] | None:
    """Those of standard output and error; ``None`` where one of them is no file of the system's."""
    try:
        return sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something in memory
        return None
