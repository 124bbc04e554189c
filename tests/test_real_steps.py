"""Which errors of a warm-up say that modules cannot be recomputed. Real steps: ``tests/e2e`` and ``tests/ranks``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import CheckpointError

from lightning_memfit import real_steps
from lightning_memfit.plan import BatchSplit, Candidate
from lightning_memfit.ranks import OneRank
from lightning_memfit.real_steps import RealSteps, Unrecomputable
from lightning_memfit.sharding import Engine, Sharding

RECOMPUTED = Candidate(
    precision="32-true",
    split=BatchSplit(effective_batch_size=8, ranks=2, loader_batch_size=4, slice_sizes=(4,)),
    activation_checkpointing="blocks",
    checkpointed_modules=("blocks.0",),
)
DIFFERS = CheckpointError("torch.utils.checkpoint: Recomputed values have different metadata.")


class UnlikeOthers(OneRank):
    """A rank whose error is its own."""

    def alike(self, error: Exception, place: str, *, doing: str) -> None:
        raise error


def settle(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | None,
    candidate: Candidate = RECOMPUTED,
    *,
    engine: Engine = "ddp",
    ranks: OneRank | None = None,
) -> Unrecomputable | None:
    """Two steps that raise an error."""

    def steps(**_: Any) -> float:
        if error is not None:
            raise error
        return 0.0

    monkeypatch.setattr(real_steps, "time_steps", steps)
    monkeypatch.setattr(real_steps, "_spare_bytes", lambda *_: 0)
    sharding = Sharding(engine=engine, ranks=2, zero_stage=2 if engine == "deepspeed" else None)
    prepared: Any = SimpleNamespace(
        loaders_in_sight=nullcontext, trainer=None, module=nn.Linear(1, 1), batch=None, device=None, budget=None,
        sharding=sharding,
    )  # fmt: skip
    run = RealSteps(prepared, None, None, ranks=ranks or OneRank(), leave_gpu=lambda: None)  # type: ignore[arg-type]
    return run.settle(SimpleNamespace(candidate=candidate))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DIFFERS, "gave something else than in its first pass (Recomputed values have different metadata)"),
        (
            Unsupported("no such call.", case_name="test"),
            "is called by code under torch.compile, which cannot be compiled when it is recomputed (no such call)",
        ),
    ],
)
def test_errors_of_recomputing_lead_to_another_plan(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settle(monkeypatch, error)
    assert found is not None and found.reason == reason


def test_steps_that_raise_nothing_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle(monkeypatch, None) is None


@pytest.mark.parametrize(
    ("error", "candidate"),
    [
        (DIFFERS, replace(RECOMPUTED, activation_checkpointing="none", checkpointed_modules=())),
        (KeyError("of the user's step"), RECOMPUTED),
    ],
)
def test_other_errors_are_the_users(error: Exception, candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)) as caught:
        settle(monkeypatch, error, candidate)
    assert caught.value is error


def test_an_error_of_one_rank_alone_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError):
        settle(monkeypatch, DIFFERS, ranks=UnlikeOthers())


def test_under_deepspeed_the_run_ends_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CheckpointError("differs")
    with pytest.raises(CheckpointError) as caught:
        settle(monkeypatch, error, engine="deepspeed")
    assert caught.value.__notes__ == [
        "MemFit does not plan again: DeepSpeed's engine cannot leave a backward that has begun. Set "
        "MemFit(activation_checkpointing='none')."
    ]
