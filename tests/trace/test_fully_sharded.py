"""A module sharded on fakes for a trace: torch's names are there, the step is what it says, and nothing is left."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives

from lightning_memfit.errors import ConfigurationError, TraceError
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.sharded_model import fully_shard, is_sharded
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.fake_module import FakeTensors, new_fake_mode
from lightning_memfit.trace.fake_ranks import fake_ranks
from lightning_memfit.trace.step_program import StepProgram, program_of
from lightning_memfit.trace.timeline import Operation, Timeline
from lightning_memfit.trace.training_step import trace_window
from lightning_memfit.trace.whole_module import whole_module

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OVER_FOUR = Sharding(engine="fsdp2", ranks=4, synchronisation="slice", shard_groups=("0", "1", ""))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), nn.Linear(8, 3))


def step(module: nn.Module) -> StepProgram:
    return program_of(module, loss=lambda network, x: network(x).square().mean(), optimizer=SGD)


def trace(module: nn.Module, sharding: Sharding | None = OVER_FOUR, **more: Any) -> Timeline:
    return trace_window(step(module), torch.zeros(2, 8), sharding=sharding, **more)


def state_of(module: nn.Module) -> list[Any]:
    return [(type(part), dict(vars(part)), dict(part._parameters)) for part in module.modules()]


def test_fake_ranks_are_a_process_group_for_as_long_as_they_are_needed() -> None:
    assert not dist.is_initialized()
    with fake_ranks(70) as mesh:
        assert (dist.get_rank(), dist.get_world_size(), mesh.size()) == (0, 70, 70)
        dist.all_reduce(torch.ones(2))  # returns, with nobody there
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_ranks(2):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_a_real_process_group_is_what_it_was_after_the_fake_ones() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        real = dist.group.WORLD
        with fake_ranks(8):
            assert dist.get_world_size() == 8
        assert dist.group.WORLD is real and dist.get_world_size() == 1
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
        assert _functional_collectives.all_reduce(total, "sum", real).wait().item() == 1
    finally:
        dist.destroy_process_group()


def test_the_module_is_as_it_was_and_nothing_is_gathered_twice() -> None:
    module = blocks()
    before = state_of(module)
    operators = [event.op for event in trace(module).events if isinstance(event, Operation)]
    # Three groups in the forward; in the backward the two blocks again, while the root kept its parameters.
    assert operators.count("fsdp.all_gather_copy_in.default") == 3 + 2
    assert operators.count("fsdp.chunk_cat.default") == 3
    assert state_of(module) == before and not any(is_sharded(part) for part in module.modules())


def test_the_module_is_as_it_was_after_an_error() -> None:
    module = blocks()
    before = state_of(module)

    def fails(network: nn.Module, x: Tensor) -> Tensor:
        raise ZeroDivisionError("in the user's code")

    with pytest.raises(TraceError, match="ZeroDivisionError: in the user's code"):
        trace_window(program_of(module, loss=fails, optimizer=SGD), torch.zeros(2, 8), sharding=OVER_FOUR)
    assert state_of(module) == before and not dist.is_initialized()
    assert not hasattr(torch.UntypedStorage.resize_, "__code__")  # torch's own, not written in Python
    assert predict_memory(trace(module)).peak_allocated_bytes  # and can be traced again


def test_a_rank_holds_its_share_and_what_is_gathered_is_communication() -> None:
    timeline = trace(blocks(), collect_signatures=False)
    held = {
        name: sum(r.allocated_bytes for r in timeline.residents if r.category == name)
        for name in ("parameters", "gradients", "optimizer_states")
    }
    # 8 x 8 + 8 in a block, over 4 ranks 2 x 8 + 2 of 4 bytes; 3 x 8 + 3 in the root, 1 x 8 + 1 on the first rank.
    assert held == dict.fromkeys(held, 4 * (2 * (2 * 8 + 2) + 1 * 8 + 1))
    assert [layout.size for layout in timeline.parameters] == [(2, 8), (2,), (2, 8), (2,), (1, 8), (1,)]
    gathered_into = [
        output.allocated_bytes
        for event in timeline.events
        if isinstance(event, Operation) and event.op == "aten.empty.memory_format" and event.phase == "forward"
        for output in event.outputs
        if timeline.categories[output.storage] == "communication"
    ]
    # A buffer and two copies out of it for each group: 72 numbers in a block, 4 rows of 8 and of 1 in the root.
    assert sum(gathered_into) == 4 * 2 * (2 * 72 + 4 * 9)
    peak = predict_memory(timeline)
    assert set(peak.by_category) <= {
        "parameters", "gradients", "optimizer_states", "inputs", "activations", "temporaries", "communication",
    }  # fmt: skip


def test_the_optimizer_steps_shares_and_no_whole_tensors_that_torch_finds_shapes_with() -> None:
    module = nn.Sequential(nn.Linear(41, 29), nn.Tanh(), nn.Linear(29, 3))  # of shapes that no other test has
    over = Sharding(engine="fsdp2", ranks=7, shard_groups=("",))
    timeline = trace_window(step(module), torch.zeros(2, 41), sharding=over)
    sizes = [
        output.allocated_bytes
        for event in timeline.events
        if isinstance(event, Operation) and event.phase == "optimizer_step"
        for output in event.outputs
    ]
    assert max(sizes, default=0) <= 5 * 41 * 4  # 29 rows over 7 ranks: 5


def test_shares_are_whole_rows() -> None:
    def share(ranks: int) -> int:
        over = Sharding(engine="fsdp2", ranks=ranks, shard_groups=("0", "1", ""))
        return sum(r.allocated_bytes for r in trace(blocks(), over).residents if r.category == "parameters")

    # Of 8 + 8 + 3 rows of 9 numbers: 4 + 4 + 2 over two ranks, and one of each over eight or nine.
    assert (share(2), share(8), share(9)) == (4 * 9 * 10, 4 * 9 * 3, 4 * 9 * 3)


def test_groups_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"shard groups: 'blocks.7' is none of the 8 modules of Sequential"):
        trace(blocks(), Sharding(engine="fsdp2", ranks=2, shard_groups=("blocks.7", "")))
    with pytest.raises(ConfigurationError, match="shard groups: there is none"):
        trace(blocks(), Sharding(engine="fsdp2", ranks=2))


def test_a_module_that_is_sharded_already_is_whole_for_a_trace_and_sharded_again() -> None:
    with fake_ranks(2) as mesh:
        module = fully_shard(blocks(), mesh=mesh, groups=("0", "1"))
        module.training_step = None  # type: ignore[assignment]  # something of the user's own beside torch's
        before, classes = dict(vars(module)), [type(part) for part in module.modules()]
        fakes = FakeTensors(new_fake_mode())
        assert [tuple(fakes.of(p).shape) for p in module.parameters()] == [(8, 8), (8,), (8, 8), (8,), (3, 8), (3,)]
        whole = trace(module, None)
        assert [layout.size for layout in whole.parameters] == [(8, 8), (8,), (8, 8), (8,), (3, 8), (3,)]
        again = predict_memory(trace(module))
        assert vars(module) == before and [type(part) for part in module.modules()] == classes
        with whole_module(nn.Linear(1, 1)) as nothing:
            assert nothing is None
        with whole_module(module) as methods:
            assert methods is not None and set(methods) == {module, module[0], module[1]}
            assert not any(is_sharded(part) for part in module.modules())
        assert [type(part) for part in module.modules()] == classes
    assert again == predict_memory(trace(blocks()))
    assert predict_memory(whole) == predict_memory(trace(blocks(), None))
