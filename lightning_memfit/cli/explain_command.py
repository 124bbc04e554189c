"""``memfit explain``: why a run was planned as it was, or why it does not fit, from what it left."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.text import Text

from lightning_memfit.cli.arguments import DOES_NOT_FIT, FITS
from lightning_memfit.cli.documents import explain_document
from lightning_memfit.errors import ConfigurationError, PlanFileError
from lightning_memfit.no_fit import NO_FIT_FILE, load_no_fit
from lightning_memfit.plan_file import FILE_NAME, WAY_OUT
from lightning_memfit.plan_schema import load_measurement, load_plan
from lightning_memfit.report.pieces import title
from lightning_memfit.report.table import render_measurement, render_plan

_SHOWN = 10
"""Folders that are named where several hold a plan."""


def run_explain(arguments: Namespace, *, say: Any) -> tuple[int, str | None]:
    """Explain a saved plan, or the record of a run that does not fit.

    Args:
        arguments: the command line.
        say: a rich console for text.

    Returns:
        The exit code, and the JSON document if that was asked for.

    Raises:
        ConfigurationError: if there is no such file, several, or one that cannot be read.
    """
    path = record_at(Path(arguments.path).expanduser())
    try:
        return _explained(path, arguments, say)
    except PlanFileError as error:
        raise ConfigurationError(str(error).removesuffix(WAY_OUT).rstrip()) from error


def _explained(path: Path, arguments: Namespace, say: Any) -> tuple[int, str | None]:
    if path.name == NO_FIT_FILE:
        no_fit = load_no_fit(path)
        if arguments.json:
            return DOES_NOT_FIT, explain_document(path, exit_code=DOES_NOT_FIT, no_fit=no_fit)
        say.print(title(f"{path}: does not fit"))
        say.print(Text(no_fit.reason))
        return DOES_NOT_FIT, None
    plan, measurement = load_plan(path), load_measurement(path)
    if arguments.json:
        return FITS, explain_document(path, exit_code=FITS, plan=plan, measurement=measurement)
    say.print(Text(str(path), style="dim"))
    render_plan(plan, console=say, most_passed_over=None)
    if measurement is not None:
        render_measurement(plan, measurement, console=say)
    return FITS, None


def record_at(path: Path) -> Path:
    """The record that a path names: a file, or the one of a run's folder.

    Raises:
        ConfigurationError: if there is none, or there are several.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigurationError(
            f"There is no file or folder {path}. Name a {FILE_NAME}, or the folder of a run that left one."
        )
    found = sorted(each for name in (FILE_NAME, NO_FIT_FILE) for each in path.rglob(name))
    if not found:
        raise ConfigurationError(f"{path} holds no {FILE_NAME}. Name a folder of a run that MemFit planned.")
    if len(found) > 1:
        listed = "".join(f"\n  {each}" for each in found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigurationError(f"{path} holds {len(found)} records. Name one of:{listed}{more}")
    return found[0]
