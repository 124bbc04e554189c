"""The models that predictions are checked against train, are the same every time, and have blocks to recompute."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.zoo import ZooCase, all_cases, build, select_cases
from benchmarks.zoo_models import MODELS
from benchmarks.zoo_models.workload import Batch
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.batch_tree import batch_size_of
from lightning_memfit.search.checkpointing import find_repeated_blocks

EVERY_SETTING = {"mlp", "gpt", "vit", "bert", "unet", "resnet", "lstm"}


def _loader(batch: Batch) -> DataLoader[Batch]:
    """One batch, already collated."""
    return DataLoader([batch, batch], batch_size=None)


def test_labels_are_different_and_every_model_has_a_case_in_8_bits() -> None:
    cases = all_cases()
    assert len(cases) == len(set(cases)) == len({case.label for case in cases}) >= 60
    assert {case.name for case in cases if case.optimizer_states == "8bit"} == set(MODELS)
    assert {case.implementation for case in cases} == {"as-configured", "foreach", "fused"}
    # bitsandbytes has one implementation of its own.
    assert not any(case.optimizer_states == "8bit" and case.implementation != "as-configured" for case in cases)


def test_the_settings_without_levers_on_the_optimizer_span_all_pairs() -> None:
    plain = [case for case in all_cases() if not case.has_optimizer_levers]
    # 2 precisions x 2 kinds of checkpointing x 2 optimizers, or the half of them with all pairs.
    assert Counter(case.name for case in plain) == {name: 8 if name in EVERY_SETTING else 4 for name in MODELS}
    for name in MODELS:
        mine = [case for case in plain if case.name == name]
        assert len({(case.precision, case.checkpointing) for case in mine}) == 4
        assert len({(case.precision, case.optimizer) for case in mine}) == 4
        assert len({(case.checkpointing, case.optimizer) for case in mine}) == 4


def test_labels_name_the_levers_and_select_cases() -> None:
    assert ZooCase("gpt", "32-true", "none", "adamw").label == "gpt 32-true none adamw"
    assert ZooCase("gpt", "32-true", "none", "adamw", "8bit").label == "gpt 32-true none adamw 8bit"
    assert [case.implementation for case in select_cases("t5 * fused")] == ["fused"]
    with pytest.raises(ValueError, match=r"no case matches 'nothing'"):
        select_cases("nothing")


def test_building_twice_gives_the_same_and_leaves_the_random_state() -> None:
    case = ZooCase("bert", "32-true", "none", "adamw")
    before = torch.get_rng_state()
    (first, first_batch), (second, second_batch) = build(case), build(case)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first_batch[key], second_batch[key]) for key in first_batch)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mlp", 4),
        ("wide", 3),
        ("gpt", 3),
        ("vit", 4),
        ("bert", 3),
        ("unet", 10),  # 3 encoder and 2 decoder stages of 2 blocks
        ("resnet", 6),  # 3 stages of 2
        ("mobile", 6),  # 3 stages of 2
        ("lstm", 2),
        ("gru", 2),
        ("seq2seq", 4),  # 2 in the encoder, 2 in the decoder
        ("llama", 3),
        ("bert_hf", 3),
        ("t5", 4),  # 3 on each side, but the first of a side has the positions and is another structure
        ("gpt2", 3),
        ("big_vocabulary", 2),
    ],
)
def test_every_model_has_repeated_blocks(name: str, count: int) -> None:
    module, _ = build(ZooCase(name, "32-true", "blocks", "adamw"))
    assert len(find_repeated_blocks(module)) == count


@pytest.mark.parametrize("name", ["gpt", "big_vocabulary"])
def test_the_output_layer_shares_the_embedding(name: str) -> None:
    module, _ = build(ZooCase(name, "32-true", "none", "adamw"))
    network = module.network
    assert network.head.weight is (network.items if name == "big_vocabulary" else network.tokens).weight


def test_the_bert_batch_is_padded_and_guesses_real_tokens_only() -> None:
    _, batch = build(ZooCase("bert", "32-true", "none", "adamw"))
    assert batch["padding"].any(dim=1).tolist() == [False] + [True] * 7
    assert bool((batch["targets"][batch["padding"]] == -100).all())


@pytest.mark.parametrize("name", ["llama", "bert_hf"])
def test_the_batches_of_transformers_are_padded_and_padding_has_no_label(name: str) -> None:
    _, batch = build(ZooCase(name, "32-true", "none", "adamw"))
    padded = batch["attention_mask"] == 0
    assert padded.any(dim=1).tolist() == [False] + [True] * 7
    assert bool((batch["labels"][padded] == -100).all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_every_model_trains_under_lightning(name: str) -> None:
    case = ZooCase(name, "bf16-mixed", "blocks", "adamw")
    module, batch = build(case)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    checkpoint_modules(module, find_repeated_blocks(module))
    trainer = Trainer(
        accelerator="cpu",
        precision=case.precision,
        fast_dev_run=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, _loader(batch))
    assert trainer.global_step == 2
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_the_blocks_changes_no_gradient(name: str) -> None:
    gradients = []
    for checkpointing in ("none", "blocks"):
        module, batch = build(ZooCase(name, "32-true", checkpointing, "adamw"))
        assert batch_size_of(batch) > 1
        if checkpointing == "blocks":
            checkpoint_modules(module, find_repeated_blocks(module))
        torch.manual_seed(3)
        module.training_step(batch).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_levers_of_a_case_are_on_its_optimizer_only_if_asked_for() -> None:
    case = ZooCase("wide", "32-true", "none", "sgd", implementation="foreach")
    without, _ = build(case)
    assert without.configure_optimizers().param_groups[0]["foreach"] is None
    with_levers, _ = build(case, with_optimizer_levers=True)
    assert with_levers.configure_optimizers().param_groups[0]["foreach"] is True


@pytest.mark.parametrize(("optimizer", "name"), [("adamw", "AdamW8bit"), ("sgd", "SGD8bit")])
def test_a_case_in_8_bits_trains_with_the_optimizer_of_bitsandbytes(optimizer: str, name: str) -> None:
    pytest.importorskip("bitsandbytes")
    module, _ = build(ZooCase("wide", "32-true", "none", optimizer, "8bit"), with_optimizer_levers=True)
    assert type(module.configure_optimizers()).__name__ == name
