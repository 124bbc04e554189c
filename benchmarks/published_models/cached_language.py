"""GPT-2 as transformers 4.51.3 trains it by default: its outputs hold the keys and values of all layers.

Source: transformers 4.51.3 src/transformers/models/gpt2/modeling_gpt2.py (``GPT2Attention``),
integrations/sdpa_attention.py, modeling_attn_mask_utils.py and loss/loss_utils.py (``ForCausalLMLoss``). Later versions
differ in each of these:

- keys and values are views of the layer's one projection, so that this stays as long as they;
- attention gets contiguous copies, and one mask of floats for all heads;
- every layer has a causal mask of its own as a buffer, which this attention does not use;
- labels are shifted by padding them, so that no copy of the logits is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published_models.language import gpt2
from benchmarks.zoo_models.workload import Batch

_IGNORED = -100


def padded_words(samples: int, length: int) -> Batch:
    """Texts of which the first is as long as the batch and the others half as long, as a collator pads them."""
    ids = torch.zeros(samples, length, dtype=torch.long)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1:, length // 2 :] = 0
    labels[1:, length // 2 :] = _IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def cached_gpt2(*, layers: int = 12) -> nn.Module:
    """openai-community/gpt2, with six layers distilbert/distilgpt2: loss, logits, and each layer's keys and values."""
    model: Any = gpt2(layers=layers)
    model.config._attn_implementation = _attention_that_shows_its_inputs()
    positions = model.config.n_positions
    for block in model.transformer.h:
        causal = torch.ones(1, 1, positions, positions, dtype=torch.bool)
        block.attn.register_buffer("bias", causal, persistent=False)
        block.attn.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
    return _WithCaches(model)


def returned_loss(network: nn.Module, batch: Batch) -> Tensor:
    """The first of what the network makes of the batch."""
    loss: Tensor = network(batch)[0]
    return loss


class _WithCaches(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        output: Any = self.model(input_ids=batch["input_ids"], attention_mask=_causal_mask(batch["attention_mask"]))
        blocks: Any = self.model.transformer.h  # type: ignore[union-attr]
        caches = [block.attn.__dict__.pop("seen") for block in blocks]
        logits: Tensor = output.logits.float()
        targets = F.pad(batch["labels"], (0, 1), value=_IGNORED)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=_IGNORED)
        return loss, logits, caches


def _causal_mask(mask: Tensor) -> Tensor:
    """What is added to scores, ``(batch, 1, length, length)``; unlike the original it reads no value of the mask."""
    length = mask.shape[-1]
    least = torch.finfo(torch.float32).min
    causal = torch.full((length, length), least, device=mask.device).triu(1)
    padding = (1.0 - mask[:, None, None, :].expand(-1, 1, length, -1).float()) * least
    return causal.expand(mask.shape[0], 1, length, length).masked_fill(padding.bool(), least)


def _attention_that_shows_its_inputs() -> str:
    """Name under which transformers knows it from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = "sdpa_of_transformers_4_51"
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, sdpa_mask)
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
) -> tuple[Tensor, None]:
    """Heads side by side ``(batch, length, heads, size)``; what came in is left at the module."""
    module.__dict__["seen"] = (key, value)
    result = F.scaled_dot_product_attention(
        query.contiguous(), key.contiguous(), value.contiguous(), attn_mask=attention_mask, dropout_p=dropout
    )
    return result.transpose(1, 2).contiguous(), None
