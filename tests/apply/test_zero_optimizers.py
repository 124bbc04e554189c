"""Under ZeRO an optimizer sees one flat tensor: who minds is refused, and who may mind is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memfit.apply.zero_optimizers import note_under_zero, why_not_under_zero


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(8, 8))]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_rules_that_treat_every_element_by_itself_are_used_without_a_word(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(parameters(), lr=1e-3)
    assert why_not_under_zero(optimizer, offload="optimizer") is None
    assert note_under_zero(optimizer) is None


def test_rules_that_look_at_whole_tensors_are_refused() -> None:
    assert why_not_under_zero(torch.optim.Adafactor(parameters())) == (
        "Adafactor factors the second moments of matrices, and under ZeRO it is given one flat tensor. Use an "
        "optimizer that treats every element by itself, such as torch.optim.AdamW, or strategy='ddp'."
    )


def test_states_in_8_bits_are_refused_since_they_would_be_those_of_embeddings_too() -> None:
    reason = why_not_under_zero(torch.optim.AdamW(parameters()), optimizer_states="8bit")
    assert reason == (
        "optimizer_states='8bit' under ZeRO would quantise embeddings, norms and biases with the rest: they lie in one "
        "flat tensor. Use optimizer_states='as-configured'; ZeRO divides the states by the number of ranks."
    )


def test_the_users_own_8_bit_optimizer_is_used_and_said() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer = bitsandbytes.optim.AdamW8bit(parameters())
    assert why_not_under_zero(optimizer) is None
    assert (note_under_zero(optimizer) or "").startswith("AdamW8bit steps one flat tensor for each parameter group")
    assert (why_not_under_zero(optimizer, offload="optimizer") or "").startswith(
        "AdamW8bit of bitsandbytes with offload"
    )
    assert note_under_zero(bitsandbytes.optim.AdamW(parameters())) is None  # 32 bits
    assert (why_not_under_zero(bitsandbytes.optim.LAMB8bit(parameters())) or "").startswith(
        "LAMB8bit scales each layer"
    )


def test_an_unknown_rule_is_used_and_said() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, given: list[nn.Parameter]) -> None:
            super().__init__(given, {})

    assert why_not_under_zero(Own(parameters())) is None
    assert (note_under_zero(Own(parameters())) or "").endswith("and MemFit does not know whether it does")

    class Mine(torch.optim.AdamW): ...

    assert note_under_zero(Mine(parameters())) is None
