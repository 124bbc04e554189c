"""What a run leaves in its folder, told from what was there before."""

from __future__ import annotations

from pathlib import Path

from lightning_memfit.no_fit import NO_FIT_FILE
from lightning_memfit.plan_file import FILE_NAME


class LeftFiles:
    """The plans and records that are written into a folder, at any depth, from now on.

    Args:
        folder: the run's output folder; loggers may put their files deeper.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = self._changed()

    def latest(self, *names: str) -> Path | None:
        """The latest file with one of these names that was written since; ``None`` if there is none."""
        left = {
            path: when
            for path, when in self._changed().items()
            if path.name in names and self._before.get(path) != when
        }
        return max(left, key=lambda path: left[path], default=None)

    def _changed(self) -> dict[Path, int]:
        """When each file was changed, in nanoseconds."""
        found = (path for name in (FILE_NAME, NO_FIT_FILE) for path in self.folder.rglob(name))
        return {path: path.stat().st_mtime_ns for path in found}
