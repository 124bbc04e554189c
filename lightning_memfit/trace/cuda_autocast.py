"""What autocast casts on CUDA, put in the place of what it casts on the CPU.

The two devices have different lists: on CUDA ``layer_norm``, ``softmax``, ``sum``, ``exp`` and many losses compute in
``float32``, on the CPU they do not.

Source: ``ATen/autocast_mode.h`` (the lists, installed with torch; a test compares them) and
``aten/src/ATen/autocast_mode.cpp`` (the policies), torch 2.13.

Adapter for private names of torch: ``torch._C.DispatchKey``, ``DispatchKeySet``, ``_ExcludeDispatchKeyGuard``,
``_dispatch_has_kernel_for_dispatch_key`` and ``_dispatch_get_all_op_names``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch

from lightning_memfit.trace.overrides import overridden

_KEY = "AutocastCPU"
_CUDA_KEY = "AutocastCUDA"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names(
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
"""Operators whose floating arguments are cast to the dtype of autocast."""
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
"""Operators whose floating arguments are cast to ``float32``."""
FLOAT32_RESULT = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Operators that are told to give ``float32`` where they have a ``dtype`` that is not set; arguments stay."""
NORMS = frozenset({"norm.Scalar", "norm.ScalarOpt_dim"})
"""Norms without a ``dtype``: the overload with one is called, with ``float32``."""
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Operators whose floating arguments are cast to the widest of their dtypes."""
BANNED = frozenset({"binary_cross_entropy"})
"""Operators that raise under autocast on CUDA."""

_LOW = (torch.float16, torch.bfloat16)
_Kernel = Callable[..., Any]


class _CastParameters:
    """Parameters as autocast cast them, by identity; torch's own cache holds what its own kernels cast.

    Source: ``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast once as long as autocast lasts, if the cache is on and the tensor is a parameter in ``float32``."""
        if not self._keeps(tensor, dtype):
            return tensor.to(dtype)
        if id(tensor) not in self._found:
            self._found[id(tensor)] = tensor, tensor.to(dtype)
        return self._found[id(tensor)][1]

    def _keeps(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        is_parameter = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
        return is_parameter and tensor.dtype is torch.float32 and dtype in _LOW and torch.is_autocast_cache_enabled()

    @contextmanager
    def cleared_with_torchs_own(self) -> Iterator[None]:
        """Within this context the casts go when torch clears its cache: at the end of the outermost autocast."""
        original = torch.clear_autocast_cache

        def clear() -> None:
            self._found.clear()
            original()

        try:
            with mock.patch.object(torch, "clear_autocast_cache", clear):
                yield
        finally:
            self._found.clear()


_parameters = _CastParameters()


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within this context autocast on the CPU casts what autocast on CUDA does.

    Code that asks for ``torch.autocast("cuda")`` gets it, with CUDA's default dtype where it names none.
    """
    autocast = torch.amp.autocast_mode.autocast
    with (
        overridden(_kernels(), _KEY),
        mock.patch.object(autocast, "__init__", _of_the_fakes(autocast.__init__)),
        _parameters.cleared_with_torchs_own(),
    ):
        yield


def _of_the_fakes(constructor: Any) -> Any:
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        constructor(self, device_type, dtype, *args, **kwargs)

    return init


@cache
def _kernels() -> Mapping[str, Any]:
    """By operator of ``aten``, what runs at the CPU's key of autocast in place of its own."""
    policies: list[tuple[frozenset[str], Callable[[Any], _Kernel]]] = [
        (LOWER_PRECISION, _lower_precision),
        (FLOAT32, _float32),
        (FLOAT32_RESULT, _float32_result),
        (NORMS, _norm),
        (WIDEST, _widest),
        (BANNED, _banned),
    ]
    found: dict[str, Any] = {
        name.removeprefix("aten::"): torch.library.fallthrough_kernel
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
    }
    for names, policy in policies:
        found.update({name: policy(_operator(name)) for name in names if _exists(name)})
    return found


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _exists(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _CUDA_KEY)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY)))


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _call(operator: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast the last argument first, as compilers evaluate them: it decides which block goes where."""
    with _without_autocast():
        named = {name: _cast(dtype, value) for name, value in reversed(kwargs.items())}
        given = [_cast(dtype, value) for value in reversed(args)]
        return operator(*reversed(given), **named)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """A tensor, or the tensors of a list, in a dtype; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return _parameters.cast(value, dtype) if value.dtype is not dtype and _is_eligible(value) else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(dtype, each) for each in value])
    return value


def _lower_precision(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _call(operator, torch.get_autocast_dtype("cpu"), args, kwargs)

    return kernel


def _float32(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _call(operator, torch.float32, args, kwargs)

    return kernel


def _float32_result(operator: Any) -> _Kernel:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return operator(*args, **kwargs)

    return kernel


def _norm(operator: Any) -> _Kernel:
    with_dtype = {
        "Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
        "ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
    }[operator._overloadname]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            if not _is_eligible(args[0]):
                return operator(*args, **kwargs)
            return with_dtype(*_filled(operator, args, kwargs), dtype=torch.float32)

    return kernel


def _filled(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments by position, defaults included."""
    arguments = operator._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(each.name, each.default_value) for each in arguments)]


def _widest(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        eligible = [t.dtype for t in tensors if _is_eligible(t)]
        widest = torch.float32 if torch.float32 in eligible else torch.get_autocast_dtype("cpu")
        return _call(operator, widest, args, kwargs)

    return kernel


def _banned(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA. "
            "Use binary_cross_entropy_with_logits."
        )

    return kernel
