"""Predicted peaks equal measured ones for models of transformers, built small from their configurations.

Run: ``pytest tests/trace/test_accuracy_transformers.py``; all precisions with ``-m "slow or not slow"``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 512,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attention_dropout=0.1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "precision"),
    [
        (llama, "bf16-mixed"),
        (bert, "32-true"),
        (gpt2, "bf16-mixed"),
        (t5, "32-true"),
        pytest.param(llama, "32-true", marks=pytest.mark.slow),
        pytest.param(bert, "bf16-mixed", marks=pytest.mark.slow),
        pytest.param(gpt2, "32-true", marks=pytest.mark.slow),
        pytest.param(t5, "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_the_peak_with_dropout_is_exact(
    compare: Callable[..., Any], build: Callable[[], nn.Module], precision: str
) -> None:
    torch.manual_seed(0)
    module = build().train()
    ids = torch.randint(3, 512, (4, 48))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    result = compare(module, batch, loss=lambda m, b: m(**b).loss, optimizer=torch.optim.AdamW, precision=precision)
    assert abs(result.error) < 0.002, (result.error, result.predicted, result.probes.failures)
