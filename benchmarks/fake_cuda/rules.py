"""Fakes that are on ``cuda`` themselves: torch takes its own branches but for attention and recurrent layers.

With ``fake_cuda.cpp`` in a build without CUDA, or on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers

from lightning_memfit.trace.cpu_rules import real_cpu_behaviour
from lightning_memfit.trace.cuda_attention import attention
from lightning_memfit.trace.cuda_recurrent import KERNELS, layers
from lightning_memfit.trace.device_rules import DeviceType
from lightning_memfit.trace.fake_module import FakeTensors
from lightning_memfit.trace.overrides import overridden

_WHOLE_ON_CUDA = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operators that torch takes apart where it has no kernel for the device, as in a build without CUDA."""
_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True, kw_only=True)
class FakeCudaRules:
    """The reference for :class:`~lightning_memfit.trace.cuda_rules.CudaRules`."""

    compute_capability: tuple[int, int]
    device_type: DeviceType = "cuda"
    has_host_apart: bool = True

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator as it is; what comes from the host may have values there, which the device cannot hold."""
        to_device = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if func is _TO_COPY and to_device and args[0].device.type == "cpu":
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.empty_strided(args[0].size(), args[0].stride(), dtype=dtype, device="cuda")
        kernel = KERNELS.get(func)
        return func(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)

    def is_on_host(self, func: Any, tensor: torch.Tensor, *, from_host: bool) -> bool:
        """What its device says."""
        return tensor.device.type == "cpu"

    def behaviour(self) -> AbstractContextManager[None]:
        """Let torch believe that there is a GPU, and fakes be tensors like others."""
        return _believing(self.compute_capability)


@contextmanager
def _believing(capability: tuple[int, int]) -> Iterator[None]:
    with suppress(ImportError):  # now, since it looks for a device when it is imported
        import bitsandbytes  # noqa: F401

    types = [*optimizers._foreach_supported_types, FakeTensor]
    with ExitStack() as patches:
        patches.enter_context(real_cpu_behaviour(rng_state_bytes=0))
        patches.enter_context(mock.patch.object(optimizers, "_foreach_supported_types", types))
        patches.enter_context(mock.patch.object(FakeTensors, "device", "cuda"))
        if not torch.cuda.is_available():
            never = mock.Mock(return_value=False)
            patches.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", never))
            patches.enter_context(mock.patch.object(torch.amp.autocast_mode.torch.cuda, "is_available", lambda: True))
            patches.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_: True))
            patches.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *_: None))
        patches.enter_context(overridden(_kernels(capability), "AutogradCUDA"))
        patches.enter_context(overridden(_missing(), "CUDA"))
        yield


def _kernels(capability: tuple[int, int]) -> Mapping[str, Any]:
    """Without a GPU torch would compute attention and recurrent layers step by step whatever the shapes."""
    return {"scaled_dot_product_attention": partial(attention, capability), **layers()}


def _missing() -> Mapping[str, Any]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: _never_called for name in _WHOLE_ON_CUDA if not has(f"aten::{name}", "CUDA")}


def _never_called(*args: Any) -> Any:
    raise AssertionError("fakes compute nothing")
