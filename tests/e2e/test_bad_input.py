"""Bad input is refused with the setting, its value, the numbers and a way out, before anything is changed.

Run with ``pytest tests/e2e/test_bad_input.py``. Whole messages are asserted: they are what a user reads at night.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memfit import MemFit
from lightning_memfit.errors import (
    BatchArithmeticError,
    BatchStructureError,
    ConfigurationError,
    NoFeasiblePlanError,
    UnsupportedError,
)
from lightning_memfit.plan import PlanRequest

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(64, 16), torch.arange(64) % 2)


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.randn(16), torch.tensor(index % 2)) for index in range(self.size)])


class Bag:
    """A batch of a structure that nobody knows."""

    def __init__(self, items: list[Any]) -> None:
        self.x = torch.stack([x for x, _ in items])
        self.y = torch.stack([y for _, y in items])


class BagModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch.x, batch.y), batch_idx)


# What the constructor refuses.

SIZES = (
    "Write a number and a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (powers of 1000), such as "
    "'700MiB'."
)
PRECISIONS = "'auto', '32-true', 'bf16-mixed', '16-mixed', 'bf16-true'"
PATTERNS = "must be 'auto', 'none', 'blocks', or patterns of module names such as ['encoder.layers.*']."

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no samples": (
        {"effective_batch_size": 0},
        "effective_batch_size=0 must be a whole number of at least 1, or be left out.",
    ),
    "negative samples": (
        {"effective_batch_size": -4},
        "effective_batch_size=-4 must be a whole number of at least 1, or be left out.",
    ),
    "samples as text": (
        {"effective_batch_size": "64"},
        "effective_batch_size='64' must be a whole number of at least 1, or be left out.",
    ),
    "samples as a flag": (
        {"effective_batch_size": True},
        "effective_batch_size=True must be a whole number of at least 1, or be left out.",
    ),
    "bananas": ({"budget": "12 bananas"}, f"budget='12 bananas' is not a size. {SIZES}"),
    "no budget": ({"budget": 0}, "budget=0 is 0 bytes; it must be more than 0."),
    "negative budget": ({"budget": -5}, "budget=-5 is -5 bytes; it must be more than 0."),
    "negative budget as text": ({"budget": "-3GiB"}, f"budget='-3GiB' is not a size. {SIZES}"),
    "budget as a fraction": (
        {"budget": 0.5},
        "budget=0.5 is not a size. Write bytes as an int, or text such as '700MiB'.",
    ),
    "headroom": ({"headroom": "a little"}, f"headroom='a little' is not a size. {SIZES}"),
    "empty slices": (
        {"micro_batch_size": 0},
        "micro_batch_size=0 must be a whole number of at least 1, or be left out.",
    ),
    "one profiled step": (
        {"num_profiled_steps": 1},
        "num_profiled_steps=1 is too few: optimizers create their states in the first step, so that only the second "
        "shows the whole peak. Use 2 or more.",
    ),
    "mode": ({"mode": "dry-run"}, "mode='dry-run' is not known. Choose one of: 'apply', 'report', 'off'."),
    "precision": ({"precision": "bf16"}, f"precision='bf16' is not known. Choose one of: {PRECISIONS}."),
    "checkpointing": (
        {"activation_checkpointing": "block"},
        "activation_checkpointing='block' is not known. Choose one of: 'auto', 'none', 'blocks', or a list of patterns "
        "of module names such as ['blocks.*'].",
    ),
    "no patterns": ({"activation_checkpointing": []}, f"activation_checkpointing=[] {PATTERNS}"),
    "patterns that are numbers": ({"activation_checkpointing": 3}, f"activation_checkpointing=3 {PATTERNS}"),
    "loss weight": (
        {"loss_weight": "token"},
        "loss_weight='token' is not known. Choose 'samples', 'tokens', 'next-tokens', 'sum', or a function of a slice "
        "that returns what its mean loss counts.",
    ),
    "split function": (
        {"split_batch": 4},
        "split_batch=4 cannot be called. Pass a function (batch, micro_batch_size) -> pairs of (slice, number of "
        "samples), or leave it out.",
    ),
    "value without a number": (
        {"on_no_fit": "value"},
        "on_no_fit='value' needs no_fit_value=: the objective of a run that does not fit, such as no_fit_value=1e9 "
        "where it is minimised. Or use on_no_fit='skip'.",
    ),
    "cache": ({"cache_dir": 3}, "cache_dir=3 is no directory. Pass a path, 'auto', or None for no cache."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_be_used_is_refused_at_once(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        MemFit(**settings)
    assert str(caught.value) == message


# What a fit refuses: nothing has changed when it does.


def refusal(
    make_trainer: MakeTrainer,
    root: Path,
    plugin: MemFit,
    error: type[Exception],
    *,
    module: Any = None,
    loader: Any = None,
    **settings: Any,
) -> str:
    """The message of the error; the run is as a plain Trainer would have it before optimizers exist."""
    module = Model() if module is None else module
    loader = DataLoader(data(), 16) if loader is None else loader
    trainer = make_trainer(plugin, **settings)
    attributes = attribute_names(module)
    loader_before = dict(vars(loader)) if isinstance(loader, DataLoader) else {}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    callbacks, accumulate = list(trainer.callbacks), trainer.accumulate_grad_batches
    random = torch.get_rng_state()
    with pytest.raises(error) as caught:
        trainer.fit(module, loader)
    assert attribute_names(module) ^ attributes == set()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in values.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (dict(vars(loader)) if isinstance(loader, DataLoader) else {}) == loader_before
    assert list(trainer.callbacks) == callbacks
    assert trainer.accumulate_grad_batches == accumulate
    assert trainer.global_step == 0
    assert torch.equal(torch.get_rng_state(), random)
    for touched in (trainer.fit_loop._data_source, trainer.fit_loop.epoch_loop.automatic_optimization):
        assert not {"dataloader", "_make_closure"} & set(vars(touched))
    assert not list(root.iterdir()), "no files"
    return str(caught.value)


def attribute_names(module: nn.Module) -> set[str]:
    """Of every submodule, but for what Lightning notes in the root before any plugin is asked."""
    noted = {".prepare_data_per_node", "._device", "._hparams"}
    return {f"{name}.{key}" for name, part in module.named_modules() for key in vars(part)} - noted


def quiet(**settings: Any) -> MemFit:
    return MemFit(verbose=False, **{**AS_IT_IS, **settings})


def test_an_effective_batch_that_cannot_be_formed_names_the_nearest(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Reported in EuroEval/EuroEval#22, and by others.

    EuroEval/EuroEval#69, huggingface/transformers#33281, ludwig-ai/ludwig#3533, unslothai/unsloth#3066,
    roboflow/rf-detr#814.
    """
    plugin = quiet(effective_batch_size=17)
    assert refusal(make_trainer, tmp_path, plugin, BatchArithmeticError) == (
        "effective_batch_size=17 samples make 17 per rank, which is not a multiple of the loader's batch of 16. "
        "Rebuilding the loader with 1 samples per batch would form it, but that is less than half of the loader's "
        "batch of 16. The nearest effective_batch_size values that work with this loader are 16 and 32. Or pass "
        "allow_inexact_slicing=True to rebuild the loader all the same."
    )


def test_an_accumulation_of_the_users_own_must_agree(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = quiet(effective_batch_size=64)
    message = refusal(make_trainer, tmp_path, plugin, BatchArithmeticError, accumulate_grad_batches=3)
    assert message == (
        "effective_batch_size=64 samples, but Trainer(accumulate_grad_batches=3) x loader batch 16 x 1 rank makes 48 "
        "samples per optimizer step. Leave accumulate_grad_batches at 1, so that MemFit can set it, or ask for "
        "effective_batch_size=48."
    )


def test_an_accumulation_that_changes_while_training_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    scheduler = GradientAccumulationScheduler({4: 2})
    message = refusal(make_trainer, tmp_path, quiet(), ConfigurationError, callbacks=[scheduler])
    assert message == (
        f"GradientAccumulationScheduler({scheduler.scheduling}) changes accumulate_grad_batches while training, so "
        "that the effective batch is not one number. Remove the callback: MemFit sets the accumulation."
    )


def test_a_budget_below_the_parameters_says_that_no_slice_helps(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    # 16 x 32 + 32 + 32 x 2 + 2 = 610 parameters: 2440 bytes, and as many for gradients.
    message = refusal(make_trainer, tmp_path, quiet(budget="1KiB"), NoFeasiblePlanError)
    lines = message.splitlines()
    assert lines[0].startswith("No plan fits the budget of 1.000 KiB: the smallest one found needs ")
    assert lines[0].endswith(" too much.") and "(predicted, allocated)" in lines[0]
    assert lines[1] == "Budget: as given."
    assert (
        "parameters 2.383 KiB + gradients 2.383 KiB + optimizer states 0 B = 4.766 KiB alone are 3.766 KiB above the "
        "budget: no slice is small enough." in lines
    )
    helps = lines[lines.index("What would help:") + 1 :]
    assert helps[0].startswith('  - budget="1MiB" or more (this device could hold ')
    assert helps[1] == "  - a smaller model: 8 bytes per parameter allow fewer than 128 parameters (this one has 610)"


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (
            lambda: DataLoader(TensorDataset(torch.zeros(0, 16)), 8),
            "DataLoader over 0 samples (TensorDataset), batches of 8, SequentialSampler, 0 workers",
        ),
        (
            lambda: DataLoader(data(), 100, drop_last=True),
            "DataLoader over 64 samples (TensorDataset), batches of 100, SequentialSampler, 0 workers",
        ),
        (
            lambda: DataLoader(Stream(0), 8),
            "DataLoader over samples of unknown number (Stream), batches of 8, _InfiniteConstantSampler, 0 workers",
        ),
    ],
)
def test_an_empty_loader_is_named(loader: Any, words: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    message = refusal(make_trainer, tmp_path, quiet(), ConfigurationError, loader=loader())
    assert message == (
        f"The train loader yields 0 batches ({words}), so there is nothing to plan with or to train on. Check the "
        "dataset's length, drop_last and the sampler."
    )


NO_STRUCTURE = (
    "The batch of type Bag has no tensor with a batch dimension, so that its number of samples is not known. Pass "
    "MemFit(split_batch=...), a function (batch, micro_batch_size) -> pairs of (slice, samples)."
)


def test_a_batch_of_unknown_structure_trains_undivided_and_says_why(make_trainer: MakeTrainer) -> None:
    plugin = quiet()
    trainer = make_trainer(plugin)
    trainer.fit(BagModel(), DataLoader(data(), 16, collate_fn=Bag))
    assert trainer.global_step == 4
    assert plugin.plan is not None
    reasons = {choice.lever: choice.reason for choice in plugin.plan.choices}
    assert reasons["micro_batch_size"] == f"not sliced: {NO_STRUCTURE}"


def test_slices_of_a_batch_of_unknown_structure_need_the_users_function(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    loader = DataLoader(data(), 16, collate_fn=Bag)
    plugin = quiet(micro_batch_size=4)
    message = refusal(make_trainer, tmp_path, plugin, ConfigurationError, module=BagModel(), loader=loader)
    assert message == (
        f"micro_batch_size=4 would divide the loader's batch of 16 samples, but {NO_STRUCTURE} Use micro_batch_size=16."
    )


def test_a_budget_that_needs_slices_of_an_unknown_structure_names_the_users_function(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    loader = DataLoader(data(), 16, collate_fn=Bag)
    plugin = quiet(budget=8500)
    message = refusal(make_trainer, tmp_path, plugin, NoFeasiblePlanError, module=BagModel(), loader=loader)
    assert f"  - smaller slices need less, but the batch is not sliced: {NO_STRUCTURE.rstrip('.')}" in message


def test_a_batch_whose_samples_nobody_knows_needs_the_users_function(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Bags:
        def __iter__(self) -> Iterator[Bag]:
            return iter([Bag([data()[index] for index in range(8)])])

    message = refusal(make_trainer, tmp_path, quiet(), BatchStructureError, module=BagModel(), loader=Bags())
    assert message == NO_STRUCTURE


def test_tokens_that_cannot_be_counted_are_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    message = refusal(make_trainer, tmp_path, quiet(loss_weight="tokens"), ConfigurationError)
    assert message == (
        "loss_weight='tokens' counts batch['labels'] other than -100, but the batch has type list and no tensor "
        "'labels' or 'label'. Pass loss_weight= a function of the batch: what its mean loss counts."
    )


@pytest.mark.parametrize(
    ("micro_batch_size", "message"),
    [
        (
            17,
            "micro_batch_size=17 is more than the 16 samples of the loader's batch. Use at most 16, or make the "
            "loader's batch larger.",
        )
    ],
)
def test_a_micro_batch_above_the_batch_is_refused(
    micro_batch_size: int, message: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    plugin = quiet(micro_batch_size=micro_batch_size)
    assert refusal(make_trainer, tmp_path, plugin, ConfigurationError) == message


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ["net.*", "nett"],
            "activation_checkpointing pattern 'nett' matches none of the 4 modules of the model. Close names: 'net', "
            "'net.2', 'net.1'. Patterns are those of fnmatch on qualified names, such as 'blocks.*'.",
        ),
        (
            ["net"[::-1] + ".*"],
            "activation_checkpointing pattern 'ten.*' matches none of the 4 modules of the model. Close names: "
            "'net.2', 'net.1', 'net.0'. Patterns are those of fnmatch on qualified names, such as 'blocks.*'.",
        ),
        (
            "blocks",
            "activation_checkpointing='blocks' found no repeated blocks: no ModuleList or Sequential of the model has "
            "two members of equal structure. Name modules by patterns, such as ('encoder.layers.*',).",
        ),
    ],
)
def test_modules_that_do_not_exist_are_refused_with_close_names(
    asked: Any, message: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    plugin = quiet(activation_checkpointing=asked)
    assert refusal(make_trainer, tmp_path, plugin, ConfigurationError) == message


def with_optimizers(configured: Callable[[Any], Any]) -> Model:
    class Configured(Model):
        def configure_optimizers(self) -> Any:
            return configured(self)

    Configured.__qualname__ = "Mine"
    return Configured()


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (
            lambda module: None,
            "Mine.configure_optimizers() returned no optimizer, so that there is no optimizer step to plan. Return "
            "one, such as torch.optim.AdamW(self.parameters()), or set MEMFIT=off in the environment to run without.",
        ),
        (
            lambda module: [sgd(module), sgd(module)],
            "Mine.configure_optimizers() returned 2 optimizers; automatic optimization steps 1. Return one, or set "
            "self.automatic_optimization = False and step them in training_step.",
        ),
        (
            lambda module: 3,
            "Mine.configure_optimizers() returned a int, which holds no optimizer. Return one, such as "
            "torch.optim.AdamW(self.parameters()).",
        ),
    ],
)
def test_anything_but_one_optimizer_is_refused(
    configured: Any, message: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    module = with_optimizers(configured)
    assert refusal(make_trainer, tmp_path, quiet(), ConfigurationError, module=module) == message


def test_an_error_of_the_users_own_passes_through_untouched(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def broken(module: Any) -> Any:
        raise KeyError("learning_rate")

    assert refusal(make_trainer, tmp_path, quiet(), KeyError, module=with_optimizers(broken)) == "'learning_rate'"


# What is left alone, or works otherwise, and says so.


@pytest.mark.parametrize(("effective", "steps"), [(None, 5), (16, 3)])
def test_a_loader_without_a_length_works_and_that_is_said(
    effective: int | None, steps: int, make_trainer: MakeTrainer
) -> None:
    plugin = quiet(effective_batch_size=effective)
    trainer = make_trainer(plugin)
    trainer.fit(Model(), DataLoader(Stream(40), 8))
    assert trainer.global_step == steps
    assert plugin.plan is not None
    assert plugin.plan.notes[0].startswith("the train loader has no length: optimizer steps per epoch are not known")


def test_a_folder_that_cannot_be_written_is_named_once_and_the_run_goes_on(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # below it there is no folder, not even for root
    trainer = make_trainer(MemFit(**AS_IT_IS), default_root_dir=tmp_path / "file" / "runs")
    trainer.fit(Model(), DataLoader(data(), 16))
    assert trainer.global_step == 4
    printed = "".join(capsys.readouterr().out.split())  # a long path is divided over lines
    assert printed.count(f"plan.yamlwasnotwrittento{tmp_path}/file/runs:") == 1
    assert printed.count("Therungoeson.") == 1


def test_a_precision_of_the_trainer_beside_memfits_names_both(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="Choose one") as caught:
        make_trainer(quiet(effective_batch_size=64), precision="bf16-mixed")
    assert str(caught.value) == (
        "Received both `precision=bf16-mixed` and `plugins=MemFit(effective_batch_size=64, precision='32-true')`. "
        "Choose one."
    )


class OtherStrategy:
    def __init__(self, device: str) -> None:
        self.root_device = torch.device(device)


@pytest.mark.parametrize(
    ("device", "count", "found"),
    [("cpu", 2, "OtherStrategy on cpu with 2 device(s) x 1 node(s)"), ("cuda", 1, "OtherStrategy on cuda with 1")],
)
def test_a_strategy_that_is_not_driven_is_named_with_what_is(
    device: str, count: int, found: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_memfit.preconditions import check_trainer

    class Several:
        strategy = OtherStrategy(device)
        num_devices, num_nodes, callbacks = count, 1, ()

    with pytest.raises(UnsupportedError) as caught:
        check_trainer(Several(), PlanRequest())
    assert str(caught.value).startswith(f"MemFit does not drive {found}")
    assert str(caught.value).endswith(
        "in this release; it drives SingleDeviceStrategy, DDPStrategy, DeepSpeedStrategy and ModelParallelStrategy "
        "(FSDP2) on cpu or cuda, such as Trainer(accelerator='cpu', devices=2, strategy='ddp'). "
        "Set MEMFIT=off in the environment, or MemFit(mode='off'), to train as if MemFit were not there."
    )


def test_an_implementation_is_not_pinned_under_deepspeed_where_it_would_not_be_applied() -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_memfit.preconditions import check_trainer

    class Zero:
        strategy: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
        num_devices, num_nodes, callbacks = 2, 1, ()

    Zero.strategy.parallel_devices, Zero.strategy.cluster_environment = [torch.device("cpu")] * 2, None
    with pytest.raises(ConfigurationError) as caught:
        check_trainer(Zero(), PlanRequest(optimizer_implementation="fused"))
    assert str(caught.value).startswith("optimizer_implementation='fused' cannot be had under DeepSpeed, which steps")
    check_trainer(Zero(), PlanRequest(optimizer_implementation="as-configured"))


def test_parameters_on_the_host_are_refused_where_the_stage_leaves_them_whole_and_less_than_the_strategy_keeps() -> (
    None
):
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_memfit.preconditions import check_trainer

    class Zero:
        strategy: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
        num_devices, num_nodes, callbacks = 2, 1, ()
        lightning_module = Model()

    Zero.strategy.parallel_devices, Zero.strategy.cluster_environment = [torch.device("cpu")] * 2, None
    for name in ("loss_scale", "loss_scale_window", "min_loss_scale", "initial_scale_power", "hysteresis"):
        setattr(Zero.strategy, name, 0)
    Zero.strategy.config = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigurationError) as caught:
        check_trainer(Zero(), PlanRequest(offload="parameters"))
    assert str(caught.value) == (
        "MemFit(offload='parameters') under stage 2 of DeepSpeed: parameters are divided, and kept on the host, in "
        "stage 3 alone. Use DeepSpeedStrategy(stage=3), or offload='optimizer'."
    )
    host = {"device": "cpu"}
    Zero.strategy.config = {"zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host}}
    for fine in ("never", "auto", "parameters"):
        check_trainer(Zero(), PlanRequest(offload=fine))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as caught:
        check_trainer(Zero(), PlanRequest(offload="optimizer"))
    assert str(caught.value) == (
        "MemFit(offload='optimizer'), and the strategy keeps the parameters on the host too (offload_parameters). Use "
        "DeepSpeedStrategy(stage=3, offload_optimizer=True), or leave offload out."
    )
    Zero.strategy.config = {"zero_optimization": {"stage": 3}}
    Zero.lightning_module.requires_grad_(False)
    for index, parameter in enumerate(Zero.lightning_module.parameters()):
        parameter.ds_id = index  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="configure_model divided frozen parameters on the device, where"):
        check_trainer(Zero(), PlanRequest(offload="parameters"))


def test_a_strategy_that_cannot_offload_is_refused_where_it_must_and_said_where_it_may(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    message = refusal(make_trainer, tmp_path, MemFit(offload="optimizer"), ConfigurationError)
    assert message == (
        "MemFit(offload='optimizer') keeps the optimizer on the host under DeepSpeed, and this run is that of "
        "SingleDeviceStrategy on cpu with 1 device(s) x 1 node(s). Use Trainer(strategy='deepspeed_stage_2'), which "
        "runs on one GPU too, or offload='never'."
    )
    memfit = MemFit(offload="auto", verbose=False)
    make_trainer(memfit, max_steps=1).fit(Model(), DataLoader(data(), 16))
    assert memfit.plan is not None and memfit.plan.candidate.offload == "never"
    assert any(note.startswith("offload='auto' without effect: SingleDeviceStrategy") for note in memfit.plan.notes)


PYTORCH_LIGHTNING = """
{imports}
import warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

plugin = MemFit(effective_batch_size=8, micro_batch_size=2, precision="bf16-mixed")
trainer = pl.Trainer(plugins=[plugin], max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, default_root_dir={root!r})
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(16, 4)), 4))
assert trainer.global_step == 2, trainer.global_step
assert type(plugin.delegate).__module__.startswith("pytorch_lightning"), type(plugin.delegate)
assert plugin.measured is not None
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import pytorch_lightning as pl\nfrom lightning_memfit import MemFit",
        "from lightning_memfit import MemFit\nimport pytorch_lightning as pl",
    ],
    ids=["pytorch_lightning first", "lightning_memfit first"],
)
def test_trainers_of_pytorch_lightning_work(imports: str, tmp_path: Path) -> None:
    """Reported in Lightning-AI/pytorch-lightning#7287, zyzisyz/mfa_conformer#2."""
    program = PYTORCH_LIGHTNING.format(imports=imports, root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "plan.yaml").exists()


def test_lbfgs_is_refused_where_batches_are_accumulated(make_trainer: MakeTrainer) -> None:
    """Reported in Lightning-AI/pytorch-lightning#4083, NeuroDiffGym/neurodiffeq#159."""

    class WithLBFGS(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    trainer = make_trainer(MemFit(effective_batch_size=16, verbose=False))
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(WithLBFGS(), DataLoader(data(), batch_size=4))
    assert str(refused.value) == (
        "LBFGS runs its closure several times per optimizer step, so that with 4 accumulated batches the gradients of "
        "the last one would be added several times. Make the loader's batch as large as effective_batch_size (MemFit "
        "slices it exactly), or use another optimizer."
    )


def test_any_optimizer_that_runs_its_closure_is_refused_there(make_trainer: MakeTrainer) -> None:
    class Twice(torch.optim.SGD):
        """As sharpness-aware minimisation does it."""

        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                closure()
                loss = closure()
            super().step()
            return loss

    class WithTwice(Model):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match=r"^Twice runs its closure several times per optimizer step, so that"):
        make_trainer(MemFit(effective_batch_size=16, verbose=False)).fit(WithTwice(), DataLoader(data(), batch_size=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split_batch": lambda batch, size: 1 / 0}, "split_batch= failed: ZeroDivisionError: division by zero"),
        ({"split_batch": lambda batch, size: None}, "split_batch= returned NoneType, not pairs of"),
        ({"split_batch": lambda batch, size: []}, "split_batch= returned slices of [] samples."),
        ({"loss_weight": lambda batch: "x"}, "loss_weight= failed for a slice of 16 samples: ValueError: "),
        ({"worst_batch": lambda: 1 / 0}, "worst_batch= failed: ZeroDivisionError: division by zero"),
    ],
)
def test_functions_of_the_users_that_fail_are_named(settings: Any, message: str, make_trainer: MakeTrainer) -> None:
    plugin = MemFit(verbose=False, micro_batch_size=4, **{**AS_IT_IS, **settings})
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(plugin).fit(Model(), DataLoader(data(), 16))
    assert str(caught.value).startswith(message)


def test_an_error_of_the_step_names_the_batch_that_was_given_and_torch_logs_nothing(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = next(iter(DataLoader(data(), 16)))
    plugin = MemFit(verbose=False, worst_batch=[torch.cat((x, x), -1), y], **AS_IT_IS)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        make_trainer(plugin).fit(Model(), DataLoader(data(), 16))
    assert caught.value.__notes__ == [
        "MemFit ran training_step with the batch given as worst_batch=: give one that the model takes, as those of the "
        "run."
    ]
    assert not [record for record in caplog.records if "fake_tensor" in record.name]


@pytest.mark.parametrize(
    ("value", "reason"), [("a\0b", "null byte"), ("x" * 5000, "too long"), ("~nobody-here/x", "home")]
)
def test_a_cache_directory_that_cannot_be_is_refused(value: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cache_dir=.* is no directory: .*{reason}"):
        MemFit(cache_dir=value)


def test_a_cache_directory_may_be_below_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert MemFit(cache_dir="~/kept")._cache_dir == tmp_path / "kept"
