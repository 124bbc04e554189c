"""The operators whose speed stands for a kind, at rising sizes: what is run to measure a device.

Each sample is a call of one operator on tensors that hold halves. Backward operators are taken from a real backward:
their arguments are kept when they are dispatched, so that nobody has to know them.

Adapter for operators that have no public name: those called through ``torch.ops.aten`` and ``torch.ops.bitsandbytes``,
those named in :func:`samples`, and ``OpOverload._schema``. A build of torch that computes one of them otherwise, as one
without oneDNN does, raises when the sample is made or called; its kind is left out then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memfit.hardware.rates import Kind

_aten = torch.ops.aten
_LARGEST = 2**22
"""Elements of the largest tensor."""
_POOLS = 4
_APART = 816
"""Elements between two buffers: of 4 bytes they are less than a page, and a multiple of 64 bytes."""
_BETWEEN = 2**21
"""Elements that are copied between two calls. Measured: with 8 MiB kernels take as long as within a real step; with 2
MiB they are up to a third faster, with 16 MiB small ones are slower (2 cores of an EPYC with 1 MiB of L2 each)."""

Call = Callable[[], Any]


class Halves:
    """Tensors full of a half, in any shape and dtype, over a few large buffers: made once, never written otherwise."""

    def __init__(self) -> None:
        # A half in float32 read as bfloat16 is a half and a zero: nothing that slows a processor. The buffers begin at
        # different places of a page: tensors at the same place would push each other out of the caches.
        whole = torch.full((_POOLS * (_LARGEST + _APART),), 0.5)
        self._pools = [whole[i * (_LARGEST + _APART) :][:_LARGEST] for i in range(_POOLS)]
        self._next = 0
        self._source, self._target = torch.zeros(_BETWEEN), torch.zeros(_BETWEEN)

    def flush(self) -> None:
        """Leave the caches as a kernel of real size does."""
        with torch.no_grad():
            self._target.copy_(self._source)

    def of(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor; up to four in a row do not overlap."""
        pool = self._pools[self._next % _POOLS]
        self._next += 1
        return pool.view(dtype)[: math.prod(shape)].view(shape)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A kind of operator and how to call it at a size."""

    kind: Kind
    sizes: tuple[int, ...]
    """Rising; what they mean is up to ``make``."""
    make: Callable[[Halves, int, torch.dtype], Call]
    """Prepares the call at one size."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


_ELEMENTS = (64, 2**12, 2**15, 2**18, 2**20, 2**22)
_FEWER = (64, 2**12, 2**16, 2**19, 2**21)


def samples() -> tuple[Sample, ...]:
    """All kinds but that of bitsandbytes."""
    return (
        Sample(kind="elementwise", sizes=_ELEMENTS, make=_add),
        Sample(kind="transcendental", sizes=_FEWER, make=_gelu),
        Sample(kind="cached_elementwise", sizes=_ELEMENTS[:-1], make=_add, dtypes=(torch.float32,)),
        Sample(kind="cached_transcendental", sizes=_FEWER, make=_sqrt, dtypes=(torch.float32,)),
        Sample(kind="copy", sizes=_ELEMENTS, make=_permuted_copy),
        Sample(kind="cast", sizes=_ELEMENTS, make=_cast),
        Sample(kind="fill", sizes=_ELEMENTS, make=_zeros),
        Sample(kind="reduction", sizes=_FEWER, make=_sum_of_rows),
        Sample(kind="softmax", sizes=_FEWER, make=_softmax),
        Sample(kind="masked_softmax", sizes=_FEWER, make=_safe_softmax),
        Sample(kind="softmax_backward", sizes=_FEWER, make=_softmax_backward),
        Sample(kind="log_softmax", sizes=_FEWER, make=_log_softmax),
        Sample(kind="log_softmax_backward", sizes=_FEWER, make=_log_softmax_backward),
        Sample(kind="layer_norm", sizes=_FEWER, make=_layer_norm),
        Sample(kind="layer_norm_backward", sizes=_FEWER, make=_backward_of(_layer_norm, "native_layer_norm_backward")),
        Sample(kind="batch_norm", sizes=_FEWER, make=_batch_norm),
        Sample(kind="batch_norm_backward", sizes=_FEWER, make=_backward_of(_batch_norm, "native_batch_norm_backward")),
        Sample(kind="pooling", sizes=_FEWER[:-1], make=_max_pool),
        Sample(kind="random", sizes=_FEWER[:-1], make=_bernoulli),
        Sample(kind="gather", sizes=_FEWER, make=_embedding),
        Sample(kind="scatter", sizes=_FEWER, make=_backward_of(_embedding, "embedding_dense_backward")),
        Sample(kind="matmul", sizes=(8, 32, 64, 128, 256, 512, 1024), make=_matmul),
        Sample(kind="thin_matmul", sizes=(64, 2**10, 2**14, 2**16), make=_thin_matmul),
        Sample(kind="batched_matmul", sizes=(1, 4, 16, 64, 256), make=_batched_matmul),
        Sample(kind="attention", sizes=(1, 2, 8, 32), make=_attention),
        Sample(
            kind="attention_backward",
            sizes=(1, 2, 8, 32),
            make=_backward_of(_attention, "_scaled_dot_product_flash_attention_for_cpu_backward"),
        ),
        Sample(kind="convolution", sizes=(8, 16, 32, 64, 128), make=_convolution),
        Sample(
            kind="convolution_backward",
            sizes=(8, 16, 32, 64, 128),
            make=_backward_of(_convolution, "convolution_backward"),
        ),
        Sample(kind="depthwise_convolution", sizes=(8, 128, 1024, 4096), make=_depthwise),
        Sample(
            kind="depthwise_convolution_backward",
            sizes=(8, 128, 1024, 4096),
            make=_backward_of(_depthwise, "convolution_backward"),
        ),
        Sample(kind="recurrent", sizes=(1, 4, 16, 64), make=_operator_of(_recurrent, "mkldnn_rnn_layer")),
        Sample(
            kind="recurrent_backward", sizes=(1, 4, 16, 64), make=_backward_of(_recurrent, "mkldnn_rnn_layer_backward")
        ),
        Sample(kind="fused_optimizer", sizes=_FEWER[1:], make=_fused_adamw, dtypes=(torch.float32,)),
    )


def quantised_samples() -> tuple[Sample, ...]:
    """The steps of bitsandbytes, with states in 8 and in 32 bits; need the library."""
    eight, full, dtypes = (2**12, 2**16, 2**19), (64, 2**12, 2**16, 2**19, 2**21), (torch.float32,)
    return (
        Sample(kind="quantised_optimizer", sizes=eight, make=_blockwise_adam, dtypes=dtypes),
        Sample(kind="unquantised_optimizer", sizes=full, make=_adam_of_bitsandbytes, dtypes=dtypes),
    )


class _Catch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the arguments of the first call of an operator."""

    def __init__(self, operator: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: Call | None = None
        self._operator = operator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.call is None and func._schema.name.split("::")[1] == self._operator:
            self.call = partial(func, *args, **kwargs)
        return func(*args, **kwargs)


def _caught(operator: str, run: Call) -> Call:
    catch = _Catch(operator)
    with catch:
        run()
    if catch.call is None:
        raise LookupError(f"{operator} was not called: torch {torch.__version__} computes it in another way")
    return catch.call


def _operator_of(make: Callable[..., Call], operator: str) -> Callable[[Halves, int, torch.dtype], Call]:
    def made(halves: Halves, size: int, dtype: torch.dtype) -> Call:
        with torch.enable_grad():
            return _caught(operator, make(halves, size, dtype))

    return made


def _backward_of(make: Callable[..., Call], operator: str) -> Callable[[Halves, int, torch.dtype], Call]:
    def made(halves: Halves, size: int, dtype: torch.dtype) -> Call:
        with torch.enable_grad():
            out = make(halves, size, dtype)()
        out = out[0] if isinstance(out, tuple) else out
        gradient = halves.of(*out.shape, dtype=out.dtype)
        return _caught(operator, lambda: out.backward(gradient))

    return made


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _add(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = halves.of(size, dtype=dtype), halves.of(size, dtype=dtype)
    return lambda: torch.add(a, b)


def _gelu(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = halves.of(size, dtype=dtype)
    return lambda: F.gelu(a)


def _sqrt(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = halves.of(size, dtype=dtype)
    return lambda: torch.sqrt(a)


def _permuted_copy(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    # As attention does with (batch, sequence, heads, features).
    heads, features = 2, 16
    rows = size // (heads * features)
    length = min(rows, 64)
    a = halves.of(rows // length, length, heads, features, dtype=dtype).transpose(1, 2)
    return lambda: a.clone(memory_format=torch.contiguous_format)


def _cast(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = halves.of(size, dtype=dtype)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    return lambda: a.to(other)


def _zeros(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    return lambda: torch.zeros(size, dtype=dtype)


def _rows(halves: Halves, size: int, dtype: torch.dtype, width: int) -> Tensor:
    width = min(size, width)
    return halves.of(size // width, width, dtype=dtype)


def _sum_of_rows(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _rows(halves, size, dtype, 512)
    return lambda: a.sum(0, keepdim=True)


def _softmax(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _rows(halves, size, dtype, 128)
    return lambda: torch.softmax(a, -1)


def _safe_softmax(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _rows(halves, size, dtype, 128)
    return lambda: _aten._safe_softmax(a, -1)


def _softmax_backward(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = _rows(halves, size, dtype, 128), _rows(halves, size, dtype, 128)
    return lambda: _aten._softmax_backward_data(a, b, -1, dtype)


def _log_softmax(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _rows(halves, size, dtype, 4096)
    return lambda: torch.log_softmax(a, -1)


def _log_softmax_backward(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = _rows(halves, size, dtype, 4096), _rows(halves, size, dtype, 4096)
    return lambda: _aten._log_softmax_backward_data(a, b, -1, dtype)


def _layer_norm(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _rows(halves, size, dtype, 512)
    weight, bias = (_leaf(halves.of(a.shape[-1], dtype=torch.float32)) for _ in range(2))
    a = _leaf(a)
    return lambda: F.layer_norm(a, a.shape[-1:], weight, bias)


def _images(halves: Halves, size: int, dtype: torch.dtype) -> Tensor:
    channels = max(1, min(32, size // 256))
    side = min(16, math.isqrt(size))
    return halves.of(size // (channels * side * side), channels, side, side, dtype=dtype)


def _batch_norm(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _leaf(_images(halves, size, dtype))
    channels = a.shape[1]
    weight, bias = (_leaf(halves.of(channels, dtype=torch.float32)) for _ in range(2))
    mean, variance = torch.zeros(channels), torch.ones(channels)
    return lambda: F.batch_norm(a, mean, variance, weight, bias, training=True)


def _max_pool(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a = _images(halves, size, dtype)
    return lambda: F.max_pool2d(a, 3, stride=2, padding=1)


def _bernoulli(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    target, generator = torch.empty(size, dtype=dtype), torch.Generator().manual_seed(0)
    return lambda: target.bernoulli_(0.9, generator=generator)


def _embedding(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    width = min(size, 128)
    weight = _leaf(halves.of(max(1, size // width), width, dtype=dtype))
    # Rows in an order that jumps, as tokens do.
    ids = torch.arange(len(weight)) * 7919 % len(weight)
    return lambda: F.embedding(ids, weight)


def _matmul(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = halves.of(size, size, dtype=dtype), halves.of(size, size, dtype=dtype)
    return lambda: torch.mm(a, b)


def _thin_matmul(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    # As the output layer of a large vocabulary at a small batch: little is computed with what is read.
    a, b = halves.of(32, 64, dtype=dtype), halves.of(64, size, dtype=dtype)
    return lambda: torch.mm(a, b)


def _batched_matmul(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = halves.of(size, 64, 32, dtype=dtype), halves.of(size, 32, 64, dtype=dtype)
    return lambda: torch.bmm(a, b)


def _attention(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    length = 16 if size == 1 else 128
    query, key, value = (_leaf(halves.of(1, size, length, 64, dtype=dtype)) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value)


def _convolution(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    image = _leaf(halves.of(max(1, size // 8), size, 16, 16, dtype=dtype))
    weight = _leaf(halves.of(size, size, 3, 3, dtype=dtype))
    return lambda: F.conv2d(image, weight, padding=1)


def _depthwise(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    channels = min(32, size)
    image = _leaf(halves.of(size // channels, channels, 16, 16, dtype=dtype))
    weight = _leaf(halves.of(channels, 1, 3, 3, dtype=dtype))
    return lambda: F.conv2d(image, weight, padding=1, groups=channels)


def _recurrent(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    # A smaller slice has fewer rows per time step, and as wide ones.
    width = 128
    with torch.random.fork_rng(devices=[]):  # its constructor draws weights
        layer = nn.LSTM(width, width, dtype=dtype)
    sequence = _leaf(halves.of(64, size, width, dtype=dtype))
    return lambda: layer(sequence)


def _fused_adamw(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    parameter = nn.Parameter(halves.of(size, dtype=dtype).clone())
    parameter.grad = halves.of(size, dtype=dtype)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return _caught("_fused_adamw_", optimizer.step)


def _blockwise_adam(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    from bitsandbytes import functional

    make_codes: Callable[..., Tensor] = functional.create_dynamic_map
    blocks = -(-size // 256)
    parameter, gradient = halves.of(size, dtype=dtype).clone(), halves.of(size, dtype=dtype)
    signed, unsigned = make_codes(signed=True), make_codes(signed=False)
    first, second = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    scales = torch.ones(blocks), torch.ones(blocks)
    update = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise
    betas, epsilon, step, rate = (0.9, 0.999, 0.0, 0.0), 1e-8, 10, 1e-3
    tables = (signed, unsigned, *scales)
    return lambda: update("adam", gradient, parameter, first, second, *betas, epsilon, step, rate, *tables, 0.0, 1.0)


def _adam_of_bitsandbytes(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    import bitsandbytes  # noqa: F401  # registers its operators

    parameter, gradient = halves.of(size, dtype=dtype).clone(), halves.of(size, dtype=dtype)
    first, second = torch.zeros(size), torch.zeros(size)
    update = torch.ops.bitsandbytes.optimizer_update_32bit
    betas, epsilon, decay, step, rate = (0.9, 0.999, 0.0, 0.0), 1e-8, 0.0, 10, 1e-3
    return lambda: update(
        "adam", gradient, parameter, first, second, None, 0.0, 0.0, *betas, epsilon, decay, step, rate, 1.0
    )
