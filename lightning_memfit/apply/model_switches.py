"""The switch of transformers' models, so that they know that MemFit recomputes layers of theirs.

Adapter for transformers: the attribute ``gradient_checkpointing`` of its models, and two classes by their names.

A model of transformers that recomputes its layers leaves out what cannot be repeated: key/value caches, which are
passed by position in one architecture and kept as attributes of layers in another. Only the model's own code knows
where. So its switch is used for that, while the layers are recomputed by MemFit: transformers' own recomputation
updates running statistics twice, recomputes all layers or every n-th, and adds a hook to the embeddings that makes
frozen layers pass gradients on that nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_memfit.undo import Undo, set_instance_attribute

_SWITCH = "gradient_checkpointing"
_ON = 1  # true, and not the True by which ``recomputes_already`` knows what the user switched on


def switch_models(module: nn.Module, names: Iterable[str]) -> Undo:
    """Tell the models of transformers around some layers that layers of theirs are recomputed.

    The layers' own switches stay off. Layers that transformers would not recompute itself are passed over, since their
    models may take the switch for an order to recompute.

    Args:
        module: the root of the qualified names.
        names: qualified names of the layers.

    Returns:
        Takes it back; calling it twice is harmless.
    """
    named = dict(module.named_modules(remove_duplicate=False))
    models = {id(model): model for name in names if _is_layer(named[name]) for model in _around(named, name)}
    switches = [part for model in models.values() for part in model.modules() if _has_switch(part)]
    with ExitStack() as undone:
        for part in switches:
            undone.callback(set_instance_attribute(part, _SWITCH, _ON))
        return undone.pop_all().close


def _around(named: dict[str, nn.Module], name: str) -> Iterator[nn.Module]:
    """The outermost model of transformers around a layer, with all its parts."""
    parts = name.split(".")
    for end in range(len(parts)):
        outer = named[".".join(parts[:end])]
        if _is_a(outer, "PreTrainedModel"):
            yield outer
            return


def _has_switch(part: nn.Module) -> bool:
    return _is_a(part, "PreTrainedModel") and vars(part).get(_SWITCH) is False


def _is_layer(block: nn.Module) -> bool:
    return _is_a(block, "GradientCheckpointingLayer")


def _is_a(value: Any, name: str) -> bool:
    """Whether it is of a class of transformers, which need not be imported for that."""
    return any(base.__name__ == name and base.__module__.startswith("transformers.") for base in type(value).__mro__)
