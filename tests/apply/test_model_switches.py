"""Models of transformers know that layers of theirs are recomputed, and leave their caches out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.apply.activation_checkpointing import CheckpointedForward, checkpoint_modules
from lightning_memfit.apply.model_switches import switch_models
from lightning_memfit.search.checkpointing import find_repeated_blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL: Mapping[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
IDS = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(1))


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def deepseek() -> Any:
    """The first layer is dense, so that it is no member of the repeated ones, and has filled the cache before them."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **SMALL, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def recurrent_gemma() -> Any:
    """Its layers keep their states as attributes."""
    torch.manual_seed(0)
    return transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**SMALL))


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=32, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def gradients(model: Any) -> list[Tensor]:
    torch.manual_seed(2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def differ(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert len(ours) == len(theirs) > 0
    whole = sum(gradient.square().sum() for gradient in theirs).sqrt()
    pairs = zip(ours, theirs, strict=True)
    return float(max((our - their).norm() / max(their.norm(), 1e-3 * whole) for our, their in pairs))


@pytest.mark.parametrize("make", [llama, gpt2, deepseek, recurrent_gemma, bart])
@pytest.mark.parametrize("last_only", [False, True])
def test_gradients_with_the_default_cache_are_those_without_recomputing(
    make: Callable[[], Any], last_only: bool
) -> None:
    model = make()
    plain = gradients(copy.deepcopy(model))
    names = find_repeated_blocks(model)
    checkpoint_modules(model, names[-1:] if last_only else names)
    assert differ(gradients(model), plain) <= 1e-6


def test_only_models_around_recomputed_layers_are_told_and_layers_are_not() -> None:
    both = nn.ModuleDict({"student": bart(), "teacher": llama()})
    undo = switch_models(both, ("student.model.decoder.layers.0",))
    told = [name for name, part in both.named_modules() if vars(part).get("gradient_checkpointing")]
    assert told == ["student.model.encoder", "student.model.decoder"]
    assert both["student"].is_activation_checkpointing
    undo()
    undo()
    assert not both["student"].is_activation_checkpointing


def test_blocks_of_other_libraries_and_of_users_tell_nobody() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gradient_checkpointing = False
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    own = Own()
    switch_models(own, ("layers.0",))
    assert own.gradient_checkpointing is False
    model = llama()
    switch_models(model, ("model.layers.0.mlp",))
    assert model.model.gradient_checkpointing is False


def test_undo_gives_every_dict_back() -> None:
    model = llama()
    before = [(part.__dict__, dict(part.__dict__)) for part in model.modules()]
    undo = checkpoint_modules(model, ("model.layers.1",))
    assert model.model.gradient_checkpointing
    undo()
    undo()
    for now, then in before:
        assert list(now) == list(then)
        assert all(now[key] is then[key] for key in then)


def test_what_memfit_switched_on_is_not_taken_for_the_users_own_choice() -> None:
    model = llama()
    names = find_repeated_blocks(model)
    checkpoint_modules(model, names)
    assert find_repeated_blocks(model) == names
    checkpoint_modules(model, names)()
    assert isinstance(vars(model.model.layers[0])["forward"], CheckpointedForward)
    assert model.model.gradient_checkpointing


def test_a_model_that_recomputes_already_stays_as_it_is() -> None:
    model = llama()
    model.activation_checkpointing_enable()
    before = [dict(part.__dict__) for part in model.modules()]
    checkpoint_modules(model, ("model.layers.0",))
    checkpoint_modules(nn.ModuleList([model]), ("0",))  # also where it lies in a block that was chosen
    for part, then in zip(model.modules(), before, strict=True):
        assert all(part.__dict__[key] is then[key] for key in then) and part.__dict__.keys() == then.keys()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_recomputes_with_its_own_weights(duplicate: Callable[[Any], Any]) -> None:
    model = llama()
    checkpoint_modules(model, ("model.layers.0", "model.layers.1"))
    twin = duplicate(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    gradients(twin)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert twin.model.layers[0].forward.block is twin.model.layers[0]


def test_evaluation_and_generation_use_their_cache_as_ever() -> None:
    model = llama()
    checkpoint_modules(model, ("model.layers.0",))
    model.eval()
    with torch.no_grad():
        assert model(input_ids=IDS).cache.get_seq_length() == IDS.shape[1]
        assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape[1] <= IDS.shape[1] + 2


def test_a_layer_in_eval_mode_whose_part_of_the_cache_is_empty_is_recomputed() -> None:
    model = llama().eval()
    plain = gradients(copy.deepcopy(model))
    checkpoint_modules(model, ("model.layers.2",))
    assert differ(gradients(model), plain) <= 1e-6


def test_the_names_of_transformers_that_the_adapter_touches_exist() -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    assert GradientCheckpointingLayer.gradient_checkpointing is False
    model = llama()
    assert isinstance(model.model.layers[0], GradientCheckpointingLayer)
    assert isinstance(model, transformers.PreTrainedModel)
    assert vars(model.model)["gradient_checkpointing"] is False
    model.model.gradient_checkpointing = 1
    assert model(input_ids=IDS).cache is None, "transformers no longer leaves its cache out"
