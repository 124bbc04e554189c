"""The dispatch mode that follows storages: every allocation and free of whatever runs inside it.

Adapter for private names of torch: ``torch._C._current_graph_task_id``, ``torch._C._current_autograd_node``,
``torch._C._autograd._get_sequence_nr``, ``UntypedStorage._cdata``, ``Tensor._is_view`` and ``FakeTensor.fake_device``.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memfit.plan import Category, Phase
from lightning_memfit.trace.collectives import Collectives
from lightning_memfit.trace.cpu_rules import CpuRules, ResultsInPlace
from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.known_values import KnownValues, constant_of
from lightning_memfit.trace.operator_work import flops_of, inner_calls_of
from lightning_memfit.trace.tensors import held_part, tensors_in
from lightning_memfit.trace.timeline import (
    Event,
    Free,
    ModuleCall,
    Operation,
    Output,
    Resident,
    Signature,
    TensorShape,
)
from lightning_memfit.trace.whole_module import RegisteredMethods

_aten = torch.ops.aten
_ADD = _aten.add.Tensor
_DEVICE = torch.ops.prim.device.default
_READ_SCALAR = _aten._local_scalar_dense.default
_LATE_STEP = 1000
_LAST_SEQUENCE_NUMBER = 2**63
_NOT_COMPUTING = ("prim", "profiler")  # a fake's ``.device`` is an operator of its own
_EXCHANGING = ("c10d", "_c10d_functional")  # a rank alone cannot probe them

# Operators whose outputs share the storage of an input on every backend: they can hide no temporaries.
_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.diagonal.default,
        _aten.expand.default,
        _aten.lift_fresh.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unfold.default,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten.view.dtype,
        _aten._unsafe_view.default,
    }
)


class StepTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record what is allocated and freed, by storage lifetime, while the mode is active.

    Storages are followed by weak references, so that a free is seen when the last tensor on it dies.

    Args:
        names: qualified name of each module, by ``id``.
        collect_signatures: keep the distinct operator calls, so that they can be probed.
        rules: how the device computes that the fakes stand for; the CPU by default.
    """

    def __init__(
        self, names: Mapping[int, str], *, collect_signatures: bool = True, rules: DeviceRules | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rules: DeviceRules = CpuRules() if rules is None else rules
        self.phase: Phase = "forward"
        self.micro_step = 0
        self.calls: list[ModuleCall] = []
        self.events: list[Event] = []
        self.residents: list[Resident] = []
        self.categories: dict[int, Category] = {}
        self.gradient_of: dict[int, int] = {}
        self.signatures: list[Signature] = []
        self.num_operations = 0
        self.flops = 0
        self.recomputed_flops = 0
        self.scalars_read = 0
        self.known = KnownValues()
        self.collectives: Collectives | None = None
        self.registered_methods: RegisteredMethods | None = None
        self._in_place = ResultsInPlace()
        self._collect_signatures = collect_signatures
        self._names = names
        self._module_stack: list[str] = []
        self._module_starts: tuple[list[int], list[str | None]] = ([], [])
        self._alive: dict[int, tuple[weakref.ref[Any], int, tuple[int, int] | None]] = {}
        self._on_host: dict[int, weakref.ref[Any]] = {}
        self._next_storage = 0
        self._views = 0
        self._signature_ids: dict[Any, int] = {}
        self._following = True
        self._recording = True

    # Storages

    def add_residents(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Register the storages of ``tensors`` as there before the step, each storage once."""
        for tensor in map(held_part, tensors):
            number = self._follow(tensor, None)
            if number is not None:
                self.residents.append(Resident(number, tensor.untyped_storage().nbytes(), category))

    def categorise(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what the storages of ``tensors`` hold, if the step allocated them."""
        for tensor in map(held_part, tensors):
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry[1] in self.categories:
                self.categories[entry[1]] = category

    def note_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember whose gradients the storages of the present ones hold."""
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                self.gradient_of.update((number, index) for number in self._numbers([held_part(parameter.grad)]))

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; ``None`` if it is not followed."""
        return next(iter(self._numbers([held_part(tensor)])), None)

    def categorise_saved(self) -> None:
        """What the forward allocated and is alive now was saved for the backward: activations."""
        for _, number, _ in self._alive.values():
            if self.categories.get(number) == "temporaries":
                self.categories[number] = "activations"

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Operators run unseen (only reads of values are answered), and nothing that dies is noted."""
        before, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = before

    def stop_following(self) -> None:
        """Record no more frees: what dies from here on dies because the trace ends."""
        self._following = False

    def _follow(self, tensor: torch.Tensor, origin: tuple[int, int] | None) -> int | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._on_host:
            return None
        number = self._new_number()

        def died(_: Any) -> None:
            entry = self._alive.pop(key, None)
            if self._following and entry is not None:
                self.events.append(Free(entry[1], self.phase))

        self._alive[key] = (weakref.ref(storage, died), number, origin)
        return number

    def _new_number(self) -> int:
        self._next_storage += 1
        return self._next_storage - 1

    def resized(self, storage: torch.UntypedStorage, category: Category) -> None:
        """A storage has another size now, which no operator told: what it was is gone, and it is a new one.

        Args:
            storage: the storage.
            category: what it holds from here on.
        """
        entry = self._alive.get(storage._cdata)
        if entry is None or not (self._recording and self._following):
            return
        reference, before, _ = entry
        number = self._new_number()
        self._alive[storage._cdata] = (reference, number, None)
        self.events.append(Free(before, self.phase))
        if storage.nbytes():
            self._allocated("storage.resize_", number, storage.nbytes(), category)

    def needed_inside(self, op: str, num_bytes: int) -> None:
        """An operator took something inside that neither dispatch nor a probe shows: it was there, and is gone."""
        if num_bytes and self._recording:
            number = self._new_number()
            self._allocated(op, number, num_bytes, "communication")
            self.events.append(Free(number, self.phase))

    def _allocated(self, op: str, number: int, num_bytes: int, category: Category) -> None:
        self.categories[number] = category
        outputs = (Output(number, 0, num_bytes),)
        module = self._module_stack[-1] if self._module_stack else ""
        self.events.append(Operation(op, module, self.phase, None, outputs, micro_step=self.micro_step))

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note what it allocated."""
        kwargs = kwargs or {}
        if self.collectives is not None and self.collectives.is_for_parts(types):
            return NotImplemented  # its operators on the parts that this rank holds come here next
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _READ_SCALAR:
            return self._answer_scalar(args[0])
        if func.namespace in _NOT_COMPUTING:
            return func(*args, **kwargs)
        out = self._run(func, args, kwargs) if self._recording else self._call(func, args, kwargs)
        if self.phase != "optimizer_step":
            self.known.follow(func, args, kwargs, out)
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.rules.call(func, args, kwargs)
        if self.rules.has_host_apart:
            self._note_host(func, args, kwargs, out)
        return out

    def _note_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = tuple(tensors_in((args, kwargs)))
        from_host = bool(given) and all(self._is_on_host(tensor) for tensor in given)
        for tensor in tensors_in(out):
            if self.rules.is_on_host(func, tensor, from_host=from_host) and not self._is_on_host(tensor):
                storage = tensor.untyped_storage()
                self._on_host[storage._cdata] = weakref.ref(storage, partial(self._left_host, storage._cdata))

    def _left_host(self, key: int, _: Any) -> None:
        self._on_host.pop(key, None)

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_operations += 1
        in_backward = torch._C._current_graph_task_id() != -1
        recomputing = in_backward and torch.is_grad_enabled()
        module = self._module(in_backward, recomputing)
        if func in _VIEWS:
            out = self._call(func, args, kwargs)
            self._note(func, module, None, None, out, recomputing, (), 0, 1)
            return out
        has_signature = self._collect_signatures and func.namespace not in _EXCHANGING
        signature = self._signature(func, args, kwargs) if has_signature else None
        target = self._written_into(func, args, in_backward=in_backward and not recomputing)
        read = tuple(tensors_in((args, kwargs)))
        out = self._call(func, args, kwargs)
        self._in_place.note(func, out)
        if self.collectives is not None:
            self.collectives.note(self, func, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        self.flops += flops
        self.recomputed_flops += flops if recomputing else 0
        self._note(func, module, signature, target, out, recomputing, read, flops, inner_calls_of(func, args))
        return out

    def _note(
        self,
        func: Any,
        module: str | None,
        signature: int | None,
        target: int | None,
        out: Any,
        recomputing: bool,
        read: tuple[torch.Tensor, ...],
        flops: int,
        inner_calls: int,
    ) -> None:
        outputs = []
        written = tuple(tensors_in(out))
        for index, tensor in enumerate(written):
            number = self._follow(tensor, None if signature is None else (signature, index))
            if number is not None:
                saved = recomputing and self.phase == "backward"
                self.categories[number] = "activations" if saved else "temporaries"
                outputs.append(Output(number, index, tensor.untyped_storage().nbytes()))
        if outputs or func not in _VIEWS:
            self.events.append(
                Operation(
                    op=str(func),
                    module=module or "",
                    phase=self.phase,
                    signature=signature,
                    outputs=tuple(outputs),
                    accumulates_into=target,
                    reads=self._numbers(read),
                    flops=flops,
                    moved_bytes=_moved_bytes(read) + _moved_bytes(written),
                    dtype=_computing_dtype(read or written),
                    micro_step=self.micro_step,
                    recomputed=recomputing,
                    views=self._views,
                    inner_calls=inner_calls,
                    outside=module is None,
                )
            )
            self._views = 0
        else:
            self._views += 1

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        entries = [self._alive.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        return tuple(dict.fromkeys(entry[1] for entry in entries if entry is not None))

    def _answer_scalar(self, tensor: torch.Tensor) -> int | float | bool:
        known = self.known.scalar(tensor)
        if known is not None:
            return known
        if tensor.dtype is torch.bool and (flag := constant_of(tensor)) is not None:
            return bool(flag)
        # Other fake tensors have no value. Losses are read for logging, flags ("is anything NaN?") for warnings: answer
        # as a healthy step would, and count it so that the forecast can say so.
        if self.phase == "optimizer_step" or not self._recording:
            # Optimizers read step counters: a late step takes the branch of the steady state, and running products
            # such as NAdam's are not 1, by whose distance from 1 is divided.
            return (
                False if tensor.dtype is torch.bool else float(_LATE_STEP) if tensor.is_floating_point() else _LATE_STEP
            )
        self.scalars_read += 1
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _written_into(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> int | None:
        tensor = self._in_place.argument(func, args, in_backward=in_backward)
        if tensor is None:
            return self._accumulation_target(func, args) if in_backward else None
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def _accumulation_target(self, func: Any, args: tuple[Any, ...]) -> int | None:
        # The engine adds a second gradient in place where it owns the buffer of the first; a fake tensor is a
        # subclass, for which it adds out of place. The replay puts that right if the first argument dies at once.
        # Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        if func is not _ADD or len(args) != 2:
            return None
        first, second = args
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            return None
        if first.shape != second.shape or first.dtype != second.dtype or first._is_view():
            return None
        entry = self._alive.get(first.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def _signature(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        described = Signature(str(func), self._describe(args), self._describe(kwargs))
        key = _without_origins(described.op), _without_origins(described.args), _without_origins(described.kwargs)
        number = self._signature_ids.get(key)
        if number is None:
            number = self._signature_ids[key] = len(self.signatures)
            self.signatures.append(described)
        return number

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            entry = self._alive.get(value.untyped_storage()._cdata)
            dtype = str(value.dtype).removeprefix("torch.")
            return TensorShape(dtype, tuple(value.shape), tuple(value.stride()), None if entry is None else entry[2])
        if isinstance(value, (list, tuple)):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, dict):
            return {name: self._describe(item) for name, item in value.items()}
        return value

    # Modules

    def _module(self, in_backward: bool, recomputing: bool) -> str | None:
        """The module that an operator belongs to; ``None`` if none was being called, or nothing tells."""
        if not in_backward or recomputing:
            return self._module_stack[-1] if self._module_stack else None
        # A backward node carries the number of the forward operator that made it; those that store gradients have none.
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() > _LAST_SEQUENCE_NUMBER:
            return None
        starts, names = self._module_starts
        position = bisect.bisect_right(starts, node._sequence_nr()) - 1
        return names[position] if position >= 0 else None

    def _note_start(self) -> None:
        # Taken between operators: a number read inside one is already past the node of that operator.
        self._module_starts[0].append(torch._C._autograd._get_sequence_nr())
        self._module_starts[1].append(self._module_stack[-1] if self._module_stack else None)

    def _note_call(self, name: str, first_event: int, output: Any) -> None:
        if self._recording:
            recomputed = torch._C._current_graph_task_id() != -1
            outputs = self._numbers(tensors_in(output))
            self.calls.append(ModuleCall(name, self.micro_step, first_event, len(self.events), outputs, recomputed))

    @contextmanager
    def beside_the_call(self) -> Iterator[None]:
        """Operators within belong to what calls the module that is being entered: a hook in front of its forward."""
        entered = [self._module_stack.pop()] if self._module_stack else []
        self._note_start()
        try:
            yield
        finally:
            self._module_stack += entered
            self._note_start()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Operators within belong to a module of this name, which is called by another method than its forward."""
        first_event = len(self.events)
        self._module_stack.append(name)
        self._note_start()
        try:
            yield
        finally:
            self._module_stack.pop()
            self._note_start()
            self._note_call(name, first_event, None)

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Keep track of the module that is being called, by global forward hooks that are removed at the end."""
        starts: list[int] = []

        def enter(module: nn.Module, args: Any) -> None:
            above = self._module_stack[-1] if self._module_stack else ""
            self._module_stack.append(self._names.get(id(module), above))
            starts.append(len(self.events))
            self._note_start()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._module_stack:
                name = self._module_stack.pop()
                self._note_start()
                self._note_call(name, starts.pop(), output)

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    # A tensor that repeats its values by strides of 0 is no larger than its storage.
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _computing_dtype(tensors: Sequence[torch.Tensor]) -> str:
    dtypes = [tensor.dtype for tensor in tensors]
    chosen = next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else None)
    return "" if chosen is None else str(chosen).removeprefix("torch.")


def _without_origins(value: Any) -> Any:
    """A hashable form of a described argument in which tensors of equal shape are equal wherever they come from."""
    if isinstance(value, TensorShape):
        return value[:3]
    if isinstance(value, tuple):
        return tuple(_without_origins(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _without_origins(item)) for name, item in value.items())
    if isinstance(value, (bool, int, float, str)) or value is None:
        return type(value), value
    return repr(value)
