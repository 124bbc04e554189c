"""Key/value caches of transformers among the arguments of a layer, which must not reach a layer that is recomputed.

A recomputed layer would append its keys and values a second time. Training never reads what a cache holds.
Adapter for transformers 4.36 and later: ``Cache.get_seq_length``, ``Cache.has_previous_state`` and ``layer_idx``.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def is_cache(value: Any) -> bool:
    """Whether an argument is a key/value cache."""
    return callable(getattr(value, "get_seq_length", None))


def tokens_held(cache: Any, layer: nn.Module) -> int:
    """Tokens that a cache holds of one layer; of linear attention, whose state has no length, 1 if there is a state.

    Layers share one cache. What others have put into it is no matter: a layer reads only its own part, by its number.
    """
    numbers = {number for part in layer.modules() if type(number := getattr(part, "layer_idx", None)) is int}
    return max(_held_at(cache, number) for number in numbers) if numbers else int(cache.get_seq_length())


def _held_at(cache: Any, number: int) -> int:
    try:
        return int(cache.get_seq_length(number))
    except TypeError:  # a cache of another library, which cannot be asked about one layer
        return int(cache.get_seq_length())
    except ValueError:
        return int(cache.has_previous_state(number))
