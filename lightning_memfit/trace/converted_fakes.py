"""Fakes of a module and a batch in another floating dtype, as ``bf16-true`` has them when training begins.

Source: ``lightning/pytorch/plugins/precision/half.py``, 2.6: ``module.to(dtype)``, and floating tensors of the batch.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.trace.fake_module import FakeTensors


def fakes_in(mode: FakeTensorMode, floating: torch.dtype | None) -> FakeTensors:
    """Makes fakes of tensors as they are, or with every floating tensor in the dtype ``floating``."""
    return FakeTensors(mode) if floating is None else ConvertedFakes(mode, floating)


class ConvertedFakes(FakeTensors):
    """Fakes of floating tensors have another dtype; all others are as they were, and storages shared as they were."""

    def __init__(self, mode: FakeTensorMode, floating: torch.dtype) -> None:
        super().__init__(mode)
        self._floating = floating

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._floating if tensor.is_floating_point() else tensor.dtype

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype_of(tensor) is tensor.dtype:
            return super()._plain(tensor)
        storage = tensor.untyped_storage()
        flat = self._storages.get(storage._cdata)
        if flat is None:
            elements = storage.nbytes() // tensor.element_size()
            flat = self._storages[storage._cdata] = torch.empty(elements, dtype=self._floating, device=self.device)
        plain = torch.empty(0, dtype=self._floating, device=self.device)
        return plain.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
