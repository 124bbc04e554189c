"""Recurrent layers as cuDNN computes them: one operator for all time steps, layers and directions.

Source: ``aten/src/ATen/native/cudnn/RNN.cpp`` (``_cudnn_impl``, ``_cudnn_rnn``, ``_cudnn_rnn_backward``) and
``aten/src/ATen/cudnn/AutocastRNN.cpp``, torch 2.13.

Ignores: the scratch memory of a call and the state of its dropout, whose sizes cuDNN alone tells; the copy of weights
that do not lie in one block (Lightning's move to the device lays them so).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_KEPT_PER_STEP = {0: 1, 1: 1, 2: 5, 3: 4}
"""Vectors of the hidden size that the backward needs of each step: gates, and for an LSTM the cell."""


def layers() -> Mapping[str, Callable[..., Any]]:
    """By name of an operator of ``aten``, what it does on CUDA."""
    return {f"{kind}.input": partial(_layer, kind) for kind in _MODES}


def _layer(
    kind: str,
    sequence: torch.Tensor,
    states: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    hidden, cell = states if kind == "lstm" else (states, None)
    if torch.is_autocast_enabled("cpu" if sequence.device.type == "cpu" else "cuda"):
        dtype = torch.get_autocast_dtype("cpu" if sequence.device.type == "cpu" else "cuda")
        sequence, hidden = sequence.to(dtype), hidden.to(dtype)
        cell = None if cell is None else cell.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
    per_layer = len(weights) // (num_layers * (2 if bidirectional else 1))
    output_size = hidden.size(-1)
    hidden_size = output_size if cell is None else cell.size(-1)
    output, last_hidden, last_cell, *_ = _aten._cudnn_rnn(
        sequence, weights, per_layer, None, hidden, cell, _MODES[kind], hidden_size,
        output_size if output_size != hidden_size else 0,
        num_layers, batch_first, dropout, train, bidirectional, [], None,
    )  # fmt: skip
    return (output, last_hidden, last_cell) if kind == "lstm" else (output, last_hidden)


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """The results of torch's own shape function, which leaves open how much is kept for the backward.

    What is kept at least, in elements: for each step, layer and direction the gates and the cell, and between layers
    the outputs. cuDNN may keep more; it documents no formula.
    """
    sequence, _, _, _, _, _, mode, hidden_size, _, num_layers, batch_first, _, train, bidirectional = args[:14]
    output, last_hidden, last_cell, reserve, _ = _aten._cudnn_rnn.default(*args)
    if train:
        steps, batch = sequence.shape[:2] if not batch_first else sequence.shape[1::-1]
        vectors = num_layers * _KEPT_PER_STEP[mode] + (num_layers - 1)
        elements = steps * batch * (2 if bidirectional else 1) * hidden_size * vectors
        reserve = torch.empty(elements * sequence.element_size(), dtype=torch.uint8, device=sequence.device)
    same_weights = sequence.new_empty(0)  # a view of those that were given
    return output, last_hidden, last_cell, reserve, same_weights


def _backward(*args: Any) -> tuple[Any, ...]:
    """Gradients of the sequence, of the first states and of the weights, which lie in one block."""
    sequence, weights, _, _, hidden, cell = args[:6]
    wanted = args[-1]
    block = torch.empty(sum(weight.numel() for weight in weights), dtype=sequence.dtype, device=sequence.device)
    sizes = [weight.numel() for weight in weights]
    gradients = [part.view(weight.shape) for part, weight in zip(torch.split(block, sizes), weights, strict=True)]
    return (
        torch.empty_like(sequence) if wanted[0] else None,
        torch.empty_like(hidden) if wanted[1] else None,
        torch.empty_like(cell) if cell is not None and wanted[2] else None,
        gradients if wanted[3] else [None] * len(weights),
    )


KERNELS: Mapping[Any, Callable[..., Any]] = {
    _aten._cudnn_rnn.default: _forward,
    _aten._cudnn_rnn_backward.default: _backward,
}
"""By operator, what it makes on fakes."""
