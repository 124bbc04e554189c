"""Runs a job as a Hydra application, with errors that say what to write instead.

Adapter for Hydra 1.3: ``hydra.main`` reads ``sys.argv``, and passes errors on where ``HYDRA_FULL_ERROR`` is set.
Hydra is imported where it is needed.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_memfit.config import register_configs, setting_words
from lightning_memfit.errors import ConfigurationError

_FULL_ERROR = "HYDRA_FULL_ERROR"
_UNKNOWN_SETTING = re.compile(r"Key '(\w+)' (?:not in|is not in) ")


def run_hydra_app(job: Callable[[Any], Any], *, folder: Path, name: str, words: Sequence[str], program: str) -> None:
    """Compose the config of ``folder`` with the overrides in ``words``, and run the job, or each job of a sweep.

    Args:
        job: the task function.
        folder: the folder of the config.
        name: the primary config.
        words: overrides and flags, as behind a Hydra application's own name.
        program: what Hydra calls the application in its help.

    Raises:
        ConfigurationError: if the config cannot be composed; with the key, the value and the choices where the key is
            one of the ``memfit`` group.
        SystemExit: of Hydra, for its flags, and of the job.
    """
    try:
        import hydra
        from hydra.errors import HydraException
    except ImportError as error:
        raise ConfigurationError(
            f"{program} needs hydra-core, which is not installed. pip install 'lightning-memfit[cli]'"
        ) from error
    from omegaconf import errors

    register_configs()
    began: list[bool] = []

    @functools.wraps(job)
    def watched(config: Any) -> Any:
        began.append(True)
        return job(config)

    main = hydra.main(config_path=str(folder), config_name=name, version_base="1.3")(watched)
    with _as_the_process_of(program, words), _full_errors():
        try:
            main()
        except (HydraException, errors.OmegaConfBaseException) as error:
            if began:  # then it is the job's, such as that of a constructor
                raise
            raise ConfigurationError(composition_words(error, f"{folder.name}/{name}")) from error


def composition_words(error: BaseException, config: str) -> str:
    """What Hydra says of a config that cannot be composed, with the settings of MemFit where one of them is unknown."""
    said = ": ".join(dict.fromkeys(line for each in _chain(error) if (line := str(each).strip())))
    unknown = _UNKNOWN_SETTING.search(said)
    is_ours = unknown is not None and "MemFitConfig" in said
    ending = f"\n{setting_words(unknown.group(1))}" if unknown is not None and is_ours else ""
    return f"The config {config} cannot be composed: {said}{ending}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@contextmanager
def _as_the_process_of(program: str, words: Sequence[str]) -> Iterator[None]:
    before = list(sys.argv)
    sys.argv[:] = [program, *words]
    try:
        yield
    finally:
        sys.argv[:] = before


@contextmanager
def _full_errors() -> Iterator[None]:
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_FULL_ERROR, None)
        else:
            os.environ[_FULL_ERROR] = before
