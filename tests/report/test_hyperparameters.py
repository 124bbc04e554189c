"""The plan as hyperparameters: flat, in plain types, beside the user's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lightning_memfit.plan import Measurement, Plan
from lightning_memfit.report.hyperparameters import hyperparameters_of, log_hyperparameters
from lightning_memfit.units import MIB
from tests.report.conftest import candidate


def test_what_was_chosen_is_flat_and_in_plain_types(plan: Plan, measurement: Measurement) -> None:
    assert hyperparameters_of(plan, measurement) == {
        "memfit/precision": "32-true",
        "memfit/effective_batch_size": 64,
        "memfit/accumulate_grad_batches": 2,
        "memfit/micro_batch_size": 8,
        "memfit/num_slices": 4,
        "memfit/activation_checkpointing": "none",
        "memfit/optimizer_states": "as-configured",
        "memfit/optimizer_implementation": "as-configured",
        "memfit/budget_bytes": 700 * MIB,
        "memfit/predicted_peak_bytes": 560 * MIB,
        "memfit/measured_peak_bytes": 561 * MIB,
    }


def test_modules_that_are_recomputed_are_named(plan: Plan, measurement: Measurement) -> None:
    recomputing = replace(plan, forecast=replace(plan.forecast, candidate=candidate(2, checkpointing=True)))
    assert hyperparameters_of(recomputing, measurement)["memfit/activation_checkpointing"] == (
        "transformer.blocks.0, transformer.blocks.1, transformer.blocks.2, transformer.blocks.3, transformer.blocks.4, "
        "transformer.blocks.5"
    )


class Keeps:
    def __init__(self) -> None:
        self.logged: dict[str, Any] = {"lr": 0.1}

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.logged.update(params)


class WantsMetrics(Keeps):
    def log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        assert metrics is not None, "it would write one of its own"
        self.logged.update(params)


class Offline(Keeps):
    def log_hyperparams(self, params: dict[str, Any]) -> None:
        raise ConnectionError("no route to host")


def test_every_logger_gets_them_and_those_that_raise_are_named() -> None:
    first, broken, last = Keeps(), Offline(), WantsMetrics()
    trainer = SimpleNamespace(loggers=[first, broken, last], fast_dev_run=0)
    failed = log_hyperparameters(trainer, {"memfit/num_slices": 4})
    assert first.logged == last.logged == {"lr": 0.1, "memfit/num_slices": 4}
    assert [(name, str(error)) for name, error in failed.items()] == [("Offline", "no route to host")]


def test_nothing_is_logged_under_fast_dev_run_which_has_no_loggers() -> None:
    logger = Keeps()
    assert log_hyperparameters(SimpleNamespace(loggers=[logger], fast_dev_run=1), {"memfit/num_slices": 4}) == {}
    assert logger.logged == {"lr": 0.1}
