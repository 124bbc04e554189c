"""Plans and errors of forecasts kept between runs: equal runs search once, also at the same time and when one dies.

One file and one lock per key. A lock is the operating system's, so that it ends with the process that holds it; files
are written whole or not at all. What cannot be read or written is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_memfit.errors import PlanFileError
from lightning_memfit.plan import Candidate, Plan
from lightning_memfit.plan_file import plain_data, read_plain, to_yaml, write_whole
from lightning_memfit.plan_schema import load_plan, read_candidate

MOST_PLANS = 500
"""Plans that are kept; the oldest are dropped."""
MOST_CORRECTIONS = 32
"""Errors of forecasts that are kept for one model on one device; the oldest are dropped."""
WAIT_SECONDS = 900.0
"""How long a run waits for another that plans the same; a search takes seconds, that of a 70B model a minute."""
WAITED_IN_VAIN = (
    f"another run has been planning the same for {WAIT_SECONDS / 60:.0f} minutes: this one did not wait any longer"
)


class KeptPlan:
    """The plan of one key."""

    def __init__(self, folder: Path, key: str) -> None:
        """Read and write nothing yet.

        Args:
            folder: where plans are kept; made when one is written.
            key: stands for everything that decides the plan.
        """
        self._path = folder / f"{key}.yaml"

    @contextmanager
    def alone(self) -> Iterator[str | None]:
        """Let no other run plan the same in the meantime; waits for one that does.

        Yields:
            ``None``; or in words that the wait was given up. Where there are no locks, none is waited for: then equal
            runs that start together each plan for themselves.
        """
        lock = FileLock(f"{self._path}.lock", timeout=WAIT_SECONDS)
        note = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            note = WAITED_IN_VAIN
        except (OSError, NotImplementedError):  # a folder that is not ours, or a file system without locks
            pass
        try:
            yield note
        finally:
            lock.release()

    def load(self) -> Plan | None:
        """The plan; ``None`` where none is kept, or what is kept cannot be read."""
        try:
            return load_plan(self._path)
        except PlanFileError:
            return None

    def save(self, plan: Plan) -> None:
        """Keep a plan in place of the one before."""
        with suppress(OSError):
            write_whole(self._path, to_yaml(plan.to_dict()))
            self._drop_the_oldest()

    def forget(self) -> None:
        """Keep no plan: the one before was disproved."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _drop_the_oldest(self) -> None:
        kept = sorted(self._path.parent.glob("*.yaml"), key=_age, reverse=True)
        for path in kept[MOST_PLANS:]:
            # The lock's file stays: another run may hold it, or wait for it.
            path.unlink(missing_ok=True)


class KeptCorrections:
    """By how many bytes the raw forecasts of one model on one device were off, as warm-ups measured."""

    def __init__(self, folder: Path, key: str) -> None:
        """Read and write nothing yet.

        Args:
            folder: where they are kept; made when some are written.
            key: stands for the model, the batch, the optimizer and the device.
        """
        self._path = folder / f"{key}.yaml"

    def load(self) -> dict[Candidate, int]:
        """Bytes by candidate, in the order in which they ran; empty where none are kept."""
        try:
            data = read_plain(self._path)
            return {_candidate(entry, str(self._path)): _bytes(entry) for entry in data["corrections"]}
        except (PlanFileError, LookupError, TypeError):
            return {}

    def add(self, measured: Mapping[Candidate, int]) -> None:
        """Keep what was measured beside what was kept before, in place of what the same candidates had.

        Args:
            measured: bytes by candidate, in the order in which they ran.
        """
        with suppress(OSError, NotImplementedError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._path}.lock", timeout=WAIT_SECONDS):
                before = {candidate: error for candidate, error in self.load().items() if candidate not in measured}
                latest = list({**before, **measured}.items())[-MOST_CORRECTIONS:]
                entries = [{"candidate": plain_data(candidate), "bytes": error} for candidate, error in latest]
                write_whole(self._path, to_yaml({"corrections": entries}))


def _candidate(entry: Any, source: str) -> Candidate:
    return read_candidate(entry["candidate"], source=source)


def _bytes(entry: Any) -> int:
    if type(entry["bytes"]) is not int:
        raise TypeError("bytes are whole numbers")
    return int(entry["bytes"])


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone in the meantime
        return 0.0
