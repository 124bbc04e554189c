"""The memory warm-up: real optimizer steps at the final settings through Lightning's own path, without a trace.

Adapter for Lightning's loops: touches ``trainer.fit_loop.epoch_loop`` (``batch_progress``, ``automatic_optimization``,
``manual_optimization``, ``_build_kwargs``, ``_should_accumulate``), its ``val_loop`` (``_on_evaluation_model_eval``,
``_on_evaluation_model_train``, ``_build_kwargs``, ``_build_step_args_from_hook_kwargs``, ``_module_mode``),
``trainer._logger_connector`` (``on_batch_start``, ``on_batch_end``, ``epoch_end_reached``), ``_call_callback_hooks``,
``_call_lightning_module_hook`` and ``_call_strategy_hook`` of ``trainer/call.py``.
"""

from __future__ import annotations

import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import torch

from lightning_memfit.apply.batch_transfer import hook_owners, transferred
from lightning_memfit.apply.deepspeed_config import is_deepspeed
from lightning_memfit.apply.gradient_exchange import exchange_of
from lightning_memfit.errors import UnsupportedError, is_out_of_memory
from lightning_memfit.observe.callbacks import callback_bytes
from lightning_memfit.observe.cuda_memory import wait_for
from lightning_memfit.observe.grown_states import let_states_grow
from lightning_memfit.observe.logger_stand_ins import loggers_standing_in
from lightning_memfit.observe.meter import AllocationMeter, Meter, storage_bytes
from lightning_memfit.observe.schedules_at_rest import schedules_at_rest
from lightning_memfit.observe.snapshot import Snapshot, reachable_tensors, take_snapshot
from lightning_memfit.observe.tensor_vault import TensorsIn
from lightning_memfit.plan import Measurement, OperatorCost, OptimizerStatesMeasurement
from lightning_memfit.trace.manual_step import MOST_BATCHES, index_in_epoch, is_mock
from lightning_memfit.undo import set_instance_attribute
from lightning_memfit.upstream import upstream_module

# A gradient scaler skips steps until its scale fits; states do not exist before a step that is not skipped.
_SKIPPED_STEPS = 20
_MOST_TIMED_STEPS = 5


def run_warmup(
    *,
    trainer: Any,
    module: Any,
    batch: Any,
    validation_batch: Any | None = None,
    accumulate_grad_batches: int,
    num_profiled_steps: int,
    spare_bytes: int,
    resident_batches: int = 1,
    snapshot_in: Literal["auto", "memory", "disk"] = "auto",
    meter: Callable[[int], Meter] = AllocationMeter,
    timed_seconds: float = 0.0,
    verify_states: Callable[[Any], OptimizerStatesMeasurement] | None = None,
    validation_loader: int | None = None,
    validation_batches: int | None = None,
    agreed: Callable[[float], float] = float,
) -> Measurement:
    """Run real optimizer steps and evaluation steps, measure them, and put everything back.

    Called where everything is final: in a callback's ``on_sanity_check_start``, or in ``on_train_start`` if no sanity
    check runs. Every Lightning batch of a window is ``batch``. The module's own hooks run as in training, since its
    ``training_step`` may rely on them: ``on_train_start``, ``on_train_epoch_start``, those of each batch, and the same
    for validation; no end-of-epoch hooks, no learning-rate scheduler steps, also where ``training_step`` calls for
    them. Callbacks, loggers and Lightning's profiler do not take part. Optimizer states that grow for many steps are
    grown after the first one. Also after an error, everything is put back, and the error passes through.

    Args:
        trainer: the user's Trainer, fitting, with optimizers made.
        module: its LightningModule.
        batch: one collated batch, as the loader gives it.
        validation_batch: one batch of the first validation loader; ``None`` if the run does not validate.
        accumulate_grad_batches: Lightning batches per optimizer step, equal to the trainer's.
        num_profiled_steps: optimizer steps to run; from the second on the optimizer's states exist.
        spare_bytes: what the plan's peak leaves of the device; decides where ``"auto"`` keeps the snapshot.
        resident_batches: batches that training holds at the same time (2 where Lightning fetches one ahead); the
            warm-up holds one, and the others are added to what is resident.
        snapshot_in: ``"memory"``, ``"disk"``, or ``"auto"``: in memory where it fits into half of what is
            spare, since on a host both share one memory.
        meter: makes the meter from the bytes that are resident at its start.
        timed_seconds: seconds to spend on further steps without the profiler, at least 1 and at most 5 steps.
        verify_states: looks at the states of the optimizers after the steps.
        validation_loader: which of several validation loaders that are read one after another the batch is from, which
            Lightning then tells the step; ``None`` if there is one.
        validation_batches: batches of one evaluation, over all loaders; ``None`` if unknown. With more than one, a
            second step shows what the module keeps of the first.
        agreed: gives the seconds of a step on which all ranks agree, so that all of them time as many.

    Returns:
        What was measured. The seconds are those of the fastest step without the profiler. The snapshot is in none of
        the allocator's peaks, but in the resident set if it is in memory.

    Raises:
        UnsupportedError: if ``training_step`` takes an iterator, or this release of Lightning has other names.
    """
    assert trainer.accumulate_grad_batches == accumulate_grad_batches, "the warm-up runs at the trainer's settings"
    _check_supported(trainer, module)
    run = _WarmUp(
        trainer=trainer,
        module=module,
        validation_loader=validation_loader,
        call=upstream_module(trainer, "trainer.call"),
        agreed=agreed,
    )
    roots = [*_roots(trainer), *hook_owners(trainer), *_engine(trainer), batch, validation_batch]
    where = _place(snapshot_in, spare_bytes, [*run.holders, batch, validation_batch])
    beside = callback_bytes(trainer, module) + exchange_of(trainer.strategy).held_bytes()
    with (
        take_snapshot(
            module,
            optimizers=trainer.optimizers,
            schedulers=trainer.lr_scheduler_configs,
            extra_roots=roots,
            tensors_in=where,
        ),
        silenced(trainer),
        schedules_at_rest(config.scheduler for config in trainer.lr_scheduler_configs),
        torch.enable_grad(),
    ):
        _drop_gradients(module, trainer.optimizers)
        resident = beside + storage_bytes(reachable_tensors([*run.holders, batch]))
        resident += (resident_batches - 1) * storage_bytes(reachable_tensors([batch]))
        training_meter = meter(resident)
        with _reusable(batch) as untouched:
            with training_meter:
                run.train(batch, untouched, num_profiled_steps)
            states = None
            if verify_states is not None and any(run.gave_loss):
                states = verify_states(trainer.optimizers)
            seconds = run.time(batch, untouched, timed_seconds)
        evaluation = _Evaluation()
        if validation_batch is not None:
            evaluation = run.evaluate(validation_batch, meter, beside, validation_batches)
    measurement = _measurement(training_meter, evaluation, seconds, num_profiled_steps if any(run.gave_loss) else 0)
    peak = measurement.measured_peak_allocated_bytes - sum(run.left_behind)
    return replace(measurement, measured_peak_allocated_bytes=peak, optimizer_states=states)


def time_steps(
    *,
    trainer: Any,
    module: Any,
    batch: Any,
    seconds: float,
    spare_bytes: int,
    accumulate_grad_batches: int,
    agreed: Callable[[float], float] = float,
) -> float:
    """Seconds of the fastest of a few optimizer steps, after one that is not counted; everything is put back.

    Args:
        trainer: as in :func:`run_warmup`.
        module: likewise.
        batch: likewise.
        seconds: how long to go on, at least 1 and at most 5 steps.
        spare_bytes: as in :func:`run_warmup`.
        accumulate_grad_batches: likewise.
        agreed: likewise.
    """
    return run_warmup(
        trainer=trainer,
        module=module,
        batch=batch,
        accumulate_grad_batches=accumulate_grad_batches,
        num_profiled_steps=1,
        spare_bytes=spare_bytes,
        meter=_Unmetered,
        timed_seconds=seconds,
        agreed=agreed,
    ).measured_step_seconds


class _Unmetered(AbstractContextManager["_Unmetered"]):
    """Measures nothing, so that nothing slows the steps down."""

    peak_allocated_bytes = 0
    peak_rss_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    costliest_ops: tuple[OperatorCost, ...] = ()

    def __init__(self, resident_bytes: int) -> None:
        """Take the bytes that are resident, as every meter does."""

    def __exit__(self, *_: object) -> None:
        return None


@contextmanager
def silenced(trainer: Any) -> Iterator[None]:
    """Let callbacks, loggers and Lightning's profiler take no part.

    Stand-ins answer what user code asks a logger. Callbacks stay where user code looks for them, such as in
    ``trainer.checkpoint_callback``; their hooks are not called.
    """
    call, profiler = upstream_module(trainer, "trainer.call"), trainer.profiler
    call_hooks = call._call_callback_hooks

    def call_hooks_of_others(other: Any, *args: Any, **kwargs: Any) -> None:
        if other.fit_loop is not trainer.fit_loop:  # the Trainer may be given as a weak proxy
            call_hooks(other, *args, **kwargs)

    undo = set_instance_attribute(call, "_call_callback_hooks", call_hooks_of_others)
    trainer.profiler = upstream_module(trainer, "profilers").PassThroughProfiler()
    try:
        with loggers_standing_in(trainer):
            yield
    finally:
        undo()
        trainer.profiler = profiler


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """What was seen of the evaluation steps; nothing if there were none."""

    meter: Meter | None = None
    kept_bytes: int = 0
    num_batches: int | None = None
    ran_out: bool = False


@dataclass(frozen=True, kw_only=True)
class _WarmUp:
    trainer: Any
    module: Any
    validation_loader: int | None
    call: Any
    """Lightning's module of functions that call hooks."""
    agreed: Callable[[float], float]
    """Gives the seconds of a step on which all ranks agree."""
    gave_loss: list[bool] = field(default_factory=list)
    """Whether each training step did, in order; under manual optimization, whether all optimizers stepped."""
    left_behind: list[int] = field(default_factory=list)
    """Bytes of the loader's batch that training lets go of, once its own is made of it; known from the first step on.

    The warm-up has to keep them for its next step.
    """

    @property
    def holders(self) -> list[Any]:
        """What holds the run's tensors."""
        return [self.module, *self.trainer.optimizers, *_engine(self.trainer)]

    def train(self, batch: Any, untouched: Snapshot, num_steps: int) -> None:
        """Run optimizer steps."""
        self.trainer.training = True
        self._hook("on_train_start")
        self._hook("on_train_epoch_start")
        steps_left = num_steps
        for _ in range(num_steps + _SKIPPED_STEPS):
            scales = [scaler.get_scale() for scaler in _scalers(self.trainer)]
            self._optimizer_step(batch, untouched)
            skipped = any(scaler.get_scale() < old for scaler, old in zip(_scalers(self.trainer), scales, strict=True))
            for optimizer in self.trainer.optimizers:
                let_states_grow(optimizer)
            steps_left -= not skipped
            if not steps_left:
                break

    def time(self, batch: Any, untouched: Snapshot, seconds: float) -> float:
        """Seconds of the fastest of further steps, as many as fit into ``seconds``."""
        steps: list[float] = []
        while not steps or (len(steps) < _MOST_TIMED_STEPS and sum(steps) + min(steps) <= seconds):
            steps.append(self.agreed(self._optimizer_step(batch, untouched)))
        return min(steps)

    def _optimizer_step(self, batch: Any, untouched: Snapshot) -> float:
        """One window of Lightning batches, as ``_TrainingEpochLoop.advance`` runs them; its seconds."""
        if not self.module.automatic_optimization:
            return self._manual_steps(batch, untouched)
        epoch_loop, seconds = self.trainer.fit_loop.epoch_loop, 0.0
        accumulate = self.trainer.accumulate_grad_batches
        for index in range(accumulate):
            epoch_loop.batch_progress.current.ready = index + 1
            epoch_loop.batch_progress.is_last_batch = index + 1 == accumulate
            seconds += self._timed_batch(batch, index)
            untouched.restore()  # a step that changes its batch in place would not find it again
            if not epoch_loop._should_accumulate():  # an epoch shorter than a window steps early
                break
        return seconds

    def _manual_steps(self, batch: Any, untouched: Snapshot) -> float:
        """As many batches as it takes for every optimizer to step, at least two; seconds of one, on average."""
        progress, seconds, number = self.trainer.fit_loop.epoch_loop.batch_progress, 0.0, 0
        with _not_stepped(self.trainer.optimizers) as waited_for:
            while number < 2 or (waited_for and number < MOST_BATCHES):
                index = index_in_epoch(self.trainer, number)
                progress.current.ready = index + 1
                seconds += self._timed_batch(batch, index)
                untouched.restore()
                number += 1
            self.gave_loss.append(not waited_for)
        return seconds / number

    def _timed_batch(self, batch: Any, index: int) -> float:
        """Run a batch; seconds until the device has done all that it was asked for."""
        device = self.trainer.strategy.root_device
        wait_for(device)
        start = perf_counter()
        self._training_batch(batch, index)
        wait_for(device)
        return perf_counter() - start

    def _training_batch(self, batch: Any, index: int) -> None:
        trainer, epoch_loop = self.trainer, self.trainer.fit_loop.epoch_loop
        loaded, batch = batch, self._to_device(batch)
        if not self.left_behind:
            both, arrived = reachable_tensors([loaded, batch]), reachable_tensors([batch])
            device = trainer.strategy.root_device
            self.left_behind.append(_bytes_on(device, both) - _bytes_on(device, arrived))
        trainer._logger_connector.on_batch_start(batch)
        self._hook("on_train_batch_start", batch, index)
        kwargs = epoch_loop._build_kwargs(OrderedDict(), batch, index)
        if self.module.automatic_optimization:
            output = epoch_loop.automatic_optimization.run(trainer.optimizers[0], index, kwargs)
            self.gave_loss.append(bool(output))
        else:
            output = epoch_loop.manual_optimization.run(kwargs)
        self._hook("on_train_batch_end", output, batch, index)
        trainer._logger_connector.on_batch_end()

    def evaluate(self, batch: Any, meter: Callable[[int], Meter], beside: int, num_batches: int | None) -> _Evaluation:
        """Run evaluation steps as the validation loop does inside an epoch: gradients are gone, states exist."""
        self._hook("on_validation_model_zero_grad")
        running = meter(beside + storage_bytes(reachable_tensors([*self.holders, batch])))
        self.trainer.validating = True
        kept = 0
        try:
            with _reusable(batch) as untouched, running, torch.no_grad():
                self._evaluation_begins()
                self._evaluation_step(batch, 0)
                if num_batches != 1:
                    untouched.restore()
                    device = self.trainer.strategy.root_device
                    before = _bytes_on(device, reachable_tensors([self.module]))
                    self._evaluation_step(batch, 1)
                    kept = max(0, _bytes_on(device, reachable_tensors([self.module])) - before)
                self.trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()
        except Exception as error:
            if self._others_wait or not is_out_of_memory(error):
                raise
            return _Evaluation(ran_out=True, num_batches=num_batches)
        return _Evaluation(meter=running, kept_bytes=kept, num_batches=num_batches)

    @property
    def _others_wait(self) -> bool:
        """Whether an evaluation step gathers parameters from other ranks, which wait if this one ends."""
        return self.trainer.world_size > 1 and exchange_of(self.trainer.strategy).in_every_slice

    def _evaluation_begins(self) -> None:
        trainer, val_loop = self.trainer, self.trainer.fit_loop.epoch_loop.val_loop
        trainer._logger_connector.epoch_end_reached()
        val_loop._on_evaluation_model_eval()
        self._hook("on_validation_start")
        self._hook("on_validation_epoch_start")

    def _evaluation_step(self, batch: Any, batch_idx: int) -> None:
        trainer, val_loop = self.trainer, self.trainer.fit_loop.epoch_loop.val_loop
        batch = self._to_device(batch, self.validation_loader or 0)
        index = self.validation_loader
        kwargs = val_loop._build_kwargs(batch, batch_idx, index)
        trainer._logger_connector.on_batch_start(batch, index)
        self._hook("on_validation_batch_start", *kwargs.values())
        arguments = val_loop._build_step_args_from_hook_kwargs(kwargs, "validation_step")
        output = self.call._call_strategy_hook(trainer, "validation_step", *arguments)
        self._hook("on_validation_batch_end", output, *kwargs.values())
        trainer._logger_connector.on_batch_end()

    def _to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        batch = self.trainer.precision_plugin.convert_input(batch)
        return transferred(self.trainer, self.module, batch, dataloader_idx)

    def _hook(self, name: str, *arguments: Any) -> None:
        self.call._call_lightning_module_hook(self.trainer, name, *arguments)


@contextmanager
def _not_stepped(optimizers: list[Any]) -> Iterator[set[int]]:
    """The ``id`` of each optimizer that has not stepped yet within this context.

    DeepSpeed puts one without hooks before that of the user, which it steps.
    """
    hooked = [each if hasattr(each, "register_step_post_hook") else each.optimizer for each in optimizers]
    waited_for = {id(optimizer) for optimizer in hooked if not is_mock(optimizer)}
    handles = [
        optimizer.register_step_post_hook(lambda stepped, *_: waited_for.discard(id(stepped))) for optimizer in hooked
    ]
    try:
        yield waited_for
    finally:
        for handle in handles:
            handle.remove()


def _bytes_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of their storages that are on the device; on a host, of all of them."""
    return storage_bytes(each for each in tensors if device.type == "cpu" or each.device.type == device.type)


def _reusable(batch: Any) -> Snapshot:
    return take_snapshot(None, extra_roots=[batch], random_state=False)


def _engine(trainer: Any) -> list[Any]:
    """DeepSpeed's engine, which holds parts of parameters and states that neither module nor optimizer have."""
    return [trainer.strategy.model] if is_deepspeed(trainer.strategy) else []


def _roots(trainer: Any) -> list[Any]:
    """Lightning's own objects whose attributes the steps change: progress, results, flags and the scaler."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    return [
        trainer, trainer.state, trainer._logger_connector, fit_loop, epoch_loop, epoch_loop.automatic_optimization,
        epoch_loop.manual_optimization, epoch_loop.val_loop, getattr(epoch_loop.val_loop, "_module_mode", None),
        *_scalers(trainer),
    ]  # fmt: skip


def _scalers(trainer: Any) -> list[Any]:
    """The gradient scaler of the precision plugin, or of the one it delegates to."""
    plugins = [trainer.precision_plugin, *vars(trainer.precision_plugin).values()]
    found = [vars(plugin).get("scaler") for plugin in plugins if hasattr(plugin, "__dict__")]
    return [scaler for scaler in found if scaler is not None]


def _place(snapshot_in: Literal["auto", "memory", "disk"], spare_bytes: int, roots: list[Any]) -> TensorsIn:
    if snapshot_in != "auto":
        return snapshot_in
    return "memory" if 2 * storage_bytes(reachable_tensors(roots)) <= spare_bytes else "disk"


def _drop_gradients(module: Any, optimizers: list[Any]) -> None:
    """Set gradients to ``None``: the meter does not see the free of a block that it did not see allocated."""
    for parameter in module.parameters():
        parameter.grad = None
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue  # DeepSpeed's: behind each step it drops gradients itself, and those on the host must stay
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _measurement(training: Meter, evaluation: _Evaluation, seconds: float, num_steps: int) -> Measurement:
    resident_sets = [meter.peak_rss_bytes for meter in (training, evaluation.meter) if meter is not None]
    known = [size for size in resident_sets if size is not None]
    return Measurement(
        measured_peak_allocated_bytes=training.peak_allocated_bytes,
        measured_evaluation_peak_bytes=None if evaluation.meter is None else evaluation.meter.peak_allocated_bytes,
        evaluation_ran_out=evaluation.ran_out,
        evaluation_kept_bytes=evaluation.kept_bytes,
        evaluation_batches=evaluation.num_batches,
        measured_peak_rss_bytes=max(known, default=None),
        measured_peak_reserved_bytes=training.peak_reserved_bytes,
        measured_device_total_bytes=training.device_total_bytes,
        measured_step_seconds=seconds,
        profiled_steps=num_steps,
        costliest_ops=training.costliest_ops,
    )


def _check_supported(trainer: Any, module: Any) -> None:
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            f"{type(module).__qualname__}.training_step(dataloader_iter) fetches its own batches: the memory warm-up "
            "cannot give it the worst one. Take `batch` instead, or set MEMFIT=off for this run."
        )
    epoch_loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
    val_loop, connector = getattr(epoch_loop, "val_loop", None), getattr(trainer, "_logger_connector", None)
    wanted: list[tuple[Any, str]] = [
        *((epoch_loop, name) for name in ("batch_progress", "automatic_optimization", "manual_optimization")),
        *((epoch_loop, name) for name in ("_build_kwargs", "_should_accumulate", "_results")),
        *((val_loop, name) for name in ("_on_evaluation_model_eval", "_on_evaluation_model_train", "_build_kwargs")),
        (val_loop, "_build_step_args_from_hook_kwargs"),
        *((connector, name) for name in ("on_batch_start", "on_batch_end", "epoch_end_reached")),
        (module, "_on_before_batch_transfer"),
        (upstream_module(trainer, "trainer.call"), "_call_callback_hooks"),
        (upstream_module(trainer, "trainer.call"), "_call_lightning_module_hook"),
        (upstream_module(trainer, "trainer.call"), "_call_strategy_hook"),
    ]
    missing = [f"{type(owner).__name__}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    if missing:
        version = importlib.import_module(upstream_module(trainer, "trainer").__name__.partition(".")[0]).__version__
        raise UnsupportedError(
            f"Lightning {version} has no {', '.join(missing)}, through which MemFit runs its memory warm-up: this "
            "release changed them. Use Lightning 2.5 or 2.6, or set MEMFIT=off for that run."
        )
