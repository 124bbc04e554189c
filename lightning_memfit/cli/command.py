"""The entry point: reads the command line, runs the command, and turns what happens into an exit code."""

from __future__ import annotations

import io
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

from rich.console import Console

from lightning_memfit.application.import_paths import current_folder_importable
from lightning_memfit.cli.arguments import (
    BAD_REQUEST,
    CANNOT_TELL,
    DOES_NOT_FIT,
    FITS,
    RUNNING,
    completion_script,
    parse,
)
from lightning_memfit.cli.documents import error_document
from lightning_memfit.cli.explain_command import run_explain
from lightning_memfit.cli.fit_command import run_fit, run_sweep
from lightning_memfit.cli.hardware_command import run_hardware
from lightning_memfit.cli.plan_command import run_plan
from lightning_memfit.cli.standard_output import kept_for_the_command
from lightning_memfit.errors import ConfigurationError, MemFitError, NoFeasiblePlanError, first_line, is_out_of_memory

_COLUMNS_OF_A_FILE = 110
"""Width of what goes into a file or a pipe, in characters."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``memfit``.

    Args:
        argv: the words behind ``memfit``; those of the process if left out.

    Returns:
        The exit code: see :mod:`lightning_memfit.cli.arguments`.

    Raises:
        SystemExit: of argparse, for ``--help`` and for options that do not exist.
    """
    arguments = parse(sys.argv[1:] if argv is None else argv)
    stdout = sys.stdout
    is_terminal = stdout.isatty()
    text = io.StringIO()
    console = Console(file=stdout) if is_terminal else Console(file=text, width=_COLUMNS_OF_A_FILE)
    prints = arguments.command in RUNNING and not arguments.json
    # What the user's own code prints must not end up inside the document. Tables go to a terminal as they are made.
    shown_now = is_terminal and not arguments.json
    with _output(prints, shown_now), current_folder_importable():
        code, document = _run(arguments, console)
    if document is not None:
        print(document, file=stdout)
    elif not is_terminal:
        # Tables fill their lines with spaces; a file is better without.
        stdout.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
    return code


def _output(prints: bool, shown_now: bool) -> AbstractContextManager[None]:
    if prints:
        return nullcontext()
    return _python_redirected() if shown_now else kept_for_the_command()


@contextmanager
def _python_redirected() -> Iterator[None]:
    with redirect_stdout(sys.stderr):
        yield


def _run(arguments: Namespace, console: Console) -> tuple[int, str | None]:
    try:
        return _COMMANDS[arguments.command](arguments, say=console)
    except Exception as error:
        code = _exit_code(error)
        if arguments.debug:
            traceback.print_exc()
        print(f"memfit: {_words(error, trains=arguments.command in RUNNING)}", file=sys.stderr)
        return code, _error_document(arguments, error, code) if arguments.json else None


def _error_document(arguments: Namespace, error: Exception, code: int) -> str:
    return error_document(error, exit_code=code, of_devices=arguments.command in ("plan", "hardware"))


def _exit_code(error: Exception) -> int:
    if isinstance(error, NoFeasiblePlanError):
        return DOES_NOT_FIT
    return BAD_REQUEST if isinstance(error, ConfigurationError) else CANNOT_TELL


def _completion(arguments: Namespace, *, say: Any) -> tuple[int, str | None]:
    return FITS, completion_script(arguments.shell)


_COMMANDS: dict[str, Callable[..., tuple[int, str | None]]] = {
    "plan": run_plan,
    "fit": run_fit,
    "sweep": run_sweep,
    "explain": run_explain,
    "hardware": run_hardware,
    "completion": _completion,
}


def _words(error: Exception, *, trains: bool) -> str:
    if isinstance(error, MemFitError):
        return str(error)
    if trains:  # the user's own code
        return f"training failed: {type(error).__name__}: {first_line(error)}. --debug shows where."
    if is_out_of_memory(error):
        return (
            f"this machine ran out of memory ({type(error).__name__}: {first_line(error)}). Leave --real out, write "
            "the batch as shapes, or make the model on a larger machine."
        )
    return f"{type(error).__name__}: {first_line(error)}. This is not foreseen: run with --debug, and report it."
