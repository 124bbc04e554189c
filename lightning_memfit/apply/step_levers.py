"""The levers of a candidate that act within an optimizer step, put on a live Trainer and taken back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.apply.gradient_exchange import exchange_of
from lightning_memfit.apply.micro_batches import Slicer
from lightning_memfit.apply.optimizer_checkpoints import as_configured_groups, carry_states, implementation_flags
from lightning_memfit.apply.optimizer_implementation import set_implementation
from lightning_memfit.apply.optimizer_swap import OptimizerSwap, swap_optimizer
from lightning_memfit.apply.precision import exchange_delegate
from lightning_memfit.apply.quantised_states import quantisation_obstacle, quantise
from lightning_memfit.apply.slicing import LossWeight, SplitBatch
from lightning_memfit.plan import Candidate, OptimizerImplementation, OptimizerStates
from lightning_memfit.ranks import Ranks
from lightning_memfit.undo import Undo

_AS_CONFIGURED: tuple[OptimizerStates, OptimizerImplementation] = ("as-configured", "as-configured")


class StepLevers:
    """Lets a Trainer run one candidate at a time.

    The levers of the optimizer come later than the others, when there is an optimizer; and they are left on where the
    next candidate has the same, since states that are quantised twice are rounded twice.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        *,
        split_batch: SplitBatch | None = None,
        loss_weight: LossWeight = "samples",
        ranks: Ranks | None = None,
    ) -> None:
        """Change nothing yet.

        Args:
            trainer: the Trainer, fitting; its precision plugin is a ``DelegatingPrecision``.
            module: its LightningModule.
            split_batch: the user's function that divides batches.
            loss_weight: what a slice's mean loss counts.
            ranks: the processes that train together; by default this one alone.
        """
        self._ranks = ranks
        self._trainer = trainer
        self._module = module
        self._split_batch: SplitBatch | None = split_batch
        self._loss_weight: LossWeight = loss_weight
        self._candidate: Candidate | None = None
        self._levers = ExitStack()
        self._optimizer_levers = ExitStack()
        # Not asked of the Trainer: between two fits it holds the optimizer of the first.
        self._optimizer_is_there = False
        self._optimizer_setting = _AS_CONFIGURED
        self._configured_flags: list[tuple[dict[str, Any], ...]] = []
        self._swap: OptimizerSwap | None = None

    def put_on(self, candidate: Candidate) -> None:
        """Let the Trainer run ``candidate`` instead of the one before."""
        if candidate == self._candidate:
            return
        self.take_off()
        if self._optimizer_is_there:
            self.put_on_optimizer(candidate)
        with ExitStack() as levers:
            levers.callback(exchange_delegate(self._trainer, candidate.precision))
            levers.callback(checkpoint_modules(self._module, candidate.checkpointed_modules))
            if self._module.automatic_optimization:  # else there is no closure in which batches could be divided
                levers.callback(self._slicer(candidate).apply())
            self._levers = levers.pop_all()
        self._candidate = candidate

    def put_on_optimizer(self, candidate: Candidate) -> None:
        """Put the format of the states and the implementation of the step on the Trainer's optimizers.

        Schedulers go on driving it with the same trajectory; states that exist are converted.
        """
        self._optimizer_is_there = True
        wanted = (candidate.optimizer_states, _implementation_here(candidate))
        if wanted == self._optimizer_setting:
            return
        self._optimizer_levers.close()
        self._optimizer_setting = _AS_CONFIGURED
        self._configured_flags = [implementation_flags(optimizer) for optimizer in self._trainer.optimizers]
        self._swap = None
        undo = _apply_to_optimizers(self._trainer, self._module, candidate)
        self._optimizer_levers.callback(undo)
        self._swap = undo if isinstance(undo, OptimizerSwap) else None
        self._optimizer_setting = wanted

    @property
    def notes(self) -> tuple[str, ...]:
        """What refers to the optimizer as configured and could not follow."""
        return () if self._swap is None else self._swap.notes

    def keep_out_of(self, checkpoint: dict[str, Any]) -> None:
        """Save the optimizer's groups as the user configured them: a lever must not travel to a plain Trainer."""
        saved = checkpoint.get("optimizer_states")
        if saved and self._optimizer_setting != _AS_CONFIGURED:
            # Both in the order of the Trainer's optimizers.
            checkpoint["optimizer_states"] = list(map(as_configured_groups, saved, self._configured_flags))

    def _slicer(self, candidate: Candidate) -> Slicer:
        return Slicer(
            trainer=self._trainer,
            module=self._module,
            split=candidate.split,
            split_batch=self._split_batch,
            loss_weight=self._loss_weight,
            zero_gradients_early=candidate.zero_gradients_early,
            ranks=self._ranks,
            exchange=exchange_of(self._trainer.strategy, candidate.sharding),
        )

    def take_off(self) -> None:
        """Take everything back but the levers of the optimizer. Calling it twice is harmless."""
        self._levers.close()
        self._candidate = None

    def end(self) -> None:
        """Take everything back, but keep an optimizer whose states were trained in another format."""
        self.take_off()
        if self._optimizer_setting[0] == "as-configured":
            self._optimizer_levers.close()
        else:
            self._optimizer_levers.pop_all()
        self._optimizer_setting = _AS_CONFIGURED
        self._optimizer_is_there = False


def _implementation_here(candidate: Candidate) -> OptimizerImplementation:
    """What an optimizer that is there is told; DeepSpeed's Adam was given to the engine when that was built."""
    implementation = candidate.optimizer_implementation
    return "as-configured" if implementation == "cpu-adam" else implementation


def _apply_to_optimizers(trainer: Any, module: Any, candidate: Candidate) -> Undo:
    if candidate.optimizer_states == "8bit":

        def quantised(old: Optimizer) -> Optimizer:
            # One of several whose states cannot be quantised stays as it is; the search knows whether any can be.
            can_be = len(trainer.optimizers) == 1 or quantisation_obstacle(old, module) is None
            return quantise(old, module) if can_be else old

        # States in 32 bits would stay alive beside the new ones, and count in what the warm-up measures.
        return swap_optimizer(trainer, quantised, carry=carry_states, keep_states=False)
    with ExitStack() as undos:
        implementation = _implementation_here(candidate)
        if implementation != "as-configured":
            for optimizer in trainer.optimizers:
                undos.callback(set_implementation(optimizer, implementation))
        return undos.pop_all().close
