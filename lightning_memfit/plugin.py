"""MemFit, the plugin: hangs planning, applying, proving and undoing on Lightning's hooks.

Adapter for Lightning's order of events in ``fit`` (2.5 to 2.6): ``Precision.convert_module`` runs after ``setup`` and
before optimizers and loaders exist; ``on_sanity_check_start``, or ``on_train_start`` where no sanity check runs, is the
first hook after everything is restored; ``Precision.teardown`` runs at the end of every fit, also after an exception.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import rich
from rich.console import Console
from rich.errors import LiveError
from rich.markup import escape

from lightning_memfit.apply.checkpoint_layouts import explain_folder
from lightning_memfit.apply.deepspeed_config import is_deepspeed
from lightning_memfit.apply.optimizer_checkpoints import adapt_optimizer_states, without_linked_momentum
from lightning_memfit.apply.precision import DelegatingPrecision, make_delegate
from lightning_memfit.apply.quiet_end import quiet_end
from lightning_memfit.apply.resumed import resumed_checkpoint
from lightning_memfit.apply.sharding import ranks_of
from lightning_memfit.apply.slicing import LossWeight, SplitBatch
from lightning_memfit.batch_functions import BatchFunctions
from lightning_memfit.cache_folder import cache_directory
from lightning_memfit.errors import MemFitError, NoFeasiblePlanError
from lightning_memfit.fit_session import FitSession
from lightning_memfit.measurement import SecondsSpent
from lightning_memfit.no_fit import NO_FIT_FILE, NoFit, no_fit_of, tell_fits, tell_no_fit
from lightning_memfit.plan import Measurement, Plan
from lightning_memfit.plan_file import FILE_NAME
from lightning_memfit.plan_reuse import given_plan, plan_into_checkpoint
from lightning_memfit.planning import Announce
from lightning_memfit.preconditions import check_batch_functions, check_trainer, idle_reason
from lightning_memfit.report.hyperparameters import hyperparameters_of, log_hyperparameters
from lightning_memfit.report.record import write_no_fit, write_record
from lightning_memfit.report.table import render_measurement, render_plan
from lightning_memfit.settings import check_no_fit_value, plan_request
from lightning_memfit.upstream import namespace_of

try:
    from lightning.pytorch.plugins.precision import Precision
except ImportError:  # of the two packages only the other one is installed
    from pytorch_lightning.plugins.precision import Precision  # type: ignore[assignment]

OFF_VARIABLE = "MEMFIT"


@functools.cache
def _with_both_bases(cls: Any) -> Any:
    other = importlib.import_module("pytorch_lightning.plugins.precision").Precision
    return type(cls.__name__, (cls, other), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _accepted_by_imported_trainers(cls: Any) -> Any:
    """The class, or a subclass that Trainers of both packages accept, where ``pytorch_lightning`` is imported.

    Lightning checks plugins by class, and ``pytorch_lightning`` has classes of its own. (No ``__new__`` does this: it
    would hide the parameters of ``__init__`` from ``inspect.signature``, and so from ``LightningCLI``.)
    """
    imported = "pytorch_lightning" in sys.modules
    has_it = any(base.__module__.startswith("pytorch_lightning.") for base in cls.__mro__)
    return _with_both_bases(cls) if imported and not has_it else cls


@_accepted_by_imported_trainers
class MemFit(DelegatingPrecision, Precision):  # type: ignore[misc, override]  # forwards to either package's plugin
    """Fits training into memory under a fixed effective batch.

    ``Trainer(plugins=[MemFit(effective_batch_size=256)])`` traces one training step without running it, searches
    precision, slicing, early zeroing of gradients, activation checkpointing and the optimizer's states and
    implementation for the plan that fits with the least harm, applies it, proves it with profiled steps that leave no
    trace, and lets training go on. It stands in front of Lightning's own precision plugin, whose checkpoints it reads
    and writes.

    After planning ``plan`` holds what was chosen; after the warm-up ``measured`` holds what was measured. Where nothing
    fits and that is no error, ``no_fit`` says why, and the other two are ``None``.
    """

    def __init__(
        self,
        effective_batch_size: int | None = None,
        *,
        budget: int | str = "auto",
        headroom: int | str = "auto",
        precision: str = "auto",
        activation_checkpointing: str | Sequence[str] = "auto",
        optimizer_states: str = "auto",
        offload: str = "never",
        micro_batch_size: int | Literal["auto"] = "auto",
        optimizer_implementation: str = "auto",
        split_batch: SplitBatch | None = None,
        loss_weight: LossWeight = "samples",
        worst_batch: Any = None,
        max_length: int | None = None,
        allow_inexact_slicing: bool = False,
        mode: str = "apply",
        on_no_fit: str = "raise",
        no_fit_value: float | None = None,
        num_profiled_steps: int = 2,
        planning_seconds: float | None = None,
        plan: Any = None,
        cache_dir: str | Path | None = "auto",
        verbose: bool = True,
    ) -> None:
        """Check the settings; nothing is planned before ``fit``.

        Args:
            effective_batch_size: samples per optimizer step; left out, the run keeps what it does today.
            budget: bytes of the torch allocator that training may use, as an int or as text such as ``"700MiB"``;
                ``"auto"`` is what the device leaves.
            headroom: bytes left free on purpose; ``"auto"`` is 5 % of the capacity, at least 256 MiB, and nothing
                where the budget is given.
            precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` (with its gradient scaler), ``"bf16-true"``, or
                ``"auto"``: the faster of ``"32-true"`` and ``"bf16-mixed"`` that fits.
            activation_checkpointing: ``"auto"``, ``"none"``, ``"blocks"`` (every repeated block), or patterns of
                module names as in ``fnmatch``.
            optimizer_states: ``"as-configured"``, ``"8bit"`` (needs bitsandbytes), or ``"auto"``: 8-bit states only
                where nothing fits without.
            offload: ``"auto"`` keeps the optimizer on the host, under DeepSpeed, only where nothing else fits, and in
                stage 3 the parameters too where that is not enough; ``"optimizer"`` always does, ``"parameters"`` both;
                ``"never"`` leaves them where the strategy has them.
            micro_batch_size: samples of the largest slice, or ``"auto"``.
            optimizer_implementation: ``"as-configured"``, ``"single-tensor"``, ``"foreach"``, ``"fused"``, or
                ``"auto"``: the fastest that fits.
            split_batch: function ``(batch, micro_batch_size) -> [(slice, samples), ...]`` for batches of a structure
                of their own.
            loss_weight: what the mean loss of a slice counts: ``"samples"``, ``"tokens"`` (labels other than -100),
                ``"next-tokens"`` (of these, the ones behind the first of each sample, as causal language models of
                transformers predict them), or a function of the slice; ``"sum"`` where the loss is a sum over samples.
            worst_batch: the largest batch that training can meet, or a function that makes it, from nothing or from the
                first batch; left out, a bounded scan looks for it.
            max_length: longest sequence in tokens that can occur: forecast and proof are those of a batch of that
                length.
            allow_inexact_slicing: slice also where the result differs from that of the undivided batch.
            mode: ``"apply"``, ``"report"`` (plan and print, change nothing; raises where ``"apply"`` would) or
                ``"off"``.
            on_no_fit: ``"raise"``; or ``"skip"`` and ``"value"``, with which a run that does not fit is a result:
                ``fit`` returns without having trained, ``no_fit`` and ``no_fit.yaml`` say why, and
                :func:`~lightning_memfit.objective` gives NaN or ``no_fit_value``.
            no_fit_value: the objective of such a run under ``on_no_fit="value"``.
            num_profiled_steps: optimizer steps of the memory warm-up, at least 2.
            planning_seconds: upper limit of the time for search and comparison; the proof of the plan always runs.
            plan: a plan made before, as a path, a :class:`Plan` or plain data: the search is skipped, the proof is not.
            cache_dir: directory of what was measured of operators and device; ``"auto"`` is the user's cache, ``None``
                none.
            verbose: print the report.

        Raises:
            ConfigurationError: for a value that cannot be used.
            UnsupportedError: for a lever that is not in this release.
        """
        self.__class__ = _accepted_by_imported_trainers(type(self))  # pytorch_lightning may be imported by now
        self.request = plan_request(
            effective_batch_size=effective_batch_size,
            budget=budget,
            headroom=headroom,
            precision=precision,
            activation_checkpointing=activation_checkpointing,
            optimizer_states=optimizer_states,
            offload=offload,
            micro_batch_size=micro_batch_size,
            optimizer_implementation=optimizer_implementation,
            loss_weight=loss_weight,
            max_length=max_length,
            allow_inexact_slicing=allow_inexact_slicing,
            mode=mode,
            on_no_fit=on_no_fit,
            num_profiled_steps=num_profiled_steps,
            planning_seconds=planning_seconds,
        )
        check_no_fit_value(on_no_fit, no_fit_value)
        check_batch_functions(split_batch=split_batch, loss_weight=loss_weight)
        self.verbose = verbose
        self.no_fit_value = no_fit_value
        self.plan: Plan | None = None
        self.measured: Measurement | None = None
        self.no_fit: NoFit | None = None
        self._functions = BatchFunctions(split_batch=split_batch, loss_weight=loss_weight)
        self._worst_batch = worst_batch
        self._given_plan = None if plan is None else given_plan(plan)
        self._cache_dir = cache_directory(cache_dir)
        self._trainer: Any = None
        self._session: FitSession | None = None
        self._warm_up: Any = None
        self._spent: SecondsSpent | None = None
        super().__init__(self._make_delegate(Precision.__module__.partition(".plugins.")[0], "cpu"))

    def __repr__(self) -> str:
        """The settings that differ from the defaults matter to a reader of Lightning's messages; precision always."""
        return (
            f"MemFit(effective_batch_size={self.request.effective_batch_size}, "
            f"precision={self.request.precision or 'auto'!r})"
        )

    @property
    def is_off(self) -> bool:
        """Whether MemFit is a plain precision plugin: ``mode="off"``, or ``MEMFIT=off`` in the environment."""
        return self.request.mode == "off" or os.environ.get(OFF_VARIABLE, "").lower() == "off"

    def convert_module(self, module: Any) -> Any:
        """Plan and apply, when fitting; the module is changed in place.

        Raises:
            NoFeasiblePlanError: if nothing fits.
            ConfigurationError: if the request cannot be met.
            UnsupportedError: if the run uses what this release does not drive.
        """
        trainer = getattr(module, "_trainer", None)
        self._trainer = trainer
        if trainer is not None:
            self._fit_delegate_to(trainer)
        module = self.delegate.convert_module(module)
        if trainer is None or not _is_fitting(trainer) or self._session is not None:
            return module
        self.plan = self.measured = self.no_fit = None  # those of an earlier fit, perhaps of another model
        if self.is_off:
            self._say_what_is_off()
            return module
        check_trainer(trainer, self.request)
        idle = idle_reason(trainer)
        if idle is not None:
            self._say(f"MemFit leaves this run alone: {idle}.")
            return module
        with self._not_fitting_is_a_result(trainer):
            self._begin(trainer, module)
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Apply the levers of the optimizers, which have just been made and have no states yet."""
        if self._session is None or self._warm_up is None:
            return model, optimizers, lr_schedulers
        self._session.connect()
        strategy = self._session.trainer.strategy
        return model, strategy.optimizers, strategy.lr_scheduler_configs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the delegate's state, and fit the saved states of optimizers to the format of this run's.

        Raises:
            CheckpointFormatError: if they cannot be converted; nothing is lost.
        """
        super().on_load_checkpoint(checkpoint)
        # Testing a checkpoint restores no optimizer, and those of the last fit are still there.
        if self._trainer is not None and _is_fitting(self._trainer):
            adapt_optimizer_states(checkpoint, self._trainer.optimizers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the delegate's state under its key, and the plan under MemFit's, so that resuming need not search."""
        super().on_save_checkpoint(checkpoint)
        if self._session is not None:
            self._session.keep_out_of(checkpoint)
        if "optimizer_states" in checkpoint:  # also after a fit, whose optimizer is kept
            checkpoint["optimizer_states"] = [
                without_linked_momentum(saved) for saved in checkpoint["optimizer_states"]
            ]
        if self.plan is not None and self.measured is not None:
            plan_into_checkpoint(checkpoint, self.plan, self.measured)

    def teardown(self) -> None:
        """Take everything back at the end of a fit, also of one that failed."""
        try:
            self._end()
        finally:
            self._trainer = None
            super().teardown()
            if not self.is_off:
                explain_folder(sys.exc_info()[1])

    def _begin(self, trainer: Any, module: Any) -> None:
        self._session = session = FitSession(
            trainer,
            module,
            self.request,
            self._functions,
            worst_batch=self._worst_batch,
            cache_dir=self._cache_dir,
            ranks=ranks_of(trainer),
        )
        try:
            with self._status() as announce:
                began = time.monotonic()
                self.plan = session.make_plan(announce, self._given_plan, resumed_checkpoint(trainer))
                self._spent = SecondsSpent(planning=time.monotonic() - began, proving=0.0)
            if self.request.mode == "report":
                session.install_loader()
                self._record(trainer)
            else:
                session.apply()
                self._warm_up = _warm_up_callback(trainer, self._prove)
                trainer.callbacks = [self._warm_up, *trainer.callbacks]
        except BaseException as error:
            self._end()
            self._name_the_batch(error)
            raise
        if self._speaks:
            render_plan(self.plan)

    def _prove(self, trainer: Any) -> None:
        session = self._session
        if session is None or self.measured is not None:
            return
        try:
            began = time.monotonic()
            with self._not_fitting_is_a_result(trainer), self._status() as announce:
                session.prove(self._report_replanned, announce)
            if self._spent is not None:
                self._spent = replace(self._spent, proving=time.monotonic() - began)
        except Exception as error:
            self._name_the_batch(error)
            raise
        self._remove_callback(trainer)
        self.plan, self.measured = session.plan, session.measurement
        assert self.plan is not None and self.measured is not None
        tell_fits()
        self._record(trainer)
        for logger, why in log_hyperparameters(trainer, hyperparameters_of(self.plan, self.measured)).items():
            self._say(f"{logger} did not take the plan as hyperparameters: {why}. The run goes on.")
        if self._speaks:
            render_measurement(self.plan, self.measured)

    @contextmanager
    def _not_fitting_is_a_result(self, trainer: Any) -> Iterator[None]:
        """End the fit quietly where nothing fits, unless the user wants an error."""
        try:
            yield
            return
        except NoFeasiblePlanError as error:
            if self.request.on_no_fit == "raise":
                raise
            self.no_fit = no_fit = no_fit_of(error)
            self.plan = self.measured = None
        # Outside of the except block: the error's traceback keeps what was planned alive.
        tell_no_fit(no_fit)
        self._write(trainer, lambda folder: write_no_fit(no_fit, folder), NO_FIT_FILE)
        words = f"MemFit does not train this run, as on_no_fit={self.request.on_no_fit!r} asks: "
        if self.verbose:
            self._say(words + no_fit.reason)
        elif trainer.is_global_zero:  # a run that does not train is never silent
            logging.getLogger(__name__).warning("%s%s", words, no_fit.reason.strip().partition("\n")[0])
        raise quiet_end(trainer)

    def _say_what_is_off(self) -> None:
        asked = self.request.effective_batch_size
        if asked is not None:
            self._say(f"MemFit is off: effective_batch_size={asked} is not applied, the run keeps its own.")

    def _name_the_batch(self, error: BaseException) -> None:
        """An error of the user's step may be one of the batch that the user gave."""
        if self._worst_batch is not None and isinstance(error, Exception) and not isinstance(error, MemFitError):
            error.add_note(
                "MemFit ran training_step with the batch given as worst_batch=: give one that the model takes, as "
                "those of the run."
            )

    def _record(self, trainer: Any) -> None:
        if self.plan is None:
            return
        plan, measured, spent = self.plan, self.measured, self._spent
        self._write(trainer, lambda folder: write_record(plan, measured, folder, spent=spent), FILE_NAME)

    def _write(self, trainer: Any, write: Callable[[str], object], name: str) -> None:
        """Write a file where the run's logs are; the run goes on where that fails."""
        if trainer.fast_dev_run:  # which writes no files
            return
        folder = trainer.log_dir or trainer.default_root_dir  # asks the other ranks, so that all of them ask
        if not trainer.is_global_zero:
            return
        try:
            write(folder)
        except Exception as error:  # libraries of remote folders raise errors of their own; training needs none of them
            self._say(f"{name} was not written to {folder}: {error}. The run goes on.")

    def _report_replanned(self, plan: Plan, found: str) -> None:
        self.plan = plan
        if self._speaks:
            self._say(f"The warm-up {found}; planned again with that correction.")
            render_plan(plan)

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.undo()
            finally:
                self._remove_callback(session.trainer)

    def _remove_callback(self, trainer: Any) -> None:
        callback, self._warm_up = self._warm_up, None
        if callback is not None:
            # A new list: Lightning may be walking through the old one.
            trainer.callbacks = [other for other in trainer.callbacks if other is not callback]

    def _fit_delegate_to(self, trainer: Any) -> None:
        """Make the delegate anew where it is of the other package, or for another kind of device than the run's."""
        namespace, device_type = namespace_of(trainer), trainer.strategy.root_device.type
        is_of_it = type(self.delegate).__module__.startswith(namespace)
        is_for_it = is_deepspeed(trainer.strategy) == (type(self.delegate).__name__ == "DeepSpeedPrecision")
        if not (is_of_it and is_for_it) or getattr(self.delegate, "device", device_type) != device_type:
            self.delegate = self._make_delegate(namespace, device_type, trainer.strategy)

    def _make_delegate(self, namespace: str, device_type: str, strategy: Any = None) -> Any:
        precision = self.request.precision or "32-true"
        return make_delegate(precision, device_type=device_type, namespace=namespace, strategy=strategy)

    @contextmanager
    def _status(self) -> Iterator[Announce]:
        """A line on the terminal that says what is being done; nothing where there is no terminal or no wish for it."""
        console = Console(file=sys.stdout)  # the file is fixed here: a trace takes sys.stdout away for a while
        if not (self._speaks and console.is_terminal):
            yield lambda words: None
            return
        status = console.status("MemFit")
        try:
            status.start()
        except LiveError:  # the user has a live display of their own
            yield lambda words: None
            return
        try:
            yield lambda words: status.update(f"MemFit: {escape(words)}")
        finally:
            status.stop()

    @property
    def _speaks(self) -> bool:
        """Whether this process prints: of several ranks the first one does."""
        return self.verbose and (self._trainer is None or self._trainer.is_global_zero)

    def _say(self, text: str) -> None:
        if self._speaks:
            rich.print(escape(text))


def _is_fitting(trainer: Any) -> bool:
    return getattr(trainer.state.fn, "value", None) == "fit"


def _warm_up_callback(trainer: Any, prove: Callable[[Any], None]) -> Any:
    """A callback of the Trainer's own package that runs ``prove`` at the first moment when everything is final."""
    base: Any = importlib.import_module(namespace_of(trainer)).Callback

    class MemFitWarmUp(base):  # type: ignore[misc]  # the class is chosen at run time
        """Runs MemFit's memory warm-up before the sanity check, or before training where none runs."""

        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            """Prove the plan."""
            prove(trainer)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Prove the plan, if no sanity check ran."""
            prove(trainer)

    return MemFitWarmUp()
