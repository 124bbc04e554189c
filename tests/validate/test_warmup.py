"""The warm-up runs the real steps and leaves no trace. Run: ``pytest tests/validate/test_warmup.py``."""

from __future__ import annotations

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import Measurement
from lightning_memfit.validate.warmup import run_warmup, silenced

MIB = 1024**2
# Lightning's advice about the size of the test, not about the code under test.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*Experiment logs directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
]


class Hostile(LightningModule):
    """Touches everything a training step can touch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.metric = MeanMetric()
        self.seen: list[float] = []
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.of_this_epoch: list[int]
        self.fail_at: int | None = None
        self.net[0].register_forward_hook(lambda *_: self.counts.update(["forward hook"]))

    def on_train_start(self) -> None:
        self.started = True
        self.of_this_epoch = []  # a run resumed within an epoch gets no on_train_epoch_start

    def on_train_epoch_start(self) -> None:
        self.of_this_epoch = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts["batch start"] += 1

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.counts["zero grad"] += 1

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.counts["optimizer step"] += 1
        super().optimizer_step(*args, **kwargs)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.steps += 1
        if self.fail_at == self.steps:
            raise ZeroDivisionError("inside training_step")
        self.of_this_epoch.append(batch_idx)
        self.passing += 1
        noise = random.random() + np.random.rand()
        target = batch.pop("y")
        batch["x"].add_(0)
        loss = (self.net(batch["x"]) - target).pow(2).mean() * (1 + 0.01 * noise)
        self.seen.append(loss.item())
        self.metric.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.logger.log_metrics({"direct": loss.item()}, step=self.steps)
        self.trainer.set_by_the_user = self.steps
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.counts["validation"] += 1
        assert not self.training
        assert not torch.is_grad_enabled()
        self.log("val_loss", (self.net(batch["x"]) - batch["y"]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "y": torch.randn(1, generator=generator)} for _ in range(count)]


def _batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 4, generator=generator), "y": torch.randn(8, 1, generator=generator)}


class WarmUp(Callback):
    """Runs the warm-up where the plugin will run it."""

    def __init__(self, moment: str, **settings: Any) -> None:
        self.moment = moment
        self.settings = {"num_profiled_steps": 2, "spare_bytes": 100 * MIB, **settings}
        self.measurement: Measurement | None = None
        self.before: Any = None
        self.after: Any = None
        self.error: BaseException | None = None

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        if self.moment == "sanity":
            self._run(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.moment == "train":
            self._run(trainer, pl_module)

    def _run(self, trainer: Any, module: Any) -> None:
        batch, validation_batch = _batch(1), _batch(2)
        contents = copy.deepcopy((batch, validation_batch))
        self.before = _state(trainer, module)
        try:
            self.measurement = run_warmup(
                trainer=trainer,
                module=module,
                batch=batch,
                validation_batch=validation_batch,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                **self.settings,
            )
        except ZeroDivisionError as error:
            self.error = error
            module.fail_at = None
            self.before["module"].pop("fail_at")
        self.after = _state(trainer, module)
        if self.error is not None:
            self.after["module"].pop("fail_at")
        for now, then in zip((batch, validation_batch), contents, strict=True):
            assert list(now) == list(then)
            assert all(torch.equal(now[key], then[key]) for key in now)


def _state(trainer: Any, module: Any) -> dict[str, Any]:
    """Everything that must be as before, written out as plain values: independent of the snapshot's own walk."""
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]
    return {
        "module": {key: _written(value) for key, value in vars(module).items() if key != "_trainer"},
        "submodules": {
            name: {k: _written(v) for k, v in vars(m).items()} for name, m in module.named_modules() if name
        },
        "gradients": [_written(parameter.grad) for parameter in module.parameters()],
        "optimizers": [
            (_written(optimizer.state), _written(optimizer.param_groups), sorted(vars(optimizer)))
            for optimizer in trainer.optimizers
        ],
        "schedulers": [
            _written(config.scheduler.state_dict(), identity=False) for config in trainer.lr_scheduler_configs
        ],
        "scaler": _written(
            getattr(getattr(trainer.precision_plugin, "scaler", None), "state_dict", dict)(), identity=False
        ),
        "random": (_written(torch.get_rng_state(), identity=False), repr(np.random.get_state()), random.getstate()),
        "loops": [_written(loop.state_dict(), identity=False) for loop in loops],
        "results": [_written(list(loop._results.items())) for loop in loops[1:]],
        "connector": {k: _written(v) for k, v in vars(trainer._logger_connector).items() if k != "trainer"},
        "trainer": {key: id(value) for key, value in vars(trainer).items()},
        "flags": (trainer.should_stop, str(trainer.state), [id(callback) for callback in trainer.callbacks]),
    }


def _written(value: Any, *, identity: bool = True) -> Any:
    """A value as plain data, with the identities of what it consists of unless it was made for the occasion."""

    def name(item: Any) -> int | None:
        return id(item) if identity else None

    if isinstance(value, torch.Tensor):
        return (name(value), value.dtype, tuple(value.shape), value.requires_grad, value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return [
            (name(key) if isinstance(key, torch.Tensor) else repr(key), name(item), _written(item, identity=identity))
            for key, item in value.items()
        ]
    if isinstance(value, list | tuple | set):
        return [_written(item, identity=identity) for item in value]
    if isinstance(value, nn.Module) or callable(value):
        return id(value)
    return repr(value)


def _fit(
    tmp_path: Path, *callbacks: Callback, fail_at: int | None = None, checkpoint: Path | None = None, **settings: Any
) -> tuple[Any, Any]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    module = Hostile()
    module.fail_at = fail_at
    if settings.pop("scaled", False):  # Trainer(precision="16-mixed") would choose bf16 on a CPU
        settings["plugins"] = [_float16(initial_scale=256.0)]
    loader = DataLoader(_rows(40), batch_size=8, shuffle=True)
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": CSVLogger(tmp_path, flush_logs_every_n_steps=1),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "gradient_clip_val": 0.5,
            "log_every_n_steps": 1,
            "callbacks": list(callbacks),
            **settings,
        }
    )
    trainer.fit(module, loader, DataLoader(_rows(8), batch_size=8), ckpt_path=checkpoint, weights_only=False)
    return trainer, module


def _float16(initial_scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=initial_scale))


class Counting(Callback):
    """Counts its hooks."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls["start"] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls["zero"] += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls["step"] += 1

    def on_validation_start(self, *_: Any) -> None:
        self.calls["validation"] += 1


@pytest.mark.parametrize(
    ("moment", "settings"),
    [
        ("sanity", {}),
        ("train", {"num_sanity_val_steps": 0}),
        ("sanity", {"accumulate_grad_batches": 2}),
        ("sanity", {"precision": "bf16-mixed"}),
        ("sanity", {"scaled": True}),
    ],
    ids=["sanity", "train", "accumulated", "bf16", "scaler"],
)
def test_a_fit_with_the_warm_up_equals_one_without(tmp_path: Path, moment: str, settings: dict[str, Any]) -> None:
    plain_count, count, warm_up = Counting(), Counting(), WarmUp(moment)
    plain_trainer, plain = _fit(tmp_path / "plain", plain_count, **settings)
    trainer, module = _fit(tmp_path / "warm", count, warm_up, **settings)

    assert warm_up.measurement is not None
    assert warm_up.before == warm_up.after
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    )
    assert (plain.seen, plain.counts, plain.steps) == (module.seen, module.counts, module.steps)
    assert plain_count.calls == count.calls
    assert plain_trainer.global_step == trainer.global_step
    assert {k: v.item() for k, v in plain_trainer.callback_metrics.items()} == {
        k: v.item() for k, v in trainer.callback_metrics.items()
    }
    logged = [
        (path / "lightning_logs/version_0/metrics.csv").read_text() for path in (tmp_path / "plain", tmp_path / "warm")
    ]
    assert logged[0] == logged[1]


def test_a_run_resumed_within_an_epoch_goes_on_as_without_the_warm_up(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt")

    _fit(tmp_path / "saved", Save())
    warm_up = WarmUp("train")
    _, plain = _fit(tmp_path / "plain", checkpoint=tmp_path / "three.ckpt")
    trainer, module = _fit(tmp_path / "warm", warm_up, checkpoint=tmp_path / "three.ckpt")
    assert warm_up.measurement is not None
    assert warm_up.before == warm_up.after
    assert trainer.global_step == 10
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_an_error_in_the_second_step_passes_through_and_everything_is_put_back(tmp_path: Path, where: str) -> None:
    _, plain = _fit(tmp_path / "plain")
    warm_up = WarmUp("sanity", snapshot_in=where)
    _, module = _fit(tmp_path / "warm", warm_up, fail_at=2)
    assert isinstance(warm_up.error, ZeroDivisionError)
    assert warm_up.before == warm_up.after
    assert not torch.autograd._profiler_enabled()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    )


class OneLinear(LightningModule):
    """W: 256 x 256 float32 = 262,144 bytes, and nothing else."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)
        self.order: list[str] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), foreach=False)


def _fit_one(trainer: Trainer, module: OneLinear) -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 256)), batch_size=4)
    trainer.fit(module, loader, loader)


def test_the_measured_peaks_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    class Measure(Callback):
        measurement: Measurement

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.measurement = run_warmup(
                trainer=trainer,
                module=pl_module,
                batch=[torch.ones(4, 256)],
                validation_batch=[torch.ones(1024, 256)],
                accumulate_grad_batches=1,
                num_profiled_steps=2,
                spare_bytes=100 * MIB,
            )

    measure = Measure()
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[measure],
    )  # fmt: skip
    _fit_one(trainer, OneLinear())
    matrix, batch = 256 * 256 * 4, 4 * 256 * 4
    # Resident: the weight and the batch. In the second optimizer step: gradient, two moments, and two temporaries of
    # the weight's size; besides 12 bytes of a wrapped Python number, the step counter (4), the loss of the closure and
    # its detached copy (4 each).
    expected = matrix + batch + 5 * matrix
    measured = measure.measurement
    assert 0 <= measured.measured_peak_allocated_bytes - expected <= 64
    # Evaluation: weight, two moments, the step counter, the batch of 1024 x 256 and an output of the same size.
    assert measured.measured_evaluation_peak_bytes == 3 * matrix + 4 + 2 * 1024 * 256 * 4
    assert measured.profiled_steps == 2
    assert measured.measured_step_seconds > 0
    assert measured.measured_peak_rss_bytes is not None
    assert measured.measured_peak_rss_bytes > expected
    assert len(measured.costliest_ops) == 5


@pytest.mark.parametrize(("batches", "calls"), [(None, 2), (1, 1), (9, 2)])
@pytest.mark.parametrize(("loader", "told"), [(1, 1), (0, 0), (None, None)], ids=["second", "first", "only one"])
def test_the_evaluation_step_is_told_the_loader_of_its_batch_as_lightning_tells_it(
    loader: int | None, told: int | None, batches: int | None, calls: int
) -> None:
    steps: list[int | None] = []
    transfers: list[int] = []

    class Several(OneLinear):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.validating:
                transfers.append(dataloader_idx)
            return batch

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
            steps.append(dataloader_idx)

    class Measure(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            run_warmup(
                trainer=trainer, module=pl_module, batch=[torch.ones(4, 256)], validation_batch=[torch.ones(8, 256)],
                accumulate_grad_batches=1, num_profiled_steps=2, spare_bytes=100 * MIB, validation_loader=loader,
                validation_batches=batches,
            )  # fmt: skip

    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, limit_val_batches=0, callbacks=[Measure()],
    )  # fmt: skip
    _fit_one(trainer, Several())
    assert steps == [told] * calls and transfers == [loader or 0] * calls


def test_states_that_exist_already_are_resident_and_gradients_are_not(tmp_path: Path) -> None:
    class Twice(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            settings: dict[str, Any] = {
                "trainer": trainer, "module": pl_module, "batch": [torch.ones(4, 256)],
                "accumulate_grad_batches": 1, "num_profiled_steps": 2, "spare_bytes": 100 * MIB,
            }  # fmt: skip
            self.fresh = run_warmup(**settings)
            pl_module.layer(torch.ones(1, 256)).sum().backward()
            trainer.optimizers[0].step()
            pl_module.zero_grad()
            self.resumed = run_warmup(**settings)
            pl_module.layer.weight.grad = gradient = torch.ones(256, 256)
            self.with_gradients = run_warmup(**settings)
            assert pl_module.layer.weight.grad is gradient
            pl_module.zero_grad()
            assert trainer.optimizers[0].state[pl_module.layer.weight]["step"] == 1

    twice = Twice()
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[twice],
    )  # fmt: skip
    _fit_one(trainer, OneLinear())
    assert twice.fresh.measured_peak_allocated_bytes == twice.resumed.measured_peak_allocated_bytes
    assert twice.fresh.measured_peak_allocated_bytes == twice.with_gradients.measured_peak_allocated_bytes
    assert twice.fresh.measured_evaluation_peak_bytes is None


def test_a_loaders_batch_that_training_lets_go_of_is_not_counted_although_the_warm_up_keeps_it() -> None:
    class Measure(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            settings: dict[str, Any] = {
                "trainer": trainer, "module": pl_module, "accumulate_grad_batches": 1, "num_profiled_steps": 2,
                "spare_bytes": 100 * MIB,
            }  # fmt: skip
            self.kept = run_warmup(batch=[torch.ones(4, 256)], **settings)
            self.replaced = run_warmup(batch=[torch.ones(4, 256, dtype=torch.uint8)], **settings)

    class Floats(OneLinear):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0].float()]  # the very tensor where it is of floats already

    measure = Measure()
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[measure],
    )  # fmt: skip
    _fit_one(trainer, Floats())
    assert measure.replaced.measured_peak_allocated_bytes == measure.kept.measured_peak_allocated_bytes


def test_every_batch_of_a_window_is_the_one_that_was_given(tmp_path: Path) -> None:
    sums: list[float] = []

    class InPlace(OneLinear):
        def training_step(self, batch: Any) -> torch.Tensor:
            sums.append(batch[0].add_(1).sum().item())
            return super().training_step(batch)

    class Measure(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            settings: dict[str, Any] = {"trainer": trainer, "module": pl_module, "batch": [torch.ones(4, 256)]}
            run_warmup(**settings, accumulate_grad_batches=2, num_profiled_steps=2, spare_bytes=100 * MIB)
            assert sums == [2 * 4 * 256] * 6  # two profiled steps and a timed one
            sums.clear()

    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=2,
        callbacks=[Measure()],
    )
    _fit_one(trainer, InPlace())
    assert sums == [2 * 4 * 256] * 2


def test_steps_that_a_gradient_scaler_skips_do_not_count(tmp_path: Path) -> None:
    """Reported in Lightning-AI/pytorch-lightning#16228."""

    class Measure(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            settings: dict[str, Any] = {
                "trainer": trainer,
                "module": pl_module,
                "batch": [torch.ones(4, 256)],
                "accumulate_grad_batches": 1,
                "num_profiled_steps": 2,
                "spare_bytes": 100 * MIB,
            }
            self.measured = run_warmup(**settings)
            self.scale = trainer.precision_plugin.scaler.get_scale()

    measure = Measure()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[measure],
        # The gradient is 4 times the scale: float16 ends at 65,504, so that scales of 65,536 and 32,768 are skipped
        plugins=[_float16(initial_scale=65536.0)],
    )
    _fit_one(trainer, OneLinear())
    assert measure.measured.measured_peak_allocated_bytes >= 6 * 256 * 256 * 4
    assert measure.scale == 65536.0


def test_manual_optimization_is_measured_too(tmp_path: Path) -> None:
    class Manual(OneLinear):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.stepped = 0

        def training_step(self, batch: Any) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).sum())
            optimizer.step()
            self.stepped += 1

    class Measure(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.measured = run_warmup(
                trainer=trainer, module=pl_module, batch=[torch.ones(4, 256)], accumulate_grad_batches=1,
                num_profiled_steps=2, spare_bytes=100 * MIB,
            )  # fmt: skip
            assert pl_module.stepped == 0
            assert trainer.global_step == 0

    measure = Measure()
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[measure],
    )  # fmt: skip
    _fit_one(trainer, Manual())
    assert measure.measured.measured_peak_allocated_bytes >= 6 * 256 * 256 * 4


def test_a_stand_in_for_a_logger_tells_its_directories_and_writes_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version=7)
    trainer = Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False)
    callbacks, profiler = trainer.callbacks, trainer.profiler
    with silenced(trainer):
        assert trainer.logger.name == "run"
        assert trainer.logger.log_dir == str(tmp_path / "run" / "version_7")
        trainer.logger.experiment.add_image("picture", 1)
        trainer.logger.log_metrics({"a": 1.0})
        assert trainer.callbacks is callbacks  # where user code looks for them
    assert not (tmp_path / "run").exists()
    assert (trainer.logger, trainer.callbacks, trainer.profiler) == (logger, callbacks, profiler)


def test_a_trainer_class_of_the_users_own_is_driven() -> None:
    class Own(Trainer):
        pass

    trainer = Own(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with silenced(trainer):
        assert type(trainer.profiler).__module__.startswith("lightning.pytorch")


def test_a_step_that_takes_an_iterator_is_refused_with_a_way_out() -> None:
    class Iterating(OneLinear):
        def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            return None

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(UnsupportedError, match=r"Iterating\.training_step\(dataloader_iter\).*`batch`.*MEMFIT=off"):
        run_warmup(
            trainer=trainer, module=Iterating(), batch=None, accumulate_grad_batches=1, num_profiled_steps=2,
            spare_bytes=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name"), [("_TrainingEpochLoop", "_build_kwargs"), ("_LoggerConnector", "epoch_end_reached")]
)
def test_a_lightning_that_changed_is_named_with_what_is_missing(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    for kind in (type(trainer.fit_loop.epoch_loop), type(trainer._logger_connector)):
        if kind.__name__ == owner:
            monkeypatch.delattr(kind, name)
    with pytest.raises(UnsupportedError, match=rf"Lightning 2\..* has no {owner}\.{name}, through which"):
        run_warmup(
            trainer=trainer, module=OneLinear(), batch=None, accumulate_grad_batches=1, num_profiled_steps=2,
            spare_bytes=1,
        )  # fmt: skip
