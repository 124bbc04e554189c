"""One rank of a step, whoever spreads it: estimates, floors, and the optimizer's step in groups.

Run: ``pytest tests/predict/test_sharded.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.forecasting import _forecaster, detect_device
from lightning_memfit.plan import BatchSplit, Candidate
from lightning_memfit.predict.sharded import RankStep, floor_bytes, host_bytes, of_one_device
from lightning_memfit.search.strategies import Spread
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import (
    FlatStep,
    Free,
    Operation,
    Output,
    ParameterLayout,
    Resident,
    Signature,
    Timeline,
)

SPLIT = BatchSplit(effective_batch_size=16, ranks=2, loader_batch_size=4, accumulate_grad_batches=2, slice_sizes=(4,))
ZERO = Sharding(engine="deepspeed", ranks=2, zero_stage=2, reduce_bucket_elements=10_000, overlap_communication=True)
FSDP2 = Sharding(engine="fsdp2", ranks=2, shard_groups=("", "0", "2", "4"), synchronisation="slice")


def candidate(sharding: Sharding | None, **settings: Any) -> Candidate:
    return Candidate(**{"precision": "bf16-mixed", "split": SPLIT, "sharding": sharding, **settings})


def alone(states: int) -> Timeline:
    """A step with a state, one temporary and a signature."""
    return Timeline(
        residents=(Resident(1, 8, "parameters"), Resident(2, states, "optimizer_states")),
        events=(
            Operation("step", "", "optimizer_step", 0, (Output(3, 0, 4),), None, (1,)), Free(3, "optimizer_step"),
        ),
        categories={3: "temporaries"}, signatures=(Signature("step", (), {}),), num_parameters=2, num_operations=1,
        flops=0, recomputed_flops=0,
    )  # fmt: skip


def test_deepspeed_computes_in_16_bits_where_precision_is_mixed() -> None:
    assert of_one_device(candidate(ZERO)) == candidate(None, precision="bf16-true")
    assert of_one_device(candidate(ZERO, precision="32-true", offload="optimizer")) == candidate(
        None, precision="32-true"
    )
    assert of_one_device(candidate(FSDP2)) == candidate(None)
    policy = replace(FSDP2, param_dtype="bfloat16")
    assert of_one_device(candidate(policy, precision="32-true")) == candidate(None, precision="32-true")
    assert of_one_device(candidate(None)) == candidate(None)


def test_groups_are_stepped_one_after_the_other_with_storages_and_signatures_of_their_own() -> None:
    flat = tuple(FlatStep(parameters=(index,), elements=2, step=alone(10 * (index + 1))) for index in range(2))
    step = RankStep.of_groups(flat)
    assert step.flat == flat and step.whole.num_operations == 2 and step.whole.num_parameters == 4
    assert len({resident.storage for resident in step.whole.residents}) == 4
    assert sum(r.allocated_bytes for r in step.whole.residents if r.category == "optimizer_states") == 30
    runs = [event for event in step.whole.events if isinstance(event, Operation)]
    assert [event.signature for event in runs] == [0, 1] and len(step.whole.signatures) == 2
    assert runs[0].outputs[0].storage != runs[1].outputs[0].storage
    assert RankStep.of_groups(()).whole.events == ()


def test_a_floor_is_what_lies_there_when_the_optimizer_steps() -> None:
    weight = (ParameterLayout("w", 1, "float32", (100, 10), True),)
    ddp = candidate(Sharding(engine="ddp", ranks=2))
    assert floor_bytes(weight, 8000, ddp) == 4000 + 4000 + 4000 + 8000  # parameters, gradients, buckets, states
    halves = (weight[0]._replace(dtype="bfloat16"),)
    # Parameters whole in 2 bytes, half of the gradients, half of the copies in 4 bytes, and the states.
    assert floor_bytes(halves, 4000, candidate(ZERO)) == 2000 + 1000 + 2000 + 4000
    # Parameters, and the buffer of the largest gradient.
    assert floor_bytes(halves, 4000, candidate(ZERO, offload="optimizer")) == 2000 + 2000
    # Copies of half of parameters and gradients in 4 bytes, of new parameters in 2, a buffer as large as the other, and
    # whole what two slices add up, since the one parameter is cut.
    assert host_bytes(halves, 4000, candidate(ZERO, offload="optimizer")) == 4000 + 2 * 2000 + 1000 + 2000 + 2000
    assert floor_bytes(weight, 8000, candidate(None)) == 0 and host_bytes(weight, 8000, candidate(None)) is None


def test_steps_of_a_policy_and_without_one_are_recorded_apart() -> None:
    def forecaster() -> Any:
        return _forecaster(
            network(), torch.zeros(4, 128, 512, device="meta"), lambda module, batch: module(batch).square().mean(),
            torch.optim.AdamW, prober=None, device=detect_device("cpu"),
        )  # fmt: skip

    plain = candidate(FSDP2, precision="32-true")
    policy = candidate(replace(FSDP2, param_dtype="bfloat16"), precision="32-true")
    one = forecaster()
    found = [one.estimate(each).memory for each in (plain, policy, plain)]
    assert found == [forecaster().estimate(each).memory for each in (plain, policy, plain)]
    assert found[1].peak_allocated_bytes < found[0].peak_allocated_bytes


def network() -> nn.Module:
    layers = [nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512)]
    with torch.device("meta"):
        return nn.Sequential(*layers)


@pytest.mark.parametrize(
    "spread",
    [
        Spread(sharding=Sharding(engine="ddp", ranks=2)),
        Spread(sharding=Sharding(engine="ddp", ranks=2, gradient_as_bucket_view=True)),
        *(Spread(sharding=replace(ZERO, zero_stage=stage)) for stage in (1, 2, 3)),
        Spread(sharding=ZERO, offload="optimizer"),
        *(Spread(sharding=replace(ZERO, ranks=1, zero_stage=stage), offload="optimizer") for stage in (2, 3)),
        *(Spread(sharding=replace(ZERO, ranks=ranks, zero_stage=3), offload="parameters") for ranks in (1, 2)),
        Spread(sharding=FSDP2),
        Spread(sharding=replace(FSDP2, param_dtype="bfloat16", reduce_dtype="float32")),
        Spread(sharding=replace(FSDP2, param_dtype="bfloat16", synchronisation="step")),
    ],
    ids=lambda spread: f"{spread.name}_over_{spread.sharding.ranks}",
)
@pytest.mark.parametrize("device", ["cpu", "a100-40gb"])
def test_an_estimate_is_close_to_the_timeline_that_confirms_it(spread: Spread, device: str) -> None:
    forecaster = _forecaster(
        network(), torch.zeros(4, 128, 512, device="meta"), lambda module, batch: module(batch).square().mean(),
        torch.optim.AdamW, prober=None, device=detect_device(device),
    )  # fmt: skip
    has_policy = spread.sharding is not None and spread.sharding.has_policy
    precision = "32-true" if has_policy else "bf16-mixed"
    asked = candidate(spread.sharding, offload=spread.offload, precision=precision)
    estimated, exact = forecaster.estimate(asked), forecaster(asked)
    assert not estimated.confirmed and exact.confirmed
    assert estimated.exchanged_bytes == exact.exchanged_bytes and estimated.host_bytes == exact.host_bytes
    assert estimated.memory.peak_allocated_bytes == pytest.approx(exact.memory.peak_allocated_bytes, rel=0.25)
    if spread.sharding is not None and spread.sharding.engine == "ddp" and device == "cpu":
        assert estimated.memory.peak_allocated_bytes == pytest.approx(exact.memory.peak_allocated_bytes, rel=0.12)
