"""The demo's models: their size worked out by hand, no look at the future, and a loss that falls."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from lightning_memfit.demo.byte_gpt import ByteGPT
from lightning_memfit.demo.byte_lstm import ByteLSTM
from lightning_memfit.demo.byte_text import NO_LABEL
from lightning_memfit.demo.next_byte import next_byte_loss
from lightning_memfit.demo.optimization import adamw_with_schedule, warmed_up_cosine
from lightning_memfit.demo.stdlib_text import StdlibText


def small_gpt(**settings: object) -> ByteGPT:
    return ByteGPT(**{"d_model": 32, "num_layers": 2, "num_heads": 2, "max_sequence_length": 32, **settings})


def small_lstm() -> ByteLSTM:
    return ByteLSTM(hidden_size=32, num_layers=2)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_gpt_has_the_parameters_worked_out_by_hand() -> None:
    # A block of width d: attention 4 d^2 + 4 d, feed-forward 8 d^2 + 5 d, two norms 4 d: 12 d^2 + 13 d.
    # Embedding 256 d, positions s d, last norm 2 d, tied head nothing. d = 32, s = 32, two blocks:
    assert count(small_gpt()) == 2 * (12 * 32**2 + 13 * 32) + 256 * 32 + 32 * 32 + 2 * 32
    assert count(small_gpt(tie_head=False)) == count(small_gpt()) + 256 * 32


def test_the_gpt_of_the_demo_has_a_few_million_parameters() -> None:
    assert count(ByteGPT()) == 6 * (12 * 192**2 + 13 * 192) + 256 * 192 + 256 * 192 + 2 * 192 == 2_767_872


def test_the_lstm_has_the_parameters_worked_out_by_hand() -> None:
    # A layer of width h: four gates, each with two matrices and two biases: 4 (2 h^2 + 2 h).
    assert count(small_lstm()) == 2 * 4 * (2 * 32**2 + 2 * 32) + 256 * 32 + 256 * 32 + 256


@pytest.mark.parametrize("model", [small_gpt(), small_lstm()], ids=["gpt", "lstm"])
def test_a_byte_changes_no_score_before_it(model: LightningModule) -> None:
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_heads_that_do_not_divide_the_width_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"^num_heads=5 does not divide d_model=32: .* Choose d_model=30, or another"):
        small_gpt(num_heads=5)


def test_equal_scores_have_the_entropy_of_a_byte() -> None:
    # ln 256 = 5.545177...
    loss = next_byte_loss(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64))
    assert loss.item() == pytest.approx(5.545177, abs=1e-6)


def test_bytes_without_a_label_count_for_nothing() -> None:
    logits = torch.randn(1, 3, 256)
    labels = torch.tensor([[7, 8, NO_LABEL]])
    assert next_byte_loss(logits, labels).item() == pytest.approx(next_byte_loss(logits[:, :2], labels[:, :2]).item())


def test_a_validation_batch_counts_as_many_times_as_it_has_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = small_gpt(), []
    monkeypatch.setattr(model, "log", lambda *_, batch_size, **__: counted.append(batch_size))
    model.validation_step((torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[7, 8, NO_LABEL], [9] * 3])), 0)
    assert counted == [5]


def test_only_matrices_decay_and_the_rate_starts_low() -> None:
    model = small_gpt()
    made = adamw_with_schedule(model, learning_rate=1.0, weight_decay=0.1, warmup_steps=4, total_steps=100)
    decayed, kept = made["optimizer"].param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for group in (decayed, kept) for p in group["params"]) == count(model)
    assert decayed["lr"] == 0.25


def test_a_run_without_an_end_keeps_the_rate() -> None:
    made = adamw_with_schedule(
        small_gpt(), learning_rate=1.0, weight_decay=0.0, warmup_steps=1, total_steps=float("inf")
    )
    factor = made["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert factor(1000) == pytest.approx(1.0)


def test_the_rate_stays_at_a_tenth_after_the_end() -> None:
    assert warmed_up_cosine(10**6, warmup_steps=2, total_steps=4) == pytest.approx(0.1)


@pytest.mark.parametrize("make", [small_gpt, small_lstm], ids=["gpt", "lstm"])
def test_the_validation_loss_falls(make: type[LightningModule], tmp_path: Path) -> None:
    seed_everything(1, verbose=False)
    model = make()
    untrained = copy.deepcopy(model)
    data = StdlibText(sequence_length=32, batch_size=8, max_bytes=100_000)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=30,
        limit_val_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    before = trainer.validate(untrained, datamodule=data, verbose=False)[0]["val_loss"]
    trainer.fit(model, datamodule=data)
    after = trainer.validate(model, datamodule=data, verbose=False)[0]["val_loss"]
    assert after < before - 0.5
