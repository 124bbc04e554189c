"""Models of transformers, made small from their configurations and trained by their own losses; nothing is downloaded.

Attention and dropout are what the library gives a training run by default; Llama, which has none, gets some dropout.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.attention import is_padding
from benchmarks.zoo_models.workload import Batch, Workload, own_loss

_VOCABULARY = 2048
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_FIRST_WORD = 3


def llama() -> Workload:
    """Causal language model with rotary positions, grouped queries and gated feed-forward; padded on the right."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
        **_SPECIAL,
    )
    batch = _padded(samples=8, longest=96)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return Workload(network=transformers.LlamaForCausalLM(config), batch={**batch, "labels": labels}, loss=own_loss)


def bert_hf() -> Workload:
    """Masked language model, padded; one token in seven is to be guessed."""
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=128,
        **_SPECIAL,
    )
    batch = _padded(samples=8, longest=96)
    guessed = (torch.arange(96) % 7 == 0) & (batch["attention_mask"] == 1)
    labels = batch["input_ids"].masked_fill(~guessed, -100)
    return Workload(network=transformers.BertForMaskedLM(config), batch={**batch, "labels": labels}, loss=own_loss)


def gpt2() -> Workload:
    """Causal language model with learned positions; whole sequences without a mask."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY, n_embd=192, n_layer=3, n_head=6, n_positions=128, use_cache=False, **_SPECIAL
    )
    ids = torch.randint(_FIRST_WORD, _VOCABULARY, (8, 96))
    return Workload(
        network=transformers.GPT2LMHeadModel(config), batch={"input_ids": ids, "labels": ids.clone()}, loss=own_loss
    )


def t5() -> Workload:
    """Encoder-decoder with relative positions, padded on both sides."""
    transformers = _transformers()
    config = transformers.T5Config(
        vocab_size=_VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    batch = _padded(samples=8, longest=96)
    labels = torch.randint(_FIRST_WORD, _VOCABULARY, (8, 64)).masked_fill(is_padding(samples=8, longest=64), -100)
    network = transformers.T5ForConditionalGeneration(config)
    return Workload(network=network, batch={**batch, "labels": labels}, loss=own_loss)


def _padded(*, samples: int, longest: int) -> Batch:
    padding = is_padding(samples=samples, longest=longest)
    ids = torch.randint(_FIRST_WORD, _VOCABULARY, (samples, longest)).masked_fill(padding, 0)
    return {"input_ids": ids, "attention_mask": (~padding).long()}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("these models need transformers: pip install transformers") from error
    return transformers
