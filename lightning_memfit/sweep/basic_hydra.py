"""What is taken over from Hydra's own sweeper and launcher.

Adapter for ``hydra._internal.core_plugins``: ``BasicSweeper.split_arguments`` and the class ``BasicLauncher``, both
private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def sweep_overrides(arguments: Sequence[str], config_loader: Any) -> list[tuple[str, ...]]:
    """The overrides of every job, in the order of Hydra's own sweeper, whose grammar is read.

    Args:
        arguments: overrides such as ``"a=1,2"``; of two for one key the later one counts.
        config_loader: Hydra's, which tells groups from values.

    Raises:
        hydra.errors.HydraException: if one of them cannot be read, or has no values to go through.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create(config_loader=config_loader).parse_overrides(list(arguments))
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return [tuple(job) for job in jobs]


def runs_one_by_one(launcher: Any) -> bool:
    """Whether it is Hydra's own launcher, which runs one job after the other in this process."""
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    return type(launcher) is BasicLauncher
