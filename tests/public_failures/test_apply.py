"""Failures of applying a plan that users reported in public: wrong batches, wrong steps, levers that break the run.

``docs/public-failures.md`` has the whole table; reports are cited as ``owner/repo#number``.
Run with ``pytest tests/public_failures/test_apply.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_memfit.errors import BatchArithmeticError, ConfigurationError, NoFeasiblePlanError
from tests.public_failures.network import (
    Block,
    Network,
    is_real,
    loader,
    predicted_peak,
    quiet,
    samples,
    weights,
)

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, reference in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


# Gradients and hooks.


class WithSpareHead(Network):
    """A head that no optimizer steps and whose gradients nobody zeroes, as in a GAN of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.spare(self(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.blocks.parameters(), *self.head.parameters()], lr=0.1)


class GradientsAtStart(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = [name for name, each in pl_module.named_parameters() if each.grad is not None]


def test_trials_leave_no_gradient_behind_also_where_no_optimizer_zeroes_it(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#591."""
    start = GradientsAtStart()
    plugin, modules = quiet(micro_batch_size=16), (WithSpareHead(), WithSpareHead())
    make_trainer(plugin, callbacks=[start]).fit(modules[0], loader())
    assert plugin.measured is not None
    assert start.found == []
    make_trainer().fit(modules[1], loader())
    assert modules[1].spare.weight.grad is not None
    torch.testing.assert_close(modules[0].spare.weight.grad, modules[1].spare.weight.grad)


def test_an_optimizer_step_of_the_users_own_is_called_once_per_window(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#5054: accumulation beside an overridden ``optimizer_step``."""

    class Warms(Network):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            self.steps += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * self.steps
            optimizer.step(closure=optimizer_closure)

    modules = Warms(), Warms()
    plugin = quiet(effective_batch_size=64)
    trainer = make_trainer(plugin)
    trainer.fit(modules[0], loader(16))
    assert plugin.plan is not None and plugin.plan.split.accumulate_grad_batches == 4
    assert trainer.global_step == modules[0].steps == 2
    make_trainer().fit(modules[1], loader(64))
    assert_same_weights(*modules)
    with pytest.raises(ConfigurationError, match="optimizer_step"):
        make_trainer(quiet(micro_batch_size=4)).fit(Warms(), loader(16))


# Loaders and samplers.


class Data(lightning.LightningDataModule):
    """Nothing here is called ``batch_size``."""

    def train_dataloader(self) -> Any:
        return loader(64)

    def val_dataloader(self) -> Any:
        return loader(32)


def test_the_batch_size_is_read_from_the_loader_and_needs_no_attribute(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#3233, Lightning-AI/pytorch-lightning#4226.

    Lightning-Universe/lightning-bolts#174.
    """
    plugin = quiet(effective_batch_size=48)
    trainer = make_trainer(plugin)
    trainer.fit(Network(), datamodule=Data())
    assert plugin.plan is not None
    assert (plugin.plan.split.loader_batch_size, plugin.plan.split.accumulate_grad_batches) == (48, 1)
    assert trainer.global_step == 3


class BatchSizes(Callback):
    def __init__(self) -> None:
        self.train: list[int] = []
        self.validation: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train.append(len(batch[0]))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: Any) -> None:
        self.validation.append(len(batch[0]))


def test_validation_keeps_its_own_batches_and_is_measured_with_them(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#9832."""
    plugin, sizes = quiet(effective_batch_size=48), BatchSizes()
    make_trainer(plugin, callbacks=[sizes], num_sanity_val_steps=0).fit(Network(), datamodule=Data())
    assert sizes.train == [48, 48, 32] and sizes.validation == [32] * 4
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.notes[0].startswith("the loader is rebuilt with batches of 48 instead of 64")
    assert plugin.measured.evaluation_batch is not None and "(32, 64)" in plugin.measured.evaluation_batch


@pytest.mark.parametrize("limit", [1.0, 3])
def test_the_number_of_validation_batches_is_that_of_a_plain_run(limit: Any, make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#18394, Lightning-AI/pytorch-lightning#18834."""
    runs = []
    for plugin in (quiet(micro_batch_size=16), None):
        sizes = BatchSizes()
        trainer = make_trainer(plugin, callbacks=[sizes], max_epochs=2, limit_val_batches=limit)
        trainer.fit(Network(), datamodule=Data())
        runs.append((trainer.num_val_batches, trainer.limit_val_batches, sizes.validation))
    assert runs[0] == runs[1]
    assert len(runs[0][2]) == 2 + 2 * (4 if limit == 1.0 else 3)  # the sanity check, and two epochs


class OwnSampler:
    """Batches of indices from a class that knows no ``batch_size`` and cannot be made anew from its attributes."""

    def __init__(self, lengths: list[int], *, seed: int) -> None:
        order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
        self.batches = [order[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Sized(BatchSampler):
    """A batch sampler of the user's own with a further argument."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, *, repeats: int) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            for _ in range(self.repeats):
                yield batch

    def __len__(self) -> int:
        return self.repeats * super().__len__()


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: OwnSampler([64, 64], seed=3),
        lambda: Sized(SequentialSampler(samples()), 64, False, repeats=2),
    ],
    ids=["without batch_size", "with a further argument"],
)
def test_batches_of_a_sampler_of_the_users_own_are_sliced_and_not_made_anew(
    sampler: Callable[[], Any], make_trainer: MakeTrainer
) -> None:
    """Lightning-AI/pytorch-lightning#18391, Lightning-AI/pytorch-lightning#19371.

    Lightning-AI/pytorch-lightning#20272.
    """
    modules, steps = (Network(), Network()), []
    plugin = quiet(micro_batch_size=16)
    for module, each in zip(modules, (plugin, None), strict=True):
        trainer = make_trainer(each)
        trainer.fit(module, DataLoader(samples(), batch_sampler=sampler()))
        steps.append(trainer.global_step)
    assert plugin.plan is not None and plugin.plan.split.slice_sizes == (16, 16, 16, 16)
    assert steps[0] == steps[1]
    assert_same_weights(*modules)
    with pytest.raises(BatchArithmeticError, match="the loader cannot be rebuilt with another batch size"):
        make_trainer(quiet(effective_batch_size=32)).fit(
            Network(), DataLoader(samples(), batch_sampler=OwnSampler([64], seed=3))
        )


class Stream(IterableDataset[Any]):
    """Every worker reads all of it, as a stream does that does not ask which worker it is in."""

    def __iter__(self) -> Iterator[Any]:
        x, y = samples(32)[:]
        return iter(zip(x, y, strict=True))


def test_a_stream_that_workers_duplicate_is_as_long_as_in_a_plain_run(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#15734."""
    plugin, runs, modules = quiet(effective_batch_size=32, micro_batch_size=4), [], (Network(), Network())
    for module, each, settings in zip(modules, (plugin, None), ({}, {"accumulate_grad_batches": 4}), strict=True):
        trainer = make_trainer(each, **settings)
        trainer.fit(module, DataLoader(Stream(), 8, num_workers=2))
        runs.append((trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.completed))
    assert runs == [(2, 8), (2, 8)], "2 workers x 32 samples in batches of 8"
    assert plugin.plan is not None and plugin.plan.notes[0].startswith("the train loader has no length")
    assert_same_weights(*modules)


class Epochs:
    """A loader whose length was given by hand in batches, as ``with_epoch`` and ``with_length`` of WebDataset do."""

    def __init__(self, batches: Any, length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in zip(range(self.length), self._endless(), strict=False))

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.batches


def test_an_epoch_whose_length_was_given_in_batches_keeps_its_length(make_trainer: MakeTrainer) -> None:
    """webdataset/webdataset#250, webdataset/webdataset#403."""
    modules = Network(), Network()
    plugin = quiet(micro_batch_size=16)
    trainer = make_trainer(plugin)
    trainer.fit(modules[0], Epochs(loader(), 5))
    make_trainer().fit(modules[1], Epochs(loader(), 5))
    assert plugin.plan is not None and plugin.plan.split.num_slices == 4
    assert trainer.global_step == 5
    assert_same_weights(*modules)
    with pytest.raises(BatchArithmeticError, match=r"cannot be rebuilt .* \(it is a Epochs, not a torch DataLoader\)"):
        make_trainer(quiet(effective_batch_size=32)).fit(Network(), Epochs(loader(), 5))


def test_the_number_of_optimizer_steps_is_the_predicted_one(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#19684: accumulation, a dropped last batch and ``max_steps``."""
    module, dataset = Network(), samples(100)
    estimates: list[Any] = []

    class Estimates(Network):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    for settings, steps in (({"max_epochs": 3}, 9), ({"max_epochs": -1, "max_steps": 7}, 7)):
        plugin, module = quiet(effective_batch_size=32), Estimates()
        trainer = make_trainer(plugin, **settings)
        # 12 batches of 8 and 4 samples dropped: three windows of four batches in each epoch.
        trainer.fit(module, DataLoader(dataset, 8, drop_last=True))
        assert plugin.plan is not None
        assert "optimizer steps per epoch: 3 instead of 12; learning rates are not changed" in plugin.plan.notes
        assert trainer.global_step == steps == estimates.pop()


# Recomputation.


class Routes:
    """How many rows routers send on, outside of the module, so that nothing restores it."""

    calls = 0
    change = False


@pytest.fixture
def routes_change() -> Iterator[None]:
    """Routers send on another number of rows at every call, as one does that depends on more than its input."""
    Routes.calls, Routes.change = 0, True
    yield
    Routes.change = False


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x)).sin()
        rows = 2
        if is_real(x) and Routes.change:
            Routes.calls += 1
            rows = 1 + Routes.calls % 3
        return x + self.down(hidden) + 0 * torch.sigmoid(hidden[:rows].sin()).sum()


MISMATCH = "(Recomputed values for the following tensors have different metadata than during the forward pass)"


def test_a_module_that_computes_something_else_when_recomputed_is_not_recomputed(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#19267, pytorch/torchtitan#1117: also where a plan was made when it did not."""
    made = quiet(activation_checkpointing="blocks")
    make_trainer(made).fit(Network(Router), loader())
    assert made.plan is not None and made.plan.candidate.checkpointed_modules
    plugin = quiet(activation_checkpointing="auto", plan=made.plan)
    Routes.change = True
    try:
        trainer = make_trainer(plugin)
        trainer.fit(Network(Router), loader())
    finally:
        Routes.change = False
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.candidate.checkpointed_modules == () and trainer.global_step == 2
    reason = f"a module that was recomputed gave something else than in its first pass {MISMATCH}"
    assert plugin.plan.passed_over[0].reason == f"warm-up: {reason}"
    choices = {choice.lever: (choice.value, choice.reason) for choice in plugin.plan.choices}
    assert choices["activation_checkpointing"] == ("none", f"not recomputed: {reason}")


@pytest.mark.usefixtures("routes_change")
def test_modules_that_the_user_asks_to_recompute_and_cannot_be_are_named(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#19267, pytorch/torchtitan#1117."""
    module = Network(Router)
    before = weights(module)
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(quiet(activation_checkpointing=["blocks.[01]"])).fit(module, loader())
    assert str(caught.value) == (
        "activation_checkpointing=('blocks.[01]',) cannot be had: of blocks.0, blocks.1, one at least computes "
        f"something else when it is recomputed {MISMATCH}. Its result depends on more than its inputs and torch's "
        "random numbers, such as a counter. Name the others by patterns, or use activation_checkpointing='none'."
    )
    assert all(torch.equal(one, other) for one, other in zip(before, weights(module), strict=True))
    assert not any("forward" in vars(each) for each in module.modules())


@pytest.mark.usefixtures("routes_change")
def test_what_the_users_own_recomputation_raises_passes_through(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#19267: there is nothing that a plan could leave out."""

    class Own(Network):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    with pytest.raises(CheckpointError, match="different metadata than during the forward pass"):
        make_trainer(quiet(activation_checkpointing="auto")).fit(Own(Router), loader())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the compiler
def test_compiled_modules_are_named_and_not_recomputed(make_trainer: MakeTrainer) -> None:
    """Modalities/modalities#361."""
    module = Network()
    for index in range(3):
        module.blocks[index].compile(backend="eager")
    plugin = quiet(activation_checkpointing=["blocks.3"])
    make_trainer(plugin).fit(module, loader())
    assert plugin.plan is not None and plugin.plan.candidate.checkpointed_modules == ("blocks.3",)
    assert (
        "compiled by torch.compile: blocks.0, blocks.1, blocks.2. The forecast is that of the same code uncompiled, "
        "and the warm-up measures the compiled one; compiled modules are not recomputed"
    ) in plugin.plan.notes


@pytest.mark.usefixtures("routes_change")
def test_a_plan_that_only_recomputing_would_make_fit_says_why_it_cannot(make_trainer: MakeTrainer) -> None:
    """pytorch/torchtitan#1117.

    Reported in Lightning-AI/pytorch-lightning#19267.
    """
    budget = predicted_peak(Network(Router), checkpoint="blocks")
    assert budget < predicted_peak(Network(Router))
    plugin = quiet(activation_checkpointing="auto", budget=budget, micro_batch_size=64)
    with pytest.raises(NoFeasiblePlanError) as caught:
        make_trainer(plugin).fit(Network(Router), loader())
    assert (
        f"\nNot recomputed: a module that was recomputed gave something else than in its first pass {MISMATCH}.\n"
        in str(caught.value)
    )


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it, as LoRA makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Block().requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_recomputed_blocks_of_a_frozen_model_train_the_same_parameters(make_trainer: MakeTrainer) -> None:
    """huggingface/peft#1142, huggingface/transformers#23170, microsoft/LoRA#120: no input of the first block needs
    a gradient, which reentrant checkpointing takes for a reason to compute none."""
    modules, gradients = (Network(Adapted), Network(Adapted)), []
    for module, plugin in zip(modules, (quiet(activation_checkpointing="blocks"), quiet()), strict=True):
        module.head.requires_grad_(False)

        class Seen(Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                named = pl_module.named_parameters()
                self.found = {name: each.grad.clone() for name, each in named if each.grad is not None}

        seen = Seen()
        make_trainer(plugin, callbacks=[seen]).fit(module, loader())
        gradients.append(seen.found)
    assert set(gradients[0]) == {f"blocks.{i}.{name}.weight" for i in range(4) for name in ("down", "up")}
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[1])
    assert set(gradients[0]) == set(gradients[1])


# Slices.


def test_every_trial_divides_the_whole_batch_and_not_what_the_last_one_left(make_trainer: MakeTrainer) -> None:
    """mosaicml/composer#1081."""
    trials: list[int] = []

    class Fails(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_real(batch[0]):
                trials.append(len(batch[0]))
                if len(batch[0]) > 10:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    modules = Fails(), Network()
    plugin = quiet(budget=predicted_peak(Network()))
    make_trainer(plugin).fit(modules[0], loader())
    assert plugin.plan is not None
    sizes = plugin.plan.split.slice_sizes
    assert sum(sizes) == 64 and max(sizes) <= 10
    failed = [passed.candidate.split for passed in plugin.plan.passed_over if passed.reason.startswith("warm-up")]
    assert len(failed) >= 2 and all(sum(split.slice_sizes) == 64 for split in failed)
    assert trials[-2 * len(sizes) :] == [*sizes, *sizes], "the two steps of training"
    make_trainer().fit(modules[1], loader())
    assert_same_weights(*modules)
