"""How much an operator computes, and in how many steps: torch's own formulas, and those that it lacks.

Adapter for private names of torch: ``torch.utils.flop_counter.flop_registry`` and ``OpOverload._overloadpacket``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_aten = torch.ops.aten


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating point operations of one call; 0 for operators whose work is moving memory."""
    packet = func._overloadpacket
    own = _OWN_FLOPS.get(packet)
    if own is not None:
        return own(*args, **kwargs)
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def inner_calls_of(func: Any, args: tuple[Any, ...]) -> int:
    """Steps that a call takes one after the other: time steps of a recurrent layer, tensors of a list."""
    first = args[0] if args else None
    if isinstance(first, (list, tuple)):
        return len(first) or 1
    return int(first.shape[0]) if func in _RECURRENT and isinstance(first, torch.Tensor) else 1


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    # Five matrix products of the size of the forward's two. Source: torch.utils.flop_counter.sdpa_backward_flop_count.
    return _attention_flops(query, key, value) * 5 // 2


def _convolution_backward_flops(gradient: Any, image: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    # Each gradient that is wanted costs as much as the forward: every element of the result (of the image, where it is
    # transposed) meets the weights of one channel. torch's own formula multiplies by the number of groups once more.
    transposed, wanted = args[4], args[7]
    met = image if transposed else gradient
    return int(2 * met.numel() * weight[0].numel() * sum(wanted[:2]))


def _recurrent_flops(sequence: Any, input_weights: Any, hidden_weights: Any, *args: Any, **kwargs: Any) -> int:
    # Every row of (time, batch, features) is multiplied by both matrices of the gates.
    rows = sequence.shape[0] * sequence.shape[1]
    return int(2 * rows * (input_weights.numel() + hidden_weights.numel()))


def _recurrent_backward_flops(*args: Any, **kwargs: Any) -> int:
    # The gradients of the rows and those of the matrices, each as much as the forward.
    return 2 * _recurrent_flops(*args, **kwargs)


def _cudnn_recurrent_flops(sequence: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    # Every row of (time, batch, features) is multiplied by all matrices of the gates, those of all layers.
    rows = sequence.shape[0] * sequence.shape[1]
    return int(2 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _cudnn_recurrent_backward_flops(*args: Any, **kwargs: Any) -> int:
    # The gradients of the rows and those of the matrices, each as much as the forward.
    return 2 * _cudnn_recurrent_flops(*args, **kwargs)


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    # Every row of each group meets the columns of its own matrix, or of its part of the columns.
    groups = left.shape[0] if (left.dim(), right.dim()) == (3, 2) else 1
    return int(2 * left.numel() // groups * right.shape[-1])


_OWN_FLOPS: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten._cudnn_rnn: _cudnn_recurrent_flops,
    _aten._cudnn_rnn_backward: _cudnn_recurrent_backward_flops,
    _aten._grouped_mm: _grouped_flops,
    _aten.convolution_backward: _convolution_backward_flops,
    _aten.mkldnn_rnn_layer: _recurrent_flops,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
}
_RECURRENT = frozenset({_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default})
