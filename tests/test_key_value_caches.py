"""How many tokens a cache holds of one layer, which is asked before the layer is recomputed without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memfit.key_value_caches import is_cache, tokens_held


class Layer(nn.Module):
    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.attention = nn.Linear(1, 1)
        if number is not None:
            self.attention.layer_idx = number  # type: ignore[assignment]


class OfOneLength:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def test_a_cache_is_what_tells_a_length() -> None:
    assert is_cache(OfOneLength(0))
    assert not is_cache(torch.zeros(1)) and not is_cache(None)


@pytest.mark.parametrize("number", [None, 0, 3])
def test_a_cache_that_knows_no_layers_is_asked_as_a_whole(number: int | None) -> None:
    assert tokens_held(OfOneLength(4), Layer(number)) == 4


def test_what_other_layers_put_into_a_cache_is_no_matter() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    cache = transformers.DynamicCache()
    states = torch.zeros(1, 1, 5, 2)
    cache.update(states, states, 0)
    assert [tokens_held(cache, Layer(number)) for number in (0, 1, None)] == [5, 0, 5]


def test_of_linear_attention_there_is_a_state_or_none() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.JambaConfig(num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=0)
    cache = transformers.DynamicCache(config=config)
    assert type(cache.layers[1]).__name__.startswith("Linear"), cache.layers
    assert tokens_held(cache, Layer(1)) == 0
    cache.update_conv_state(torch.zeros(1, 2, 4), 1)
    assert tokens_held(cache, Layer(1)) == 1
