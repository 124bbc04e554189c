"""Remember the state of a model and everything that trains it, and bring it back in place.

The objects reachable from the roots are walked once. Of each mutable one a shallow copy of its contents is kept, and
the bytes of each tensor storage once. Restoring writes the old contents into the same objects, so that identity is
kept: an optimizer still holds the module's parameters, a hook its dict, a tied weight its twin.

Not looked into, and so not restored: trainers, callbacks, loggers and other Lightning objects, data sets and loaders,
files, locks, threads and processes, weak references, classes, Python modules, compiled code, the objects of libraries
in ``_OPAQUE``, ``itertools`` and generator positions, and ``functools`` caches. A root that is given is always looked
into itself.
"""

from __future__ import annotations

import array
import contextlib
import enum
import functools
import random
import re
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memfit.observe.gathered_parameters import let_go_of_gathered
from lightning_memfit.observe.tensor_vault import TensorsIn, TensorVault

Restore = Callable[[], None]

_ATOMS = (
    types.NoneType, bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, re.Pattern, PurePath,
    types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MappingProxyType,
    torch.dtype, torch.device, torch.Size, np.generic, np.dtype, np.memmap,
)  # fmt: skip
_CONTAINERS = (dict, list, set, deque)
_OPAQUE = frozenset((
    "lightning", "pytorch_lightning", "lightning_fabric", "lightning_memfit", "lightning_utilities", "_io",
    "io", "_thread", "threading", "queue", "_queue", "asyncio", "concurrent", "multiprocessing", "subprocess",
    "socket", "ssl", "selectors", "sqlite3", "logging", "weakref", "_weakref", "_weakrefset", "contextvars",
    "tempfile", "inspect", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "aim", "litlogger",
    "tensorboard", "tensorboardX", "datasets", "webdataset", "streaming", "pyarrow", "pandas", "polars", "h5py",
    "zarr", "lmdb", "PIL", "rich", "tqdm", "ray", "psutil", "torch.utils.data", "torch.utils.tensorboard",
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch.fx",
    "torch.distributed", "torch.jit", "torch.profiler", "torch.multiprocessing", "torch.cuda", "torch.autograd",
))  # fmt: skip
_LIGHTNING_STATE = (".loops.progress", ".utilities.types", ".logger_connector.result", ".trainer.states")


class Snapshot:
    """State kept by :func:`take_snapshot`. As a context manager it restores and closes, also after an error.

    Attributes:
        tensor_bytes: bytes of the distinct tensor storages that were kept.
    """

    def __init__(self, records: list[Restore], vault: TensorVault) -> None:
        self._records = records
        self._vault = vault
        self._closed = False
        self.tensor_bytes = vault.num_bytes

    def restore(self) -> None:
        """Bring everything back in place. May be called more than once.

        Raises:
            RuntimeError: if the snapshot is closed.
            ExceptionGroup: with what could not be brought back; everything else was.
        """
        if self._closed:
            raise RuntimeError("The snapshot is closed: what it kept is gone. Restore before close().")
        errors: list[Exception] = []
        with torch.no_grad():
            for record in (*self._records, self._vault.restore):
                try:
                    record()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise ExceptionGroup("Part of the state could not be brought back.", errors)

    def close(self) -> None:
        """Let go of what was kept, and delete the file if there is one. A second call does nothing."""
        self._closed = True
        self._records.clear()
        self._vault.close()

    def __enter__(self) -> Self:
        """Give the snapshot itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore and close."""
        try:
            self.restore()
        finally:
            self.close()


def take_snapshot(
    module: nn.Module | None,
    *,
    optimizers: Iterable[Any] = (),
    schedulers: Iterable[Any] = (),
    scaler: Any | None = None,
    extra_roots: Iterable[Any] = (),
    tensors_in: TensorsIn = "memory",
    random_state: bool = True,
) -> Snapshot:
    """Keep the state of everything reachable from the arguments, and of the global random generators.

    Args:
        module: the model: parameters, buffers, gradients and every submodule's ``__dict__``.
        optimizers: their states and groups; a fresh optimizer is fresh again after the restore.
        schedulers: learning-rate schedulers, or the configurations that hold them.
        scaler: the gradient scaler, if there is one.
        extra_roots: any other objects, such as progress counters or a batch.
        tensors_in: where tensor contents are kept: ``"memory"`` (outside of torch's allocator), ``"disk"`` (a file
            in the system's temporary directory, of the size of ``tensor_bytes``), or ``"nowhere"`` (only which tensors
            there are, their gradients, attributes and containers, for work that runs on stand-ins).
        random_state: keep the global generators of torch, NumPy and Python, too.
    """
    vault = TensorVault(tensors_in)
    # First, since what keeps track of gathered parameters is not walked through.
    records: list[Restore] = [] if module is None else [functools.partial(let_go_of_gathered, module)]
    try:
        for value, aspects in _walk([module, *optimizers, *schedulers, scaler, *extra_roots]):
            records.extend(save(value, vault) for _, save in aspects)
    except BaseException:
        vault.close()
        raise
    if random_state:
        records.append(_save_random_state())
    return Snapshot(records, vault)


def reachable_tensors(roots: Iterable[Any]) -> list[torch.Tensor]:
    """Return every tensor that can be reached from ``roots``, each once: gradients and optimizer states too."""
    return [value for value, _ in _walk(list(roots)) if isinstance(value, torch.Tensor)]


# The walk. An aspect says how one side of an object is looked into and how it is saved.

Children = Callable[[Any], Iterable[Any]]
Save = Callable[[Any, TensorVault], Restore]
Aspect = tuple[Children, Save]


def _walk(roots: list[Any]) -> Iterator[tuple[Any, tuple[Aspect, ...]]]:
    """Yield each mutable object once with its aspects. Without recursion: graphs are deep and have cycles."""
    seen: dict[int, Any] = {}  # the values keep the objects alive, so that no id is used twice
    by_type: dict[type, tuple[Aspect, ...]] = {}
    stack = [(root, _aspects_of(type(root))) for root in reversed(roots)]
    while stack:
        value, aspects = stack.pop()
        if not aspects or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value, aspects
        for children, _ in aspects:
            for child in children(value):
                kind = type(child)
                if kind not in by_type:
                    by_type[kind] = () if _is_opaque(kind) else _aspects_of(kind)
                if by_type[kind]:
                    stack.append((child, by_type[kind]))


def _is_opaque(kind: type) -> bool:
    if issubclass(kind, (nn.Module, torch.Tensor, torch.optim.Optimizer, *_CONTAINERS)):
        return False
    return any(_is_opaque_name(base.__module__) for base in kind.__mro__ if isinstance(base.__module__, str))


def _is_opaque_name(module: str) -> bool:
    parts = module.split(".")
    if module.endswith(_LIGHTNING_STATE):
        return False
    return any(".".join(parts[:count]) in _OPAQUE for count in range(1, min(len(parts), 3) + 1))


def _aspects_of(kind: type) -> tuple[Aspect, ...]:
    if issubclass(kind, _ATOMS):
        return ()
    found = [(children, save) for base, children, save in _BY_TYPE if issubclass(kind, base)][:1]
    if found and not issubclass(kind, (*_CONTAINERS, torch.Tensor, types.FunctionType)):
        return tuple(found)
    has_attributes = bool(_slots(kind)) or getattr(kind, "__dictoffset__", 0) != 0
    return (*found, (_attributes, _save_attributes)) if has_attributes else tuple(found)


# Plain objects: what is in __dict__ and in __slots__.


def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    return tuple(
        value
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for value in vars(base).values()
        if isinstance(value, types.MemberDescriptorType)
    )


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _slot_values(value: Any) -> dict[types.MemberDescriptorType, Any]:
    filled: dict[types.MemberDescriptorType, Any] = {}
    for slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):  # an empty slot
            filled[slot] = slot.__get__(value)
    return filled


def _attributes(value: Any) -> Iterable[Any]:
    yield from list(_dict_of(value).values())
    yield from _slot_values(value).values()
    if isinstance(value, torch.jit.ScriptModule):  # its tensors live in C++
        yield from (*value.parameters(), *value.buffers())


def _save_attributes(value: Any, _: TensorVault) -> Restore:
    kind, filled = type(value), _slot_values(value)
    restore_dict = _save_dict(_dict_of(value), _)

    def restore() -> None:
        if type(value) is not kind:  # a lazy module or parameter turns into its final class
            value.__class__ = kind
        restore_dict()
        for slot in _slots(kind):
            if slot in filled:
                slot.__set__(value, filled[slot])
            else:
                with contextlib.suppress(AttributeError):
                    slot.__delete__(value)

    return restore


# Containers. The methods of the base class are called: a subclass may override them with side effects.


def _dict_children(value: dict[Any, Any]) -> Iterable[Any]:
    for key, item in list(dict.items(value)):
        yield key
        yield item


def _save_dict(value: dict[Any, Any], _: TensorVault) -> Restore:
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    saved = list(base.items(value))

    def restore() -> None:
        now = list(base.items(value))
        if len(now) == len(saved) and all(a is c and b is d for (a, b), (c, d) in zip(now, saved, strict=True)):
            return
        base.clear(value)
        for key, item in saved:
            base.__setitem__(value, key, item)

    return restore


def _save_list(value: list[Any], _: TensorVault) -> Restore:
    saved = list(value)
    return lambda: list.__setitem__(value, slice(None), saved)


def _save_set(value: set[Any], _: TensorVault) -> Restore:
    saved = list(value)

    def restore() -> None:
        if {id(item) for item in value} != {id(item) for item in saved}:
            set.clear(value)
            set.update(value, saved)

    return restore


def _save_deque(value: deque[Any], _: TensorVault) -> Restore:
    saved = list(value)

    def restore() -> None:
        deque.clear(value)
        deque.extend(value, saved)

    return restore


def _save_buffer(value: Any, _: TensorVault) -> Restore:
    saved = value[:]

    def restore() -> None:
        if value != saved:
            value[:] = saved

    return restore


def _array_children(value: npt.NDArray[Any]) -> Iterable[Any]:
    return list(value.flat) if value.dtype.hasobject else ()


def _save_array(value: npt.NDArray[Any], _: TensorVault) -> Restore:
    saved = value.copy()

    def restore() -> None:
        if value.shape != saved.shape:
            value.resize(saved.shape, refcheck=False)
        if value.flags.writeable:
            np.copyto(value, saved, casting="no")

    return restore


def _save_cell(value: types.CellType, _: TensorVault) -> Restore:
    saved = _cell_children(value)

    def restore() -> None:
        if saved and (not _cell_children(value) or value.cell_contents is not saved[0]):
            value.cell_contents = saved[0]

    return restore


def _cell_children(value: types.CellType) -> tuple[Any, ...]:
    try:
        return (value.cell_contents,)
    except ValueError:  # an empty cell
        return ()


def _function_children(value: types.FunctionType) -> Iterable[Any]:
    module = value.__module__ or ""
    return () if _is_opaque_name(module) or module.partition(".")[0] == "torch" else (value.__closure__ or ())


def _nothing_to_save(value: Any, _: TensorVault) -> Restore:
    return lambda: None


def _save_by_state(get: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> Save:
    def save(value: Any, _: TensorVault) -> Restore:
        saved = get(value)
        return lambda: put(value, saved)

    return save


def _put_bit_generator(value: np.random.BitGenerator, state: Any) -> None:
    value.state = state


def _save_random_state() -> Restore:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_states = torch.cuda.get_rng_state_all() if cuda_in_use else None

    def restore() -> None:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)

    return restore


# Tensors.


def _tensor_children(value: torch.Tensor) -> Iterable[Any]:
    if value.is_leaf and value.grad is not None:
        yield value.grad
    if value._backward_hooks is not None:
        yield value._backward_hooks
    if is_traceable_wrapper_subclass(value):
        yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
    elif value.layout == torch.sparse_coo:
        yield from (value._indices(), value._values())


def _save_tensor(value: torch.Tensor, vault: TensorVault) -> Restore:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        alias = None if is_traceable_wrapper_subclass(value) else value.detach()
        if alias is not None and alias.layout == torch.strided and alias.device.type != "meta":
            vault.keep(alias.untyped_storage())
        where = None if alias is None else _where(alias)
    is_leaf, requires_grad, hooks = value.is_leaf, value.requires_grad, value._backward_hooks
    grad = value.grad if is_leaf else None

    def restore() -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if alias is not None and _where(value.detach()) != where:
                value.data = alias
            if is_leaf:
                if not value.is_leaf and not value._is_view():
                    value.detach_()
                if value.is_leaf:
                    value.requires_grad_(requires_grad)
                    if value.grad is not grad:
                        value.grad = grad
            if value._backward_hooks is not hooks:
                value._backward_hooks = hooks

    return restore


def _where(value: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a tensor is made to look at other memory."""
    if value.layout != torch.strided or is_traceable_wrapper_subclass(value):
        return (value.shape, value.dtype, value.layout, object())  # unlike anything: put back in any case
    storage = value.untyped_storage()
    return (value.shape, value.dtype, value.stride(), value.storage_offset(), storage._cdata)


def _none(_: Any) -> Iterable[Any]:
    return ()


# The first row that fits is taken.
_BY_TYPE: tuple[tuple[type, Children, Save], ...] = (
    (torch.Tensor, _tensor_children, _save_tensor),
    (dict, _dict_children, _save_dict),
    (list, list, _save_list),
    (set, list, _save_set),
    (deque, list, _save_deque),
    (tuple, list, _nothing_to_save),
    (frozenset, list, _nothing_to_save),
    (bytearray, _none, _save_buffer),
    (array.array, _none, _save_buffer),
    (np.ndarray, _array_children, _save_array),
    (types.FunctionType, _function_children, _nothing_to_save),
    (types.CellType, _cell_children, _save_cell),
    (types.MethodType, lambda value: (value.__func__, value.__self__), _nothing_to_save),
    (functools.partial, lambda value: (value.func, *value.args, value.keywords), _nothing_to_save),
    (random.SystemRandom, _none, _nothing_to_save),
    (random.Random, _none, _save_by_state(random.Random.getstate, random.Random.setstate)),
    (np.random.Generator, lambda value: (value.bit_generator,), _nothing_to_save),
    (np.random.BitGenerator, _none, _save_by_state(lambda value: value.state, _put_bit_generator)),
    (np.random.RandomState, _none, _save_by_state(lambda value: value.get_state(), lambda v, s: v.set_state(s))),
    (torch.Generator, _none, _save_by_state(lambda value: value.get_state(), lambda v, s: v.set_state(s))),
    (functools._lru_cache_wrapper, _none, _nothing_to_save),
)
