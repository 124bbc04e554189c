"""Multilayer perceptrons from lists of layers, as GPUMemNet generated and measured them.

Source: itu-rad/GPUMemNet mlp_next.py@9daf4d7: after each hidden linear layer perhaps batch normalisation, then the
activation, perhaps dropout of one half; a softmax at the end, and cross entropy of what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

_LAYERS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch_normalization": nn.BatchNorm1d,
    "dropout": lambda width: nn.Dropout(0.5),
    "ReLU": lambda width: nn.ReLU(),
    "LeakyReLU": lambda width: nn.LeakyReLU(),
    "PReLU": lambda width: nn.PReLU(),
    "ELU": lambda width: nn.ELU(),
    "SELU": lambda width: nn.SELU(),
    "Tanh": lambda width: nn.Tanh(),
    "Softplus": lambda width: nn.Softplus(),
    "SiLU": lambda width: nn.SiLU(),
    "Mish": lambda width: nn.Mish(),
    "GELU": lambda width: nn.GELU(),
    "Identity": lambda width: nn.Identity(),
    "Softmax": lambda width: nn.Softmax(dim=1),
}
"""By the name in a list of layers; the argument is the width of the linear layer before."""


def perceptron(inputs: int, layers: Sequence[tuple[str, int]]) -> nn.Sequential:
    """A chain of layers.

    Args:
        inputs: features per sample.
        layers: kind and width of each; the width of ``"linear"`` is that of its output.

    Raises:
        KeyError: for a kind that is not known.
    """
    chain: list[nn.Module] = []
    for kind, width in layers:
        if kind == "linear":
            chain.append(nn.Linear(inputs, width))
            inputs = width
        else:
            chain.append(_LAYERS[kind](width))
    return nn.Sequential(*chain)
