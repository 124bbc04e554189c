"""Equal runs plan once, one after the other and at the same time; what warm-ups measured corrects later forecasts.

Run: ``pytest tests/e2e/test_equal_runs.py``.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit, NoFeasiblePlanError, Plan, fit_session, planning, preparation
from lightning_memfit.kept_plans import KeptPlan
from lightning_memfit.plan import Candidate, Forecast
from lightning_memfit.plan_schema import load_plan
from lightning_memfit.preparation import Preparation

MakeTrainer = Callable[..., Any]
ROOT = Path(__file__).parents[2]
EQUAL = "the plan is that of an equal run before, so that nothing was searched"

pytestmark = [pytest.mark.usefixtures("no_probing")]


class Deep(lightning.LightningModule):
    def __init__(self, *, learning_rate: float = 0.1, width: int = 16, repeats: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.learning_rate, self.repeats = learning_rate, repeats
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for _ in range(self.repeats):
            for layer in self.layers:
                x = layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Other(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 2 * super().training_step(batch, batch_idx)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every search."""
    found: list[int] = []
    search = planning.search_plan

    def counted(*arguments: Any, **settings: Any) -> Any:
        found.append(1)
        return search(*arguments, **settings)

    monkeypatch.setattr(planning, "search_plan", counted)
    return found


def loader(samples: int = 64) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, 16)), 32)


def fit(make_trainer: MakeTrainer, module: Any = None, data: Any = None, **settings: Any) -> Plan:
    plugin = MemFit(**{"budget": "24KiB", "precision": "32-true", "verbose": False, **settings})
    make_trainer(plugin).fit(module or Deep(), data or loader())
    assert plugin.plan is not None and plugin.measured is not None, "also a plan that was kept is proven"
    return plugin.plan


def test_equal_runs_search_once_and_prove_each(make_trainer: MakeTrainer, searches: list[int]) -> None:
    first = fit(make_trainer)
    known = len(searches)
    second = fit(make_trainer)
    assert known > 0 and len(searches) == known
    assert EQUAL not in first.notes and EQUAL in second.notes
    assert second.candidate == first.candidate


def test_a_learning_rate_makes_no_other_run_and_what_changes_memory_does(
    make_trainer: MakeTrainer, searches: list[int]
) -> None:
    fit(make_trainer)
    assert EQUAL in fit(make_trainer, Deep(learning_rate=0.2)).notes
    assert EQUAL not in fit(make_trainer, Other()).notes, "another training_step"
    assert EQUAL not in fit(make_trainer, Deep(repeats=2), budget="40KiB").notes
    assert EQUAL in fit(make_trainer, Deep(repeats=2), budget="40KiB").notes
    assert EQUAL not in fit(make_trainer, Deep(repeats=3), budget="40KiB").notes, "a whole number of the user's own"
    assert EQUAL not in fit(make_trainer, budget="25KiB").notes, "another budget"
    assert EQUAL not in fit(make_trainer, activation_checkpointing="none").notes
    assert EQUAL in fit(make_trainer, num_profiled_steps=3).notes


@pytest.mark.parametrize(("factor", "is_used"), [(0.96, True), (1.04, True), (0.9, False), (1.1, False)])
def test_what_the_device_leaves_may_differ_a_little_from_that_of_an_equal_run(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, factor: float, is_used: bool
) -> None:
    form_budget, left = preparation.form_budget, 10**9

    def leaving(*arguments: Any, **settings: Any) -> Any:
        return replace(form_budget(*arguments, **settings), budget_bytes=round(left))

    monkeypatch.setattr(preparation, "form_budget", leaving)
    fit(make_trainer, budget="auto")
    left = round(left * factor)
    assert (EQUAL in fit(make_trainer, budget="auto").notes) is is_used


def test_the_wait_for_an_equal_run_is_no_part_of_the_planning_time(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    alone, postpone = KeptPlan.alone, planning.Planning.postpone

    @contextmanager
    def waiting(kept: KeptPlan) -> Iterator[str | None]:
        time.sleep(0.05)
        with alone(kept) as note:
            yield note

    def seen(planned: Any, seconds: float) -> None:
        before = planned._deadline
        postpone(planned, seconds)
        waits.append(planned._deadline - before)

    monkeypatch.setattr(KeptPlan, "alone", waiting)
    monkeypatch.setattr(planning.Planning, "postpone", seen)
    fit(make_trainer, planning_seconds=1000.0)
    assert len(waits) == 1 and waits[0] >= 0.04


def test_without_a_cache_nothing_is_kept(make_trainer: MakeTrainer, searches: list[int]) -> None:
    fit(make_trainer, cache_dir=None)
    assert EQUAL not in fit(make_trainer, cache_dir=None).notes
    assert EQUAL not in fit(make_trainer).notes


def test_a_report_keeps_no_plan_since_nothing_of_it_is_proven_or_timed(make_trainer: MakeTrainer) -> None:
    plugin = MemFit(budget="24KiB", precision="32-true", mode="report", verbose=False)
    make_trainer(plugin).fit(Deep(), loader())
    assert plugin.plan is not None
    assert EQUAL not in fit(make_trainer).notes


def test_a_kept_plan_that_does_not_stand_is_searched_anew(
    make_trainer: MakeTrainer, kept_folder: Path, searches: list[int]
) -> None:
    plan = fit(make_trainer, budget="60KiB")
    (path,) = kept_folder.glob("plans/*.yaml")
    assert load_plan(path).candidate == plan.candidate
    (kept,) = kept_folder.glob("plans/*.yaml")
    kept.write_text(kept.read_text().replace("\nschema_version", "\nno_schema")[:200])
    known = len(searches)
    assert EQUAL not in fit(make_trainer, budget="60KiB").notes
    assert len(searches) > known
    assert load_plan(kept).candidate == plan.candidate, "and kept anew"


def test_a_kept_plan_that_needs_too_much_is_replaced(make_trainer: MakeTrainer, kept_folder: Path) -> None:
    own = fit(make_trainer, budget="17KiB")
    (path,) = kept_folder.glob("plans/*.yaml")
    greedy = fit(make_trainer, budget="60KiB", micro_batch_size=32, activation_checkpointing="none")
    memory = replace(greedy.forecast.memory, peak_allocated_bytes=1024, by_category={})
    forecast = replace(greedy.forecast, memory=memory, correction_bytes=0)
    wrong = replace(greedy, budget=own.budget, forecast=forecast)
    assert wrong.candidate != own.candidate
    KeptPlan(path.parent, path.stem).save(wrong)
    assert fit(make_trainer, budget="17KiB").candidate == own.candidate
    assert load_plan(path).candidate == own.candidate, "the next run need not disprove it again"


def test_a_kept_plan_is_forgotten_where_no_plan_stands(
    make_trainer: MakeTrainer, kept_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_stands(*arguments: Any) -> Any:
        raise NoFeasiblePlanError("No plan fits.", budget_bytes=1, best_peak_bytes=2)

    monkeypatch.setattr(fit_session.Proving, "prove", nothing_stands)
    with pytest.raises(NoFeasiblePlanError):
        fit(make_trainer)
    assert not list(kept_folder.glob("plans/*.yaml"))


def test_a_plan_that_was_chosen_by_rates_that_are_forgotten_is_not_kept(
    make_trainer: MakeTrainer, kept_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_session, "_DISPROVED", 0.0)
    plan = fit(make_trainer)
    assert any("the next run measures them anew" in note for note in plan.notes)
    assert not list(kept_folder.glob("plans/*.yaml"))


def test_a_plan_that_is_only_reported_is_not_kept(make_trainer: MakeTrainer, kept_folder: Path) -> None:
    """It was not timed beside others, and a run that took it over would not do so either."""
    plugin = MemFit(budget="60KiB", precision="32-true", verbose=False, mode="report")
    make_trainer(plugin).fit(Deep(), loader())
    assert plugin.plan is not None and not list(kept_folder.glob("plans/*.yaml"))
    assert EQUAL not in fit(make_trainer, budget="60KiB").notes


class Misjudged:
    """Forecasts 8 KiB too low for every candidate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forecasts: dict[Candidate, Forecast] = {}
        forecast = Preparation.forecast

        def lower(prepared: Any, candidate: Candidate) -> Forecast:
            found = forecast(prepared, candidate)
            memory = replace(
                found.memory, peak_allocated_bytes=found.memory.peak_allocated_bytes - 8 * 1024, by_category={}
            )
            return replace(found, memory=memory)

        monkeypatch.setattr(Preparation, "forecast", lower)
        monkeypatch.setattr(Preparation, "estimate", lower)


def test_what_a_warm_up_measured_corrects_the_forecast_of_a_later_run(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, searches: list[int]
) -> None:
    Misjudged(monkeypatch)
    first = fit(make_trainer, budget="60KiB")
    assert first.forecast.correction_bytes == 8 * 1024, "as its own warm-up measured"
    second = fit(make_trainer, budget="61KiB")  # another run, that is searched for
    assert EQUAL not in second.notes
    assert any("corrected by what the warm-ups of earlier runs" in note for note in second.notes)
    assert all(
        other.predicted_peak_bytes is None or other.predicted_peak_bytes > 8 * 1024 for other in second.passed_over
    )


def test_corrections_that_leave_no_plan_are_doubted(
    make_trainer: MakeTrainer, kept_folder: Path, searches: list[int]
) -> None:
    fit(make_trainer, budget="60KiB")
    (path,) = kept_folder.glob("corrections/*.yaml")
    text = path.read_text()
    path.write_text(re.sub(r"bytes: -?[0-9]+", "bytes: 10000000", text))  # more than 61 KiB for a slice of 1 sample too
    plan = fit(make_trainer, budget="61KiB")
    assert not any("corrected by what" in note for note in plan.notes)


# Two processes at the same time.

RUN = """
import sys, time
from pathlib import Path
from lightning_memfit import planning
from tests.e2e.conftest import OperatorProber, Probes
OperatorProber.start = lambda prober: None
OperatorProber.probe = lambda prober, signatures: Probes(results={})
marker, slow = Path(sys.argv[1]), sys.argv[2] == "slow"
search = planning.search_plan
def searched(*arguments, **settings):
    marker.touch()
    if slow:
        time.sleep(300)
    return search(*arguments, **settings)
planning.search_plan = searched
import lightning
from lightning_memfit import MemFit
from tests.e2e.test_equal_runs import EQUAL, Deep, loader
plugin = MemFit(budget="24KiB", precision="32-true", verbose=False)
trainer = lightning.Trainer(plugins=[plugin], accelerator="cpu", max_epochs=1, logger=False, barebones=True)
trainer.fit(Deep(), loader())
print("EQUAL" if EQUAL in plugin.plan.notes else "SEARCHED")
"""


def run(folder: Path, marker: str, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(folder / marker), how]
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_run_whose_twin_is_killed_while_it_plans_finishes_and_the_cache_is_whole(tmp_path: Path) -> None:
    dying = run(tmp_path, "dying", "slow")
    living = None
    try:
        while not (tmp_path / "dying").exists():
            assert dying.poll() is None, dying.communicate()[1]
            time.sleep(0.05)
        living = run(tmp_path, "living", "quick")
        with pytest.raises(subprocess.TimeoutExpired):
            living.wait(4)
        assert not (tmp_path / "living").exists(), "it waits, and does not plan the same"
        dying.send_signal(signal.SIGKILL)
        output, errors = living.communicate(timeout=120)
        assert output.splitlines()[-1:] == ["SEARCHED"], errors[-2000:]
    finally:
        for process in (dying, living):
            if process is not None:
                process.kill()
                process.communicate()
    kept = list((tmp_path / "cache").rglob("plans/*.yaml"))
    assert len(kept) == 1
    assert load_plan(kept[0]).split.effective_batch_size == 32
    later = run(tmp_path, "later", "quick")
    assert later.communicate(timeout=120)[0].splitlines()[-1:] == ["EQUAL"]
    assert not (tmp_path / "later").exists()
