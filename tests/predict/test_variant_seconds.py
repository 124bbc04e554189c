"""Seconds of a variant equal those of its timeline. Run: ``pytest tests/predict/test_variant_seconds.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_memfit.hardware.rates import AllocatorRates, CallSeconds, DeviceRates, RateCurve
from lightning_memfit.plan import BatchSplit
from lightning_memfit.predict import variant_seconds
from lightning_memfit.predict.optimizer_step import with_optimizer_step
from lightning_memfit.predict.step_time import predict_step_seconds
from lightning_memfit.predict.variant_seconds import StepSeconds, VariantSeconds
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import Event, Free, ModuleCall, Operation, Output, Resident, Timeline
from lightning_memfit.units import MIB

Write = Callable[[], Any]


def rates(limit: int | None = 60 * MIB) -> DeviceRates:
    curve = RateCurve(work=(10.0, 1e6), seconds=(1e-3, 2.0))
    return DeviceRates(
        device="cpu", threads=1, torch_version="2",
        curves={kind: {"float32": curve} for kind in ("elementwise", "matmul", "transcendental")},
        calls=CallSeconds(
            forward=1e-2, backward=2e-2, optimizer_step=3e-2, foreach_tensor=0.0, fused_tensor=0.0, recomputed_block=0.5
        ),
        allocator=AllocatorRates(seconds_per_new_byte=1e-7, largest_kept_block_bytes=limit),
        noise=0.0,
    )  # fmt: skip


def layers(write: Write, *samples: int) -> StepRecord:
    """Two equal blocks and a loss, with operators of several kinds, and blocks of 0.1 to 100 MiB."""
    step = write()
    batch = step.resident(MIB, "inputs")
    for size in samples:
        step.start_slice()
        saved = []
        for number in range(2):
            step.begin(f"blocks.{number}", batch)
            hidden = step.op(12 * MIB * size, name="aten.mm.default", flops=10_000 * size)
            saved.append(step.save(hidden))
            step.free(hidden, step.op(3 * MIB * size, name="aten.gelu.default"))
            step.end()
        step.end_forward()
        step.free(step.op(MIB // 8, name="aten.ones_like.default"))
        for number in reversed(saved):
            step.unpack(number)
            step.free(step.op(6 * MIB * size, name="aten.mm.default", flops=20_000 * size))
            step.release(number)
            step.free(step.op(5 * MIB * size, name="aten.mul.Tensor"))
    step.phase = "gradient_clipping"
    step.op(MIB, name="aten.mul.Tensor")
    record = step.record(*samples)
    events = [e._replace(dtype="float32", views=i % 3) if hasattr(e, "op") else e for i, e in enumerate(record.events)]
    return replace(record, events=tuple(events))


def optimizer_step() -> Timeline:
    """States of 10 MiB, and temporaries that are kept, that grow the heap, and that are too large for it."""
    sizes = (MIB, 40 * MIB, 70 * MIB)
    events: list[Event] = []
    for number, size in enumerate(sizes):
        made = (Output(number, 0, size),)
        events.append(
            Operation("aten.sqrt.default", "", "optimizer_step", None, made, moved_bytes=size, dtype="float32")
        )
    return Timeline(
        residents=(Resident(3, 10 * MIB, "optimizer_states"),),
        events=(*events, *(Free(number, "optimizer_step") for number in range(3))),
        categories=dict.fromkeys(range(3), "temporaries"), signatures=(), num_parameters=1, num_operations=3,
        flops=0, recomputed_flops=0,
    )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 2 * MIB, 60 * MIB, 10**12])
@pytest.mark.parametrize("recomputed", [(), ("blocks.0",), ("blocks.0", "blocks.1")])
@pytest.mark.parametrize(("sizes", "batches"), [((8,), 1), ((6,), 2), ((4, 4), 1), ((3, 3, 2), 1), ((3, 2), 3)])
def test_they_are_those_of_the_variants_own_timeline(
    write: Write, recomputed: tuple[str, ...], sizes: tuple[int, ...], batches: int, limit: int | None
) -> None:
    variants = StepVariants(layers(write, 8, 2))
    variant = Variant(slice_sizes=sizes, accumulate_grad_batches=batches, recomputed=recomputed)
    split = BatchSplit(
        effective_batch_size=batches * sum(sizes), loader_batch_size=sum(sizes), accumulate_grad_batches=batches,
        slice_sizes=sizes,
    )  # fmt: skip
    timeline = with_optimizer_step(variants.timeline(variant), optimizer_step())
    calls = tuple(
        ModuleCall(name, slice_, 10 * number, 10 * number + 1, (), recomputed=True)
        for slice_ in range(len(variant.followed))
        for number, name in enumerate(recomputed)
    )
    # Calls of different slices have to lie apart.
    calls = tuple(c._replace(first_event=100 * i, end_event=100 * i + 1) for i, c in enumerate(calls))
    whole = predict_step_seconds(replace(timeline, calls=calls), rates(limit), split=split)
    step = StepSeconds(optimizer_step(), rates(limit))
    assert VariantSeconds(variants, rates(limit)).of(variant, step) == pytest.approx(whole, rel=1e-9)


def test_more_work_takes_longer(write: Write) -> None:
    seconds, step = VariantSeconds(StepVariants(layers(write, 8, 2)), rates()), StepSeconds(optimizer_step(), rates())
    plain = seconds.of(Variant(slice_sizes=(8,)), step)
    one, two = (
        seconds.of(Variant(slice_sizes=(8,), recomputed=names), step)
        for names in (("blocks.0",), ("blocks.0", "blocks.1"))
    )
    assert plain < one < two
    assert seconds.of(Variant(slice_sizes=(8,), accumulate_grad_batches=2), step) > plain


def test_operators_that_cost_the_same_are_predicted_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(timeline: Any, *args: Any, **options: Any) -> float:
        asked.append(timeline)
        return predict_step_seconds(timeline, *args, **options)

    monkeypatch.setattr(variant_seconds, "predict_step_seconds", counting)
    seconds, step = VariantSeconds(StepVariants(layers(write, 8, 2)), rates()), StepSeconds(optimizer_step(), rates())
    seconds.of(Variant(slice_sizes=(8,)), step)
    first = len(asked)
    seconds.of(Variant(slice_sizes=(8,)), step)
    assert len(asked) == first
    seconds.of(Variant(slice_sizes=(8,), recomputed=("blocks.0",)), step)
    seconds.of(Variant(slice_sizes=(8,), recomputed=("blocks.1",)), step)
    assert len(asked) < first + 10
