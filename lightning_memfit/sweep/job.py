"""One job of a sweep: its number, its overrides, its folder, and the config that is composed of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_memfit.application.composed import answering_hydra
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.config_digest import digest_of


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """A job as it was asked for."""

    number: int
    """Its place in the sweep's own order, from 0, whatever the order of the launches."""
    overrides: tuple[str, ...]
    """What tells it from the other jobs, and what they share, as Hydra's sweeper writes it."""
    subdir: str
    """Its output folder below the sweep's, as ``hydra.sweep.subdir`` says."""
    config_digest: str
    """Stands for its whole config, the ``hydra`` part left out."""
    config: Any = field(repr=False)
    """The config that was composed, with its ``hydra`` part."""
    no_fit_value: float | None = None
    """The job's objective where no plan fits, under ``memfit.on_no_fit=value``; ``None`` for none."""

    @property
    def words(self) -> str:
        """Its overrides in one line."""
        return " ".join(shown_overrides(self.overrides)) or "no overrides"


def shown_overrides(overrides: Sequence[str]) -> list[str]:
    """Those that are not about Hydra itself."""
    return [each for each in overrides if not each.lstrip("+~").startswith(("hydra.", "hydra/"))]


def compose_jobs(sweep_config: Any, overrides: Sequence[Sequence[str]], config_loader: Any) -> list[SweepJob]:
    """Compose every job as a launcher will.

    Args:
        sweep_config: the config of the sweep.
        overrides: of each job, in the sweep's order.
        config_loader: Hydra's.

    Raises:
        hydra.errors.HydraException: if one of them cannot be composed.
        ConfigurationError: if two of them would write into one folder.
    """
    jobs = [_composed(number, each, sweep_config, config_loader) for number, each in enumerate(overrides)]
    if not jobs:
        raise ConfigurationError(
            "The overrides to sweep over give no job: one of them has no value, such as range(0,0)."
        )
    subdir, count = Counter(job.subdir for job in jobs).most_common(1)[0]
    if count > 1:
        raise ConfigurationError(
            f"hydra.sweep.subdir gives {count} of {len(jobs)} jobs the folder {subdir!r}, where each would overwrite "
            "the results of the others. Leave it at ${hydra.job.num}, or put in what tells the jobs apart, such as "
            "${hydra.job.override_dirname}."
        )
    return jobs


def _composed(number: int, overrides: Sequence[str], sweep_config: Any, config_loader: Any) -> SweepJob:
    from omegaconf import open_dict

    config = config_loader.load_sweep_config(sweep_config, list(overrides))
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    with answering_hydra(config) as own:
        return SweepJob(
            number=number,
            overrides=tuple(overrides),
            subdir=str(config.hydra.sweep.subdir),
            config_digest=digest_of(own),
            config=config,
            no_fit_value=_no_fit_value(own),
        )


def _no_fit_value(config: Any) -> float | None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        memfit = OmegaConf.to_container(OmegaConf.select(config, "memfit"), resolve=True)
    except (OmegaConfBaseException, ValueError):  # none, or one that cannot be resolved here
        return None
    if not isinstance(memfit, dict) or memfit.get("on_no_fit") != "value":
        return None
    value = memfit.get("no_fit_value")
    return float(value) if isinstance(value, (int, float)) else None


def varying_overrides(jobs: Sequence[SweepJob]) -> dict[int, str]:
    """The overrides of each job that not all jobs share, by number, with the last word of each key if that will do.

    A table and a picture have no room for more.
    """
    told = {job.number: shown_overrides(job.overrides) for job in jobs}
    shared = set.intersection(*(set(each) for each in told.values())) if len(jobs) > 1 else set()
    varying = {number: [each for each in overrides if each not in shared] for number, overrides in told.items()}
    keys = {each.partition("=")[0] for overrides in varying.values() for each in overrides}
    ends = Counter(_last_word(key) for key in keys)
    short = {key: _last_word(key) if ends[_last_word(key)] == 1 else key for key in keys}
    return {
        number: " ".join(f"{short[key]}={value}" for key, _, value in (each.partition("=") for each in overrides))
        for number, overrides in varying.items()
    }


def _last_word(key: str) -> str:
    return key.rpartition(".")[2]
