"""Allocations, frees, modules and FLOPs, worked out by hand. Run: ``pytest tests/trace/test_tracer.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memfit.applied_in_a_trace import checkpointed
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.timeline import Free, Operation, Timeline
from lightning_memfit.trace.tracer import StepTracer
from lightning_memfit.trace.training_step import program_of, trace_window

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


def traced(module: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None, **options: Any) -> Timeline:
    program = program_of(module, loss=loss or (lambda m, b: m(b).sum()), optimizer=options.pop("optimizer", SGD))
    return trace_window(program, batch, **options)


def operations(timeline: Timeline, op: str, phase: str | None = None) -> list[Operation]:
    return [
        event
        for event in timeline.events
        if isinstance(event, Operation) and event.op == op and phase in (None, event.phase)
    ]


def test_a_linear_layer_under_sgd_with_momentum_is_followed_byte_by_byte() -> None:
    # weight (3, 5) float32 = 60 B, bias (3,) = 12 B, batch (2, 5) = 40 B, output (2, 3) = 24 B, loss 4 B.
    timeline = traced(nn.Linear(5, 3), torch.zeros(2, 5))
    sizes: Counter[str] = Counter()
    for resident in timeline.residents:
        sizes[resident.category] += resident.allocated_bytes
    assert sizes == {"parameters": 72, "gradients": 72, "optimizer_states": 72, "inputs": 40}
    assert timeline.resident_bytes == 256
    assert timeline.num_parameters == 18
    # Forward: 256 + output 24 + loss 4. Lightning divides the loss and keeps a copy of it. The engine is given a one.
    # Backward: the old gradients (72) are gone; output (24) died with the sum, the loss (4) with its division; left are
    # the divided loss 4, its copy 4, the one 4, and the one divided 4.
    # At the peak, output and loss are temporaries: neither outlives the forward.
    # addmm's backward: weight gradient 60, bias gradient 12 (as 1 x 3), nothing of the input: 256 - 72 + 16 + 72.
    memory = predict_memory(timeline)
    assert memory.by_phase["forward"] == 256 + 24 + 4
    assert memory.by_phase["backward"] == 256 - 72 + 16 + 72
    # SGD: momentum buffer times 0.9 plus gradient in place; the parameter plus -lr x buffer in place: nothing new.
    assert memory.by_phase["optimizer_step"] <= 256
    assert (memory.peak_allocated_bytes, memory.peak_phase) == (284, "forward")
    assert memory.by_category == {
        "parameters": 72, "gradients": 72, "optimizer_states": 72, "inputs": 40, "temporaries": 28,
    }  # fmt: skip


def test_new_gradients_are_gradients_and_what_the_forward_saves_is_activations() -> None:
    # tanh saves its output: (2, 3) float32 = 24 B is alive after the forward, the linear's own output is not.
    timeline = traced(nn.Sequential(nn.Linear(5, 3), nn.Tanh()), torch.zeros(2, 5))
    (tanh,) = operations(timeline, "aten.tanh.default")
    (linear,) = operations(timeline, "aten.addmm.default")
    assert timeline.categories[tanh.outputs[0].storage] == "activations"
    assert timeline.categories[linear.outputs[0].storage] == "temporaries"
    freed_in = {event.storage: event.phase for event in timeline.events if isinstance(event, Free)}
    assert freed_in[linear.outputs[0].storage] == "forward"
    assert freed_in[tanh.outputs[0].storage] == "backward"
    new = {out.allocated_bytes for e in timeline.events if isinstance(e, Operation) for out in e.outputs
           if timeline.categories[out.storage] == "gradients"}  # fmt: skip
    assert new == {60, 12}
    assert not [storage for storage, category in timeline.categories.items() if category == "gradients" and
                storage in freed_in]  # fmt: skip


def test_every_storage_is_freed_at_most_once_and_only_after_it_was_there() -> None:
    timeline = traced(nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5)), torch.zeros(2, 5))
    alive = {resident.storage for resident in timeline.residents}
    for event in timeline.events:
        if isinstance(event, Free):
            alive.remove(event.storage)
        else:
            for output in event.outputs:
                assert output.storage not in alive
                alive.add(output.storage)
    # What is left: parameters, new gradients, states, the batch.
    kinds = Counter(timeline.categories.get(storage, "resident") for storage in alive)
    assert kinds == {"resident": 4 + 4 + 1, "gradients": 4}


def test_views_allocate_nothing_and_are_not_probed() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        hidden = module(batch)
        parts = hidden.view(2, 2, 2).transpose(0, 1)[:, :1].unsqueeze(0).expand(3, 2, 1, 2).split(1)
        return parts[0].sum()

    timeline = traced(nn.Linear(5, 4), torch.zeros(2, 5), loss)
    forward = [event.op for event in timeline.events if isinstance(event, Operation) and event.phase == "forward"]
    # The last two are the loss as Lightning divides and copies it.
    assert forward == ["aten.addmm.default", "aten.sum.default", "aten.div.Tensor", "aten.clone.default"]
    assert not {s.op for s in timeline.signatures} & {"aten.view.default", "aten.expand.default", "aten.t.default"}


def test_equal_calls_share_one_signature() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    timeline = traced(module, torch.zeros(2, 4))
    calls = operations(timeline, "aten.addmm.default")
    assert len(calls) == 5
    assert len({call.signature for call in calls}) == 1


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("recomputed", [False, True])
def test_operators_carry_the_module_of_their_forward(recomputed: bool) -> None:
    module = Nest()
    with checkpointed(module, ("blocks.0", "blocks.1") if recomputed else ()):
        timeline = traced(module, torch.zeros(4, 8))
    forward = [call.module for call in operations(timeline, "aten.addmm.default", "forward")]
    assert forward == ["first", "blocks.0.0", "blocks.1.0"]
    again = [call.module for call in operations(timeline, "aten.addmm.default", "backward")]
    assert again == (["blocks.1.0", "blocks.0.0"] if recomputed else [])
    tanh = [call.module for call in operations(timeline, "aten.tanh_backward.default")]
    assert tanh == ["blocks.1.1", "blocks.0.1"]
    products = [call.module for call in operations(timeline, "aten.mm.default", "backward")]
    assert set(products) == {"first", "blocks.0.0", "blocks.1.0"}


def test_what_is_recomputed_in_the_backward_is_activations() -> None:
    module = Nest()
    with checkpointed(module, ("blocks.0", "blocks.1")):
        timeline = traced(module, torch.zeros(4, 8))
    (last, first) = operations(timeline, "aten.tanh.default", "backward")
    assert timeline.categories[last.outputs[0].storage] == "activations"
    assert timeline.categories[first.outputs[0].storage] == "activations"


def test_flops_of_a_linear_layer() -> None:
    # (4, 8) x (8, 16): 2 x 4 x 8 x 16 = 1024. Backward: the weight's gradient as many; the input needs none.
    assert traced(nn.Linear(8, 16), torch.zeros(4, 8)).flops == 1024 + 1024


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention(causal: bool) -> None:
    # Per (batch, head) of 2 x 4: two products of 2 x 6 x 6 x 8 = 576 forward; five of them backward.
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.zeros(2, 4, 6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.query, x, x, is_causal=causal)

    assert traced(Attend(), torch.zeros(2, 4, 6, 8)).flops == 2 * 4 * 576 * (2 + 5)


def test_checkpointed_blocks_are_counted_as_recomputed() -> None:
    # Products of 2 x 4 x 8 x 8 = 512. Forward 3, recomputed 2, backward: weights 3, inputs 2 (not the batch).
    module = Nest()
    with checkpointed(module, ("blocks.0", "blocks.1")):
        timeline = traced(module, torch.zeros(4, 8))
    assert (timeline.flops, timeline.recomputed_flops) == (512 * (3 + 2 + 5), 512 * 2)
    plain = traced(module, torch.zeros(4, 8))
    assert (plain.flops, plain.recomputed_flops) == (512 * 8, 0)


@pytest.mark.parametrize(("sizes", "micro_steps"), [((6, 5, 5), 3), ((6, 5, 5), 6), ((4, 4, 4, 4), 4), ((16,), 3)])
def test_flops_of_a_window_are_those_of_all_its_samples(sizes: tuple[int, ...], micro_steps: int) -> None:
    # Per sample 2 x 8 x 8 = 128 forward and as many for the weight.
    batches = micro_steps // len(sizes)
    timeline = traced(
        nn.Linear(8, 8), torch.zeros(16, 8), divide=lambda batch: list(batch.split(sizes)), micro_steps=micro_steps
    )
    assert timeline.flops == 256 * 16 * batches


def test_gradients_are_added_in_place_where_the_engine_owns_the_buffer() -> None:
    # x is used three times: the engine adds the second and third gradient into the first's buffer.
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        hidden = module(batch)
        return (hidden.sin() + hidden.cos() + hidden.tanh()).sum()

    timeline = traced(nn.Linear(5, 64), torch.zeros(2, 5), loss)
    adds = [op for op in operations(timeline, "aten.add.Tensor", "backward") if op.accumulates_into is not None]
    assert len(adds) == 2
    for add in adds:
        position = timeline.events.index(add)
        assert any(
            isinstance(event, Free) and event.storage == add.accumulates_into
            for event in timeline.events[position + 1 : position + 3]
        )


def test_the_random_state_kept_for_recomputing_is_an_allocation() -> None:
    module = Nest()
    with checkpointed(module, ("blocks.0", "blocks.1")):
        timeline = traced(module, torch.zeros(4, 8))
    operators = [event for event in timeline.events if isinstance(event, Operation) and event.phase == "forward"]
    states = [output.allocated_bytes for operator in operators for output in operator.outputs]
    assert states.count(torch.get_rng_state().numel()) == 2


def test_without_signatures_the_allocations_are_the_same() -> None:
    module, batch = Nest(), torch.zeros(4, 8)
    with_them, without = traced(module, batch), traced(module, batch, collect_signatures=False)
    assert with_them.signatures and not without.signatures
    assert predict_memory(with_them) == predict_memory(without)


def test_hooks_are_removed_when_the_forward_raises() -> None:
    from torch.nn.modules import module as torch_modules

    before = len(torch_modules._global_forward_hooks), len(torch_modules._global_forward_pre_hooks)
    tracer = StepTracer({})
    with pytest.raises(KeyError), tracer.following_modules():
        raise KeyError
    assert (len(torch_modules._global_forward_hooks), len(torch_modules._global_forward_pre_hooks)) == before


def test_a_failing_module_does_not_shift_the_names_of_those_that_follow() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    timeline = traced(Tries(), torch.zeros(4, 8))
    (call,) = operations(timeline, "aten.addmm.default", "forward")
    assert call.module == "good"


@pytest.mark.parametrize(
    "name",
    ["torch._C._current_graph_task_id", "torch._C._current_autograd_node", "torch._C._autograd._get_sequence_nr",
     "torch.UntypedStorage._cdata", "torch.Tensor._is_view"],
)  # fmt: skip
def test_torch_still_has_the_private_names_that_the_tracer_uses(name: str) -> None:
    found: Any = torch
    for part in name.split(".")[1:]:
        assert hasattr(found, part), f"torch {torch.__version__} has no {name}: trace/tracer.py must be changed"
        found = getattr(found, part)


def test_storages_can_be_followed_by_weak_references_and_keep_their_address() -> None:
    tracer = StepTracer({})
    with new_fake_mode(), tracer:
        kept = torch.zeros(4)
        torch.zeros(8)
    first, second = (event for event in tracer.events if isinstance(event, Operation))
    (free,) = (event for event in tracer.events if isinstance(event, Free))
    assert (first.outputs[0].allocated_bytes, second.outputs[0].allocated_bytes) == (16, 32)
    assert free.storage == second.outputs[0].storage
    assert kept.numel() == 4
