"""Causal language models of transformers: from a configuration alone, trained by their own loss on every byte."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest
import torch

from lightning_memfit.demo.byte_text import NO_LABEL, ByteSample, ByteWindows
from lightning_memfit.demo.hf_causal_lm import HFCausalLM, config_of
from lightning_memfit.demo.next_byte import next_byte_loss

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def small_model(model_type: str = "llama", **sizes: Any) -> HFCausalLM:
    if model_type == "llama":
        sizes = {"intermediate_size": 32, **sizes}
    return HFCausalLM(model_type=model_type, sizes={**SIZES, **sizes})


def batch_of_windows(length: int = 6) -> ByteSample:
    windows = ByteWindows(torch.randint(0, 256, (3 * length + 1,), dtype=torch.uint8).numpy(), length)
    inputs, labels = zip(*(windows[index] for index in range(3)), strict=True)
    return ByteSample(inputs=torch.stack(inputs), labels=torch.stack(labels))


def test_the_model_of_the_configuration_file_has_the_parameters_worked_out_by_hand() -> None:
    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 512}
    model = HFCausalLM(sizes=sizes)
    # A Llama layer of width d and feed-forward width f: four matrices of d^2, three of d f, two norms of d. Embedding
    # and head 256 d each, last norm d.
    d, f = 192, 512
    expected = 6 * (4 * d**2 + 3 * d * f + 2 * d) + 2 * 256 * d + d
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 2_755_008


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "opt"])
def test_its_own_loss_is_the_mean_over_every_labelled_byte(model_type: str) -> None:
    model = small_model(model_type).eval()
    batch = batch_of_windows()
    assert model.loss(batch).item() == pytest.approx(next_byte_loss(model(batch.inputs), batch.labels).item(), rel=1e-5)


def test_padding_counts_for_nothing() -> None:
    model = small_model().eval()
    batch = batch_of_windows()
    alone = ByteSample(*(part[:1, :4] for part in batch))
    padded = ByteSample(batch.inputs[:1].clone(), batch.labels[:1].clone())
    padded.inputs[:, 4:], padded.labels[:, 4:] = 0, NO_LABEL
    assert model.loss(padded).item() == pytest.approx(model.loss(alone).item(), rel=1e-5)


def test_making_it_needs_no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = small_model()
    assert model.model.config.use_cache is False
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 256)


def test_what_goes_into_the_checkpoint_is_plain_data() -> None:
    from omegaconf import OmegaConf

    model = HFCausalLM(sizes=OmegaConf.create({**SIZES, "intermediate_size": None}), model_type="gpt2")
    assert type(model.hparams["sizes"]) is dict
    assert model.hparams["sizes"] == {**SIZES, "intermediate_size": None}


def test_null_leaves_a_size_to_the_architecture() -> None:
    assert config_of("llama", {**SIZES, "num_key_value_heads": None}).num_key_value_heads == 2
    # GPT-2 has no such setting, and its own names for the others.
    config = config_of("gpt2", {**SIZES, "num_key_value_heads": None})
    assert (config.n_embd, config.n_layer, config.n_head) == (16, 2, 2)


def test_no_byte_is_a_padding_token() -> None:
    # OPT's padding token is 1 by default, and the embedding of a padding token is never trained.
    assert small_model("opt").model.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize("model_type", ["lama", "vit"])
def test_what_is_no_causal_language_model_is_an_error_with_examples(model_type: str) -> None:
    with pytest.raises(ValueError, match=rf"^model_type='{model_type}' is no causal .* Choose such as 'llama', 'gpt2'"):
        config_of(model_type, {})


def test_a_size_that_the_architecture_does_not_have_is_an_error_with_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"^sizes\.hiden_size=16 is no setting of LlamaConfig\. .*\bhidden_size\b"):
        config_of("llama", {"hiden_size": 16})


def test_samples_longer_than_the_positions_are_an_error_with_both_numbers() -> None:
    model = small_model(max_position_embeddings=6)
    with pytest.raises(ValueError, match=r"^sizes\.max_position_embeddings=6, but the samples have 7 bytes .* least 7"):
        model.loss(batch_of_windows(6))
    model.loss(batch_of_windows(5))


def test_without_transformers_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"^model=hf_causal_lm needs transformers, .* pip install 'lightning-memfit\["
    ):
        small_model()
