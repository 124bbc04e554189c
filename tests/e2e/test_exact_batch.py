"""Promise 1 through the Trainer: every optimizer step sees the gradient of exactly the effective batch.

Run with ``pytest tests/e2e/test_exact_batch.py``. The reference is a loop written by hand over undivided windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memfit import MemFit, forecast
from lightning_memfit.errors import NoFeasiblePlanError

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]
FEATURES = 16

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(lightning.LightningModule):
    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(FEATURES, dropout) for _ in range(3))
        self.head = nn.Linear(FEATURES, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def samples(count: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


class Gradients(Callback):
    """The gradients that each optimizer step gets."""

    def __init__(self) -> None:
        self.steps: list[list[torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps.append([parameter.grad.clone() for parameter in pl_module.parameters()])


def by_hand(
    module: Any, windows: list[Any], loss: Callable[[Any, Any], torch.Tensor] | None = None
) -> list[list[torch.Tensor]]:
    """Gradients of one step per undivided window."""
    optimizer, steps = module.configure_optimizers(), []
    for window in windows:
        optimizer.zero_grad()
        (loss(module, window) if loss is not None else module.training_step(window, 0)).backward()
        steps.append([parameter.grad.clone() for parameter in module.parameters()])
        optimizer.step()
    return steps


def windows_of(dataset: TensorDataset, effective: int) -> list[Any]:
    return [dataset[start : start + effective] for start in range(0, len(dataset), effective)]


def assert_equal_gradients(found: Any, expected: Any, tolerance: float) -> None:
    """DESIGN's promise: error <= tolerance x max(norm of the tensor, 1e-3 x norm of the whole gradient)."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        whole = torch.stack([gradient.norm() for gradient in theirs]).norm()
        for mine, reference in zip(ours, theirs, strict=True):
            assert (mine - reference).norm() <= tolerance * max(reference.norm(), 1e-3 * whole)


def collated(dataset: TensorDataset, size: int) -> list[torch.Tensor]:
    """A batch as the loader makes it: memory of its own, not a view of the whole data."""
    return [part.clone() for part in dataset[:size]]


def peak(module: Any, batch: Any, **candidate: Any) -> int:
    """Predicted, with room for the few bytes that a forecast without probing misses."""
    return forecast(module, batch, probe_operators=False, **candidate).peak_allocated_bytes + 512


def quiet(**settings: Any) -> MemFit:
    return MemFit(verbose=False, **{**AS_IT_IS, **settings})


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_a_budget_that_forces_slices_leaves_every_gradient_as_it_was(
    dtype: torch.dtype, tolerance: float, make_trainer: MakeTrainer
) -> None:
    # 596 samples in batches of 64: nine full ones and one of 20. Windows of four batches: 256, 256 and 64 + 20 = 84.
    """Reported in NVIDIA/Megatron-LM#1849, and by others.

    Lightning-AI/pytorch-lightning#17393, Lightning-AI/pytorch-lightning#21534, caikit/caikit-nlp#207,
    keras-team/keras#18948, EuroEval/EuroEval#22, EuroEval/EuroEval#69, huggingface/transformers#33281,
    ludwig-ai/ludwig#3533, unslothai/unsloth#3066, roboflow/rf-detr#814.
    """
    dataset, module = samples(596, dtype), Model(dtype)
    two, three = (peak(module, collated(dataset, 64), micro_batch_size=size) for size in (32, 22))
    assert three < two
    budget = (two + three) // 2
    plugin, gradients = quiet(effective_batch_size=256, budget=budget), Gradients()
    trainer = make_trainer(plugin, callbacks=[gradients])
    trainer.fit(module, DataLoader(dataset, 64))
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.split.slice_sizes == (22, 21, 21)
    assert plugin.plan.split.accumulate_grad_batches == 4
    assert plugin.plan.candidate.activation_checkpointing == "none"
    assert plugin.measured.measured_peak_bytes <= budget
    assert trainer.global_step == 3

    reference = Model(dtype)
    assert_equal_gradients(gradients.steps, by_hand(reference, windows_of(dataset, 256)), tolerance)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=10 * tolerance, atol=10 * tolerance)


def test_a_budget_that_slices_alone_do_not_meet_is_met_by_recomputing(make_trainer: MakeTrainer) -> None:
    # A micro-batch of 40 is given, since otherwise slices of a few samples need less than recomputing them.
    dataset, module = samples(320, torch.float64), Model(torch.float64)
    budget = peak(module, collated(dataset, 120), micro_batch_size=40, activation_checkpointing="blocks")
    assert budget < peak(module, collated(dataset, 120), micro_batch_size=40)
    plugin, gradients = quiet(budget=budget, micro_batch_size=40), Gradients()
    make_trainer(plugin, callbacks=[gradients]).fit(module, DataLoader(dataset, 120))
    assert plugin.plan is not None
    # The last block is recomputed while everything else is still saved: without it the peak is the same.
    assert plugin.plan.candidate.checkpointed_modules == ("blocks.0", "blocks.1")
    assert plugin.measured is not None and plugin.measured.measured_peak_bytes <= budget
    assert_equal_gradients(gradients.steps, by_hand(Model(torch.float64), windows_of(dataset, 120)), 1e-12)


class LargeInside(Model):
    """Memory is highest in the forward: many activations are dropped before the backward begins."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = 1 + x.repeat(1, 400).exp().sin().mean(1, keepdim=True)
        return super().forward(x * scale)


def test_old_gradients_are_dropped_early_where_only_that_fits(make_trainer: MakeTrainer) -> None:
    # The peak is in the forward, beside the old gradients of a head that is large while its activations are small.
    dataset, module = samples(64, torch.float64), LargeInside(torch.float64)
    whole = forecast(module, collated(dataset, 16), probe_operators=False)
    assert whole.peak_phase == "forward"
    plugin, gradients = quiet(budget=whole.peak_allocated_bytes - 512), Gradients()
    make_trainer(plugin, callbacks=[gradients]).fit(module, DataLoader(dataset, 16))
    assert plugin.plan is not None
    assert plugin.plan.candidate.zero_gradients_early and plugin.plan.split.num_slices == 1
    assert plugin.measured is not None
    assert plugin.measured.measured_peak_bytes < whole.peak_allocated_bytes
    assert_equal_gradients(gradients.steps, by_hand(LargeInside(torch.float64), windows_of(dataset, 16)), 1e-12)


@pytest.mark.parametrize("micro_batch_size", ["auto", 7])
def test_a_loader_that_does_not_divide_the_effective_batch_is_rebuilt(
    micro_batch_size: Any, make_trainer: MakeTrainer
) -> None:
    # The largest divisor of 100 that is at most 32 is 25. 230 samples: windows of 100, 100 and 30.
    """Reported in Lightning-AI/pytorch-lightning#17393, and by others.

    Lightning-AI/pytorch-lightning#21534, caikit/caikit-nlp#207, keras-team/keras#18948, EuroEval/EuroEval#22,
    EuroEval/EuroEval#69, huggingface/transformers#33281, ludwig-ai/ludwig#3533, unslothai/unsloth#3066,
    roboflow/rf-detr#814.
    """
    dataset = samples(230, torch.float64)

    def shuffled(batch_size: int) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(4))

    plugin, gradients = quiet(effective_batch_size=100, micro_batch_size=micro_batch_size), Gradients()
    trainer = make_trainer(plugin, callbacks=[gradients])
    trainer.fit(Model(torch.float64), shuffled(32))
    assert plugin.plan is not None
    split = plugin.plan.split
    assert (split.loader_batch_size, split.accumulate_grad_batches) == (25, 4)
    assert split.slice_sizes == ((25,) if micro_batch_size == "auto" else (7, 6, 6, 6))
    assert plugin.plan.notes[0].startswith("the loader is rebuilt with batches of 25 instead of 32")
    assert trainer.global_step == 3
    order = TensorDataset(*(torch.cat(parts) for parts in zip(*shuffled(32), strict=True)))
    assert_equal_gradients(gradients.steps, by_hand(Model(torch.float64), windows_of(order, 100)), 1e-12)


@pytest.mark.parametrize(("asked", "accumulate", "effective"), [(None, 3, 24), (24, 3, 24)])
def test_the_effective_batch_is_what_the_run_does_today_unless_asked(
    asked: int | None, accumulate: int, effective: int, make_trainer: MakeTrainer
) -> None:
    """Reported in roboflow/rf-detr#1176."""
    dataset = samples(56, torch.float64)
    plugin, gradients = quiet(effective_batch_size=asked, micro_batch_size=5), Gradients()
    trainer = make_trainer(plugin, callbacks=[gradients], accumulate_grad_batches=accumulate)
    trainer.fit(Model(torch.float64), DataLoader(dataset, 8))
    assert plugin.plan is not None and plugin.plan.split.effective_batch_size == effective
    assert_equal_gradients(gradients.steps, by_hand(Model(torch.float64), windows_of(dataset, effective)), 1e-12)
    assert trainer.accumulate_grad_batches == accumulate, "as the user set it, once the fit is over"


class Tokens(Model):
    """The loss is a mean over the tokens that have a label."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch["x"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def token_batches(count: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (count, 5), generator=generator)
    labels[torch.rand(count, 5, generator=generator) < 0.4] = -100
    return [{"x": x[i : i + size], "labels": labels[i : i + size]} for i in range(0, count, size)]


def test_a_mean_over_tokens_is_weighted_by_tokens(make_trainer: MakeTrainer) -> None:
    """Reported in huggingface/transformers#34191, and by others.

    karpathy/nanochat#59, meta-pytorch/torchtune#1875, OpenNMT/OpenNMT-py#2209, ml-explore/mlx-lm#1413.
    """
    batches = token_batches(20, 6)  # 6, 6, 6 and 2 samples: two windows
    plugin = quiet(effective_batch_size=12, micro_batch_size=4, loss_weight="tokens")
    gradients = Gradients()
    make_trainer(plugin, callbacks=[gradients]).fit(
        Tokens(torch.float64), DataLoader(Batches(batches), batch_size=None)
    )
    windows = [
        {name: torch.cat([batch[name] for batch in pair]) for name in pair[0]} for pair in (batches[:2], batches[2:])
    ]
    assert_equal_gradients(gradients.steps, by_hand(Tokens(torch.float64), windows), 1e-12)


class Batches(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Bag:
    """A batch of a structure that nobody knows."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


class BagModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch.x, batch.y), batch_idx)


def split_bag(bag: Bag, micro_batch_size: int) -> list[tuple[Bag, int]]:
    pairs = zip(bag.x.split(micro_batch_size), bag.y.split(micro_batch_size), strict=True)
    return [(Bag(x, y), len(x)) for x, y in pairs]


def collate_bag(items: list[Any]) -> Bag:
    return Bag(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


def test_a_batch_of_the_users_own_structure_is_divided_by_the_users_function(make_trainer: MakeTrainer) -> None:
    dataset = samples(40, torch.float64)
    plugin, gradients = quiet(effective_batch_size=32, micro_batch_size=7, split_batch=split_bag), Gradients()
    trainer = make_trainer(plugin, callbacks=[gradients])
    trainer.fit(BagModel(torch.float64), DataLoader(dataset, 16, collate_fn=collate_bag))
    assert plugin.plan is not None and plugin.plan.split.num_slices == 3
    assert_equal_gradients(gradients.steps, by_hand(Model(torch.float64), windows_of(dataset, 32)), 1e-12)


class Normalised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def test_normalisation_over_the_batch_is_not_sliced_and_that_is_said(make_trainer: MakeTrainer) -> None:
    """Reported in mosaicml/composer#1207."""
    plugin = quiet()
    make_trainer(plugin).fit(Normalised(), DataLoader(samples(32), 16))
    assert plugin.plan is not None and plugin.plan.split.num_slices == 1
    reasons = {choice.lever: choice.reason for choice in plugin.plan.choices}
    assert reasons["micro_batch_size"] == (
        "not sliced: norm normalises over the batch in train mode, so that slices would change the result. "
        "allow_inexact_slicing=True slices it all the same."
    )
    inexact = quiet(micro_batch_size=4, allow_inexact_slicing=True)
    make_trainer(inexact).fit(Normalised(), DataLoader(samples(32), 16))
    assert inexact.plan is not None and inexact.plan.split.num_slices == 4
    assert any("slices were not compared" in note for note in inexact.plan.notes)


class Contrastive(Model):
    """Each sample is compared with every other of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = nn.functional.normalize(self(batch[0]), dim=1)
        return nn.functional.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


def test_a_loss_that_couples_samples_is_found_and_not_sliced(make_trainer: MakeTrainer) -> None:
    """Reported in dahiyaaneesh/peclr#17, kamalkraj/e5-mistral-7b-instruct#15."""
    dataset = samples(80)
    room = peak(Contrastive(), collated(dataset, 40), activation_checkpointing="blocks")
    plugin = quiet(budget=room)
    make_trainer(plugin).fit(Contrastive(), DataLoader(dataset, 40))
    assert plugin.plan is not None
    assert plugin.plan.split.num_slices == 1 and plugin.plan.candidate.activation_checkpointing == "blocks"

    with pytest.raises(NoFeasiblePlanError) as caught:
        make_trainer(quiet(budget=room - 12 * 1024)).fit(Contrastive(), DataLoader(dataset, 40))
    assert "smaller slices need less, but the batch is not sliced: The loss of 4 samples is " in str(caught.value)


def test_dropout_is_no_obstacle(make_trainer: MakeTrainer) -> None:
    dataset = samples(256)
    budget = peak(Model(dropout=0.2), collated(dataset, 64), micro_batch_size=22)
    plugin, module = quiet(budget=budget), Model(dropout=0.2)
    trainer = make_trainer(plugin, max_epochs=8)
    before = nn.functional.cross_entropy(module(dataset[:][0]), dataset[:][1])
    trainer.fit(module, DataLoader(dataset, 64))
    module.eval()
    assert plugin.plan is not None and plugin.plan.split.slice_sizes == (22, 21, 21)
    assert nn.functional.cross_entropy(module(dataset[:][0]), dataset[:][1]) < 0.9 * before


@pytest.mark.parametrize(
    ("asked", "modules"),
    [
        (["blocks.[02]"], ("blocks.0", "blocks.2")),
        (["blocks.*.up", "head"], ("blocks.0.up", "blocks.1.up", "blocks.2.up", "head")),
    ],
)
def test_named_modules_are_recomputed_with_equal_gradients(
    asked: Any, modules: tuple[str, ...], make_trainer: MakeTrainer
) -> None:
    dataset = samples(24, torch.float64)
    plugin, gradients = quiet(activation_checkpointing=asked, micro_batch_size=5), Gradients()
    make_trainer(plugin, callbacks=[gradients]).fit(Model(torch.float64), DataLoader(dataset, 8))
    assert plugin.plan is not None and plugin.plan.candidate.checkpointed_modules == modules
    assert_equal_gradients(gradients.steps, by_hand(Model(torch.float64), windows_of(dataset, 8)), 1e-12)


def test_bf16_slices_equal_lightnings_own_mixed_precision(make_trainer: MakeTrainer) -> None:
    dataset, gradients, plain = samples(32), Gradients(), Gradients()
    plugin = quiet(precision="bf16-mixed", micro_batch_size=6, activation_checkpointing="blocks")
    make_trainer(plugin, callbacks=[gradients]).fit(Model(), DataLoader(dataset, 16))
    make_trainer(callbacks=[plain], precision="bf16-mixed").fit(Model(), DataLoader(dataset, 16))
    assert plugin.plan is not None and plugin.plan.candidate.precision == "bf16-mixed"
    assert_equal_gradients(gradients.steps, plain.steps, 2e-2)  # bf16 keeps 8 bits: 4e-3 per rounding


class Scheduled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.expected: list[Any] = []

    def configure_optimizers(self) -> Any:
        self.expected.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("effective", "settings"),
    [
        (32, {"max_epochs": 3}),
        (24, {"max_epochs": 2, "limit_train_batches": 5}),
        (20, {"max_epochs": 3}),
        (20, {"max_steps": 2}),
    ],
)
def test_the_estimate_for_schedules_is_the_real_number_of_steps(
    effective: int, settings: dict[str, int], make_trainer: MakeTrainer
) -> None:
    # 24 rebuilds nothing (3 x 8); 20 rebuilds the loader with batches of 5.
    """Reported in Lightning-AI/pytorch-lightning#11599, Lightning-AI/pytorch-lightning#12894."""
    module = Scheduled()
    trainer = make_trainer(quiet(effective_batch_size=effective), **settings)
    trainer.fit(module, DataLoader(samples(74), 8))
    assert module.expected == [trainer.global_step], "read once by Lightning; what planning read was taken back"


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter([self.dataset[index] for index in range(len(self.dataset))])


def test_a_stream_without_length_has_exact_windows_too(make_trainer: MakeTrainer) -> None:
    dataset = samples(74, torch.float64)
    plugin, gradients = quiet(effective_batch_size=32, micro_batch_size=3), Gradients()
    make_trainer(plugin, callbacks=[gradients]).fit(Model(torch.float64), DataLoader(Stream(dataset), 8))
    assert_equal_gradients(gradients.steps, by_hand(Model(torch.float64), windows_of(dataset, 32)), 1e-12)


@pytest.mark.filterwarnings("ignore:.*overfit_batches:UserWarning")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"limit_train_batches": 6}, 2),  # windows of 4 and 2 batches
        ({"limit_train_batches": 0.5}, 2),  # 5 batches
        ({"overfit_batches": 2, "max_epochs": 2}, 2),  # one short window per epoch
        ({"max_steps": 2}, 2),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 5}, 2),
        ({"barebones": True}, 3),
    ],
    ids=str,
)
def test_runs_that_are_cut_short_step_as_often_as_their_batches_allow(
    settings: dict[str, Any], steps: int, make_trainer: MakeTrainer, tmp_path: Any
) -> None:
    if "barebones" in settings:
        settings = {**settings, "enable_checkpointing": None, "logger": None, "enable_progress_bar": None}
        settings["enable_model_summary"] = None
    plugin, gradients = quiet(effective_batch_size=32, micro_batch_size=3), Gradients()
    trainer = make_trainer(plugin, callbacks=[gradients], **settings)
    dataset = samples(74, torch.float64)
    trainer.fit(Model(torch.float64), DataLoader(dataset, 8))
    assert trainer.global_step == len(gradients.steps) == steps
    first = dataset[: min(32, 8 * int(trainer.num_training_batches))]
    assert_equal_gradients(gradients.steps[:1], by_hand(Model(torch.float64), [first]), 1e-12)
    assert (tmp_path / "plan.yaml").exists() == ("fast_dev_run" not in settings)
