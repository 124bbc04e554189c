"""Fakes of what one rank steps where parameters are divided over ranks."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memfit.trace.fake_module import FakeTensors
from lightning_memfit.trace.timeline import ParameterLayout


class ShardedFakes(FakeTensors):
    """Fakes of parameters are the first rank's shards under ``fully_shard``; all other tensors are as they were.

    Source: pytorch/pytorch ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, 2.13: ``torch.chunk`` along
    dimension 0, so that the first rank's chunk is the largest.

    Ignores: that a shard is a ``DTensor``, whose ``size()`` is that of the whole parameter.

    Args:
        whole: makes the fakes that are divided.
        ranks: devices that each have a shard.
    """

    def __init__(self, whole: FakeTensors, ranks: int) -> None:
        super().__init__(whole.mode)
        self._whole, self._ranks = whole, ranks

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._whole.of(tensor)
        if not isinstance(fake, nn.Parameter):
            return fake
        with self.mode, torch.no_grad():
            size = shard_size(tuple(fake.size()), self._ranks)
            plain = torch.empty(size, dtype=fake.dtype, device=self.device)
            return nn.Parameter(plain, requires_grad=fake.requires_grad)


def shard_size(size: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Size of the largest shard of a tensor that is divided along its first dimension.

    >>> shard_size((10, 3), 4), shard_size((2,), 4)
    ((3, 3), (1,))
    """
    return (-(-size[0] // ranks), *size[1:]) if size else size


def parameters_of(module: nn.Module, floating: torch.dtype | None = None) -> tuple[ParameterLayout, ...]:
    """The parameters of a module as a trace would tell them, with no storages to tell apart.

    Args:
        module: on any device.
        floating: its floating tensors have this dtype, whatever they have now.
    """
    return tuple(
        ParameterLayout(name, -1, _dtype_name(each, floating), tuple(each.size()), each.requires_grad)
        for name, each in module.named_parameters()
    )


def _dtype_name(tensor: torch.Tensor, floating: torch.dtype | None) -> str:
    dtype = tensor.dtype if floating is None or not tensor.is_floating_point() else floating
    return str(dtype).removeprefix("torch.")
