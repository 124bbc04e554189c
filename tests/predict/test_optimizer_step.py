"""A step traced alone, priced and put in the place of another. Run: ``pytest tests/predict/test_optimizer_step.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.optimizer_step import optimizer_step_cost, with_optimizer_step
from lightning_memfit.trace.timeline import (
    Event,
    Free,
    Operation,
    Output,
    ProbeResult,
    Resident,
    Signature,
    TensorShape,
    Timeline,
)


def op(storage: int, size: int, phase: Any, *, signature: int | None = None, reads: tuple[int, ...] = ()) -> Operation:
    return Operation(f"op{storage}", "", phase, signature, (Output(storage, 0, size),), None, reads)


def timeline(*events: Event, residents: tuple[Resident, ...] = (), signatures: Any = (), notes: Any = ()) -> Timeline:
    return Timeline(
        residents=residents, events=events,
        categories={o.storage: "temporaries" for e in events if isinstance(e, Operation) for o in e.outputs},
        signatures=signatures, num_parameters=3, num_operations=len(events), flops=11, recomputed_flops=0, notes=notes,
    )  # fmt: skip


ALONE = timeline(
    op(3, 40, "optimizer_step", signature=0, reads=(1,)),
    op(4, 5, "optimizer_step", signature=1),
    Free(3, "optimizer_step"),
    Free(4, "optimizer_step"),
    residents=(Resident(0, 10, "parameters"), Resident(1, 10, "gradients"), Resident(2, 20, "optimizer_states")),
    signatures=(
        Signature("op3", (), {}),
        Signature("op4", ((TensorShape("float32", (5,), (1,), (0, 0)), 1.5),), {"out": TensorShape("f", (), (), None)}),
    ),
    notes=("a note", "read"),
)
WINDOW = timeline(
    op(2, 30, "forward", signature=0),
    Free(2, "backward"),
    op(5, 100, "optimizer_step"),
    Free(5, "optimizer_step"),
    residents=(Resident(0, 10, "parameters"), Resident(1, 60, "optimizer_states")),
    signatures=(Signature("op2", (), {}),),
    notes=("read",),
)


def test_a_step_costs_its_states_and_what_it_takes_beyond_what_is_there() -> None:
    cost = optimizer_step_cost(ALONE)
    assert cost.states_bytes == 20
    assert cost.memory.peak_allocated_bytes == 45
    assert cost.memory.by_phase == {"optimizer_step": 45}
    probed = optimizer_step_cost(ALONE, {0: ProbeResult(peak_bytes=70, output_bytes={})})
    assert probed.memory.peak_allocated_bytes == 70
    assert probed.memory.peak_op == "op3"


def test_a_step_in_the_place_of_another_has_its_own_states_and_temporaries() -> None:
    whole = with_optimizer_step(WINDOW, ALONE)
    memory = predict_memory(whole)
    # 10 of parameters and 20 of states; 30 in the forward, 45 in the step.
    assert memory.by_phase == {"forward": 60, "optimizer_step": 75}
    assert memory.by_category == {"parameters": 10, "optimizer_states": 20, "temporaries": 45}
    assert whole.flops == WINDOW.flops
    assert whole.notes == ("read", "a note")


def test_storages_and_signatures_do_not_collide() -> None:
    whole = with_optimizer_step(WINDOW, ALONE)
    made = [output.storage for event in whole.events if isinstance(event, Operation) for output in event.outputs]
    there = [resident.storage for resident in whole.residents]
    assert len({*made, *there}) == len(made) + len(there) == 5
    assert [event.signature for event in whole.events if isinstance(event, Operation)] == [0, 1, 2]
    # The maker of the argument was signature 0 of the step and is 1 of the whole.
    assert whole.signatures[2].args == ((TensorShape("float32", (5,), (1,), (1, 0)), 1.5),)
    assert whole.signatures[2].kwargs == {"out": TensorShape("f", (), (), None)}


def test_a_window_that_was_traced_without_a_step_gets_one() -> None:
    bare = replace(
        WINDOW,
        residents=WINDOW.residents[:1],
        events=tuple(event for event in WINDOW.events if event.phase != "optimizer_step"),
    )
    assert predict_memory(with_optimizer_step(bare, ALONE)) == predict_memory(with_optimizer_step(WINDOW, ALONE))
