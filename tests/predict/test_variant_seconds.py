"""Seconds of a variant equal those of its timeline. Run: ``pytest tests/predict/test_variant_seconds.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_memfit.hardware.rates import AllocatorRates, CallSeconds, DeviceRates, RateCurve
from lightning_memfit.plan import BatchSplit
from lightning_memfit.predict import variant_seconds
from lightning_memfit.predict.step_time import predict_step_seconds
from lightning_memfit.predict.variant_seconds import VariantSeconds
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import ModuleCall

Write = Callable[[], Any]


def rates() -> DeviceRates:
    curve = RateCurve(work=(10.0, 1e6), seconds=(1e-3, 2.0))
    return DeviceRates(
        device="cpu", threads=1, torch_version="2",
        curves={kind: {"float32": curve} for kind in ("elementwise", "matmul", "transcendental")},
        calls=CallSeconds(
            forward=1e-2, backward=2e-2, optimizer_step=3e-2, foreach_tensor=0.0, fused_tensor=0.0, recomputed_block=0.5
        ),
        allocator=AllocatorRates(seconds_per_new_byte=1e-4, largest_kept_block_bytes=2000),
        noise=0.0,
    )  # fmt: skip


def layers(write: Write, *samples: int) -> StepRecord:
    """Two equal blocks and a loss, with operators of several kinds and sizes."""
    step = write()
    batch = step.resident(100, "inputs")
    for size in samples:
        step.start_slice()
        saved = []
        for number in range(2):
            step.begin(f"blocks.{number}", batch)
            hidden = step.op(400 * size, name="aten.mm.default", flops=10_000 * size)
            saved.append(step.save(hidden))
            step.free(hidden, step.op(90 * size, name="aten.gelu.default"))
            step.end()
        step.end_forward()
        step.free(step.op(4, name="aten.ones_like.default"))
        for number in reversed(saved):
            step.unpack(number)
            step.free(step.op(200 * size, name="aten.mm.default", flops=20_000 * size))
            step.release(number)
    step.phase = "gradient_clipping"
    step.op(8, name="aten.mul.Tensor")
    record = step.record(*samples)
    return replace(
        record,
        events=tuple(
            e._replace(dtype="float32", views=i % 3) if hasattr(e, "op") else e for i, e in enumerate(record.events)
        ),
    )


@pytest.mark.parametrize("recomputed", [(), ("blocks.0",), ("blocks.0", "blocks.1")])
@pytest.mark.parametrize(("sizes", "batches"), [((8,), 1), ((6,), 2), ((4, 4), 1), ((3, 3, 2), 1), ((3, 2), 3)])
def test_they_are_those_of_the_variants_own_timeline(
    write: Write, recomputed: tuple[str, ...], sizes: tuple[int, ...], batches: int
) -> None:
    variants = StepVariants(layers(write, 8, 2))
    variant = Variant(slice_sizes=sizes, accumulate_grad_batches=batches, recomputed=recomputed)
    split = BatchSplit(
        effective_batch_size=batches * sum(sizes), loader_batch_size=sum(sizes), accumulate_grad_batches=batches,
        slice_sizes=sizes,
    )  # fmt: skip
    timeline = variants.timeline(variant)
    calls = tuple(
        ModuleCall(name, slice_, 10 * number, 10 * number + 1, (), recomputed=True)
        for slice_ in range(len(variant.followed))
        for number, name in enumerate(recomputed)
    )
    # Calls of different slices have to lie apart.
    calls = tuple(c._replace(first_event=100 * i, end_event=100 * i + 1) for i, c in enumerate(calls))
    whole = predict_step_seconds(replace(timeline, calls=calls), rates(), split=split)
    assert VariantSeconds(variants, rates()).of(variant) == pytest.approx(whole, rel=1e-9)


def test_more_work_takes_longer(write: Write) -> None:
    seconds = VariantSeconds(StepVariants(layers(write, 8, 2)), rates())
    plain = seconds.of(Variant(slice_sizes=(8,)))
    one, two = (
        seconds.of(Variant(slice_sizes=(8,), recomputed=names)) for names in (("blocks.0",), ("blocks.0", "blocks.1"))
    )
    assert plain < one < two
    assert seconds.of(Variant(slice_sizes=(8,), accumulate_grad_batches=2)) > plain


def test_operators_that_cost_the_same_are_predicted_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(timeline: Any, *args: Any, **options: Any) -> float:
        asked.append(timeline)
        return predict_step_seconds(timeline, *args, **options)

    monkeypatch.setattr(variant_seconds, "predict_step_seconds", counting)
    seconds = VariantSeconds(StepVariants(layers(write, 8, 2)), rates())
    seconds.of(Variant(slice_sizes=(8,)))
    first = len(asked)
    seconds.of(Variant(slice_sizes=(8,)))
    assert len(asked) == first
    seconds.of(Variant(slice_sizes=(8,), recomputed=("blocks.0",)))
    seconds.of(Variant(slice_sizes=(8,), recomputed=("blocks.1",)))
    assert len(asked) < first + 10
