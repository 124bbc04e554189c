"""Variants of a step written by hand, and of any legal one: the sums over tables equal the replay of the timeline.

Run: ``pytest tests/predict/test_variants.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.micro_batch_scaling import NotDerivableError
from lightning_memfit.predict.optimizer_step import OptimizerStepCost, optimizer_step_cost, with_optimizer_step
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.trace.step_record import BufferCopy
from lightning_memfit.trace.timeline import Free, Operation, Output, ProbeResult, Resident, Timeline

Write = Callable[[], Any]


def optimizer_step(states: int = 0, temporaries: int = 0) -> Timeline:
    """A step that holds states, and allocates and frees once."""
    events = (Operation("update", "", "optimizer_step", None, (Output(1, 0, temporaries),)), Free(1, "optimizer_step"))
    return Timeline(
        residents=(Resident(0, states, "optimizer_states"),), events=events if temporaries else (),
        categories={1: "temporaries"} if temporaries else {}, signatures=(), num_parameters=1, num_operations=1,
        flops=0, recomputed_flops=0,
    )  # fmt: skip


NO_STEP = optimizer_step_cost(optimizer_step())


def peak(variants: StepVariants, *sizes: int, step: OptimizerStepCost = NO_STEP, **options: Any) -> int:
    return variants.memory(Variant(slice_sizes=sizes, **options), step).peak_allocated_bytes


def one_slice(step: Any, samples: int, batch: int, *, block: Any = None) -> None:
    """A block that makes 8, 4 and 2 bytes per sample and saves the first two; then a loss of 1 byte."""
    step.start_slice()
    step.begin("block", batch, **(block or {}))
    first = step.op(8 * samples, name="mm", flops=100 * samples)
    one = step.save(first)
    second = step.op(4 * samples, name="gelu")
    two = step.save(second)
    step.free(first)
    out = step.op(2 * samples, name="mm", flops=50 * samples)
    step.free(second)
    step.end()
    loss = step.op(1, name="sum")
    step.free(out)
    step.end_forward()
    grad = step.op(4 * samples, name="mm", flops=60 * samples)
    step.unpack(two)
    other = step.op(4 * samples, name="gelu_backward")
    step.release(two)
    step.free(grad)
    step.unpack(one)
    last = step.op(8 * samples, name="mm", flops=70 * samples)
    step.release(one)
    step.free(other, last, loss)


def written(write: Write, *samples: int, **options: Any) -> Any:
    step = write()
    batch = step.resident(100, "inputs")
    for size in samples:
        one_slice(step, size, batch, **options)
    return step.record(*samples)


def test_without_recomputation_what_is_saved_lives_until_its_node_has_run(write: Write) -> None:
    memory = StepVariants(written(write, 10)).memory(Variant(slice_sizes=(10,)), NO_STEP)
    # Forward: 100, +80, +40, +20, +1 = 241. Backward: the output's 20 are gone; 221 + 40 + 40 = 301; later less.
    assert memory.by_phase == {"forward": 241, "backward": 301}
    assert (memory.peak_allocated_bytes, memory.peak_op, memory.peak_phase) == (301, "gelu_backward", "backward")
    assert memory.by_category == {"inputs": 100, "activations": 121, "temporaries": 80}


def test_with_recomputation_it_dies_in_the_forward_and_is_made_again_in_front_of_its_node(write: Write) -> None:
    variants = StepVariants(written(write, 10))
    memory = variants.memory(Variant(slice_sizes=(10,), recomputed=("block",)), NO_STEP)
    # Forward: 100 + the generator's 5; +80, +40 = 225, the first is gone, +20, +1.
    # Backward: 100 + 5 + 1, +40; repeated in front of the second node: the generator's 5 again, +80, +40 = 271 (the
    # last operator of the block saves nothing and is not repeated); those 5 are gone, +40 = 306.
    assert memory.by_phase == {"forward": 225, "backward": 306}
    assert memory.peak_op == "gelu_backward"
    assert memory.by_category == {"inputs": 100, "activations": 126, "temporaries": 80}


def test_inputs_of_a_recomputed_block_are_held_until_its_last_node_has_run(write: Write) -> None:
    step = write()
    step.start_slice()
    given_ = step.op(1000)
    step.begin("block", given_)
    inner = step.op(10)
    saved = step.save(inner)
    step.free(inner)
    step.end()
    step.free(given_)
    step.end_forward()
    step.op(1)
    step.unpack(saved)
    step.op(1)
    step.release(saved)
    step.op(1)
    variants = StepVariants(step.record(1))
    assert variants.memory(Variant(slice_sizes=(1,)), NO_STEP).by_phase["backward"] == 12
    # 1000 of the input, 5 of the generator, 1; repeated: 5 and 10, then 10 and 1.
    assert variants.memory(Variant(slice_sizes=(1,), recomputed=("block",)), NO_STEP).by_phase["backward"] == 1021


def test_buffers_that_a_block_changes_are_copied_and_all_in_its_first_call(write: Write) -> None:
    step = write()
    step.start_slice()
    step.begin("block", buffers=(BufferCopy(90, 30, True), BufferCopy(91, 200, False)))
    inner = step.op(10)
    saved = step.save(inner)
    step.free(inner)
    step.end()
    step.end_forward()
    step.free(step.op(1))
    step.unpack(saved)
    step.op(1)
    step.release(saved)
    variants = StepVariants(step.record(1))
    # Forward: 5 + 30 + 200 + 10. Backward: 5 + 30 kept, and while repeating 5 + 30 + 10 more.
    memory = variants.memory(Variant(slice_sizes=(1,), recomputed=("block",)), NO_STEP)
    assert memory.by_phase == {"forward": 245, "backward": 80}


@pytest.mark.parametrize("recomputed", [(), ("block",)])
def test_other_sizes_are_what_a_record_of_them_would_give(write: Write, recomputed: tuple[str, ...]) -> None:
    shared = StepVariants(written(write, 8, 2))
    for sizes in ((8, 2), (5, 4), (1, 1), (20, 20)):
        own = StepVariants(written(write, *sizes))
        variant = Variant(slice_sizes=sizes, recomputed=recomputed)
        assert shared.memory(variant, NO_STEP) == own.memory(variant, NO_STEP)
        assert shared.flops(variant) == own.flops(variant)
    # One slice is the first of two.
    alone = Variant(slice_sizes=(6,), recomputed=recomputed)
    assert shared.memory(alone, NO_STEP) == StepVariants(written(write, 6)).memory(alone, NO_STEP)


def test_flops_add_up_over_all_slices_and_batches(write: Write) -> None:
    variants = StepVariants(written(write, 8, 2))
    sizes, split = (3, 3, 2), {"slice_sizes": (3, 3, 2), "accumulate_grad_batches": 2}
    # Per sample: 100 + 50 forward, 60 + 70 backward; the last product of the block is not repeated.
    assert variants.flops(Variant(**split)) == (2 * sum(sizes) * 280, 0)
    assert variants.flops(Variant(**split, recomputed=("block",))) == (2 * sum(sizes) * 380, 2 * sum(sizes) * 100)


def test_the_optimizers_states_and_temporaries_come_on_top(write: Write) -> None:
    variants = StepVariants(written(write, 10))
    small = optimizer_step_cost(optimizer_step(states=7, temporaries=150))
    memory = variants.memory(Variant(slice_sizes=(10,)), small)
    assert memory.by_phase == {"forward": 248, "backward": 308, "optimizer_step": 257}
    large = optimizer_step_cost(optimizer_step(states=7, temporaries=500))
    memory = variants.memory(Variant(slice_sizes=(10,)), large)
    assert (memory.peak_allocated_bytes, memory.peak_phase, memory.peak_op) == (607, "optimizer_step", "update")
    assert memory.by_category == {"inputs": 100, "optimizer_states": 7, "temporaries": 500}


def test_old_gradients_are_there_until_they_are_zeroed(write: Write) -> None:
    step = write()
    old = step.resident(50, "gradients")
    step.start_slice()
    step.op(10)
    step.end_forward()
    step.free(old)
    step.op(30)
    variants = StepVariants(step.record(1))
    late = variants.memory(Variant(slice_sizes=(1,)), NO_STEP)
    early = variants.memory(Variant(slice_sizes=(1,), zero_gradients_early=True), NO_STEP)
    assert late.by_phase == {"forward": 60, "backward": 40}
    assert early.by_phase == {"forward": 10, "backward": 40}


def test_outputs_of_slices_that_are_not_followed_are_held_too(write: Write) -> None:
    step = write()
    for number, samples in enumerate((8, 2)):
        step.start_slice()
        if number:
            others = step.op(8 * 3, name="empty")
        step.op(3 * samples)  # kept: 3 bytes per sample
        step.end_forward()
    record = step.record(8, 2, left_out=others, kept_bytes=(24, 6))
    variants = StepVariants(record)
    assert peak(variants, 4, 4) == 12 + 12
    assert peak(variants, 4, 4, 4, 4) == 12 + 12 + 2 * 12


def test_what_only_a_second_slice_would_let_go_of_lives_on_without_one(write: Write) -> None:
    step = write()
    kept: list[int] = []
    for samples in (8, 2):
        step.start_slice()
        step.free(*kept)  # such as an attribute that every forward sets
        kept = [step.op(10 * samples)]
        step.end_forward()
        step.free(step.op(samples))
    step.phase = "gradient_clipping"
    step.op(1)
    variants = StepVariants(step.record(8, 2))
    assert variants.memory(Variant(slice_sizes=(8, 2)), NO_STEP).by_phase["gradient_clipping"] == 20 + 1
    assert variants.memory(Variant(slice_sizes=(8,)), NO_STEP).by_phase["gradient_clipping"] == 80 + 1


def test_what_probing_found_counts_at_every_size(write: Write) -> None:
    step = write()
    for signature, samples in enumerate((8, 2)):
        step.start_slice()
        step.op(4 * samples, signature=signature)
        step.end_forward()
    probes = {
        0: ProbeResult(peak_bytes=100, output_bytes={0: 40}),  # 8 samples
        1: ProbeResult(peak_bytes=40, output_bytes={0: 10}),  # 2 samples
    }
    variants = StepVariants(step.record(8, 2), probes)
    assert peak(variants, 8) == 100
    assert peak(variants, 4) == 60
    # 20 of output, alive when the forward is done, and 40 within the operator.
    assert variants.memory(Variant(slice_sizes=(4,)), NO_STEP).by_category == {"activations": 20, "temporaries": 40}
    # The second slice starts with the 20 of the first, since nothing is freed here.
    assert peak(variants, 4, 4) == 20 + 60


def test_an_addition_in_place_takes_no_room_repeated_or_not(write: Write) -> None:
    step = write()
    step.start_slice()
    step.begin("block")
    product = step.op(10, name="mm")
    total = step.op(10, name="add", into=product)
    step.free(product)
    saved = step.save(total)
    step.free(total)
    step.end()
    step.end_forward()
    step.free(step.op(1))
    step.unpack(saved)
    step.op(1)
    step.release(saved)
    variants = StepVariants(step.record(1))
    assert variants.memory(Variant(slice_sizes=(1,)), NO_STEP).by_phase == {"forward": 10, "backward": 11}
    # 5 of the generator and 10; then 5 + 5 + 10 while repeating, and 5 + 10 + 1.
    recomputed = variants.memory(Variant(slice_sizes=(1,), recomputed=("block",)), NO_STEP)
    assert recomputed.by_phase == {"forward": 15, "backward": 20}


def test_an_addition_to_what_came_from_outside_a_repeated_block_has_a_result_of_its_own(write: Write) -> None:
    step = write()
    step.start_slice()
    outside = step.op(10, name="mm")
    step.begin("block")
    total = step.op(10, name="add", into=outside, signature=0)
    step.free(outside)
    saved = step.save(total)
    step.free(total)
    step.end()
    step.end_forward()
    step.free(step.op(1))
    step.unpack(saved)
    step.op(1)
    step.release(saved)
    variants = StepVariants(step.record(1), {0: ProbeResult(peak_bytes=17, output_bytes={0: 12})})
    # In place, and 5 of temporaries beside it; repeated after the generator's 5 and 5 more: 17 within the operator.
    assert variants.memory(Variant(slice_sizes=(1,)), NO_STEP).by_phase == {"forward": 15, "backward": 11}
    recomputed = variants.memory(Variant(slice_sizes=(1,), recomputed=("block",)), NO_STEP)
    assert recomputed.by_phase == {"forward": 20, "backward": 27}


def different(write: Write) -> StepVariants:
    step = write()
    for samples, name in ((8, "one"), (2, "two")):
        step.start_slice()
        step.op(samples, name=name)
        step.end_forward()
    return StepVariants(step.record(8, 2))


def test_what_a_record_cannot_tell_is_an_error_that_says_why(write: Write) -> None:
    one, two = StepVariants(written(write, 8)), StepVariants(written(write, 8, 8))
    obstacle = StepVariants(written(write, 8, block={"has_cache": True}))
    for variants, variant, message in (
        (one, Variant(slice_sizes=(4, 4)), "only one slice was recorded"),
        (one, Variant(slice_sizes=(4,)), "only slices of 8 samples were recorded"),
        (two, Variant(slice_sizes=(4, 4)), "only slices of 8 samples were recorded"),
        (different(write), Variant(slice_sizes=(4, 4)), "slices of 8 and 2 samples run different operators"),
        (one, Variant(slice_sizes=(8,), recomputed=("other",)), "no call of other was followed"),
        (one, Variant(slice_sizes=(8,), recomputed=("block", "block.inner")), "block.inner lies in another block"),
        (
            obstacle,
            Variant(slice_sizes=(8,), recomputed=("block",)),
            "recomputing block cannot be derived: it is given a key/value cache",
        ),
    ):
        assert variants.obstacle(variant) is not None
        for ask in (lambda: variants.memory(variant, NO_STEP), lambda: variants.flops(variant)):  # noqa: B023
            with pytest.raises(NotDerivableError, match=message):
                ask()
    assert peak(two, 8, 8) and peak(different(write), 8, 2) and peak(obstacle, 8)


def test_what_probing_found_within_an_addition_in_place_counts(write: Write) -> None:
    step = write()
    step.start_slice()
    product = step.op(10, name="mm")
    step.free(step.op(10, name="add", into=product, signature=0))
    step.free(product)
    step.end_forward()
    record = step.record(1)
    assert peak(StepVariants(record), 1) == 10
    # 17 within the operator, of which 10 are its result, which takes the place of what it is added to.
    assert peak(StepVariants(record, {0: ProbeResult(peak_bytes=17, output_bytes={0: 10})}), 1) == 17


@st.composite
def any_step(draw: st.DrawFn, write: Write) -> tuple[Any, dict[int, ProbeResult]]:
    """Any legal step of one or two equal slices: blocks, saved tensors, sums in place, gradients, clipping."""
    step = write()
    alive = [step.resident(draw(st.integers(0, 40)), "parameters") for _ in range(draw(st.integers(0, 2)))]
    old = [step.resident(draw(st.integers(0, 40)), "gradients") for _ in range(draw(st.integers(0, 2)))]
    sizes = draw(st.sampled_from(((3,), (3, 3))))
    for number in range(len(sizes)):
        step.start_slice()
        waiting: list[int] = []
        own: list[int] = []
        for block in range(draw(st.integers(0, 3))):
            inputs = tuple(draw(st.sets(st.sampled_from(alive + own), max_size=2))) if alive + own else ()
            step.begin(f"blocks.{block}", *inputs)
            _some_operators(draw, step, own, alive, waiting)
            step.end()
            _some_operators(draw, step, own, alive, waiting)
        step.end_forward()
        if number == 0:
            step.free(*old)
        own.append(step.op(1))  # the gradient of the loss
        while waiting:
            node = [waiting.pop() for _ in range(min(len(waiting), draw(st.integers(1, 2))))]
            asked = [saved for saved in node if draw(st.integers(0, 9))]
            step.unpack(*asked)
            made = step.op(draw(st.integers(0, 30)), signature=draw(st.integers(0, 3)), gradient=draw(st.booleans()))
            if own and draw(st.booleans()):
                step.free(own.pop())
            own.append(made)
            step.release(*node)
        while own and draw(st.integers(0, 4)):
            step.free(own.pop(draw(st.integers(0, len(own) - 1))))
        alive += own
    if draw(st.booleans()):
        step.phase = "gradient_clipping"
        step.free(step.op(draw(st.integers(0, 60))))
    probes = {
        signature: ProbeResult(
            peak_bytes=draw(st.integers(0, 60)), output_bytes=draw(st.dictionaries(st.just(0), st.integers(0, 40)))
        )
        for signature in range(draw(st.integers(0, 4)))
    }
    return step.record(*sizes), probes


def _some_operators(draw: st.DrawFn, step: Any, own: list[int], alive: list[int], waiting: list[int]) -> None:
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("op", "op", "free", "save", "in place")))
        if kind == "free" and own:
            step.free(own.pop(draw(st.integers(0, len(own) - 1))))
        elif kind == "save" and own + alive:
            waiting.append(step.save(draw(st.sampled_from(own + alive))))
        elif kind == "in place" and own:
            target = own.pop()
            own.append(step.op(draw(st.integers(0, 40)), into=target, signature=draw(st.integers(0, 3))))
            step.free(target)
        else:
            own.append(step.op(draw(st.integers(0, 40)), signature=draw(st.integers(0, 3))))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_sums_equal_the_plain_replay_of_the_variants_own_timeline(write: Write, data: st.DataObject) -> None:
    record, probes = data.draw(any_step(write))
    called = sorted({call.module for call in record.blocks})
    variant = Variant(
        slice_sizes=record.samples,
        recomputed=tuple(data.draw(st.sets(st.sampled_from(called)))) if called else (),
        zero_gradients_early=data.draw(st.booleans()),
    )
    step = optimizer_step(states=9, temporaries=data.draw(st.integers(0, 200)))
    variants = StepVariants(record, probes)
    whole = with_optimizer_step(variants.timeline(variant), step)
    assert variants.memory(variant, optimizer_step_cost(step)) == predict_memory(
        whole, probes, zero_gradients_early=variant.zero_gradients_early
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_is_recomputed_nothing_lives_twice_and_nothing_is_freed_twice(
    write: Write, data: st.DataObject
) -> None:
    record, probes = data.draw(any_step(write))
    called = tuple(sorted({call.module for call in record.blocks}))
    timeline = StepVariants(record, probes).timeline(Variant(slice_sizes=record.samples, recomputed=called))
    alive = {resident.storage for resident in timeline.residents}
    for event in timeline.events:
        if isinstance(event, Free):
            alive.remove(event.storage)
        else:
            made = {output.storage for output in event.outputs}
            assert not made & alive
            alive |= made
