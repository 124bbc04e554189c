"""A tracer under which autograd holds no activations, but says when it would.

Adapter for private names of torch: ``UntypedStorage._cdata``, ``FakeTensor.fake_device``, and the order of
``torch.autograd.graph.saved_tensors_hooks``, which activation checkpointing is made of too: every tensor that an
operator saves passes through the hooks, in the order in which a checkpointed block would see them.

A saved tensor is let go when it is saved. When its node asks for it, it gets a stand-in of the same shape, which
counts as the original and is held by the node alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.step_record import Mark, MarkKind, SavedTensor
from lightning_memfit.trace.tracer import StepTracer

_DETACH = torch.ops.aten.detach.default
_DEVICE = torch.ops.prim.device.default


class SavedTensorTracer(StepTracer):  # type: ignore[no-untyped-call]
    """Follows storages as :class:`StepTracer` does; frees are those of the program alone.

    Args:
        names: qualified name of each module, by ``id``.
        collect_signatures: keep the distinct operator calls, so that they can be probed.
        rules: how the device computes that the fakes stand for; the CPU by default.
    """

    def __init__(
        self, names: Mapping[int, str], *, collect_signatures: bool = True, rules: DeviceRules | None = None
    ) -> None:
        super().__init__(names, collect_signatures=collect_signatures, rules=rules)
        self.marks: list[Mark] = []
        self.saved: list[SavedTensor] = []
        self._residents: set[int] = set()
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._just_unpacked = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note what it allocated."""
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # what the fake mode would answer: two out of three calls are this question
        if self._just_unpacked:
            self._just_unpacked = False
            if func is _DETACH:  # autograd detaches whatever a hook gives back; without hooks, only results
                return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def hooks(self) -> AbstractContextManager[Any]:
        """Within this context, on the thread of the forward, autograd lets go of what it saves."""
        self._residents = {resident.storage for resident in self.residents}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def storages_of(self, tensors: Any) -> tuple[int, ...]:
        """Numbers of the followed storages of ``tensors``, each once."""
        return self._numbers(tensors)

    def _pack(self, tensor: torch.Tensor) -> Any:
        entry = self._alive.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None
        if entry is None:
            return tensor if tensor.is_leaf else tensor.detach()  # a constant, or nothing that can be stood in for
        number = len(self.saved)
        self.saved.append(SavedTensor(entry[1], tensor.requires_grad))
        self._mark("saved", number)
        saved = _Saved(number, tensor, keep=entry[1] in self._residents, storage=entry[1], origin=entry[2])
        self._watched[number] = weakref.ref(saved, lambda _: self._let_go(number))
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        self._mark("unpacked", saved.number)
        tensor = self._stand_in(saved) if saved.tensor is None else saved.tensor
        self._just_unpacked = True
        return tensor

    def _stand_in(self, saved: _Saved) -> torch.Tensor:
        with self.not_recording(), torch.no_grad():
            tensor = torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype)
        storage = tensor.untyped_storage()
        key, number = storage._cdata, saved.number

        def died(_: Any) -> None:
            self._alive.pop(key, None)
            self._mark("used", number)

        self._alive[key] = (weakref.ref(storage, died), saved.storage, saved.origin)
        return tensor

    def _let_go(self, number: int) -> None:
        del self._watched[number]
        self._mark("released", number)

    def _mark(self, kind: MarkKind, number: int) -> None:
        if self._following:
            self.marks.append(Mark(kind, number, len(self.events)))


class _Saved:
    """What autograd keeps in place of a tensor."""

    __slots__ = ("__weakref__", "dtype", "number", "origin", "size", "storage", "stride", "tensor")

    def __init__(
        self, number: int, tensor: torch.Tensor, *, keep: bool, storage: int, origin: tuple[int, int] | None
    ) -> None:
        self.number = number
        self.size, self.stride, self.dtype = tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype
        self.storage, self.origin = storage, origin
        # What was there before the step stays anyway.
        self.tensor: torch.Tensor | None = tensor if keep else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex()
