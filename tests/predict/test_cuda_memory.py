"""What the caching allocator needs for a step. Run: ``pytest tests/predict/test_cuda_memory.py``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lightning_memfit.predict.caching_allocator import Allocate, Release
from lightning_memfit.predict.cuda_memory import predict_cuda_memory, requests_of
from lightning_memfit.predict.cuda_temporaries import CudaArchitecture, Workspace, library_workspaces
from lightning_memfit.trace.cuda_rules import CudaRules
from lightning_memfit.trace.timeline import Free, Operation, Output, ProbeResult, Resident, Timeline
from lightning_memfit.trace.training_step import program_of, trace_window

MIB = 2**20


def _timeline(**changes: object) -> Timeline:
    """One parameter of 4 MiB with a gradient and a state; a forward that makes 1,000 bytes for the backward."""
    whole = Timeline(
        residents=(
            Resident(0, 4 * MIB, "parameters"),
            Resident(1, 4 * MIB, "gradients"),
            Resident(2, 8 * MIB, "optimizer_states"),
            Resident(3, 100, "inputs"),
        ),
        events=(
            Operation("mm", "", "forward", 0, (Output(4, 0, 1000),), flops=1),
            Free(1, "zero_grad"),
            Operation("mm", "", "backward", None, (Output(5, 0, 4 * MIB),), flops=1),
            Free(4, "backward"),
        ),
        categories={4: "activations", 5: "gradients"},
        signatures=(),
        num_parameters=MIB,
        num_operations=2,
        flops=2,
        recomputed_flops=0,
    )
    return replace(whole, **changes)


def _workspaces(capability: tuple[int, int]) -> tuple[Workspace, ...]:
    products = (("aten.mm.default", "forward"), ("aten.mm.default", "backward"))
    architecture = CudaArchitecture(compute_capability=capability, multiprocessors=108, torch_minor=(2, 13))
    return library_workspaces(products, architecture)


def _sizes(requests: list[Allocate | Release]) -> list[int]:
    """Bytes asked for, negative where they are given back."""
    held = {each.block: each.requested_bytes for each in requests if isinstance(each, Allocate)}
    return [each.requested_bytes if isinstance(each, Allocate) else -held[each.block] for each in requests]


def test_three_steps_are_asked_for_in_their_order() -> None:
    # Batch, activation, gradient, end of the activation, states; there are no old gradients yet.
    first_step = [100, 1000, 4 * MIB, -1000, 8 * MIB]
    later_step = [-100, 100, 1000, -4 * MIB, 4 * MIB, -1000]
    assert _sizes(requests_of(_timeline())) == [4 * MIB, *first_step, *later_step, *later_step]


def test_states_are_made_in_front_of_the_first_optimizer_step() -> None:
    events = (*_timeline().events, Operation("addcdiv", "", "optimizer_step", None, (Output(6, 0, 512),)))
    sizes = _sizes(requests_of(_timeline(events=(*events, Free(6, "optimizer_step")))))
    assert sizes[:9] == [4 * MIB, 100, 1000, 4 * MIB, -1000, 8 * MIB, 512, -512, -100]
    assert sizes.count(8 * MIB) == 1


def test_gradients_that_are_zeroed_early_go_in_front_of_the_forward() -> None:
    # The batch first: it is moved before the step begins, when the last one is gone.
    assert _sizes(requests_of(_timeline(), zero_gradients_early=True))[6:10] == [-100, 100, -4 * MIB, 1000]


def test_what_a_step_replaces_is_handed_to_the_next_one() -> None:
    # 7 holds what the step before returned until this one's 8 is there; of another category or size nothing is.
    whole = _timeline()
    replaced = (Resident(7, 2048, "activations"), Resident(9, 2048, "buffers"))
    events = (
        Operation("mm", "", "forward", 0, (Output(8, 0, 2048), Output(10, 0, 4096)), flops=1),
        Free(7, "forward"),
        *whole.events,
    )
    timeline = _timeline(
        residents=(*whole.residents, *replaced),
        events=events,
        categories={**whole.categories, 8: "activations", 10: "activations"},
    )
    sizes = _sizes(requests_of(timeline))
    # Parameter, buffer, batch, both results; none was there to be let go of. 10 goes with the step, 8 in the next.
    first_step = [4 * MIB, 2048, 100, 2048, 4096, 1000, 4 * MIB, -1000, 8 * MIB, -4096]
    assert sizes[: len(first_step) + 5] == [*first_step, -100, 100, 2048, 4096, -2048]


def test_gradients_that_no_step_lets_go_of_are_made_once() -> None:
    # Zeroed in place: the new gradient is added to the old one and goes.
    whole = _timeline()
    kept = (*(event for event in whole.events if event != Free(1, "zero_grad")), Free(5, "backward"))
    # Batch, activation, new gradient, end of both, then the lasting gradient and the states.
    first_step = [100, 1000, 4 * MIB, -1000, -4 * MIB, 4 * MIB, 8 * MIB]
    later_step = [-100, 100, 1000, 4 * MIB, -1000, -4 * MIB]
    assert _sizes(requests_of(_timeline(events=kept))) == [4 * MIB, *first_step, *later_step, *later_step]


def test_temporaries_inside_an_operator_come_after_its_outputs_and_go_at_once() -> None:
    probes = {0: ProbeResult(peak_bytes=0, output_bytes={}, hidden_bytes=3000)}
    assert _sizes(requests_of(_timeline(), probes))[2:5] == [1000, 3000, -3000]


def test_an_output_is_as_large_as_a_real_call_made_it() -> None:
    # 2,048 bytes in place of 1,000, and 5,000 at the most within the call: 2,952 beside it.
    real = Operation("mm", "", "forward", 0, (Output(4, 0, 1000),), flops=1)
    timeline = _timeline(events=(real, *_timeline().events[1:]))
    probes = {0: ProbeResult(peak_bytes=5000, output_bytes={0: 2048})}
    assert _sizes(requests_of(timeline, probes))[2:5] == [2048, 2952, -2952]
    # In blocks of 512 bytes: 4,096 that were 1,024, and 5,120 at the most within.
    blind, seen = (predict_cuda_memory(timeline, each).by_phase["forward"] for each in (None, probes))
    assert seen - blind == 5120 - 1024


def test_workspaces_are_taken_once_by_the_first_product_of_their_phase() -> None:
    workspaces = _workspaces((8, 0))
    sizes = _sizes(requests_of(_timeline(), workspaces=workspaces))
    # 2 x 4096 KiB + 8 x 16 KiB = 8,519,680 bytes for each of two threads.
    assert sizes[:6] == [4 * MIB, 100, 8_519_680, 1000, 8_519_680, 4 * MIB]
    assert sizes.count(8_519_680) == 2
    assert {each.high_bytes for each in _workspaces((9, 0))} == {32 * MIB}


def test_the_peak_is_of_blocks_rounded_to_512_bytes() -> None:
    # At the end of the forward: 4 + 4 + 8 MiB, the batch's 512 and 1,024 for 1,000 bytes.
    memory = predict_cuda_memory(_timeline())
    assert memory.peak_allocated_bytes == 16 * MIB + 512 + 1024
    assert sum(memory.by_category.values()) == memory.peak_allocated_bytes


def test_reserved_is_no_less_than_allocated_and_the_least_capacity_lies_between() -> None:
    memory = predict_cuda_memory(_timeline(), workspaces=_workspaces((8, 0)))
    assert memory.peak_reserved_bytes is not None
    assert memory.minimum_feasible_bytes is not None
    assert memory.peak_allocated_bytes <= memory.minimum_feasible_bytes + 2 * MIB
    assert memory.minimum_feasible_bytes <= memory.peak_reserved_bytes


def test_adamw_over_lists_of_tensors_takes_20_bytes_per_parameter_and_fused_16() -> None:
    # Ten layers of 1,000 x 1,000: parameter 4, gradient 4, two states 8; lists of tensors take another copy, 4.
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(10)))
    peaks = {}
    for fused in (None, True):
        program = program_of(
            module,
            loss=lambda m, batch: m(batch).sum(),
            optimizer=lambda parameters, fused=fused: torch.optim.AdamW(parameters, fused=fused),
        )
        rules = CudaRules(compute_capability=(8, 0))
        timeline = trace_window(replace(program, rules=rules), torch.zeros(2, 1000), collect_signatures=False)
        peaks[fused] = predict_cuda_memory(timeline).by_phase["optimizer_step"] / 10_000_000
    assert round(peaks[None], 2) == 20.0
    assert round(peaks[True], 2) == 16.0
