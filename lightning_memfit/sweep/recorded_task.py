"""The task of a sweep's jobs: the user's own, with a record of how each of them ended."""

from __future__ import annotations

import functools
import logging
import numbers
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_memfit.application.left_files import LeftFiles
from lightning_memfit.errors import NoFeasiblePlanError, PlanFileError, SweepError, first_line
from lightning_memfit.no_fit import NO_FIT_FILE, NoFit, load_no_fit, no_fit_of, no_fits_heard
from lightning_memfit.plan_file import FILE_NAME as PLAN_FILE
from lightning_memfit.plan_file import write_whole
from lightning_memfit.sweep.config_digest import digest_of
from lightning_memfit.sweep.job_end import ERROR_FILE, JobEnd, write_job_end


class RecordedTask:
    """Runs a task, and writes ``job.json`` into the job's output folder; of one that fails also its traceback.

    It can be pickled wherever the task can, so that launchers may send it to other processes.

    Args:
        task: the user's task function, from a config to what Hydra calls the job's return value.
    """

    def __init__(self, task: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, task, updated=())
        self.task = task
        self.numbers: dict[str, int] = {}
        """The jobs' places in the sweep by their output folders below the sweep's; launchers count launches."""

    def __call__(self, config: Any) -> Any:
        """Run the task.

        Returns:
            What the task returns; ``None`` where MemFit found no plan that fits, which is a result and no failure.

        Raises:
            Exception: what the task raises, once that is recorded; what cannot be sent between processes becomes a
                :class:`~lightning_memfit.errors.SweepError` with its words.
        """
        from hydra.core.hydra_config import HydraConfig

        number = self._numbered()
        hydra_config = HydraConfig.get()
        recorded = _Recorded(
            folder=Path(hydra_config.runtime.output_dir),
            number=number,
            overrides=tuple(hydra_config.overrides.task),
            config_digest=digest_of(config),
        )
        try:
            with no_fits_heard() as heard:
                value = self.task(config)
        except (Exception, SystemExit) as error:
            return recorded.raised(error)
        recorded.returned(value, heard)
        return value

    def _numbered(self) -> int | None:
        """Give ``hydra.job.num`` the job's place in the sweep, where the launcher counted the launches instead."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import open_dict, read_write

        hydra_config: Any = HydraConfig.get()
        number = self.numbers.get(str(hydra_config.sweep.subdir))
        if number is not None and hydra_config.job.num != number:
            with read_write(hydra_config), open_dict(hydra_config):
                hydra_config.job.num = number
        return number


class _Recorded:
    """A job that is under way."""

    def __init__(self, *, folder: Path, number: int | None, overrides: tuple[str, ...], config_digest: str) -> None:
        self._folder, self._number = folder, number
        self._overrides, self._config_digest = overrides, config_digest
        self._left = LeftFiles(folder)
        self._began = time.perf_counter()

    def returned(self, value: Any, heard: Sequence[NoFit]) -> None:
        no_fit = heard[-1] if heard else self._recorded_no_fit()
        if no_fit is None:
            self._end("completed", objective=_plain_number(value))
        else:  # what was returned only stands for an objective
            self._does_not_fit(no_fit)

    def raised(self, error: BaseException) -> None:
        causes = list(_chain(error))
        for cause in causes:
            if isinstance(cause, NoFeasiblePlanError):
                self._does_not_fit(no_fit_of(cause))
                return
        if isinstance(error, SystemExit):
            if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
                raise KeyboardInterrupt from error  # Lightning leaves the process on Ctrl-C
            if error.code in (None, 0):
                self._end("completed")
                return
        words = _words(error)
        # Hydra keeps an error to itself until somebody asks for what the job returned.
        logging.getLogger("lightning_memfit.sweep").error("the job failed: %s", words, exc_info=error)
        text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode("utf-8")
        write_whole(self._folder / ERROR_FILE, text)
        self._end("failed", reason=words, error_file=ERROR_FILE)
        if isinstance(error, SystemExit) or not _can_be_sent(error):
            raise SweepError(words) from error
        raise error

    def _recorded_no_fit(self) -> NoFit | None:
        """What a run in another process left that did not fit and was not trained (``memfit.on_no_fit``)."""
        path = self._left.latest(PLAN_FILE, NO_FIT_FILE)
        if path is None or path.name != NO_FIT_FILE:
            return None
        try:
            return load_no_fit(path)
        except PlanFileError:
            return None

    def _does_not_fit(self, no_fit: NoFit) -> None:
        self._end(
            "does not fit",
            reason=no_fit.reason.strip().partition("\n")[0],
            budget_bytes=no_fit.budget_bytes,
            best_peak_bytes=no_fit.best_peak_bytes,
            missing_bytes=no_fit.missing_bytes,
        )

    def _end(self, status: Any, **told: Any) -> None:
        seconds = time.perf_counter() - self._began
        plan = self._left.latest(PLAN_FILE)
        end = JobEnd(
            status=status,
            number=self._number,
            overrides=self._overrides,
            config_digest=self._config_digest,
            seconds=seconds,
            plan_file=None if plan is None else str(plan.relative_to(self._folder)),
            ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **told,
        )
        write_job_end(self._folder, end)
        if end.error_file is None:  # that of an earlier try
            (self._folder / ERROR_FILE).unlink(missing_ok=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what lies behind it.

    Applications turn errors into exit codes, by ``raise SystemExit(2) from None`` too; an error that is raised while
    another is handled, such as in a second try with other settings, is one of its own.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if isinstance(error, SystemExit) else None)


def _words(error: BaseException) -> str:
    """What an error says, and what lies behind it where that tells more: Hydra's error of a call names no cause."""
    is_exit = isinstance(error, SystemExit)
    words = f"the job ended with exit code {error.code}" if is_exit else _named(error)  # type: ignore[attr-defined]
    innermost = list(_chain(error))[-1]
    if innermost is error or first_line(innermost) in words:
        return words
    return f"{words.rstrip(':')} ({_named(innermost)})"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _plain_number(value: Any) -> float | None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else None


def _can_be_sent(error: BaseException) -> bool:
    """Whether a launcher can send an error to another process; one that breaks there takes the other jobs with it."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # pickling runs code of the error's own class, which may raise anything
        return False
