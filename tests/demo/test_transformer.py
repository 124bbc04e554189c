"""The block of the transformers: who sees whom, and weights that keep the variance of what they read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memfit.demo.byte_gpt import ByteGPT
from lightning_memfit.demo.next_byte import next_byte_loss
from lightning_memfit.demo.transformer import Block, initialise_blocks, sinusoids


@pytest.mark.parametrize(("causal", "first_changes"), [(True, False), (False, True)])
def test_a_position_sees_what_follows_only_without_a_mask(causal: bool, first_changes: bool) -> None:
    block = Block(16, num_heads=2, dropout=0.0, causal=causal)
    hidden = torch.randn(1, 5, 16)
    changed = hidden.clone()
    changed[0, 4] += 1.0
    assert torch.equal(block(hidden)[0, 0], block(changed)[0, 0]) is not first_changes


def test_matrices_keep_the_variance_and_those_that_add_to_the_stream_are_drawn_smaller() -> None:
    blocks = nn.ModuleList(Block(128, num_heads=2, dropout=0.0, causal=True) for _ in range(2))
    initialise_blocks(blocks, token_deviation=1.0)
    # 1 / sqrt(128) = 0.0884; of that 1 / sqrt(2 x 2 blocks) = 0.0442; and 1 / sqrt(512) / 2 = 0.0221.
    assert blocks[1].attention.query_key_value.weight.std().item() == pytest.approx(0.0884, rel=0.05)
    assert blocks[1].attention.output.weight.std().item() == pytest.approx(0.0442, rel=0.05)
    assert blocks[1].feed_forward[2].weight.std().item() == pytest.approx(0.0221, rel=0.05)
    assert (blocks[1].attention_norm.weight == 1).all()
    initialise_blocks(blocks, token_deviation=0.1)
    assert blocks[0].attention.query_key_value.weight.std().item() == pytest.approx(0.0884, rel=0.05)
    assert blocks[0].attention.output.weight.std().item() == pytest.approx(0.00442, rel=0.05)


def test_how_alike_two_positions_are_depends_on_their_distance_alone() -> None:
    waves = sinusoids(30, 16, longest_wavelength=100.0)
    alike = waves @ waves.T
    # Of eight pairs of sine and cosine each adds cos(0) = 1 for a position and itself.
    assert alike.diagonal().tolist() == pytest.approx([8.0] * 30, rel=1e-5)
    assert alike[3, 5].item() == pytest.approx(alike[20, 22].item(), rel=1e-4)
    assert sinusoids(30, 15, longest_wavelength=100.0).shape == (30, 15)


@pytest.mark.parametrize("tie_head", [True, False])
def test_the_untrained_gpt_knows_nothing_of_the_next_byte(tie_head: bool) -> None:
    model = ByteGPT(tie_head=tie_head)
    tokens = model.embedding(torch.arange(256)) * model.scale
    assert tokens.std().item() == pytest.approx(0.5, rel=0.05)
    # ln 256 = 5.545 is what knowing nothing costs; a byte's score of itself, at most 0.5 sqrt(192) = 6.9, adds some.
    text = torch.randint(0, 256, (4, 257))
    assert 5.5 < next_byte_loss(model(text[:, :-1]), text[:, 1:]).item() < 6.5
