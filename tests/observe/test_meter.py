"""The meter against programs whose peak is worked out by hand. Run: ``pytest tests/validate/test_meter.py``."""

from __future__ import annotations

import _thread
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.observe.meter import AllocationMeter, MemoryEvent, _read, peak_of, storage_bytes
from lightning_memfit.sharded_model import fully_shard
from lightning_memfit.trace.fake_ranks import fake_ranks

KIB = 1024


def _event(time_ns: int, address: int, num_bytes: int) -> MemoryEvent:
    return MemoryEvent(time_ns=time_ns, address=address, num_bytes=num_bytes)


def test_a_block_freed_and_taken_again_at_one_time_is_not_counted_twice() -> None:
    events = [_event(5, 1, 100), _event(7, 1, -100), _event(7, 1, 100), _event(7, 2, 1)]
    assert peak_of(events) == 101


def test_events_are_put_in_the_order_of_their_times() -> None:
    # Alive together: 10 and 20 from time 1 on; 5 comes after the 20 is gone.
    events = [_event(3, 3, 5), _event(2, 2, -20), _event(0, 1, 10), _event(1, 2, 20)]
    assert peak_of(events) == 30


def test_the_free_of_a_block_that_was_not_allocated_here_is_not_counted() -> None:
    assert peak_of([_event(0, 9, -1000), _event(1, 1, 10)]) == 10


def test_storages_are_counted_once_whatever_looks_at_them() -> None:
    base = torch.zeros(100)  # 400 bytes
    tied = torch.nn.Parameter(base)
    sparse = torch.eye(3).to_sparse()  # indices 2 x 3 x 8 = 48 bytes, values 3 x 4 = 12 bytes
    assert storage_bytes([base, base[10:20], tied, tied.detach(), sparse, torch.empty(9, device="meta")]) == 460


def test_of_a_tensor_over_several_ranks_the_own_part_counts() -> None:
    with fake_ranks(4) as mesh:
        layer = fully_shard(torch.nn.Linear(8, 6, bias=False), mesh=mesh)
        # 6 rows of 8 numbers over 4 ranks: 2 rows on the first. DTensor's own storage says 6 x 8 x 4 bytes.
        assert layer.weight.untyped_storage().nbytes() == 6 * 8 * 4
        assert storage_bytes([layer.weight]) == 2 * 8 * 4


def test_a_chain_of_matrix_products_peaks_at_two_results() -> None:
    # 64 x 64 float32 = 16 KiB. Alive together: the resident input, the last result and the one being computed.
    start = torch.ones(64, 64)
    with AllocationMeter(storage_bytes([start])) as meter:
        result = start @ start
        for _ in range(3):
            result = result @ start
    assert meter.peak_allocated_bytes == 3 * 16 * KIB


def test_the_training_step_of_a_linear_layer_with_adamw_is_exact() -> None:
    # W: 32 x 16 float32 = 2048 B, no bias. x: 8 x 16 = 512 B.
    layer = torch.nn.Linear(16, 32, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    inputs = torch.ones(8, 16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        layer(inputs).sum().backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    resident = storage_bytes([*layer.parameters(), *states, inputs])
    assert resident == 2048 + 512 + 2 * 2048 + 4  # the step counter of AdamW is a float32 scalar
    with AllocationMeter(resident) as meter:
        step()
    # In the optimizer's step: the gradient (2048), and at most two temporaries of the weight's size (the square root
    # of the second moment and its quotient), with the quotient's Python number wrapped as a float64 scalar (8 B) that
    # the kernel casts to float32 (4 B). Forward and backward hold less: 8 x 32 x 4 = 1024 B of outputs.
    assert meter.peak_allocated_bytes == resident + 2048 + 2 * 2048 + 12


def test_bytes_inside_one_operator_are_seen() -> None:
    # The gates of an LSTM live inside the operator: none of its outputs holds them.
    lstm = torch.nn.LSTM(8, 8)
    inputs = torch.ones(16, 4, 8)
    with torch.no_grad(), AllocationMeter(0) as meter:
        output, state = lstm(inputs)
    outputs = storage_bytes([output, *state])
    assert meter.peak_allocated_bytes > outputs


def _recorded(name: str, nanoseconds: int, *children: Any, kind: str = "TorchOp") -> Any:
    return SimpleNamespace(name=name, tag=SimpleNamespace(name=kind), duration_time_ns=nanoseconds, children=children)


def test_the_costliest_operators_are_the_five_with_the_most_time_in_themselves() -> None:
    # An annotation and a graph node are no operators, however long they take; a caller does not pay for its callee.
    product = _recorded("aten::mm", 900)
    tree = [
        _recorded("Optimizer.step#AdamW.step", 10_000, _recorded("aten::matmul", 1000, product)),
        _recorded("autograd::engine::evaluate_function: MmBackward0", 9000, product),
        *(_recorded(f"aten::op{index}", 10 * index) for index in range(11, 15)),
    ]
    _, costliest = _read(tree)
    assert [(cost.name, round(cost.self_seconds * 1e9), cost.calls) for cost in costliest] == [
        ("aten::mm", 1800, 2),
        ("aten::op14", 140, 1),
        ("aten::op13", 130, 1),
        ("aten::op12", 120, 1),
        ("aten::op11", 110, 1),
    ]


def test_a_real_recording_names_operators() -> None:
    with AllocationMeter(0) as meter:
        torch.relu(torch.ones(8, 8)).softmax(0).sum().exp().log()
    assert len(meter.costliest_ops) == 5
    assert all(cost.name.startswith("aten::") and cost.self_seconds > 0 for cost in meter.costliest_ops)


def test_the_resident_set_is_sampled_and_the_thread_ends() -> None:
    with AllocationMeter(0) as meter:
        block = torch.ones(8 * KIB * KIB)  # 32 MiB
        block.add_(1)
    assert meter.peak_rss_bytes is not None
    assert meter.peak_rss_bytes > 32 * KIB * KIB
    assert meter._rss._ended.is_set()


@pytest.mark.parametrize("how", ["no stack", "no first frame"])
def test_a_thread_for_which_there_is_no_memory_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def start(*_: Any) -> None:
        if how == "no stack":
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    with AllocationMeter(0) as meter:
        torch.ones(8)
    assert meter.peak_rss_bytes is not None
    assert meter.peak_rss_bytes > 32 * KIB * KIB


def test_a_second_measurement_does_not_see_blocks_of_the_first() -> None:
    # A block of the first recording is freed outside, its address is taken again outside and freed in the second.
    # torch's table of sizes still has it, and would report a free of the old size.
    with AllocationMeter(0):
        block = torch.ones(500_000)
    address = block.data_ptr()
    del block
    again = [torch.ones(499_000) for _ in range(2)]
    assert address  # where the address is not taken again the assertion below holds trivially
    with AllocationMeter(0) as meter:
        again.clear()
        small = torch.ones(10)
    assert meter.peak_allocated_bytes == small.untyped_storage().nbytes()


def test_nothing_reaches_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    old = torch.ones(1000)
    with AllocationMeter(0):
        del old  # "Memory block of unknown size was allocated before the profiling started"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_the_log_level_of_torch_is_put_back_also_after_an_error() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before = flag.value
    with pytest.raises(ValueError, match="inside"), AllocationMeter(0):
        assert flag.value == 2
        raise ValueError("inside")
    assert flag.value == before
    assert not torch.autograd._profiler_enabled()


def test_a_profiler_that_is_recording_already_is_refused_with_a_way_out() -> None:
    with (
        torch.autograd.profiler.profile(),
        pytest.raises(UnsupportedError, match=r"one at a time.*Trainer\(profiler=\.\.\.\).*MEMFIT=off"),
        AllocationMeter(0),
    ):
        pass


def test_the_names_of_torch_that_the_adapter_touches_exist() -> None:
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler", "_profiler_enabled"):
        assert hasattr(torch._C._autograd, name), (
            f"torch._C._autograd.{name} is gone: lightning_memfit.observe.meter needs it"
        )
    with AllocationMeter(0) as meter:
        torch.ones(3)
    assert meter.peak_allocated_bytes == 12, "the profiler's event tree no longer carries Allocation records"
