"""Losses that slices change are recognised. Run: ``pytest tests/validate/test_splittable.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.validate.splittable import SplitVerdict, check_splittable, has_train_mode_batch_norm


class Classifier(LightningModule):
    """A classifier whose loss is given from outside."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], Any] = F.cross_entropy, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), *layers)
        self.loss = loss
        self.sizes: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        self.sizes.append(len(batch["x"]))
        loss = self.loss(self.net(batch["x"]), batch["y"])
        self.log("loss", 0.0)
        self.log_dict({"other": 0.0})
        return loss


def _batch(samples: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(samples, 4, generator=generator), "y": torch.arange(samples) % 3}


def _check(module: Any, batch: Any = None, **settings: Any) -> SplitVerdict:
    return check_splittable(
        module=module,
        batch=_batch() if batch is None else batch,
        split_by_sizes=split_by_sizes,
        training_step=lambda part: module.training_step(part, 0),
        **{"weights": lambda part: float(batch_size_of(part)), **settings},
    )


def test_a_mean_over_samples_is_exact() -> None:
    verdict = _check(Classifier())
    assert verdict.exact
    assert verdict.reason.startswith("The loss of 4 samples equals the weighted mean over slices of 2 and 2 (")


def test_three_samples_are_compared_as_two_and_one_with_their_weights() -> None:
    verdict = _check(Classifier(), _batch(3))
    assert verdict.exact
    assert "3 samples equals the weighted mean over slices of 2 and 1" in verdict.reason


def test_one_sample_is_never_sliced_and_so_nothing_runs() -> None:
    module = Classifier(lambda *_: 1 / 0)
    assert _check(module, _batch(1)) == SplitVerdict(exact=True, reason="A batch of one sample is never sliced.")


class WithRouter(nn.Module):
    """Returns what models of transformers with experts return."""

    router_aux_loss_coef = 1e-9

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        share = x.softmax(-1)
        return {"logits": x, "router_logits": (x,), "aux_loss": share.mean(0).square().sum(), "cache": None}


def test_a_routers_auxiliary_loss_is_named_however_small_it_is() -> None:
    module = Classifier(lambda output, y: F.cross_entropy(output["logits"], y), WithRouter())
    verdict = _check(module)
    assert not verdict.exact
    assert verdict.reason == (
        "WithRouter adds its router's auxiliary loss (aux_loss, router_aux_loss_coef=1e-09), which balances the "
        "experts over all tokens of the batch, so that slices would change it. allow_inexact_slicing=True slices it "
        "all the same."
    )
    module.net[-1].router_aux_loss_coef = 0.0  # type: ignore[assignment]
    assert _check(module).exact
    assert not torch.nn.modules.module._global_forward_hooks


def test_an_auxiliary_loss_without_a_router_is_compared_like_any_other() -> None:
    class Deep(WithRouter):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"logits": x, "aux_loss": x.square().mean()}

    assert _check(Classifier(lambda output, y: F.cross_entropy(output["logits"], y) + output["aux_loss"], Deep())).exact


def test_a_contrastive_loss_with_negatives_from_the_batch_is_caught() -> None:
    """Reported in dahiyaaneesh/peclr#17, kamalkraj/e5-mistral-7b-instruct#15."""

    def contrastive(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        normed = F.normalize(logits, dim=1)
        return F.cross_entropy(normed @ normed.T, torch.arange(len(logits)))

    verdict = _check(Classifier(contrastive))
    assert not verdict.exact
    assert "the weighted mean over slices of 2 and 2 is" in verdict.reason
    assert verdict.reason.endswith("allow_inexact_slicing=True slices it all the same.")


def test_a_sum_over_samples_is_caught() -> None:
    def total(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y, reduction="sum")

    verdict = _check(Classifier(total))
    assert not verdict.exact
    assert "no mean over samples" in verdict.reason
    exact = _check(Classifier(total), sums=True)
    assert exact.exact
    assert exact.reason.startswith("The loss of 4 samples equals the sum over slices of 2 and 2 (")
    mean = _check(Classifier(), sums=True)
    assert not mean.exact
    assert "the loss is no sum over samples, as loss_weight='sum' says" in mean.reason


def coupled_gradients(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The value is a mean over samples; the gradient is larger the more samples there are."""
    return (
        F.cross_entropy(logits, y)
        + len(y) * (logits - logits.detach()).square().mean()
        + (len(y) * (logits.mean() - logits.mean().detach()))
    )


def test_gradients_that_depend_on_the_other_samples_are_found_where_losses_agree() -> None:
    assert _check(Classifier(coupled_gradients)).exact
    verdict = _check(Classifier(coupled_gradients), gradients=True)
    assert not verdict.exact
    assert "equals the weighted mean over slices of 2 and 2, but the gradient of net.0." in verdict.reason
    assert "of its size: it depends on the other samples of the batch" in verdict.reason


class Balance(torch.autograd.Function):
    """Scales gradients by their norm over the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / gradients[0].norm()


class Balanced(nn.Module):
    """Balances gradients while training, as layers of speech recognisers do."""

    def forward(self, x: torch.Tensor) -> Any:
        return Balance.apply(x) if self.training else x


def test_gradients_that_depend_on_the_other_samples_in_train_mode_only_are_found() -> None:
    verdict = _check(Classifier(F.cross_entropy, Balanced()), gradients=True)
    assert not verdict.exact
    assert verdict.reason.startswith("In train mode: The loss of 4 samples equals the weighted mean over slices")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_a_mean_over_samples_agree_in_every_dtype(dtype: torch.dtype) -> None:
    batch = {"x": torch.randn(6, 4).to(dtype), "y": torch.arange(6) % 3}
    assert _check(Classifier().to(dtype), batch, gradients=True).exact


def test_a_loss_that_is_computed_in_16_bits_and_returned_in_32_is_compared_as_what_it_is() -> None:
    module = Classifier(lambda logits, y: F.cross_entropy(logits.bfloat16(), y).float())
    three = _batch(3)  # whose mean is no number of 8 binary digits
    assert not _check(module, three, gradients=True).exact  # nothing tells that it was rounded
    assert _check(module, three, gradients=True, computed_in=torch.bfloat16).exact
    summed = Classifier(lambda logits, y: F.cross_entropy(logits.bfloat16(), y, reduction="sum").float())
    assert not _check(summed, computed_in=torch.bfloat16).exact  # a sum is told from a mean all the same


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_that_are_not_finite_cannot_be_compared(whole: bool) -> None:
    """Of slices of two equal samples, or of the undivided batch: the root of 0 has an infinite slope."""
    batch = {"x": torch.ones(4, 4), "y": torch.zeros(4, dtype=torch.long)}
    if not whole:
        batch["x"][2:] = 2.0

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y) + 0 * (logits - logits.mean(0)).square().sum().sqrt()

    assert _check(Classifier(loss), batch).exact
    verdict = _check(Classifier(loss), batch, gradients=True)
    assert not verdict.exact
    assert verdict.reason == (
        "The gradient of net.0.weight is not finite, of the undivided batch or of a slice: nothing can be compared. "
        "allow_inexact_slicing=True slices it all the same."
    )


def test_gradients_that_dropout_moves_are_compared_without_it() -> None:
    assert _check(Classifier(F.cross_entropy, nn.Dropout(0.5)), gradients=True).exact


def test_a_comparison_with_gradients_leaves_those_of_the_run() -> None:
    module = Classifier()
    module.net[0].weight.grad = torch.ones(3, 4)
    assert _check(module, gradients=True).exact
    assert torch.equal(module.net[0].weight.grad, torch.ones(3, 4))
    assert module.net[0].bias.grad is None


def test_a_mean_over_tokens_needs_the_weight_of_tokens() -> None:
    """Reported in huggingface/transformers#34191, and by others.

    karpathy/nanochat#59, meta-pytorch/torchtune#1875, OpenNMT/OpenNMT-py#2209, ml-explore/mlx-lm#1413.
    """
    batch = {"x": torch.randn(4, 4), "y": torch.tensor([0, -100, 1, 2])}
    assert not _check(Classifier(), batch).exact
    assert _check(Classifier(), batch, weights=lambda part: float((part["y"] != -100).sum())).exact


def test_a_half_whose_labels_are_all_ignored_is_left_out_as_in_training() -> None:
    batch = {"x": torch.randn(4, 4), "y": torch.tensor([-100, -100, 1, 2])}  # the mean over no label is not a number
    assert _check(Classifier(), batch, weights=lambda part: float((part["y"] != -100).sum())).exact


def test_a_batch_norm_in_training_mode_is_named() -> None:
    module = Classifier(F.cross_entropy, nn.BatchNorm1d(3))
    verdict = _check(module)
    assert not verdict.exact
    assert verdict.reason.startswith("BatchNorm 'net.1' is in training mode")
    assert module.sizes == []


def test_only_batch_norms_that_use_the_batch_count() -> None:
    assert has_train_mode_batch_norm(nn.Sequential(nn.InstanceNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3))) is None
    assert has_train_mode_batch_norm(nn.Sequential(nn.Identity(), nn.SyncBatchNorm(3))) == "1"
    assert has_train_mode_batch_norm(nn.BatchNorm2d(3)) == "BatchNorm2d"
    assert has_train_mode_batch_norm(nn.Sequential(nn.BatchNorm1d(3)).eval()) is None
    without_running = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    assert has_train_mode_batch_norm(without_running) == "0"


def test_dropout_is_not_taken_for_coupling() -> None:
    assert _check(Classifier(F.cross_entropy, nn.Dropout(0.5))).exact


def test_a_loss_that_differs_when_repeated_cannot_be_compared() -> None:
    verdict = _check(Classifier(lambda logits, y: F.cross_entropy(F.dropout(logits, 0.5), y)))
    assert not verdict.exact
    assert "not deterministic: cannot be compared. The same 4 samples gave" in verdict.reason
    assert "allow_inexact_slicing=True" in verdict.reason


def test_a_loss_that_is_not_finite_cannot_be_compared() -> None:
    verdict = _check(Classifier(lambda logits, y: F.cross_entropy(logits, y) * float("nan")))
    assert not verdict.exact
    assert "not finite (undivided, repeated, slices: nan, nan, nan, nan)" in verdict.reason


@pytest.mark.parametrize("output", [None, torch.ones(2)], ids=["none", "two numbers"])
def test_a_step_without_one_loss_cannot_be_compared(output: Any) -> None:
    verdict = _check(Classifier(lambda *_: output))
    assert not verdict.exact
    assert "returned no loss" in verdict.reason


def test_outputs_that_cannot_be_joined_are_told_in_the_words_of_the_join() -> None:
    def with_matrix(logits: torch.Tensor, y: torch.Tensor) -> Mapping[str, Any]:
        return {"loss": F.cross_entropy(logits, y), "gram": logits.T @ logits}

    verdict = _check(Classifier(with_matrix))
    assert not verdict.exact
    assert "gram" in verdict.reason


def test_outputs_that_can_be_joined_are_fine() -> None:
    def with_logits(logits: torch.Tensor, y: torch.Tensor) -> Mapping[str, Any]:
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "kind": "classifier"}

    assert _check(Classifier(with_logits)).exact


def test_a_batch_that_cannot_be_divided_is_told_in_its_own_words() -> None:
    verdict = _check(Classifier(), {"x": torch.ones(6, 4), "y": torch.zeros(5)})
    assert not verdict.exact
    assert "6" in verdict.reason
    assert "5" in verdict.reason


def test_a_step_that_differentiates_inside_is_compared_with_gradients() -> None:
    def penalised(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), logits, create_graph=True)
        return slope.pow(2).sum(1).mean()

    assert _check(Classifier(penalised)).exact


def test_an_error_of_the_step_passes_through_and_everything_is_put_back() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("inside")

    module = Classifier(fail)
    with pytest.raises(KeyError, match="inside"):
        _check(module)
    assert module.sizes == []
    assert module.training
    assert "log" not in vars(module)


def test_nothing_of_the_run_is_changed() -> None:
    def greedy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.rand(1), np.random.rand(), random.random()
        y.clamp_(min=0)
        module.net[0].weight.data.mul_(1.0)
        return F.cross_entropy(logits, y)

    module = Classifier(greedy)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module.trainer = trainer
    callbacks, batch = trainer.callbacks, _batch()
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), module.net[0].weight.clone())
    keys = list(vars(module))
    assert _check(module, batch).exact
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert torch.equal(module.net[0].weight, before[3])
    assert list(vars(module)) == keys
    assert (module.sizes, module.training, trainer.callbacks) == ([], True, callbacks)
    assert all(torch.equal(batch[key], _batch()[key]) for key in batch)


class Centred(nn.Module):
    """A norm of a user's own: over the batch while training only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if self.training else x


def test_coupling_while_training_only_is_found() -> None:
    verdict = _check(Classifier(F.cross_entropy, Centred()))
    assert not verdict.exact
    assert verdict.reason.startswith("In train mode: The loss of 4 samples is ")
    frozen = Classifier(F.cross_entropy, Centred())
    frozen.eval()
    assert _check(frozen).exact


def test_dropout_is_not_mistaken_for_coupling_while_training() -> None:
    module = Classifier(F.cross_entropy, nn.Dropout(0.5))
    verdict = _check(module)
    assert verdict.exact and not verdict.undecided
    assert all(layer.training for layer in module.modules()), "the modes are as they were"


class Changing(Classifier):
    """Changes its buffers while it runs, in the way that is given."""

    def __init__(self, change: Callable[[Any], None], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 3).requires_grad_(False)
        self.teacher.load_state_dict(self.net[0].state_dict())
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.change = change

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        with torch.no_grad():
            self.change(self)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # The teacher begins as a copy of the student, so that the first update changes no value.
        (lambda module: module.teacher.weight.lerp_(module.net[0].weight, 0.1), "teacher.weight"),
        (lambda module: module.teacher.bias.data.mul_(0.9), "teacher.bias"),
        (lambda module: module.register_buffer("queue", module.queue.roll(1, 0)), "queue"),
        (lambda module: module.count.add_(1), "count"),
        (lambda module: [module.count.add_(1), module.queue.add_(1)], "queue and 1 more"),
    ],
)
def test_what_the_step_changes_by_itself_would_be_changed_by_every_slice(
    change: Callable[[Any], None], named: str
) -> None:
    """Momentum encoders, queues of negatives, codebooks: BYOL, MoCo, VQ-VAE."""
    module = Changing(change, queue=torch.arange(6.0), count=torch.tensor(0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    verdict = _check(module)
    assert not verdict.exact
    assert f"training_step changes {named} by itself, as a moving average or a counter does" in verdict.reason
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        lambda module: None if hasattr(module, "mask") else module.register_buffer("mask", torch.ones(3)),
        lambda module: module.queue.data.clamp_(0, 3),
        lambda module: setattr(module, "seen", torch.ones(2)),
    ],
    ids=["made once", "already so", "an attribute"],
)
def test_caches_and_what_is_already_so_are_no_change(change: Callable[[Any], None]) -> None:
    assert _check(Changing(change, queue=torch.arange(6.0))).exact


def test_layers_that_keep_statistics_of_their_own_are_named() -> None:
    module = Classifier()
    module.net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    assert "net.0.parametrizations.weight.0._u" in _check(module).reason
