"""Whether the batches of a run may be divided: first what can be seen, then a comparison of slices with the whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memfit.apply.fsdp2 import computing_dtype_of, start_anew, underway
from lightning_memfit.apply.micro_batches import unsliceable_reason
from lightning_memfit.apply.slicing import LOSS_WEIGHT_WORDS
from lightning_memfit.batch_functions import BatchFunctions
from lightning_memfit.batch_tree import join_outputs
from lightning_memfit.errors import BatchStructureError, first_line, is_out_of_memory
from lightning_memfit.observe.lone_rank import without_other_ranks
from lightning_memfit.plan import balanced_slices
from lightning_memfit.ranks import OneRank, Ranks
from lightning_memfit.trace.training_step import program_of
from lightning_memfit.validate.splittable import (
    SplitVerdict,
    batch_norm_obstacle,
    check_splittable,
    gradient_hook_obstacle,
)

COMPARING = "comparing slices with the undivided batch"
"""What is being done, for messages."""
_COMPARED_PAIRS = 8


class _Passes:
    """How often the step was begun: equally often on every rank, until it fails on one."""

    def __init__(self) -> None:
        self.begun = 0

    def counting(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(batch: Any) -> Any:
            self.begun += 1
            return step(batch)

        return counted


@dataclass(frozen=True, kw_only=True)
class SliceGuard:
    """Says why the batches of a run may not be divided."""

    trainer: Any
    """The Trainer."""
    module: Any
    """Its LightningModule."""
    functions: BatchFunctions
    """The user's functions."""
    batch: Any
    """The batch that is compared."""
    allow_inexact_slicing: bool
    """Whether the user allows slices whose result differs."""
    uneven_batches: str | None = None
    """Which other batch of the epoch has no common number of samples, unless the user's function divides it."""
    with_other_ranks: bool = False
    """Whether every rank compares the same batch now, so that parameters can be gathered."""
    ranks: Ranks = field(default_factory=OneRank)
    """The processes that compare together; of no interest where one compares alone."""
    _passes: _Passes = field(default_factory=_Passes, init=False, repr=False, compare=False)

    def visible_obstacle(self) -> str | None:
        """Why batches may not be divided, as far as can be seen without running anything."""
        reason = unsliceable_reason(self.trainer, self.module)
        if reason is None and not self.allow_inexact_slicing:
            reason = batch_norm_obstacle(self.module) or gradient_hook_obstacle(self.module)
            if reason is not None:
                reason += " allow_inexact_slicing=True slices it all the same."
        if reason is None:
            reason = self._structure_obstacle()
        return None if reason is None else f"not sliced: {reason}"

    def compare_slices(self, micro_batch_size: int) -> str | None:
        """Why slices of the real batch differ from the whole; ``None`` if they do not.

        Four samples are compared first, with the gradients of every parameter, then the losses of pairs of slices of
        the planned size: a loss that weighs classes or leaves labels out is no mean over samples, but four samples need
        not show it.
        """
        with nullcontext() if self.with_other_ranks else without_other_ranks():
            return self._compared(micro_batch_size)

    def _compared(self, micro_batch_size: int) -> str | None:
        obstacle = self._compare_few()
        # More samples than a slice may not fit, even without gradients; then as many as a slice are compared.
        for samples in (2 * micro_batch_size, micro_batch_size):
            if obstacle is not None or samples <= 4:
                break
            try:
                return self._compare_pairs(samples)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._go_on_after(error)
        return obstacle

    def _compare_few(self) -> str | None:
        """Four samples, with their gradients; without them where these do not fit."""
        for gradients in (True, False):
            try:
                return self._compare_halves_of(self.batch, 4, gradients=gradients)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._go_on_after(error)
        return (
            "not sliced: the comparison of four samples with their slices ran out of memory. "
            "allow_inexact_slicing=True slices it all the same."
        )

    def _compare_pairs(self, samples: int) -> str | None:
        present = self.functions.samples_of(self.batch)
        sizes = balanced_slices(present, -(-present // samples))
        pairs = self.functions.divide(self.batch, sizes) if len(sizes) > 1 else [self.batch]
        for pair in pairs[:_COMPARED_PAIRS]:
            obstacle = self._compare_halves_of(pair, samples)
            if obstacle is not None:
                return obstacle
        return None

    def _compare_halves_of(self, batch: Any, samples: int, *, gradients: bool = False) -> str | None:
        try:
            verdict = self._verdict(batch, samples, self.functions, gradients=gradients)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._go_on_after(error)
            # A step may need what a later hook sets up. Nothing is sliced that could not be compared.
            return (
                f"not sliced: the comparison of slices raised {type(error).__name__}: {first_line(error)}. "
                "allow_inexact_slicing=True slices it all the same."
            )
        return None if verdict.exact else f"not sliced: {verdict.reason}{self._other_weight(batch, samples, gradients)}"

    def _other_weight(self, batch: Any, samples: int, gradients: bool) -> str:
        """Which other word for the weight would be exact, in words that can be added to a sentence."""
        for word in LOSS_WEIGHT_WORDS:
            try:
                other = replace(self.functions, loss_weight=word)
                if word == self.functions.loss_weight:
                    continue
                if self._verdict(batch, samples, other, gradients=gradients).exact:
                    return f" With loss_weight={word!r} they do not differ."
            except Exception as error:  # the batch has no labels, or the step ran out of memory
                self._go_on_after(error)
                if is_out_of_memory(error):
                    return ""
        return ""

    def _go_on_after(self, error: Exception) -> None:
        """Return if the comparison may go on without what failed: where ranks gather, only if it failed on all alike.

        Raises:
            Exception: the error itself.
        """
        if not self.with_other_ranks:
            return
        what = "memory ran out" if is_out_of_memory(error) else "an error"
        place = f"{what} in pass {self._passes.begun}, under way: {underway(self.module)}"
        self.ranks.alike(error, place, doing=COMPARING)
        start_anew(self.module)

    def _verdict(self, batch: Any, samples: int, functions: BatchFunctions, *, gradients: bool) -> SplitVerdict:
        return check_splittable(
            module=self.module,
            batch=batch,
            split_by_sizes=functions.divide,
            training_step=self._passes.counting(program_of(self.module).compute_loss),
            weights=functions.weight_of,
            join=join_outputs,
            batch_size=functions.samples_of(batch),
            compared_samples=samples,
            sums=functions.loss_weight == "sum",
            gradients=gradients,
            computed_in=computing_dtype_of(self.module),
        )

    def _structure_obstacle(self) -> str | None:
        try:
            samples = self.functions.samples_of(self.batch)
        except BatchStructureError as error:
            return str(error)
        if samples == 1:
            return "the batch is a single sample"
        return self.uneven_batches if self.functions.split_batch is None else None
