"""Manual optimization: a ``training_step`` that runs backward and steps its optimizers itself, on fakes.

Adapter for Lightning's private names (2.5 to 2.6): ``core.optimizer._init_optimizers_and_lr_schedulers``,
``_MockOptimizer``, ``Strategy._lightning_optimizers`` and ``LightningOptimizer._strategy``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.observe.grown_states import let_states_grow
from lightning_memfit.observe.schedules_at_rest import schedules_at_rest
from lightning_memfit.plan import Phase
from lightning_memfit.trace.closure_step import follow_few_iterations, growth_notes
from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.cpu_rules import CpuRules
from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.faked_step import (
    add_batch_residents,
    add_module_residents,
    add_step_residents,
    check_known,
    fake_batches,
    faked_step,
    names_of,
    timeline_of,
)
from lightning_memfit.trace.step_program import takes_batch_idx, users_code
from lightning_memfit.trace.tensors import tensors_in
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.tracer import StepTracer
from lightning_memfit.upstream import upstream_module

MOST_BATCHES = 32
"""Within so many batches every optimizer is expected to step once."""


@dataclass(frozen=True, kw_only=True)
class ManualProgram:
    """What a step under manual optimization consists of."""

    module: Any
    """The LightningModule, attached to its Trainer."""
    trainer: Any
    """The Trainer; for the duration of a trace its strategy holds optimizers over fakes."""
    step_context: Callable[[], AbstractContextManager[Any]]
    """Context of ``training_step``, such as autocast."""
    prepare_optimizer: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer
    """Gives an optimizer the states and the implementation that a candidate wants."""
    follow: Callable[[Sequence[tuple[Optimizer, Optimizer]]], None] = lambda pairs: None
    """Lets the module's own references follow, where another optimizer took the place of one."""
    rules: DeviceRules = field(default_factory=CpuRules)
    """How the device computes that the step is followed for."""


def is_mock(optimizer: Any) -> bool:
    """Whether it is Lightning's stand-in for an optimizer, where ``configure_optimizers`` returned ``None``."""
    return type(optimizer).__name__ == "_MockOptimizer"


def trace_manual_steps(
    program: ManualProgram,
    batch: Any,
    *,
    resident_batches: int = 1,
    waiting_batch: Any = None,
    collect_signatures: bool = True,
    floating: torch.dtype | None = None,
) -> Timeline:
    """Follow as many training steps as it takes for every optimizer to step, at least two, in the steady state.

    Before, the same number of steps runs unrecorded: it creates the optimizers' states, and leaves gradients and
    attributes as the user's code leaves them. States that go on growing are those of a late step.

    Args:
        program: what the step consists of.
        batch: one collated batch.
        resident_batches: batches alive at the same time (2 where the loop prefetches one).
        waiting_batch: one of the others, where it is not like ``batch``.
        collect_signatures: keep the distinct operator calls for probing.
        floating: the module and the batch have this floating dtype, whatever they have now.

    Returns:
        A timeline of several training steps; ``micro_steps`` says how many, and all of them are followed.

    Raises:
        TraceError: if the step needs values, or raises for another reason.
    """
    module = program.module
    fakes = fakes_in(new_fake_mode(), floating)
    tracer = StepTracer(names_of(module), collect_signatures=collect_signatures, rules=program.rules)
    with faked_step(module, fakes, tracer), _FakeOptimizers(program, tracer) as optimizers:
        with tracer.not_recording():
            waiting = batch if waiting_batch is None else waiting_batch
            batches = fake_batches(fakes, batch, waiting, resident_batches, floating)
            tracer.known.tell(fakes.pairs())
            run = _training_step(program, batches[0])
            count = 0
            while count < 2 or (optimizers.waited_for and count < MOST_BATCHES):
                run(count)
                count += 1
            for optimizer in optimizers.made:
                let_states_grow(optimizer)
        add_module_residents(tracer, module)
        parameters = list(module.parameters())
        add_step_residents(tracer, parameters, optimizers.made)
        add_batch_residents(tracer, batches)
        tracer.phase = "forward"
        with tracer.following_modules():
            for index in range(count):
                tracer.micro_step = index
                run(index)
        tracer.stop_following()
        notes = (*_still_waiting(optimizers), *growth_notes(optimizers.made))
        return timeline_of(tracer, parameters, micro_steps=count, followed_micro_steps=count, notes=notes)


def look_at_optimizers(program: ManualProgram, look: Callable[[Optimizer], Any]) -> list[Any]:
    """What ``look`` finds out about each of the program's optimizers, made over fakes and thrown away.

    Raises:
        TraceError: if they cannot be made.
    """
    module = program.module
    tracer = StepTracer(names_of(module), collect_signatures=False, rules=program.rules)
    with faked_step(module, fakes_in(new_fake_mode(), None), tracer), tracer.not_recording():
        optimizers, _ = _configured(program)
        return [look(optimizer) for optimizer in optimizers]


def index_in_epoch(trainer: Any, number: int) -> int:
    """The index of a batch behind ``number`` others, over as many epochs as that takes; notes the last of each."""
    in_epoch = trainer.num_training_batches
    index = number if in_epoch == float("inf") else number % max(1, in_epoch)
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = index + 1 == in_epoch
    return index


def _training_step(program: ManualProgram, batch: Any) -> Callable[[int], None]:
    """Runs ``training_step`` as Lightning's loop does, with the index of the batch where it takes one."""
    step = program.module.training_step
    takes_index = takes_batch_idx(step)

    def run(number: int) -> None:
        index = index_in_epoch(program.trainer, number)
        with users_code(), program.step_context():
            step(batch, index) if takes_index else step(batch)

    return run


def _configured(program: ManualProgram) -> tuple[list[Any], list[Any]]:
    core = upstream_module(program.trainer, "core.optimizer")
    if not hasattr(core, "_init_optimizers_and_lr_schedulers"):
        raise UnsupportedError(
            f"{core.__name__} has no _init_optimizers_and_lr_schedulers: this release of Lightning changed it. Use "
            "Lightning 2.5 or 2.6, or set MEMFIT=off."
        )
    with users_code():
        optimizers, schedulers = core._init_optimizers_and_lr_schedulers(program.module)
    for optimizer in optimizers:
        check_known(optimizer, list(program.module.parameters()))
    return list(optimizers), list(schedulers)


class _FakeOptimizers:
    """Within this context the Trainer's strategy holds optimizers over fakes, and the tracer is told of phases.

    ``self.optimizers()``, ``self.lr_schedulers()``, ``toggle_optimizer`` and ``clip_gradients`` then do what they do in
    training, but schedules stand still. ``self.manual_backward`` and the optimizers' ``step`` go past strategy and
    precision plugin, whose hooks would reach callbacks.

    Attributes:
        made: the optimizers, with their levers.
        waited_for: those that have not stepped yet.
    """

    def __init__(self, program: ManualProgram, tracer: StepTracer) -> None:
        self.made: list[Any] = []
        self.waited_for: set[int] = set()
        self._program = program
        self._tracer = tracer
        self._attributes: dict[str, Any] = {}
        self._was_last_batch = False
        self._resting = ExitStack()

    def __enter__(self) -> _FakeOptimizers:
        program, strategy = self._program, self._program.trainer.strategy
        with self._tracer.not_recording():
            optimizers, schedulers = _configured(program)
            self.made = [program.prepare_optimizer(optimizer) for optimizer in optimizers]
            program.follow([(old, new) for old, new in zip(optimizers, self.made, strict=True) if new is not old])
            for optimizer in self.made:
                follow_few_iterations(optimizer)
        self._resting.enter_context(schedules_at_rest(config.scheduler for config in schedulers))
        self.waited_for = {id(optimizer) for optimizer in self.made if not is_mock(optimizer)}
        self._attributes = dict(vars(strategy))
        self._was_last_batch = program.trainer.is_last_batch
        strategy.optimizers = self.made
        strategy.lr_scheduler_configs = schedulers
        for wrapper in strategy._lightning_optimizers:
            wrapper._strategy = self
        for optimizer in self.made:
            optimizer.register_step_pre_hook(self._stepping)
            optimizer.register_step_post_hook(self._stepped)
        vars(program.module)["manual_backward"] = self._backward  # undone with everything else of a faked step
        return self

    def __exit__(self, *_: object) -> None:
        attributes = vars(self._program.trainer.strategy)
        self._resting.close()
        attributes.clear()
        attributes.update(self._attributes)
        self._program.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self._was_last_batch

    @property
    def lightning_module(self) -> Any:
        """As ``LightningOptimizer`` asks its strategy."""
        return self._program.module

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """As ``LightningOptimizer`` asks its strategy: within the step the closure runs, and then the module's hook."""

        def within_step() -> Any:
            with _phase(self._tracer, "forward"):
                result = closure()
            self._program.module.on_before_optimizer_step(optimizer)
            return result

        with users_code():
            return optimizer.step(closure=within_step, **kwargs)

    def _backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        tracer = self._tracer
        tracer.categorise_saved()
        module = self._program.module
        with _phase(tracer, "backward"):
            module.on_before_backward(loss)
            module.backward(loss, *args, **kwargs)
            module.on_after_backward()
        grads = [each.grad for each in self._program.module.parameters() if each.grad is not None]
        tracer.categorise(grads, "gradients")

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        self.waited_for.discard(id(optimizer))
        self._tracer.phase = "optimizer_step"

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._tracer.categorise(tensors_in(dict(enumerate(optimizer.state.values()))), "optimizer_states")
        self._tracer.phase = "forward"


@contextmanager
def _phase(tracer: StepTracer, phase: Phase) -> Iterator[None]:
    before, tracer.phase = tracer.phase, phase
    try:
        yield
    finally:
        tracer.phase = before


def _still_waiting(optimizers: _FakeOptimizers) -> Sequence[str]:
    waiting = [type(each).__qualname__ for each in optimizers.made if id(each) in optimizers.waited_for]
    if not waiting:
        return ()
    return (
        f"{', '.join(waiting)} did not step within {MOST_BATCHES} batches, so that its states are not in the forecast",
    )
