"""The models that predictions are checked against train, are the same every time, and have blocks to recompute."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.zoo import MODELS, Batch, ZooCase, all_cases, build
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.search.checkpointing import find_repeated_blocks


def _loader(batch: Batch) -> DataLoader[Batch]:
    """One batch, already collated."""
    return DataLoader([batch, batch], batch_size=None)


def test_there_are_fifty_six_different_cases() -> None:
    cases = all_cases()
    # 7 models x 2 precisions x 2 kinds of checkpointing x 2 optimizers.
    assert len(cases) == len(set(cases)) == len({case.label for case in cases}) == 56
    assert set(Counter(case.name for case in cases).values()) == {8}


def test_building_twice_gives_the_same_and_leaves_the_random_state() -> None:
    case = ZooCase("bert", "32-true", "none", "adamw")
    before = torch.get_rng_state()
    (first, first_batch), (second, second_batch) = build(case), build(case)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first_batch[key], second_batch[key]) for key in first_batch)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "count"),
    # U-Net: 3 encoder and 2 decoder stages of 2 blocks; ResNet: 3 stages of 2.
    [("mlp", 4), ("gpt", 3), ("vit", 4), ("bert", 3), ("unet", 10), ("resnet", 6), ("lstm", 2)],
)
def test_every_model_has_repeated_blocks(name: str, count: int) -> None:
    module, _ = build(ZooCase(name, "32-true", "blocks", "adamw"))
    assert len(find_repeated_blocks(module)) == count


def test_the_language_model_shares_its_embedding() -> None:
    module, _ = build(ZooCase("gpt", "32-true", "none", "adamw"))
    assert module.network.head.weight is module.network.tokens.weight


def test_the_bert_batch_is_padded_and_guesses_real_tokens_only() -> None:
    _, batch = build(ZooCase("bert", "32-true", "none", "adamw"))
    assert batch["padding"].any(dim=1).tolist() == [False] + [True] * 7
    assert bool((batch["targets"][batch["padding"]] == -100).all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("precision", "checkpointing", "optimizer"), [("32-true", "none", "sgd"), ("bf16-mixed", "blocks", "adamw")]
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_every_model_trains_under_lightning(name: str, precision: str, checkpointing: str, optimizer: str) -> None:
    module, batch = build(ZooCase(name, precision, checkpointing, optimizer))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    if checkpointing == "blocks":
        checkpoint_modules(module, find_repeated_blocks(module))
    trainer = Trainer(
        accelerator="cpu",
        precision=precision,
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
        if checkpointing == "blocks":
            checkpoint_modules(module, find_repeated_blocks(module))
        torch.manual_seed(3)
        module.training_step(batch).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
