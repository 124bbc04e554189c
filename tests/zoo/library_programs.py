"""Models of transformers, adapters of peft, metrics of torchmetrics: made from configurations, nothing is downloaded.

Dropout is off where the library's default is on: with it slices are equal in distribution only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.zoo.loss_programs import features
from tests.zoo.models import WIDTH, Classifier
from tests.zoo.program import SGD_MOMENTUM, Program, Run

VOCABULARY, LENGTH, SAMPLES = 96, 12, 24
IGNORED = -100

LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
BERT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class WithItsOwnLoss(lightning.LightningModule):
    """A model of transformers, trained as its documentation says: batches are its arguments."""

    def __init__(self, make_model: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], **SGD_MOMENTUM)


class WarmedUp(WithItsOwnLoss):
    """With transformers' own schedule, whose length the Trainer tells."""

    def configure_optimizers(self) -> Any:
        from transformers import get_cosine_schedule_with_warmup

        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(columns: Mapping[str, Tensor]) -> DataLoader[Any]:
    """Mappings of 8 samples, as the default collator of transformers makes them."""
    count = len(next(iter(columns.values())))
    samples = [{name: column[index] for name, column in columns.items()} for index in range(count)]
    return DataLoader(samples, batch_size=8)  # type: ignore[arg-type]


def text(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Token numbers ``(samples, length)`` and where they are no padding; at least five are none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(5, LENGTH + 1, (SAMPLES,), generator=generator)
    return ids, (torch.arange(LENGTH) < lengths[:, None]).long()


def whole_text() -> Mapping[str, Tensor]:
    ids, _ = text()
    return {"input_ids": ids, "labels": ids}


def padded_text() -> Mapping[str, Tensor]:
    """The loss is a mean over the tokens that are predicted: all but padding and the first of each sample."""
    ids, mask = text()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def instructions() -> Mapping[str, Tensor]:
    """Neither the question nor padding is learned."""
    ids, mask = text()
    learned = (mask == 1) & (torch.arange(LENGTH) >= 3)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(~learned, IGNORED)}


def masked_text() -> Mapping[str, Tensor]:
    ids, mask = text()
    hidden = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < 0.3) & (mask == 1)
    hidden[:, 1] = True
    labels = ids.masked_fill(~hidden, IGNORED)
    return {"input_ids": ids.masked_fill(hidden, 1) * mask, "attention_mask": mask, "labels": labels}


def translations() -> Mapping[str, Tensor]:
    (source, mask), (target, target_mask) = text(3), text(4)
    labels = target.masked_fill(target_mask == 0, IGNORED)
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


def images() -> Mapping[str, Tensor]:
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "labels": torch.arange(SAMPLES) % 4}


def speech() -> Mapping[str, Tensor]:
    _, labels = translations()["input_ids"], translations()["labels"]
    return {
        "input_features": torch.randn(SAMPLES, 16, 24, generator=torch.Generator().manual_seed(3)),
        "labels": labels,
    }


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **settings}))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**BERT))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = {name: value for name, value in BERT.items() if name != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**config, image_size=16, patch_size=4, num_labels=4))


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH,
        max_source_positions=12, max_target_positions=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4, output_router_logits=True))


def trained(
    make_model: Callable[[], Any],
    columns: Callable[[], Mapping[str, Tensor]],
    kind: Callable[[Callable[[], Any]], Any] = WithItsOwnLoss,
) -> Callable[[], Run]:
    """A program that trains a model of transformers."""
    return lambda: Run(module=kind(make_model), fit={"train_dataloaders": batches(columns())})


def with_adapters(model: Any, **settings: Any) -> Any:
    """The model as peft wraps it; matrices of rank 64 are large enough for 8-bit states."""
    import peft

    with warnings.catch_warnings():  # peft asks transformers by a name that is to go
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, peft.LoraConfig(r=WIDTH, init_lora_weights=False, **settings))


def lora() -> Any:
    return with_adapters(llama(), target_modules=["q_proj", "down_proj"])


def lora_with_the_switch_on() -> Any:
    """peft and transformers make the output of the frozen embeddings require gradients."""
    return with_adapters(llama_with_its_switch_on(), target_modules=["q_proj", "down_proj"])


def classifier_with_a_new_head() -> Any:
    """Of BERT only adapters and the head are trained and saved."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**BERT, num_labels=4))
    return with_adapters(model, target_modules=["query"], modules_to_save=["classifier"])


def labelled_text() -> Mapping[str, Tensor]:
    ids, mask = text()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.arange(SAMPLES) % 4}


class WithMetrics(Classifier):
    """Metrics are updated in both steps, and logged as objects."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        metrics = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])
        self.in_training = metrics.clone(prefix="train_")
        self.in_validation = metrics.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.in_training.update(logits.detach(), y)
        self.log_dict(self.in_training, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.in_validation.update(self(x), y)
        self.log_dict(self.in_validation)


def with_metrics() -> Run:
    return Run(module=WithMetrics(), fit={"train_dataloaders": features(), "val_dataloaders": features(20)})


def llama_with_its_switch_on() -> Any:
    model = llama()
    model.activation_checkpointing_enable()
    return model


PROGRAMS = (
    Program(name="a Llama", make=trained(llama, whole_text, WarmedUp), blocks=("model.model.layers.*",)),
    Program(
        name="a Llama whose switch is on",
        make=trained(llama_with_its_switch_on, whole_text),
        blocks=("model.model.layers.*",),
        recomputed_anyway=True,
    ),
    Program(
        name="a Llama of which the last layers are recomputed",
        make=trained(llama, whole_text),
        blocks=("model.model.layers.[12]",),
    ),
    Program(
        name="a Llama and padded text",
        make=trained(llama, padded_text),
        settings={"loss_weight": "next-tokens"},
        blocks=("model.model.layers.*",),
    ),
    # A sample's first token is in its labels, but nothing predicts it.
    Program(
        name="a Llama and padded text, weighed by all tokens",
        make=trained(llama, padded_text),
        settings={"loss_weight": "tokens"},
        blocks=("model.model.layers.*",),
        not_sliced="With loss_weight='next-tokens' they do not differ",
    ),
    Program(
        name="a Mixtral and its router",
        make=trained(mixtral, whole_text),
        blocks=("model.model.layers.*",),
        not_sliced="MixtralForCausalLM adds its router's auxiliary loss (aux_loss, router_aux_loss_coef=0.001)",
    ),
    Program(name="LoRA on a Llama", make=trained(lora, whole_text), blocks=("model.base_model.model.model.layers.*",)),
    Program(
        name="LoRA on a Llama whose switch is on",
        make=trained(lora_with_the_switch_on, whole_text),
        blocks=("model.base_model.model.model.layers.*",),
        recomputed_anyway=True,
    ),
    Program(
        name="LoRA on a BERT with a new head",
        make=trained(classifier_with_a_new_head, labelled_text),
        blocks=("model.base_model.model.bert.encoder.layer.*",),
    ),
    Program(name="metrics as objects", make=with_metrics),
    Program(
        name="a GPT-2 and instructions",
        make=trained(gpt2, instructions),
        settings={"loss_weight": "tokens"},
        blocks=("model.transformer.h.*",),
    ),
    Program(
        name="a BERT",
        make=trained(bert, masked_text),
        settings={"loss_weight": "tokens"},
        blocks=("model.bert.encoder.layer.*",),
    ),
    Program(
        name="a T5",
        make=trained(t5, translations),
        settings={"loss_weight": "tokens"},
        blocks=("model.*coder.block.*",),
    ),
    Program(name="a ViT", make=trained(vit, images), blocks=("model.vit.layers.*",)),
    Program(
        name="a Whisper",
        make=trained(whisper, speech),
        settings={"loss_weight": "tokens"},
        blocks=("model.model.*coder.layers.*",),
    ),
)
