"""What DDP adds to a step: buckets, and gradients as views of them. Run: ``pytest tests/predict/test_ddp.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.predict.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES, bucket_sizes, ddp_timeline
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.step_program import program_of
from lightning_memfit.trace.timeline import Free, Operation, Output, ParameterLayout, Resident, Timeline
from lightning_memfit.trace.training_step import trace_window
from lightning_memfit.units import MIB

PLAIN = Sharding(engine="ddp", ranks=2)
VIEWS = Sharding(engine="ddp", ranks=2, gradient_as_bucket_view=True)


def weight(number: int, rows: int, *, dtype: str = "float32", trainable: bool = True) -> ParameterLayout:
    return ParameterLayout(f"w{number}", number, dtype, (rows, 1024), trainable)


def made(storage: int, size: int, phase: str, micro_step: int = 0) -> Operation:
    return Operation("op", "", phase, None, (Output(storage, 0, size),), micro_step=micro_step)  # type: ignore[arg-type]


def a_step() -> Timeline:
    """Two weights of 100 and 40 KiB; an activation of 64 KiB, and one temporary of 32 KiB in front of each gradient."""
    return Timeline(
        residents=(
            Resident(1, 102_400, "parameters"), Resident(2, 40_960, "parameters"),
            Resident(3, 102_400, "gradients"), Resident(4, 40_960, "gradients"),
        ),
        events=(
            made(10, 65_536, "forward"),
            Free(3, "zero_grad"), Free(4, "zero_grad"),
            made(11, 32_768, "backward"), made(12, 40_960, "backward"), Free(11, "backward"),
            made(13, 32_768, "backward"), made(14, 102_400, "backward"), Free(13, "backward"), Free(10, "backward"),
            made(15, 1_024, "optimizer_step"), Free(15, "optimizer_step"),
        ),
        categories={10: "activations", 11: "temporaries", 12: "gradients", 13: "temporaries", 14: "gradients",
                    15: "temporaries"},
        signatures=(), num_parameters=35_840, num_operations=6, flops=0, recomputed_flops=0,
        parameters=(weight(1, 25), weight(2, 10)), gradient_of={3: 0, 4: 1, 14: 0, 12: 1},
    )  # fmt: skip


def test_buckets_take_as_much_as_the_gradients_beside_them() -> None:
    plain = predict_memory(ddp_timeline(a_step(), PLAIN))
    # Weights 143,360, both gradients 143,360, activation 65,536 and temporary 32,768 at the second gradient; and the
    # one bucket of 143,360 bytes.
    assert plain.by_category["communication"] == 143_360
    assert plain.peak_allocated_bytes == 3 * 143_360 + 65_536 + 32_768
    assert plain.peak_allocated_bytes == predict_memory(a_step()).peak_allocated_bytes + 143_360


def test_views_leave_one_gradient_at_a_time_beside_the_buckets() -> None:
    views = predict_memory(ddp_timeline(a_step(), VIEWS))
    # Weights and bucket, activation, temporary, and the larger gradient until it is copied.
    assert views.by_phase["backward"] == 2 * 143_360 + 65_536 + 32_768 + 102_400
    assert views.by_phase["forward"] == 2 * 143_360 + 65_536
    # In front of the second forward gradients are views of the buckets that are made anew.
    small = replace(a_step(), events=())
    assert predict_memory(ddp_timeline(small, VIEWS)).peak_allocated_bytes == 3 * 143_360
    early = predict_memory(ddp_timeline(small, VIEWS), zero_gradients_early=True)
    assert early.peak_allocated_bytes == 2 * 143_360
    assert views.by_phase["optimizer_step"] == 2 * 143_360 + 1_024


def test_slices_that_accumulate_keep_their_gradients_beside_the_buckets_until_the_last_one_is_done() -> None:
    views = predict_memory(ddp_timeline(replace(a_step(), micro_steps=2), VIEWS))
    assert views.peak_allocated_bytes == 3 * 143_360 + 65_536 + 32_768
    assert views.by_phase["optimizer_step"] == 2 * 143_360 + 1_024


def test_buckets_are_filled_from_the_last_parameter_on_and_each_dtype_has_its_own() -> None:
    # 1 MiB is 256 rows of 1024 floats. From the last: 512 rows close the first bucket, 20 x 256 rows + 1280 rows
    # (5 MiB) make 25 MiB, one more lies in the last.
    parameters = (weight(0, 256), weight(1, 1280), *(weight(2, 256) for _ in range(20)), weight(3, 512))
    assert bucket_sizes(parameters) == (2 * MIB, 25 * MIB, MIB)
    halves = tuple(weight(4, 512, dtype="bfloat16") for _ in range(2))
    assert sorted(bucket_sizes((*parameters, *halves))) == [MIB, MIB, MIB, 2 * MIB, 25 * MIB]


def test_buckets_are_those_that_torch_makes() -> None:
    rows = [300, 10, 2000, 7, 900, 4, 4, 4, 5000, 1200, 3, 6000]
    parameters = tuple(weight(number, each) for number, each in enumerate(rows))
    tensors = [torch.empty(each, 1024, device="cpu") for each in reversed(rows)]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
    expected = sorted(sum(tensors[index].nbytes for index in bucket) for bucket in indices)
    assert sorted(bucket_sizes(parameters)) == expected


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def a_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 512))


def squared(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).square().mean()


def measured_peak(sharding: Sharding, batch: torch.Tensor, slices: int) -> int:
    """Peak of three real steps of torch's DDP, old gradients alive in the first forward as in Lightning's order."""
    module = a_module()
    with AllocationMeter(storage_bytes([*module.parameters(), batch])) as meter:
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=sharding.gradient_as_bucket_view)
        optimizer = torch.optim.SGD(wrapped.parameters(), momentum=0.9, foreach=False)
        for _ in range(3):
            for number, part in enumerate(batch.chunk(slices)):
                with nullcontext() if number == slices - 1 else wrapped.no_sync():
                    loss = squared(wrapped, part)
                    if number == 0:
                        optimizer.zero_grad()
                    loss.backward()
            optimizer.step()
    return meter.peak_allocated_bytes


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("sharding", [PLAIN, VIEWS], ids=["beside", "views"])
def test_a_real_step_of_ddp_peaks_where_the_timeline_does(one_rank: None, sharding: Sharding, slices: int) -> None:
    batch = torch.randn(64, 512)
    program = program_of(a_module(), loss=squared, optimizer=partial(torch.optim.SGD, momentum=0.9, foreach=False))
    traced = trace_window(program, batch, divide=lambda batch: batch.chunk(slices), micro_steps=slices)
    predicted = predict_memory(ddp_timeline(traced, sharding)).peak_allocated_bytes
    measured = measured_peak(sharding, batch, slices)
    if sharding == VIEWS and slices == 2:  # the first slice's gradients go one by one
        assert measured <= predicted <= 1.1 * measured
    else:
        assert predicted == pytest.approx(measured, rel=0.002)


def test_what_is_not_trained_is_in_no_bucket() -> None:
    assert bucket_sizes((weight(0, 256), weight(1, 512, trainable=False))) == (MIB,)
    assert bucket_sizes(()) == ()
