"""What differs between the config that a job ran with and the one that it would run with now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_MOST_TOLD = 3  # keys in a message
_MISSING = object()


def changes_words(job_config: Any, folder: Path) -> str:
    """The first keys that differ, with both values, as Hydra wrote the earlier config into a job's folder.

    Args:
        job_config: as it is now, with its ``hydra`` part.
        folder: the job's output folder.

    Returns:
        In one line; empty where there is no earlier config to read, or none differs as it is written.
    """
    from omegaconf import OmegaConf

    try:
        own = OmegaConf.masked_copy(job_config, [str(key) for key in job_config if key != "hydra"])
        subdir = str(job_config.hydra.output_subdir)
        before = OmegaConf.to_container(OmegaConf.load(folder / subdir / "config.yaml"))
        found = list(_changes("", before, OmegaConf.to_container(own))) if isinstance(before, dict) else []
    except Exception:  # only words depend on it, and whatever lies in that folder may have been changed
        return ""
    return _listed(found)


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
    return f"{', '.join(found[:_MOST_TOLD])}{more}"


def _changes(key: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            yield from _changes(
                f"{key}.{name}" if key else str(name), before.get(name, _MISSING), now.get(name, _MISSING)
            )
    elif before is _MISSING:
        yield f"{key} is new"
    elif now is _MISSING:
        yield f"{key} is gone"
    elif before != now:
        yield f"{key} was {before!r} and is {now!r}"
