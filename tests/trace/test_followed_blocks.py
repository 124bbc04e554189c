"""Which calls could be recomputed, and with what. Run: ``pytest tests/trace/test_followed_blocks.py``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.trace.followed_blocks import FollowedBlocks
from lightning_memfit.trace.recording import record_window
from lightning_memfit.trace.saved_tensors import SavedTensorTracer
from lightning_memfit.trace.step_program import program_of
from lightning_memfit.trace.step_record import StepRecord
from lightning_memfit.trace.timeline import Operation


class Block(nn.Module):
    """Takes a tensor by name; counts its calls in a buffer."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))
        if counts:
            self.register_buffer("calls", torch.zeros(3))

    def forward(self, hidden: Tensor, *, scale: Tensor | None = None, cache: Any = None) -> Tensor:
        if hasattr(self, "calls"):
            self.calls += 1
        hidden = self.inner(hidden) * self.table
        return hidden if scale is None else hidden * scale


def recorded(module: nn.Module, forward: Any, *names: str, slices: int = 1) -> StepRecord:
    program = program_of(module, loss=lambda m, x: forward(m, x).sum(), optimizer=torch.optim.SGD)
    return record_window(
        program, torch.zeros(4, 8), slices_of=lambda batch: [batch] * slices, samples=(4,) * slices, blocks=names,
        collect_signatures=False,
    )  # fmt: skip


def test_a_call_is_noted_with_its_events_and_all_tensors_it_was_given() -> None:
    module = nn.ModuleList([Block(), Block()])

    def forward(m: Any, x: Tensor) -> Tensor:
        scale = x.mean()
        return m[1](m[0](x, scale=scale), scale=scale)

    record = recorded(module, forward, "0", "1")
    made = {e.op: e.outputs[0].storage for e in record.events if isinstance(e, Operation) and e.outputs}
    first, second = record.blocks
    assert (first.module, second.module) == ("0", "1")
    assert 0 < first.first_event < first.end_event <= second.first_event < second.end_event
    assert made["aten.mean.default"] in first.inputs and made["aten.mean.default"] in second.inputs
    assert len(first.inputs) == len(second.inputs) == 2
    inside = [e for e in record.events[first.first_event : first.end_event] if isinstance(e, Operation)]
    assert {e.module for e in inside} == {"0", "0.inner"}


def test_every_call_of_a_shared_block_is_noted_and_of_each_slice() -> None:
    record = recorded(Block(), lambda m, x: m.inner(m.inner(x)), "inner", slices=2)
    assert [(call.module, call.micro_step) for call in record.blocks] == [("inner", 0)] * 2 + [("inner", 1)] * 2


def test_buffers_that_a_block_changes_are_found_and_all_are_copied_the_first_time() -> None:
    record = recorded(nn.Sequential(Block(counts=True)), lambda m, x: m(x), "0", slices=2)
    first, second = record.blocks
    assert [(copy.allocated_bytes, copy.changes) for copy in first.buffers] == [(32, False), (12, True)]
    assert [(copy.allocated_bytes, copy.changes) for copy in second.buffers] == [(12, True)]


def test_running_statistics_change_although_fakes_do_not_say_so() -> None:
    record = recorded(nn.Sequential(nn.BatchNorm1d(8)), lambda m, x: m(x), "0", slices=2)
    assert [[copy.allocated_bytes for copy in call.buffers if copy.changes] for call in record.blocks] == [
        [32, 32, 8]
    ] * 2


class Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def test_a_cache_is_noted_and_an_empty_one_not_handed_on_where_blocks_are_recomputed() -> None:
    given = []

    class Cached(Block):
        def forward(self, hidden: Tensor, *, scale: Tensor | None = None, cache: Any = None) -> Tensor:
            given.append(cache)
            return super().forward(hidden)

    for length, without, noted, handed_on in (
        (0, False, True, True), (0, True, False, False), (3, False, True, True), (3, True, True, True),
    ):  # fmt: skip
        module, cache = nn.Sequential(Cached()), Cache(length)
        program = program_of(
            module,
            loss=lambda m, x, cache=cache: m[0](x, cache=cache).sum(),  # type: ignore[misc]
            optimizer=torch.optim.SGD,
        )
        record = record_window(program, torch.zeros(4, 8), samples=(4,), blocks=("0",), without_caches=without)
        assert record.blocks[0].has_cache is noted
        assert (given[-1] is cache) is handed_on


def test_calls_without_gradients_are_no_calls() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = m[0](x)
        return m[1](x)

    record = recorded(nn.ModuleList([Block(), Block()]), forward, "0", "1")
    assert [call.module for call in record.blocks] == ["1"]
    frozen = nn.ModuleList([Block().requires_grad_(False), Block()])
    assert [call.module for call in recorded(frozen, lambda m, x: m[1](m[0](x)), "0", "1").blocks] == ["1"]


def test_forwards_are_put_back_also_when_the_body_raises() -> None:
    module = nn.Sequential(Block(), Block())
    own = module[1].forward
    module[1].__dict__["forward"] = own
    followed = FollowedBlocks(SavedTensorTracer({}), module, ("0", "1"))
    with pytest.raises(KeyError), followed.following():
        assert "forward" in vars(module[0])
        assert list(inspect.signature(module[0].forward).parameters) == ["hidden", "scale", "cache"]
        raise KeyError
    assert "forward" not in vars(module[0])
    assert vars(module[1])["forward"] is own
