"""``hydra/sweeper=memfit``: jobs that cannot fit are left out before any is launched.

Hydra imports this module in every application, whether or not it sweeps, so that it imports Hydra alone; what it does
is imported when a sweep begins. Annotations are not postponed: Hydra runs the module before it is in ``sys.modules``,
where dataclasses look for the meaning of postponed ones.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class MemFitSweeperConf:
    """The ``hydra.sweeper`` config of ``hydra/sweeper=memfit``."""

    _target_: str = "hydra_plugins.memfit_sweeper.memfit_sweeper.MemFitSweeper"
    max_batch_size: int | None = None
    """Most jobs that are handed to the launcher at a time; ``None`` for all."""
    params: dict[str, str] | None = None
    """Overrides to sweep over, beside those of the command line, which outweigh them."""
    device: str | None = None
    """What is planned for: ``local``, or a GPU of the catalogue; ``None`` for the job's ``hardware.device``, or
    ``local``."""
    subject: str | None = None
    """Import path of a function from a job's config to ``(module, batch)``; ``None`` makes ``model``, ``data`` and
    ``trainer`` of the config."""
    real: bool = False
    """Make modules for real to forecast them, and not on torch's ``meta`` device."""


ConfigStore.instance().store(group="hydra/sweeper", name="memfit", node=MemFitSweeperConf, provider="lightning-memfit")


class MemFitSweeper(Sweeper):
    """Forecasts every job, leaves out what cannot fit, launches the rest cheapest first, and says what came of each.

    Args:
        max_batch_size: as in :class:`MemFitSweeperConf`, like the others.
        params: overrides to sweep over.
        device: what is planned for.
        subject: import path of a function.
        real: make modules for real.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
        device: str | None = None,
        subject: str | None = None,
        real: bool = False,
    ) -> None:
        super().__init__()
        self.max_batch_size = max_batch_size
        self.params = dict(params or {})
        self.device = device
        self.subject = subject
        self.real = real
        self.config: DictConfig | None = None
        self.launcher: Any = None
        self._context: HydraContext | None = None
        self._task: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher, of a task that records how each job ends."""
        from hydra.core.plugins import Plugins

        from lightning_memfit.sweep.recorded_task import RecordedTask

        self._context, self.config = hydra_context, config
        self._task = RecordedTask(task_function)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=self._task, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep.

        Args:
            arguments: the overrides of the command line.

        Returns:
            What the launcher returned: a sequence of ``JobReturn`` for each batch of jobs, in the order of launches.

        Raises:
            SweepError: if jobs failed, once everything else is done.
            ConfigurationError: if a setting cannot be used.
        """
        from lightning_memfit.sweep.conduct import Settings, conduct

        assert self.config is not None and self.launcher is not None
        assert self._context is not None and self._task is not None
        return conduct(
            [*(f"{key}={value}" for key, value in self.params.items()), *arguments],
            config=self.config,
            config_loader=self._context.config_loader,
            launcher=self.launcher,
            task=self._task,
            settings=Settings(
                max_batch_size=self.max_batch_size, device=self.device, subject=self.subject, real=self.real
            ),
        )
