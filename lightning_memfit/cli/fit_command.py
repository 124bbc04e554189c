"""``memfit fit`` and ``memfit sweep``: train what a Hydra config names, once or for every combination of a sweep."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_memfit.application.left_files import LeftFiles
from lightning_memfit.cli.arguments import CANNOT_TELL, DOES_NOT_FIT, FITS
from lightning_memfit.cli.config_folder import CONFIG_DIR, CONFIG_NAME
from lightning_memfit.cli.documents import fit_document, sweep_document
from lightning_memfit.cli.hydra_app import run_hydra_app
from lightning_memfit.errors import ConfigurationError, SweepError
from lightning_memfit.no_fit import NoFit, no_fits_heard
from lightning_memfit.plan_file import FILE_NAME
from lightning_memfit.plan_schema import load_measurement, load_plan
from lightning_memfit.sweep.sweep_file import FILE_NAME as SWEEP_FILE

_MULTIRUN = ("-m", "--multirun")


def run_fit(arguments: Namespace, *, say: Any) -> tuple[int, str | None]:
    """Train once.

    Args:
        arguments: the command line.
        say: not used: the job prints as it goes.

    Returns:
        The exit code, and the JSON document if that was asked for.

    Raises:
        ConfigurationError: if the config cannot be composed or used.
        NoFeasiblePlanError: if nothing fits, unless ``memfit.on_no_fit`` says otherwise.
    """
    if set(arguments.words) & set(_MULTIRUN):
        raise ConfigurationError("-m makes a sweep: write memfit sweep in place of memfit fit -m.")
    left: list[LeftFiles] = []

    def job(config: Any) -> Any:
        from hydra.core.hydra_config import HydraConfig

        from lightning_memfit.cli.training import train

        left.append(LeftFiles(Path(HydraConfig.get().runtime.output_dir)))
        return train(config)

    with no_fits_heard() as heard:
        _run(job, arguments, arguments.words, "memfit fit")
    no_fit = heard[-1] if heard else None
    code = FITS if no_fit is None else DOES_NOT_FIT
    # None where Hydra only showed something.
    return code, _document(left[0] if left else None, no_fit, code) if arguments.json else None


def run_sweep(arguments: Namespace, *, say: Any) -> tuple[int, str | None]:
    """Train every combination that fits, through the MemFit sweeper unless another is named.

    Args:
        arguments: the command line.
        say: not used: the sweeper prints as it goes.

    Returns:
        The exit code, and the JSON document if that was asked for.

    Raises:
        ConfigurationError: if the config cannot be composed or used.
    """
    from lightning_memfit.cli.training import train
    from lightning_memfit.sweep.heard import sweeps_heard

    words = [word for word in arguments.words if word not in _MULTIRUN]
    if not any(word.startswith("hydra/sweeper=") for word in words):
        words.insert(0, "hydra/sweeper=memfit")
    document = None
    with sweeps_heard() as folders:
        try:
            _run(train, arguments, [_MULTIRUN[0], *words], "memfit sweep")
            code = _sweep_code(folders)
        except SweepError as error:  # what became of the others is in the document, and in the files
            if not arguments.json:
                raise
            print(f"memfit: {error}", file=sys.stderr)
            code = CANNOT_TELL
    if arguments.json:
        document = sweep_document(folders[0] if folders else None, exit_code=code)
    return code, document


def _sweep_code(folders: Sequence[Path]) -> int:
    """Whether any job was trained; another sweeper than MemFit's does not tell."""
    if not folders:
        return FITS
    jobs = json.loads((folders[0] / SWEEP_FILE).read_text(encoding="utf-8"))["jobs"]
    return FITS if any(job["status"] == "completed" for job in jobs) else DOES_NOT_FIT


def _run(job: Any, arguments: Namespace, words: Sequence[str], program: str) -> None:
    folder = Path(arguments.config_dir or CONFIG_DIR).resolve()
    if not folder.is_dir():
        raise ConfigurationError(f"There is no folder {folder} to compose a config from. Name one with --config-dir.")
    run_hydra_app(job, folder=folder, name=arguments.config_name or CONFIG_NAME, words=words, program=program)


def _document(left: LeftFiles | None, no_fit: NoFit | None, code: int) -> str:
    record: dict[str, Any] = {"plan": None, "measured": None, "no_fit": no_fit}
    plan = None if left is None or no_fit is not None else left.latest(FILE_NAME)
    if plan is not None:
        record |= {"plan": load_plan(plan).to_dict(), "measured": load_measurement(plan)}
    return fit_document(None if left is None else str(left.folder), record, exit_code=code)
