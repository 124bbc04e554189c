"""What a run may choose from, by what was looked at. Whole runs: ``tests/e2e`` and ``tests/ranks``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_memfit.apply.optimizer_levers import OptimizerFacts
from lightning_memfit.errors import TraceError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import BatchSplit, PlanRequest
from lightning_memfit.run_space import MANUAL_ZEROING, SAVED_PRECISION, cpu_adam_obstacle, space_of
from lightning_memfit.search.levers import SearchSpace
from lightning_memfit.sharding import Sharding

ADAM = OptimizerFacts(name="torch.optim.Adam", implementations=("foreach", "fused"), quantisation_obstacle=None)
ZERO_2 = Sharding(engine="deepspeed", ranks=2, zero_stage=2)


class Untraceable:
    """A forecaster of a module whose optimizer cannot be made."""

    @property
    def facts(self) -> OptimizerFacts:
        raise TraceError("no optimizer")


def prepared(*, automatic: bool = True, clip: float | None = None, **looked_at: Any) -> Any:
    module = nn.Sequential(nn.Linear(4, 4))
    module.automatic_optimization = automatic  # type: ignore[assignment]
    sharding = looked_at.get("sharding")
    ranks = 1 if sharding is None else sharding.ranks
    device = DeviceSpec(name="x", kind="cpu", capacity_bytes=100, available_bytes=100, process_bytes=1, cores=1)
    return SimpleNamespace(
        **{
            "module": module,
            "request": PlanRequest(),
            "forecaster": SimpleNamespace(facts=ADAM),
            "trainer": SimpleNamespace(gradient_clip_val=clip, strategy=SimpleNamespace()),
            "whole": BatchSplit(
                effective_batch_size=4 * ranks, ranks=ranks, loader_batch_size=4, slice_sizes=(4,)
            ),
            "device": device,
            "num_ranks": ranks,
            "sharding": None,
            "gathers": False,
            "offload": "never",
            "recomputed": frozenset(),
            "saved_precision": None,
            "engine_precision": None,
            "host_budget_bytes": None,
            **looked_at,
        }
    )  # fmt: skip


def space(**looked_at: Any) -> SearchSpace:
    return space_of(prepared(**looked_at), None)


def test_on_one_device_everything_may_be_chosen() -> None:
    found = space()
    assert found.precisions[0] == "32-true" and len(found.precisions) > 1
    assert found.precision_reason is None and found.states_reason is None and found.gradients_reason is None


@pytest.mark.parametrize(
    ("fixed_by", "reason"),
    [("saved_precision", SAVED_PRECISION), ("engine_precision", "that of your DeepSpeed configuration")],
)
def test_a_precision_that_the_engine_has_is_the_only_one(fixed_by: str, reason: str) -> None:
    found = space(sharding=ZERO_2, **{fixed_by: "bf16-mixed"})
    assert found.precisions == ("bf16-mixed",) and found.precision_reason == reason


def test_under_deepspeed_the_optimizer_is_its_own() -> None:
    found = space(sharding=ZERO_2)
    assert found.states_reason == "DeepSpeed makes an optimizer of its own of the user's"
    assert {setting.optimizer_implementation for setting in found.settings(0)} == {"as-configured"}


def test_a_fused_optimizer_that_is_clipped_is_not_mixed() -> None:
    fused = SimpleNamespace(
        facts=OptimizerFacts(
            name="torch.optim.Adam", implementations=(), quantisation_obstacle=None, unscales_by_itself=True
        )
    )
    found = space(forecaster=fused, clip=1.0)
    assert found.precisions == ("32-true",)
    assert found.precision_reason == "in mixed precision Lightning refuses to clip the gradients of a fused optimizer"
    assert len(space(forecaster=fused).precisions) > 1


def test_under_manual_optimization_the_step_zeroes_gradients() -> None:
    assert space(automatic=False).gradients_reason == MANUAL_ZEROING


def test_an_optimizer_that_cannot_be_made_keeps_its_states_and_says_why() -> None:
    unknown = "the optimizer could not be made before training begins (no optimizer)"
    assert space(forecaster=Untraceable()).states_reason == unknown
    assert cpu_adam_obstacle(prepared(forecaster=Untraceable())) == unknown
    assert cpu_adam_obstacle(prepared()) is None
