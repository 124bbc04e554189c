"""What makes a fake run on the CPU allocate what a real one on a GPU would.

Fakes of ``cuda`` tensors can run no backward without a GPU (torch 2.13: a build without CUDA aborts the process), so
that a step for a GPU is followed on fakes of the CPU under CUDA's rules: its lists of autocast, its kernels of
attention and dropout, its defaults of optimizers. Tensors that would stay on the host are not counted. Tests compare it
with a run of fake ``cuda`` tensors, byte for byte.

Adapter for private names of torch: ``torch.optim.optimizer._get_foreach_kernels_supported_devices``,
``_get_capturable_supported_devices`` and ``_foreach_supported_types``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils

from lightning_memfit.trace.cpu_rules import real_cpu_behaviour
from lightning_memfit.trace.cuda_attention import attention
from lightning_memfit.trace.cuda_autocast import cuda_autocast
from lightning_memfit.trace.cuda_recurrent import KERNELS, layers
from lightning_memfit.trace.device_rules import DeviceType
from lightning_memfit.trace.overrides import overridden

_aten = torch.ops.aten
_BATCH_NORMS = frozenset({_aten.native_batch_norm.default})
_MADE_OF_NUMBERS = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})


@dataclass(frozen=True, kw_only=True)
class CudaRules:
    """Fakes on the CPU stand for tensors on a GPU."""

    compute_capability: tuple[int, int]
    """Major and minor number: it decides which kernels of attention there are."""
    device_type: DeviceType = "cuda"
    has_host_apart: bool = True

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on fakes; results have the dtypes that CUDA's kernels give them."""
        kernel = KERNELS.get(func)
        if kernel is not None:
            return kernel(*args, **kwargs)
        out = func(*args, **kwargs)
        return _with_float32_statistics(out) if func in _BATCH_NORMS else out

    def is_on_host(self, func: Any, tensor: torch.Tensor, *, from_host: bool) -> bool:
        """Whether a result stays on the host: a number made without a device, or one computed from such numbers alone.

        Ignores: other tensors that user code makes on the host and moves later; they count as made on the device, and
        so do those of several elements made of a number, which may have been moved without a trace.
        """
        return (from_host and tensor.numel() == 1) or (func in _MADE_OF_NUMBERS and tensor.dim() == 0)

    def behaviour(self) -> AbstractContextManager[None]:
        """Within this context torch takes CUDA's branches."""
        return _cuda_behaviour(self.compute_capability)


def _with_float32_statistics(out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Means and deviations of 16-bit inputs have 32 bits. Source: ``aten/src/ATen/native/cuda/Normalization.cu``."""
    result, *statistics = out
    return result, *(each.float() if each.numel() else each for each in statistics)


@contextmanager
def _cuda_behaviour(capability: tuple[int, int]) -> Iterator[None]:
    with ExitStack() as patches:
        # Activation checkpointing keeps generator states on the host.
        patches.enter_context(real_cpu_behaviour(rng_state_bytes=0))
        patches.enter_context(cuda_autocast())
        patches.enter_context(overridden(_kernels(capability), "AutogradCPU"))
        patches.enter_context(_optimizers_as_on_cuda())
        yield


@contextmanager
def _optimizers_as_on_cuda() -> Iterator[None]:
    """Optimizers that are left to choose run over lists of tensors, and ``capturable=True`` is taken."""
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    types = [*optimizers._foreach_supported_types, FakeTensor]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", lambda: devices))
        patches.enter_context(mock.patch.object(optimizers, "_foreach_supported_types", types))
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
                patches.enter_context(
                    mock.patch.object(module, "_get_capturable_supported_devices", lambda *_, **__: devices)
                )
        yield


def _kernels(capability: tuple[int, int]) -> Mapping[str, Any]:
    """Functions of torch that consist of other operators on CUDA than on the CPU, by name."""
    return {
        "scaled_dot_product_attention": partial(attention, capability),
        "dropout": _dropout,
        **layers(),
    }


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One operator that keeps its mask as flags. Source: ``aten/src/ATen/native/Dropout.cpp``, torch 2.13."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return _aten.native_dropout(tensor, p, True)[0]  # type: ignore[no-any-return]
