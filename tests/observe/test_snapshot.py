"""Everything a training step may touch comes back in place. Run: ``pytest tests/validate/test_snapshot.py``."""

from __future__ import annotations

import array
import random
import tempfile
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit.observe.meter import AllocationMeter
from lightning_memfit.observe.snapshot import reachable_tensors, take_snapshot

Where = Literal["memory", "disk"]
EVERYWHERE = pytest.mark.parametrize("where", ["memory", "disk"])


class Bare(nn.Module):
    """A module that carries one value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@EVERYWHERE
def test_parameters_and_buffers_come_back_bit_for_bit_in_the_same_memory(where: Where) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.register_buffer("passing", torch.tensor([1.0, float("nan"), -0.0]), persistent=False)
    tensors = [*module.parameters(), *module.buffers()]
    before = [(tensor.data_ptr(), tensor.detach().clone().numpy().tobytes()) for tensor in tensors]
    with take_snapshot(module, tensors_in=where):
        for tensor in tensors:
            tensor.detach().fill_(7)
    assert [(tensor.data_ptr(), tensor.detach().numpy().tobytes()) for tensor in tensors] == before
    assert [*module.parameters(), *module.buffers()][0] is tensors[0]


@EVERYWHERE
def test_tied_and_overlapping_tensors_are_kept_once(where: Where) -> None:
    base = torch.arange(100.0)  # 400 bytes
    module = Bare([base, base[10:20], nn.Parameter(base)])
    with take_snapshot(module, tensors_in=where) as snapshot:
        assert snapshot.tensor_bytes == 400
        base.zero_()
    assert torch.equal(base, torch.arange(100.0))


def test_a_snapshot_that_keeps_tensors_nowhere_brings_back_everything_but_their_contents() -> None:
    module = Bare([1, 2])
    module.weight = nn.Parameter(torch.zeros(3))
    weight, before = module.weight, torch.get_rng_state()
    with take_snapshot(module, tensors_in="nowhere") as snapshot:
        assert snapshot.tensor_bytes == 0
        module.value.append(3)
        module.extra = "new"
        module.weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        weight.data.fill_(7)
        torch.rand(1)
    assert module.value == [1, 2] and not hasattr(module, "extra")
    assert module.weight is weight and weight.grad is None
    assert torch.equal(weight, torch.full((3,), 7.0))  # the contents were not kept
    assert torch.equal(torch.get_rng_state(), before)


def test_a_snapshot_on_disk_uses_no_bytes_of_the_allocator_and_its_file_goes_at_close() -> None:
    module = Bare(torch.ones(100_000))
    before = set(Path(tempfile.gettempdir()).glob("memfit-*"))
    with AllocationMeter(0) as meter:
        snapshot = take_snapshot(module, tensors_in="disk")
    (directory,) = set(Path(tempfile.gettempdir()).glob("memfit-*")) - before
    assert (directory / "tensors.bin").stat().st_size == snapshot.tensor_bytes == 400_000
    assert meter.peak_allocated_bytes <= 5056  # the state of torch's random generator
    snapshot.close()
    snapshot.close()
    assert not directory.exists()
    with pytest.raises(RuntimeError, match=r"closed.*Restore before close"):
        snapshot.restore()


def test_gradients_come_back_as_none_or_with_their_values() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = gradient = torch.full((2, 2), 3.0)
    with take_snapshot(module):
        module(torch.ones(1, 2)).sum().backward()
        assert module.bias.grad is not None
    assert module.bias.grad is None
    assert module.weight.grad is gradient
    assert torch.equal(gradient, torch.full((2, 2), 3.0))


def test_frozen_and_trained_parameters_stay_what_they_were() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    with take_snapshot(module):
        module.bias.requires_grad_(True)
        module.weight.requires_grad_(False)
    assert (module.weight.requires_grad, module.bias.requires_grad) == (True, False)


def test_a_tensor_that_was_pointed_at_other_memory_looks_at_its_own_again() -> None:
    module = nn.Linear(2, 3)
    address = module.weight.data_ptr()
    values = module.weight.detach().clone()
    with take_snapshot(module):
        module.weight.data = torch.zeros(5, 5)
    assert module.weight.data_ptr() == address
    assert torch.equal(module.weight, values)


def test_a_buffer_that_took_part_in_a_graph_is_a_leaf_again() -> None:
    module = Bare(torch.zeros(3))
    with take_snapshot(module):
        module.value.add_(torch.ones(3, requires_grad=True))
        assert not module.value.is_leaf
    assert module.value.is_leaf
    assert not module.value.requires_grad
    assert torch.equal(module.value, torch.zeros(3))


def test_a_storage_that_was_resized_has_its_size_and_contents_again() -> None:
    module = Bare(torch.arange(10.0))
    with take_snapshot(module):
        module.value.untyped_storage().resize_(0)
    assert torch.equal(module.value, torch.arange(10.0))


def test_sparse_tensors_come_back_also_with_another_number_of_entries() -> None:
    module = Bare(torch.eye(3).to_sparse())
    with take_snapshot(module):
        module.value.add_(torch.ones(3, 3).to_sparse())
    assert torch.equal(module.value.to_dense(), torch.eye(3))


def test_hooks_on_tensors_and_modules_are_taken_off_again() -> None:
    module = nn.Linear(2, 2)
    with take_snapshot(module):
        module.weight.register_hook(lambda gradient: gradient * 0)
        module.register_forward_hook(lambda *_: None)
        module.register_full_backward_hook(lambda *_: None)
    assert not module._forward_hooks
    assert not module._backward_hooks
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.abs().sum() > 0


def test_a_lazy_module_is_lazy_again() -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    with take_snapshot(module):
        module(torch.ones(1, 2))
        assert type(module[0]) is nn.Linear
    assert type(module[0]) is nn.LazyLinear
    assert nn.parameter.is_lazy(module[0].weight)
    assert module(torch.ones(1, 5)).shape == (1, 3)


class Slotted:
    __slots__ = ("__hidden", "empty", "filled")

    def __init__(self) -> None:
        self.filled = [1]
        self.__hidden = 2


@dataclass(frozen=True)
class Frozen:
    numbers: list[int] = field(default_factory=lambda: [1])


class NoisyDict(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("the subclass must not notice the restore")


def _change(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return call


CONTAINERS: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
    ("list", lambda: [1, [2]], lambda v: (v[1].append(3), v.insert(0, 9))),
    ("dict", lambda: {"a": 1, "b": {}}, lambda v: (v["b"].update(x=1), v.pop("a"), v.update(c=2))),
    ("ordered", lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    ("default", lambda: defaultdict(list, a=[1]), lambda v: (v["a"].append(2), v["new"])),
    ("counter", lambda: Counter("aab"), lambda v: v.update("bbb")),
    ("set", lambda: {1, 2}, lambda v: (v.add(3), v.discard(1))),
    ("deque", lambda: deque([1, 2, 3], maxlen=3), lambda v: v.append(4)),
    ("bytearray", lambda: bytearray(b"abc"), lambda v: v.extend(b"d")),
    ("array", lambda: array.array("d", [1.0, 2.0]), lambda v: v.append(3.0)),
    ("tuple of lists", lambda: ([1], {"k": [2]}), lambda v: (v[0].clear(), v[1]["k"].append(3))),
    ("slots", Slotted, lambda v: (v.filled.append(2), setattr(v, "empty", 1), setattr(v, "_Slotted__hidden", 5))),
    ("frozen dataclass", Frozen, lambda v: (v.numbers.append(2), object.__setattr__(v, "extra", 1))),
    ("noisy", lambda: NoisyDict(a=1), lambda v: dict.__setitem__(v, "a", 2)),
]


def _plain(value: Any) -> Any:
    """What a value consists of, worked out without the code under test."""
    if isinstance(value, Slotted):
        return [_plain(getattr(value, name, "empty")) for name in ("filled", "empty", "_Slotted__hidden")]
    if isinstance(value, Frozen):
        return _plain(vars(value))
    if isinstance(value, dict):
        return [(key, id(item), _plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque | set):
        return [(id(item), _plain(item)) for item in value]
    return repr(value)


@pytest.mark.parametrize(("make", "change"), [row[1:] for row in CONTAINERS], ids=[row[0] for row in CONTAINERS])
def test_containers_come_back_in_place(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    module = Bare(make())
    value, before = module.value, _plain(module.value)
    with take_snapshot(module):
        change(value)
        assert _plain(value) != before
        module.value = None
        module.added = 1
        del module.training
    assert module.value is value
    assert _plain(value) == before
    assert module.training is True
    assert not hasattr(module, "added")


def test_numpy_arrays_come_back_in_place() -> None:
    numbers, objects = np.arange(4), np.array([[1], None], dtype=object)
    module = Bare((numbers, objects))
    with take_snapshot(module):
        numbers[:] = 0
        objects[0].append(2)
        objects[1] = "x"
    assert numbers.tolist() == [0, 1, 2, 3]
    assert objects.tolist() == [[1], None]


def test_cycles_and_deep_graphs_are_walked_once() -> None:
    first: list[Any] = []
    first.append(first)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    module = Bare([first, deep])
    module.__dict__["itself"] = module
    with take_snapshot(module):
        first.append(1)
    assert len(first) == 1


def test_generators_of_random_numbers_go_on_where_they_were() -> None:
    own = [random.Random(1), np.random.default_rng(2), np.random.RandomState(3), torch.Generator().manual_seed(4)]
    module = Bare(own)

    def draw() -> list[float]:
        return [
            torch.rand(()).item(), float(np.random.rand()), random.random(),
            own[0].random(), own[1].random(), own[2].rand(), torch.rand((), generator=own[3]).item(),
        ]  # fmt: skip

    with take_snapshot(module):
        first = draw()
    assert draw() == first


def test_counters_of_hooks_in_closures_come_back() -> None:
    calls: list[int] = []
    total = 0

    def hook(*_: Any) -> None:
        nonlocal total
        total += 1
        calls.append(total)
        hook.calls += 1  # type: ignore[attr-defined]

    hook.calls = 0  # type: ignore[attr-defined]
    module = nn.Linear(1, 1)
    module.register_forward_hook(hook)
    with take_snapshot(module):
        module(torch.ones(1, 1))
        assert (total, calls, hook.calls) == (1, [1], 1)  # type: ignore[attr-defined]
    assert (total, calls, hook.calls) == (0, [], 0)  # type: ignore[attr-defined]


def test_a_fresh_optimizer_is_fresh_again_and_a_used_one_has_its_states() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    with take_snapshot(module, optimizers=[optimizer], schedulers=[scheduler]):
        step()
        optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    assert len(optimizer.state) == 0
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0

    step()
    state = optimizer.state[module.weight]
    before = {key: (id(value), value.clone()) for key, value in state.items()}
    with take_snapshot(module, optimizers=[optimizer], schedulers=[scheduler]):
        step()
    assert {key: id(value) for key, value in state.items()} == {key: kept[0] for key, kept in before.items()}
    assert all(torch.equal(state[key], kept[1]) for key, kept in before.items())
    assert scheduler.last_epoch == 1


def test_the_scale_of_the_gradient_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with take_snapshot(None, scaler=scaler):
        scaler.scale(torch.ones(()))
        scaler.update(2.0)
    assert scaler._scale is None
    assert scaler.get_scale() == 16.0


def test_metrics_of_torchmetrics_come_back() -> None:
    from torchmetrics import CatMetric, MeanMetric

    module = nn.ModuleDict({"mean": MeanMetric(), "cat": CatMetric()})
    module["mean"].update(1.0)
    module["cat"].update(torch.ones(2))
    with take_snapshot(module):
        module["mean"].update(5.0)
        module["cat"].update(torch.zeros(3))
        module["mean"].compute()
    assert module["mean"]._update_count == 1
    assert module["mean"]._computed is None
    assert module["mean"].compute() == 1.0
    assert module["cat"].compute().tolist() == [1.0, 1.0]


def test_data_files_locks_and_lightning_objects_are_left_alone(tmp_path: Path) -> None:
    from lightning.pytorch import Callback

    class Counting(Callback):
        calls = 0

    data = TensorDataset(torch.ones(1000))
    file = (tmp_path / "log.txt").open("w")
    module = Bare({"data": data, "loader": DataLoader(data), "file": file, "lock": threading.Lock(), "cb": Counting()})
    with take_snapshot(module) as snapshot:
        module.value["cb"].calls = 3
        file.write("kept")
        data.tensors[0].zero_()
        assert snapshot.tensor_bytes == 0
    file.close()
    assert (tmp_path / "log.txt").read_text() == "kept"
    assert module.value["cb"].calls == 3
    assert data.tensors[0].sum() == 0


def test_a_root_that_would_be_left_alone_is_looked_into_itself() -> None:
    from lightning.pytorch import Callback

    callback = Callback()
    callback.calls = []
    with take_snapshot(None, extra_roots=[callback]):
        callback.calls.append(1)
    assert callback.calls == []


@EVERYWHERE
def test_everything_comes_back_when_the_body_raises(where: Where) -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    with pytest.raises(KeyError, match="inside"), take_snapshot(module, tensors_in=where):
        module.weight.detach().zero_()
        raise KeyError("inside")
    assert torch.equal(module.weight, before)


def test_what_cannot_be_brought_back_is_reported_after_the_rest_was() -> None:
    numbers = np.arange(3)
    module = Bare([numbers, torch.ones(2)])
    snapshot = take_snapshot(module)
    numbers.dtype = np.float64  # the same memory, read as another type
    module.value[1].zero_()
    with pytest.raises(ExceptionGroup, match="could not be brought back"):
        snapshot.restore()
    assert torch.equal(module.value[1], torch.ones(2))


def test_reachable_tensors_finds_states_gradients_and_attributes_once() -> None:
    module = nn.Linear(2, 2)
    module.extra = {"mask": torch.ones(1)}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = reachable_tensors([module, optimizer, module])
    # Two parameters, their gradients, their momenta, one attribute.
    assert len({id(tensor) for tensor in found}) == len(found) == 7
