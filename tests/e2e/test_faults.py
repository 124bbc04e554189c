"""Fault injection: whatever raises while MemFit plans or proves, everything is as if it had not run.

Run ``pytest tests/e2e/test_faults.py -s`` to see the number of points. A point is a call, within the two hooks in which
MemFit works, of a function of the user's program or of one of MemFit's stages. At the first call of each, and the last
of the program's, an error is raised in its place. What a fit leaves behind is compared with a run that MemFit takes no
part in and that ends at the same hook.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_memfit import (
    MemFit,
    contest,
    evaluation_forecast,
    fit_session,
    forecaster,
    manual_forecaster,
    planning,
    preparation,
    proving,
    run_forecaster,
    slice_guard,
)
from lightning_memfit.apply import loader as apply_loader
from lightning_memfit.apply import micro_batches, step_levers
from lightning_memfit.kept_plans import KeptCorrections, KeptPlan
from lightning_memfit.search import planner
from lightning_memfit.trace import evaluation_step, manual_step, training_step
from lightning_memfit.validate import splittable, warmup
from tests.e2e.test_no_trace import Augmented, Counting, Hostile, differing, mapped, plain, random_states

pytestmark = [pytest.mark.usefixtures("no_probing", "no_kept_plans"), pytest.mark.contest]

MakeTrainer = Callable[..., Any]

STAGES: tuple[ModuleType, ...] = (
    contest, evaluation_forecast, fit_session, forecaster, planning, preparation, proving, run_forecaster, slice_guard,
    apply_loader, micro_batches, step_levers, planner, evaluation_step, training_step, splittable, warmup,
)  # fmt: skip
MANUAL_STAGES: tuple[ModuleType, ...] = (manual_forecaster, manual_step)
"""Those of manual optimization only."""
TAKES_BACK = {"undo", "take_off", "end", "close", "restore", "_end", "teardown", "__exit__"}
"""Functions that take something back: what they call is no point, since nobody could take it back then."""
CACHED = {"_closure_class"}
"""Called once in the life of a process."""
_USERS = ("test_no_trace.", "test_faults.")
Point = tuple[str, int]
"""A function by its qualified name, and the number of the call, from 1."""


@pytest.fixture
def no_kept_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run searches: the plan of the one before would spare it what may raise."""
    monkeypatch.setattr(KeptPlan, "load", lambda kept: None)
    monkeypatch.setattr(KeptCorrections, "load", lambda kept: {})


class Injected(Exception):
    pass


class EndsHereError(Exception):
    """Ends a run at one of MemFit's hooks."""


class CountingPlainly(Counting):
    """Changes no buffer, which slices would change once each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        hidden: torch.Tensor = self.linear(x)
        return hidden.tanh()


class Program(Hostile):
    """Slices of it add up, so that the guard and the slices run too."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = CountingPlainly()
        self.norm = torch.nn.LayerNorm(6)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.head(self.norm(self.counting(x))), y)
        self.history.append(float(loss.detach()))
        self.nested["steps"].append(batch_idx)
        self.mean_loss.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class ByHand(Program):
    """The same under manual optimization, which is not sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class EndsBeforeTraining(Callback):
    """Comes after the warm-up, which is another callback of the same hook, in front of it."""

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        raise EndsHereError


def functions_of(owner: Any) -> Iterator[CodeType]:
    """The code of functions and methods that are defined in a module or class."""
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for value in vars(owner).values():
        value = getattr(value, "fget", value)  # properties
        value = inspect.unwrap(getattr(value, "__func__", value))  # context managers
        if inspect.isfunction(value) and value.__module__ == name:
            yield value.__code__
        elif inspect.isclass(value) and value.__module__ == name:
            yield from functions_of(value)


WATCHED = {
    code
    for owner in (*STAGES, *MANUAL_STAGES, Hostile, Program, CountingPlainly, Augmented)
    for code in functions_of(owner)
    if code.co_name not in TAKES_BACK | CACHED and not code.co_name.startswith("<")
}


class Injector:
    """Counts calls while MemFit works, and raises in the place of one of them."""

    def __init__(self, point: Point | None = None, error: type[BaseException] = Injected) -> None:
        self.calls: Counter[str] = Counter()
        self.raised = False
        self._point, self._error = point, error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """MemFit works within this context."""
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code not in WATCHED or self.raised or _takes_back(frame):
            return
        name = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
        self.calls[name] += 1
        if self._point == (name, self.calls[name]):
            self.raised = True
            raise self._error("injected")


def _takes_back(frame: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name in TAKES_BACK:
            return True
        caller = caller.f_back
    return False


class Watched(MemFit):
    """MemFit whose work is watched; or, with ``ends=True``, a run that ends where MemFit would begin."""

    injector = Injector()
    ends = False

    def convert_module(self, module: Any) -> Any:
        if self.ends:
            raise EndsHereError
        with self.injector.watching():
            return super().convert_module(module)

    def _prove(self, trainer: Any) -> None:
        with self.injector.watching():
            super()._prove(trainer)


def left_behind(
    make_trainer: MakeTrainer, plugin: Watched, program: type[Program]
) -> tuple[dict[str, Any], type[BaseException]]:
    """What a run leaves that ends before training begins, and what ended it."""
    lightning.seed_everything(11, verbose=False)
    module, ending = program(), EndsBeforeTraining()
    trainer = make_trainer(plugin, callbacks=[ending], enable_checkpointing=False)
    loaders = mapped(), DataLoader(Augmented(8), batch_size=4)
    # An interrupt is answered by Lightning with SystemExit.
    with pytest.raises((Exception, SystemExit)) as caught:
        trainer.fit(module, *loaders)
    state = {
        "module": plain(module),
        "gradients": [parameter.grad is not None for parameter in module.parameters()],
        "modes": [layer.training for layer in module.modules()],
        "random": random_states(),
        "data": [plain(loader.dataset) for loader in loaders],
        "loaders": [trainer.fit_loop._data_source.instance is loaders[0]],
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "precision": type(plugin.delegate).__name__,
        "steps": (trainer.global_step, trainer.current_epoch),
        "profile": sys.getprofile() is None,
    }
    return state, caught.type


def settings(program: type[Program]) -> dict[str, Any]:
    return {
        "micro_batch_size": "auto" if program is ByHand else 4,
        "activation_checkpointing": ["counting"],
        "precision": "32-true",
        "optimizer_states": "as-configured",
        "optimizer_implementation": "foreach",
        "verbose": False,
    }


def ends_of(make_trainer: MakeTrainer, program: type[Program]) -> dict[str, dict[str, Any]]:
    """What runs leave that MemFit takes no part in, by the hook at which they end."""
    at_begin = Watched(mode="off", verbose=False)
    at_begin.ends = True
    return {
        "begin": left_behind(make_trainer, at_begin, program)[0],
        "proof": left_behind(make_trainer, Watched(mode="off", verbose=False), program)[0],
    }


def points_of(make_trainer: MakeTrainer, program: type[Program]) -> list[Point]:
    """The first call of every watched function in a run without faults, and the last of the program's own."""
    plugin = Watched(**settings(program))
    plugin.injector = Injector()
    _, ended_by = left_behind(make_trainer, plugin, program)
    assert ended_by is EndsHereError
    return [
        (name, number)
        for name, count in plugin.injector.calls.items()
        for number in sorted({1, count if name.startswith(_USERS) else 1})
    ]


def check(
    points: list[tuple[Point, type[BaseException]]], make_trainer: MakeTrainer, program: type[Program], *, at_least: int
) -> None:
    ends = ends_of(make_trainer, program)
    traces, missed = {}, []
    for point, error in points:
        plugin = Watched(**settings(program))
        plugin.injector = Injector(point, error)
        state, _ = left_behind(make_trainer, plugin, program)
        if not plugin.injector.raised:
            missed.append(point)
        candidates = [differing(end, state) for end in ends.values()]
        if all(candidates):
            traces[point, error.__name__] = min(candidates, key=len)[:3]
    print(f"{len(points)} points")
    assert missed == []
    assert len(points) >= at_least
    assert traces == {}


ERRORS: tuple[type[BaseException], ...] = (Injected, torch.OutOfMemoryError, KeyboardInterrupt)


def test_whatever_raises_while_memfit_works_everything_is_as_if_it_had_not_run(make_trainer: MakeTrainer) -> None:
    """One error at each point but those within a stage (its private functions), in turns.

    Reported in Lightning-AI/pytorch-lightning#11012.
    """
    points = [point for point in points_of(make_trainer, Program) if "._" not in point[0].replace(".__", "")]
    check(list(zip(points, itertools.cycle(ERRORS))), make_trainer, Program, at_least=60)  # endless


def test_whatever_raises_under_manual_optimization_everything_is_as_if_memfit_had_not_run(
    make_trainer: MakeTrainer,
) -> None:
    """One error at each point of the stages that only manual optimization has, in turns."""
    stems = tuple(f"{stage.__name__.rpartition('.')[2]}." for stage in MANUAL_STAGES)
    points = [point for point in points_of(make_trainer, ByHand) if point[0].startswith(stems)]
    check(list(zip(points, itertools.cycle(ERRORS))), make_trainer, ByHand, at_least=15)


@pytest.mark.slow
@pytest.mark.parametrize("program", [Program, ByHand])
def test_every_error_at_every_point(program: type[Program], make_trainer: MakeTrainer) -> None:
    check(list(itertools.product(points_of(make_trainer, program), ERRORS)), make_trainer, program, at_least=150)


def test_the_injector_itself_sees_calls_and_raises_in_their_place() -> None:
    injector = Injector(("test_no_trace.Augmented.__len__", 2))
    with pytest.raises(Injected), injector.watching():
        len(Augmented())
        len(Augmented())
        raise AssertionError("not reached")
    assert injector.calls["test_no_trace.Augmented.__len__"] == 2
