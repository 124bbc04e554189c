"""What makes a fake run on the CPU behave like a real one: branches taken, memory formats, what is written in place.

:class:`CpuRules` is the CPU's :class:`~lightning_memfit.trace.device_rules.DeviceRules`.

Adapter for names that are patched for the duration of a trace: ``torch.get_rng_state`` and ``torch.set_rng_state``
(activation checkpointing keeps a generator state per call, a tensor that only real runs would allocate), torch's list
of types for which gradient clipping takes its multi-tensor path, and transformers' test for fake tensors (with which
its models take another branch than in training). It also reads ``torch._C._current_autograd_node``,
``UntypedStorage._cdata`` and the frames that called an operator, and calls
``torch._meta_registrations._create_grouped_mm_output_tensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

from lightning_memfit.trace.device_rules import DeviceType

_aten = torch.ops.aten
Callers = tuple[tuple[int, int], ...]

# Operators whose outputs are contiguous on a CPU where the fake run keeps the strides of an input, or whose outputs
# have the memory format of the input named. It decides whether operators that follow make a contiguous copy.
# Measured: each called with transposed and channels-last inputs, torch 2.13, CPU.
_FORMAT_OF_INPUT: Mapping[Any, int | None] = {
    _aten.glu_backward.default: None,
    _aten.huber_loss_backward.default: None,
    _aten.log_sigmoid_forward.default: None,
    _aten.mse_loss_backward.default: None,
    _aten.rrelu_with_noise.default: None,
    _aten.smooth_l1_loss_backward.default: None,
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.roll.default: 0,
}

# Formulas of gradients apply these in place to zeros that they have just made, but out of place where a dispatch mode
# is active. Source: torch/csrc/autograd/FunctionsManual.cpp, ``areAnyTensorSubclassLike``; torch 2.13.
_IN_PLACE_IN_BACKWARD = frozenset(
    {
        _aten.index_add.default,
        _aten.index_put.default,
        _aten.scatter.src,
        _aten.scatter_add.default,
    }
)
_GROUPED_PRODUCT = _aten._grouped_mm.default
_PRODUCTS = frozenset({_aten.bmm.default, _aten.mm.default})
_AROUND_DISPATCH = ("_dynamo/eval_frame.py", "torch/_compile.py")  # files in which torch wraps a mode's function
_CALLERS_COMPARED = 3


def called_as_on_cpu(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator on fakes with the dtypes that the CPU's own kernel takes.

    The products of grouped experts (``torch.nn.functional.grouped_mm``): fakes take ``bfloat16`` alone, as CUDA does.
    Source: torch/_meta_registrations.py, ``_meta_grouped_mm_common``; torch 2.13.
    """
    if func is _GROUPED_PRODUCT and args[0].dtype is not torch.bfloat16:
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    product: torch.Tensor = _create_grouped_mm_output_tensor(left, right, offs, out_dtype)  # type: ignore[no-untyped-call]
    return product


def as_on_cpu(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The outputs of an operator in the memory format that the CPU's own kernel gives them.

    Ignores: results of an expanded ``bfloat16`` gradient of a sum, which fakes make contiguous and the CPU does not.
    """
    if func not in _FORMAT_OF_INPUT:
        return out
    source = None if _rolls_by_nothing(func, args) else _FORMAT_OF_INPUT[func]
    memory_format = torch.contiguous_format if source is None else _suggested_format(args[source])
    if isinstance(out, torch.Tensor):
        return out.contiguous(memory_format=memory_format)
    ranks = {tensor.dim() for tensor in out if tensor is not None}
    return tuple(
        tensor.contiguous(memory_format=memory_format) if tensor is not None and tensor.dim() == max(ranks) else tensor
        for tensor in out
    )


def _rolls_by_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a ``roll`` returns a plain copy, or goes through a flat one, whatever the format of its input."""
    if func is not _aten.roll.default:
        return False
    tensor, shifts, *rest = args
    dims = rest[0] if rest else ()
    return not dims or any(shift % tensor.shape[dim] == 0 for shift, dim in zip(shifts, dims, strict=True))


class ResultsInPlace:
    """Knows which operators of a trace the real CPU would have applied in place.

    Where a dispatch mode is active, torch's own functions that consist of several operators leave in-place ones out.
    """

    def __init__(self) -> None:
        self._product: tuple[int, Callers] | None = None

    def argument(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> torch.Tensor | None:
        """The tensor whose storage the result would have; ``None`` if it would have one of its own, as usual.

        Args:
            func: the operator about to run.
            args: its arguments.
            in_backward: whether a gradient is computed, not a forward that is repeated.
        """
        if in_backward:
            return args[0] if func in _IN_PLACE_IN_BACKWARD and not _in_users_function() else None
        if func is not _aten.add.Tensor or self._product is None:
            return None
        # A linear layer adds its bias to a product in place, if input and bias do not fit into one ``addmm``.
        # Source: aten/src/ATen/native/Linear.cpp, torch 2.13. Only within that layer both operators have one caller.
        first, second = args[0], args[1]
        if not isinstance(second, torch.Tensor) or second.dim() != 1:
            return None
        return first if self._product == (first.untyped_storage()._cdata, _callers()) else None

    def note(self, func: Any, out: Any) -> None:
        """Keep in mind that an operator ran."""
        if func in _PRODUCTS:
            self._product = (out.untyped_storage()._cdata, _callers())


def _callers() -> Callers:
    """The innermost calls in Python that led to the operator, each with its position: one call of torch, one answer."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND_DISPATCH):
        frame = frame.f_back
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < _CALLERS_COMPARED:
        found.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _in_users_function() -> bool:
    """Whether the gradient is computed by a ``torch.autograd.Function`` written in Python."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def _suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    # Source: TensorImpl::suggest_memory_format; contiguous where both would do.
    if not tensor.is_contiguous():
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


class CpuRules:
    """Fakes on the CPU are what they say."""

    device_type: DeviceType = "cpu"
    has_host_apart = False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on fakes; results are laid out as the CPU's own kernel lays them out."""
        return as_on_cpu(func, args, called_as_on_cpu(func, args, kwargs))

    def is_on_host(self, func: Any, tensor: torch.Tensor, *, from_host: bool) -> bool:
        """The host is the device."""
        return False

    def behaviour(self) -> AbstractContextManager[None]:
        """See :func:`real_cpu_behaviour`."""
        return real_cpu_behaviour()


@contextmanager
def real_cpu_behaviour(*, rng_state_bytes: int | None = None) -> Iterator[None]:
    """Within this context a fake training step takes the branches, and allocates what, a real one would.

    Args:
        rng_state_bytes: bytes of generators' states that activation checkpointing keeps per call; the CPU's by default.
    """
    state_bytes = torch.get_rng_state().numel() if rng_state_bytes is None else rng_state_bytes

    def fake_rng_state() -> torch.Tensor:
        return torch.empty(state_bytes, dtype=torch.uint8)

    def ignore_rng_state(state: torch.Tensor) -> None:
        return None

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "get_rng_state", fake_rng_state))
        patches.enter_context(mock.patch.object(torch, "set_rng_state", ignore_rng_state))
        types = [*_foreach_utils._foreach_supported_types, FakeTensor]
        patches.enter_context(mock.patch.object(_foreach_utils, "_foreach_supported_types", types))
        imports = sys.modules.get("transformers.utils.import_utils")
        if imports is not None and hasattr(imports, "is_fake_tensor"):
            patches.enter_context(mock.patch.object(imports, "is_fake_tensor", _never))
        yield


def _never(_: Any) -> bool:
    return False
