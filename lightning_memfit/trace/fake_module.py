"""Stand-ins without memory for a module's tensors, put in place for the duration of a trace.

Adapter for private names of torch: ``FakeTensorMode`` (``torch._subclasses``), ``Module._parameters`` and ``_buffers``,
``RNNBase._flat_weights``, ``UntypedStorage._cdata``; of DeepSpeed: a divided parameter's ``ds_shape``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from lightning_memfit.batch_tree import map_tensors
from lightning_memfit.errors import ConfigurationError, TraceError
from lightning_memfit.trace.tensors import held_part


def new_fake_mode() -> FakeTensorMode:
    """A fake mode that also takes real tensors (constants that a module keeps outside its buffers) as inputs."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class FakeTensors:
    """Makes fakes of real or meta tensors, one for each, storages shared as the originals share theirs.

    The fake of a tensor that is spread over ranks is the whole one.

    The fakes live on the CPU whatever device the originals are on: ``meta`` modules stand for modules that would be
    built there.
    """

    device = "cpu"

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._fakes: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of ``tensor``; a parameter gives a parameter.

        Raises:
            TraceError: if the tensor is sparse or otherwise has no strided storage.
        """
        fake = self._fakes.get(id(tensor))
        if fake is None:
            fake = self._make(tensor)
            self._fakes[id(tensor)] = fake
            self._originals.append(tensor)  # keeps the id taken
        return fake

    @property
    def dtypes_at_rest(self) -> dict[int, torch.dtype]:
        """By ``id`` of the fake: the dtype that the engine of a spread step keeps a parameter in, where it is another.

        None here; see :class:`~lightning_memfit.trace.group_precision.GroupFakes`.
        """
        return {}

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every original with its fake."""
        return [(original, self._fakes[id(original)]) for original in self._originals]

    def of_batch(self, batch: Any) -> Any:
        """The same nested structure with a fake for every tensor."""
        return map_tensors(batch, self.of)

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} has layout {tensor.layout}, only strided is traced"
            )
        with self.mode, torch.no_grad():
            size = getattr(tensor, "ds_shape", tensor.size())  # deepspeed.zero.Init leaves parameters without elements
            is_whole = held_part(tensor) is tensor and size == tensor.size()
            plain = (
                self._plain(tensor) if is_whole else torch.empty(size, dtype=self._dtype_of(tensor), device=self.device)
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(plain, requires_grad=tensor.requires_grad)
            return plain.requires_grad_(tensor.requires_grad) if tensor.is_leaf else plain

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        flat = self._storages.get(storage._cdata)
        if flat is None:
            flat = self._storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
        whole: Any = flat.untyped_storage()
        plain = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return plain.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


@contextmanager
def faked(module: nn.Module, fakes: FakeTensors) -> Iterator[None]:
    """Put fakes in place of the module's parameters and buffers; ties stay ties; everything is put back at the end.

    Raises:
        TraceError: if the module is scripted, so that its tensors cannot be exchanged; nothing was.
        ConfigurationError: if a lazy module has no shapes yet.
    """
    _check_exchangeable(module)
    saved: list[tuple[Any, dict[str, Any]]] = []
    flat_weights: list[tuple[nn.RNNBase, list[Any]]] = []
    try:
        for part in module.modules():
            for tensors in (vars(part)["_parameters"], vars(part)["_buffers"]):
                if tensors:
                    saved.append((tensors, dict(tensors)))
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            tensors[name] = fakes.of(tensor)
            if isinstance(part, nn.RNNBase):
                flat_weights.append((part, part._flat_weights))
                part._flat_weights = [None if w is None else fakes.of(w) for w in part._flat_weights]
        yield
    finally:
        for tensors, originals in saved:
            tensors.clear()
            tensors.update(originals)
        for rnn, originals_list in flat_weights:
            rnn._flat_weights = originals_list


def _check_exchangeable(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = f"module {name}" if name else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise TraceError(f"{where} is a scripted one, whose tensors live outside of Python; give the module itself")
        if any(is_lazy(tensor) for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise ConfigurationError(f"{where} is lazy and has no shapes yet. Run it once on a batch before.")
