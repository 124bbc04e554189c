"""Language models of transformers from explicit configurations, trained by their own losses; nothing is downloaded.

Source of the numbers: the ``config.json`` that each model's authors published on the Hugging Face Hub.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import Batch, own_loss

_GPT2_VOCABULARY = 50257
_BERT_VOCABULARY = 30522


def gpt2(*, layers: int = 12) -> nn.Module:
    """openai-community/gpt2."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=_GPT2_VOCABULARY, n_embd=768, n_layer=layers, n_head=12, n_positions=1024, use_cache=False
    )
    config._attn_implementation = "sdpa"
    network: nn.Module = transformers.GPT2LMHeadModel(config)
    return network


def bert_base_for_masked_words() -> nn.Module:
    """google-bert/bert-base-uncased with the head of its pre-training."""
    network: nn.Module = _transformers().BertForMaskedLM(_bert(width=768, layers=12, heads=12, attention="sdpa"))
    return network


def bert_large_for_classification() -> nn.Module:
    """bert-large-uncased with two labels and the attention of torch 1.10, of single operators.

    Source: pytorch/pytorch#64000: until 1.10 softmax kept its argument for the backward beside its result.
    """
    config = _bert(width=1024, layers=24, heads=16, attention=_attention_that_keeps_scores())
    network: nn.Module = _transformers().BertForSequenceClassification(config)
    return network


def llama(*, width: int, hidden: int, layers: int, heads: int, key_value_heads: int, vocabulary: int) -> nn.Module:
    """A model of the Llama family with an output layer of its own."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    network: nn.Module = transformers.LlamaForCausalLM(config)
    return network


def qwen3(*, width: int, hidden: int, layers: int, heads: int, key_value_heads: int) -> nn.Module:
    """A model of the Qwen3 family with an output layer of its own, heads of 128 features."""
    transformers = _transformers()
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=128,
        use_cache=False,
    )
    network: nn.Module = transformers.Qwen3ForCausalLM(config)
    return network


def qwen3_8b() -> nn.Module:
    """Qwen/Qwen3-8B."""
    return qwen3(width=4096, hidden=12288, layers=36, heads=32, key_value_heads=8)


def own_loss_with_cached_casts(network: nn.Module, batch: Batch) -> Tensor:
    """The network's own loss; where autocast is on, parameters are cast once in a forward, as is autocast's default.

    Source: huggingface/transformers src/transformers/trainer.py of January 2022, ``autocast_smart_context_manager``;
    Lightning's autocast does not keep what it cast.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        return own_loss(network, batch)
    finally:
        torch.set_autocast_cache_enabled(before)


def _bert(*, width: int, layers: int, heads: int, attention: str) -> Any:
    config = _transformers().BertConfig(
        vocab_size=_BERT_VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=512,
        type_vocab_size=2,
    )
    config._attn_implementation = attention
    return config


class _SoftmaxThatKeepsScores(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: Tensor) -> Tensor:
        result = torch.softmax(scores, dim=-1)
        context.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        scores, result = context.saved_tensors
        found: Tensor = torch.ops.aten._softmax_backward_data(gradient, result, -1, scores.dtype)
        return found


def _attention_that_keeps_scores() -> str:
    """Name under which transformers knows it from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    name = "eager_of_torch_1_10"
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, eager_mask)
    return name


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Heads side by side ``(batch, length, heads, size)``, and the weights."""
    scores = torch.matmul(query, key.transpose(2, 3)) / query.shape[-1] ** 0.5
    if attention_mask is not None:
        scores = scores + attention_mask
    weights: Tensor = _SoftmaxThatKeepsScores.apply(scores)  # type: ignore[no-untyped-call]
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("these models need transformers: pip install transformers") from error
    return transformers
