"""Settings of jobs that MemFit will refuse wherever they run: told before any job is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_memfit.application.composed import answering_hydra
from lightning_memfit.config import memfit_arguments
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.job import SweepJob

_MOST_NAMED = 5  # jobs of one mistake


def refuse_wrong_settings(jobs: Sequence[SweepJob]) -> None:
    """Check the ``memfit`` group of every job.

    What is no group of settings of MemFit is left to the job: one that is instantiated, or that cannot be resolved
    here.

    Raises:
        ConfigurationError: naming every job with a setting that cannot be used, the value and the choices.
    """
    refuse(dict(_wrong(jobs)), jobs)


def refuse(wrong: Mapping[int, str], jobs: Sequence[SweepJob]) -> None:
    """Refuse a sweep because of some of its jobs, if there are any.

    Args:
        wrong: what is wrong, by the number of the job.
        jobs: all that would be launched.

    Raises:
        ConfigurationError: telling each mistake once, with its jobs.
    """
    if not wrong:
        return
    of_mistake: dict[str, list[str]] = {}
    for job in jobs:
        if job.number in wrong:
            of_mistake.setdefault(wrong[job.number], []).append(f"{job.number} ({job.words})")
    lines = [f"job{'s' if len(named) > 1 else ''} {_listed(named)}: {words}" for words, named in of_mistake.items()]
    told = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
    raise ConfigurationError(
        f"No job is launched: {len(wrong)} of {len(jobs)} have settings that MemFit cannot use.{told}"
    )


def batch_is_as_it_will_be(config: Any) -> bool:
    """Whether a job's batch is divided in its run as in its forecast, which is made for one device, exactly."""
    memfit, trainer = config.get("memfit") or {}, config.get("trainer") or {}
    if memfit.get("allow_inexact_slicing") or str(trainer.get("num_nodes", 1)) != "1":
        return False
    devices = trainer.get("devices")
    # Where it is not said how many devices there are, what is accumulated may be right for several.
    return str(devices) == "1" or (devices is None and trainer.get("accumulate_grad_batches", 1) == 1)


def _wrong(jobs: Sequence[SweepJob]) -> Iterator[tuple[int, str]]:
    for job in jobs:
        with answering_hydra(job.config) as config:
            group = config.get("memfit")
            if not _is_resolvable_group(group):
                continue
            try:
                memfit_arguments(group)
            except ConfigurationError as error:
                yield job.number, str(error)
            except Exception:  # a module that a setting names and that fails as it is imported: its own run tells
                continue


def _is_resolvable_group(group: Any) -> bool:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(group, DictConfig) or "_target_" in group:
        return False
    try:
        OmegaConf.to_container(group, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:
        return False
    return True


def _listed(named: Sequence[str]) -> str:
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return f"{', '.join(named[:_MOST_NAMED])}{more}"
