"""A causal language model of transformers over bytes, made from a configuration: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from lightning_memfit.demo.byte_text import ByteSample
from lightning_memfit.demo.next_byte import VOCABULARY, NextByteModel
from lightning_memfit.demo.optimization import adamw, schedule_steps

_INSTALL = "model=hf_causal_lm needs transformers, which is not installed. pip install 'lightning-memfit[models]'"


def config_of(model_type: str, sizes: Mapping[str, Any]) -> Any:
    """Make the configuration of an architecture with a vocabulary of bytes.

    Args:
        model_type: the architecture, by the name that transformers gives it.
        sizes: values of its configuration, by its own keys; ``None`` leaves a key to the architecture.

    Returns:
        A ``PreTrainedConfig`` of transformers.

    Raises:
        ImportError: if transformers is not installed.
        ValueError: if the architecture is not known or is no causal language model, or has no such key.
    """
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type={model_type!r} is no causal language model that this version of transformers knows. Choose "
            "such as 'llama', 'gpt2', 'gpt_neox', 'mistral', 'qwen2' or 'opt'."
        )
    chosen = {name: value for name, value in sizes.items() if value is not None}
    defaults = AutoConfig.for_model(model_type)
    unknown = sorted(name for name in chosen if not hasattr(defaults, name))
    if unknown:
        raise ValueError(
            f"sizes.{unknown[0]}={chosen[unknown[0]]!r} is no setting of {type(defaults).__name__}. Set it to null, or "
            f"choose one of: {', '.join(sorted(name for name in defaults.to_dict() if not name.startswith('_')))}."
        )
    # Bytes have no special values: a padding token would be a byte whose embedding is never trained. The cache of keys
    # and values serves generation only.
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(model_type, **{**special, "vocab_size": VOCABULARY, "use_cache": False, **chosen})


def _model_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # transformers says that it is typed, but this method is not
    return auto.from_config(config)


class HFCausalLM(NextByteModel):
    """Any causal language model of transformers, trained on bytes by its own loss.

    Args:
        model_type: the architecture, by the name that transformers gives it.
        sizes: values of its configuration, by its own keys; ``None`` leaves a key to the architecture.
        learning_rate: highest learning rate.
        weight_decay: decay of the matrices.
        warmup_steps: optimizer steps until the highest learning rate.

    Raises:
        ImportError: if transformers is not installed.
        ValueError: if the architecture is not known or is no causal language model, or has no such key.
    """

    def __init__(
        self,
        model_type: str = "llama",
        sizes: Mapping[str, Any] | None = None,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        # A plain dict: what hyperparameters hold goes into the checkpoint, and a DictConfig of Hydra's could be
        # loaded only where OmegaConf is.
        sizes = {str(name): value for name, value in (sizes or {}).items()}
        self.save_hyperparameters()
        self.model = _model_of(config_of(model_type, sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte after each position: ``(batch, sequence)`` int64 to ``(batch, sequence, 256)``."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def loss(self, batch: ByteSample) -> Tensor:
        """Mean loss of the labelled bytes of a batch as the model itself forms it, in nats per byte.

        Raises:
            ValueError: if the samples are longer than the model's positions.
        """
        # These models shift the labels themselves: they are given a whole window, one byte longer than its inputs.
        # Its first label is left out by the shift, the last position has nothing to predict.
        window = torch.cat([batch.inputs[:, :1], batch.labels], dim=1)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and window.shape[1] > longest:
            raise ValueError(
                f"sizes.max_position_embeddings={longest}, but the samples have {window.shape[1]} bytes (the inputs "
                f"and the byte after them). Use at least {window.shape[1]}, or a shorter data.sequence_length."
            )
        loss: Tensor = self.model(input_ids=window.clamp(min=0), labels=window).loss
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, and transformers' own schedule: up in a line, then down to nothing along half a cosine."""
        from transformers import get_cosine_schedule_with_warmup

        optimizer = adamw(self, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        warmup, total = schedule_steps(self.warmup_steps, self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=warmup, num_training_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
