"""Promise 3 through the Trainer: planning and proving leave nothing behind; a plan that changes nothing is no change.

Run with ``pytest tests/e2e/test_no_trace.py``. Every run with MemFit is compared with one without.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import psutil
import pytest
import torch
import torchmetrics
import yaml
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_memfit import MemFit
from lightning_memfit.apply.loader import TrainLoader
from lightning_memfit.apply.step_levers import StepLevers
from lightning_memfit.trace.op_probe import OperatorProber

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


def draw() -> float:
    """One number that all three global generators take part in."""
    return float(torch.rand(())) + float(np.random.rand()) + random.random()


class Augmented(Dataset[Any]):
    """Map-style, with random augmentation."""

    def __init__(self, size: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * draw(), self.y[index]


class Streamed(IterableDataset[Any]):
    """A stream that remembers where it is, and never goes back."""

    def __init__(self, size: int = 24) -> None:
        self.position = 0
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.size):
            self.position += 1
            yield torch.full((6,), self.position / 10) + 0.1 * draw(), torch.tensor(self.position % 3)


class Counting(nn.Module):
    """A layer whose forward changes everything that it can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0
        self.seen: list[tuple[int, ...]] = []
        self.by_shape: dict[tuple[int, ...], int] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.recent: deque[float] = deque(maxlen=3)
        self.plain = torch.zeros(6)
        self.array = np.zeros(2)
        self.register_buffer("hidden", torch.zeros(6), persistent=False)
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        shape = tuple(x.shape)
        self.seen.append(shape)
        self.by_shape[shape] = self.by_shape.get(shape, 0) + 1
        self.shapes.add(shape)
        self.recent.append(random.random())
        self.plain = self.plain + 1
        self.array += np.random.rand(2)
        self.hidden.add_(x.detach().mean(0))
        self.kept = self.kept + 1
        return self.linear(x)


class Hostile(lightning.LightningModule):
    """Everything a step can change outside of its parameters."""

    draws_before_data = True
    """Hooks that run before the first batch is fetched draw random numbers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.counting = Counting()
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, 3)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.mean_loss = torchmetrics.MeanMetric()
        self.history: list[float] = []
        self.counts: Counter[str] = Counter()
        self.nested = {"steps": [], "inner": {"set": {0}}}
        self.generator = torch.Generator().manual_seed(7)
        self.numpy_generator = np.random.default_rng(7)

    def look_at(self, x: torch.Tensor) -> None:
        """For what needs values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.counting(x))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.look_at(x)
        noise = torch.rand(x.shape, generator=self.generator) * draw() + float(self.numpy_generator.random())
        logits = self(x + 0.01 * noise)
        loss = nn.functional.cross_entropy(logits, y)
        self.history.append(float(loss.detach()))
        self.counts["training_step"] += 1
        self.nested["steps"].append(batch_idx)
        self.nested["inner"]["set"].add(len(self.history))
        self.late = len(self.history)  # an attribute that does not exist before the first step
        self.accuracy(logits, y)
        self.mean_loss.update(loss.detach())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.counts["validation_step"] += 1
        self.log("val_loss", nn.functional.cross_entropy(self(x), y) + 0.01 * draw(), prog_bar=True)

    def on_train_start(self) -> None:
        self.counts["on_train_start"] += 1
        if self.draws_before_data:
            draw()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts["on_train_batch_start"] += 1
        draw()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.counts["on_before_optimizer_step"] += 1
        self.log("grad_norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", self.mean_loss.compute())
        self.mean_loss.reset()

    def configure_optimizers(self) -> Any:
        self.counts["configure_optimizers"] += 1
        if self.draws_before_data:
            draw()
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches  # -1 where a stream has no length
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=int(steps) if steps > 0 else 100
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).digest()[:8]


def plain(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """``value`` as nested data that ``==`` compares bit by bit."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.requires_grad, digest(value)
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return "generator", digest(value.get_state())
    if isinstance(value, np.random.Generator):
        return "generator", repr(value.bit_generator.state)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return repr(value)
    if id(value) in seen:
        return "seen"
    seen = seen | {id(value)}
    if isinstance(value, (lightning.Trainer, Path)):
        return type(value).__name__
    if isinstance(value, dict):
        known = {k: v for k, v in value.items() if k not in _IDS}
        return type(value).__name__, {repr(k): plain(v, seen) for k, v in known.items()}, [repr(k) for k in known]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(item) for item in value)
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [plain(item, seen) for item in value]
    if isinstance(value, (nn.Module, Augmented, Streamed)):
        return type(value).__qualname__, plain(vars(value), seen)
    return type(value).__qualname__


_IDS = ("_metric_attributes",)  # Lightning notes ids of objects there, which no two runs share


def random_states() -> tuple[Any, ...]:
    states = (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())
    return tuple(hashlib.sha256(repr(state).encode()).digest()[:8] for state in states)


def state_of(trainer: Any, module: Any) -> dict[str, Any]:
    """Everything that promise 3 names, as comparable data."""
    loaders = trainer.train_dataloader, trainer.val_dataloaders
    return {
        "module": plain(module),
        "random": random_states(),
        "optimizers": [plain(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedulers": [plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "loops": plain(trainer.fit_loop.state_dict()),
        "metrics": plain([trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]),
        "trainer": {
            name: plain(value)
            for name, value in vars(trainer).items()
            if isinstance(value, (int, float, str, bool)) and name not in ("_default_root_dir", "_last_val_time")
        },
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "global_step": (trainer.global_step, trainer.current_epoch),
        "flags": (module.training, trainer.state.fn, trainer.state.stage, trainer.state.status),
        "data": [plain(getattr(loader, "dataset", None)) for loader in loaders],
        "generators": [plain(getattr(loader, "generator", None)) for loader in loaders],
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two states differ: paths with both values."""
    return list(_differences("", one, other))


def _differences(path: str, one: Any, other: Any) -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            yield from _differences(f"{path}.{name}", one.get(name), other.get(name))
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{path}[{index}]", left, right)
    else:
        yield f"{path}: {one!r} != {other!r}"


class Watcher(Callback):
    """Notes every hook in order, and the whole state right before training begins."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.batches: list[bytes] = []
        self.starts: list[dict[str, Any]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.hooks.append("on_train_epoch_start")
        self.starts.append(state_of(trainer, pl_module))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append("on_train_batch_start")
        self.batches.append(digest(batch[0]))
        self.starts.append(state_of(trainer, pl_module))


def _note(name: str) -> Callable[..., None]:
    def hook(self: Watcher, *args: Any, **kwargs: Any) -> None:
        self.hooks.append(name)

    return hook


for _name in vars(Callback):
    if _name.startswith("on_") and "exception" not in _name and _name not in vars(Watcher):
        setattr(Watcher, _name, _note(_name))


def mapped(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=8, shuffle=True, **settings)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": mapped,
    "shuffled, untraceable": mapped,
    "shuffled by a generator": lambda: mapped(generator=torch.Generator().manual_seed(5)),
    "shuffled, in a worker": lambda: mapped(num_workers=1),
    "stream": lambda: DataLoader(Streamed(), batch_size=8),
    "stream, in a worker": lambda: DataLoader(Streamed(), batch_size=8, num_workers=1),
}


class HostileOnAStream(Hostile):
    """Samples of a stream that cannot be rewound were drawn when it was looked at, so nothing may draw in between."""

    draws_before_data = False


class Untraceable(Hostile):
    def look_at(self, x: torch.Tensor) -> None:
        self.array = x.detach().numpy().mean(0)


MODULES = {"stream": HostileOnAStream, "stream, in a worker": HostileOnAStream, "shuffled, untraceable": Untraceable}


def run(
    make_trainer: MakeTrainer,
    root: Path,
    plugin: MemFit | None,
    kind: str,
    **settings: Any,
) -> tuple[Any, Hostile, Watcher]:
    lightning.seed_everything(11, verbose=False)
    module, watcher = MODULES.get(kind, Hostile)(), Watcher()
    trainer = make_trainer(
        plugin,
        default_root_dir=root,
        callbacks=[watcher, LearningRateMonitor("step"), *settings.pop("callbacks", [])],
        logger=CSVLogger(root, name="logs"),
        enable_checkpointing=True,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(module, LOADERS[kind](), DataLoader(Augmented(8), batch_size=4))
    return trainer, module, watcher


@pytest.mark.parametrize("kind", LOADERS)
def test_a_plan_that_changes_nothing_leaves_the_whole_run_as_it_was(
    kind: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Reported in Lightning-AI/pytorch-lightning#11012."""
    runs = {}
    for name, plugin in (("without", None), ("with", MemFit(verbose=False, **AS_IT_IS))):
        root = tmp_path / name
        checkpoint = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
        runs[name] = run(make_trainer, root, plugin, kind, max_epochs=2, callbacks=[checkpoint], gradient_clip_val=0.5)
    (trainer, module, watcher), (trainer_with, module_with, watcher_with) = runs.values()
    assert trainer_with.precision_plugin.measured is not None, "the warm-up ran"
    assert trainer_with.precision_plugin.plan.split.num_slices == 1

    assert len(watcher.starts) == len(watcher_with.starts) == 2 + 6
    for number, (before, after) in enumerate(zip(watcher.starts, watcher_with.starts, strict=True)):
        found = differing(before, after)
        assert not found, f"start {number}: {found}"
    assert watcher.hooks == watcher_with.hooks
    assert watcher.batches == watcher_with.batches
    traced = trainer_with.precision_plugin.plan.forecast.method == "traced"
    assert traced == (kind != "shuffled, untraceable")
    assert differing(state_of(trainer, module), state_of(trainer_with, module_with)) == []

    files = {name: files_below(tmp_path / name) for name in runs}
    written = {Path("logs/version_0/plan.yaml"), Path("logs/version_0/memfit_report.txt")}
    assert set(files["with"]) - set(files["without"]) == written
    assert set(files["without"]) <= set(files["with"])
    for path in files["without"]:
        ours, theirs = tmp_path / "with" / path, tmp_path / "without" / path
        if path.suffix == ".ckpt":
            assert checkpoint_content(ours, tmp_path / "with") == checkpoint_content(theirs, tmp_path / "without"), path
        elif path.name == "hparams.yaml":  # the plan is among them: MemFit's own output
            assert {k: v for k, v in read_yaml(ours).items() if not k.startswith("memfit/")} == read_yaml(theirs)
        else:
            assert ours.read_bytes() == theirs.read_bytes(), path
    assert sum(path.suffix == ".ckpt" for path in files["without"]) == 3


def read_yaml(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def files_below(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def checkpoint_content(path: Path, root: Path) -> Any:
    content = torch.load(path, weights_only=False)
    content.pop("MemFit", None)  # the plan travels in it: MemFit's own output
    return repr(plain(content)).replace(str(root), "ROOT")


class Raising(Hostile):
    """Its second step raises; the first is traced, and runs for real in the warm-up."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(self.history) == 1:
            raise ZeroDivisionError("the user's own")
        return super().training_step(batch, batch_idx)


class StopsBeforeTraining(Callback):
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        raise ZeroDivisionError("the user's own")


def test_a_step_that_raises_in_the_warm_up_raises_its_own_error_and_leaves_nothing(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    states, callbacks = [], []
    for plugin, extra in ((None, [StopsBeforeTraining()]), (MemFit(verbose=False, **AS_IT_IS), [])):
        lightning.seed_everything(11, verbose=False)
        module = Raising()
        trainer = make_trainer(plugin, callbacks=[*extra, LearningRateMonitor("step")], logger=CSVLogger(tmp_path))
        with pytest.raises(ZeroDivisionError, match=r"^the user's own$"):
            trainer.fit(module, mapped(), DataLoader(Augmented(8), batch_size=4))
        states.append(plain(module))
        states[-1] = (states[-1], random_states(), trainer.accumulate_grad_batches, trainer.global_step)
        callbacks.append([type(callback).__name__ for callback in trainer.callbacks])
    assert not list(_differences("", *states))
    assert callbacks[1] == callbacks[0][1:], "the warm-up's callback is gone"
    assert not list(tmp_path.rglob("plan.yaml"))


def test_where_taking_one_lever_back_raises_the_others_are_taken_back_all_the_same(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(levers: StepLevers) -> None:
        real(levers)
        raise ZeroDivisionError("while taking levers back")

    closed: list[str] = []
    real = StepLevers.end
    monkeypatch.setattr(StepLevers, "end", end)
    monkeypatch.setattr(OperatorProber, "close", lambda prober: closed.append("prober"))
    monkeypatch.setattr(TrainLoader, "close", lambda loader: closed.append("loader"))
    plugin = MemFit(verbose=False, effective_batch_size=16, **AS_IT_IS)
    trainer, module = make_trainer(plugin), Hostile()
    with pytest.raises(ZeroDivisionError, match="while taking levers back"):
        trainer.fit(module, mapped())
    assert plugin.plan is not None and plugin.plan.split.accumulate_grad_batches > 1
    assert trainer.accumulate_grad_batches == 1
    assert closed[-2:] == ["prober", "loader"]


def test_containers_and_tensors_stay_the_same_objects(make_trainer: MakeTrainer) -> None:
    replaced = []
    for plugin in (None, MemFit(verbose=False, **AS_IT_IS)):
        module = Hostile()
        before = identities(module)
        after: dict[str, int] = {}

        class Look(Callback):
            def on_train_epoch_start(self, trainer: Any, pl_module: Any, after: dict[str, int] = after) -> None:
                after.update(identities(pl_module))

        make_trainer(plugin, callbacks=[Look()], num_sanity_val_steps=0).fit(module, mapped())
        assert after
        replaced.append({name for name in {**before, **after} if before.get(name) != after.get(name)})
    assert replaced[0] == replaced[1], "only what Lightning itself replaces"
    assert not any(name.startswith(("counting", "norm", "head")) for name in replaced[1])


MUTABLE = (dict, list, set, deque, np.ndarray, np.random.Generator, torch.Tensor, torch.Generator, nn.Module)


def identities(module: nn.Module) -> dict[str, int]:
    found = {}
    for name, part in module.named_modules():
        found.update({f"{name}.{key}": id(value) for key, value in vars(part).items() if isinstance(value, MUTABLE)})
        for kind in ("_parameters", "_buffers"):
            found.update({f"{name}.{key}": id(value) for key, value in vars(part)[kind].items()})
    return found


@pytest.mark.parametrize("mode", ["off", "MEMFIT=off"])
def test_switched_off_it_is_a_plain_precision_plugin(
    mode: str, make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "MEMFIT=off":
        monkeypatch.setenv("MEMFIT", "off")
        plugin = MemFit(effective_batch_size=9999, budget=1)
    else:
        plugin = MemFit(effective_batch_size=9999, budget=1, mode="off")
    trainer, module, watcher = run(make_trainer, tmp_path / "with", plugin, "shuffled")
    plain_trainer, plain_module, plain_watcher = run(make_trainer, tmp_path / "without", None, "shuffled")
    assert not differing(state_of(plain_trainer, plain_module), state_of(trainer, module))
    assert watcher.hooks == plain_watcher.hooks
    assert plugin.plan is None and plugin.measured is None
    assert files_below(tmp_path / "with") == files_below(tmp_path / "without")


def test_a_report_prints_the_plan_and_changes_nothing(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported in CUNY-CL/yoyodyne#148."""
    plugin = MemFit(effective_batch_size=48, mode="report")
    trainer, module, watcher = run(make_trainer, tmp_path / "with", plugin, "shuffled")
    assert "MemFit plan" in capsys.readouterr().out
    plain_trainer, plain_module, plain_watcher = run(make_trainer, tmp_path / "without", None, "shuffled")
    assert not differing(state_of(plain_trainer, plain_module), state_of(trainer, module))
    assert watcher.hooks == plain_watcher.hooks
    for before, after in zip(plain_watcher.starts, watcher.starts, strict=True):
        assert not differing(before, after)
    assert plugin.plan is not None and plugin.plan.split.accumulate_grad_batches == 6
    assert plugin.measured is None, "nothing was run"
    assert set(files_below(tmp_path / "with")) - set(files_below(tmp_path / "without")) == {
        Path("logs/version_0/plan.yaml"),
        Path("logs/version_0/memfit_report.txt"),
    }


@pytest.mark.parametrize("mode", ["apply", "report"])
def test_the_loaders_hooks_run_once(mode: str, make_trainer: MakeTrainer) -> None:
    class WithLoaders(Hostile):
        def train_dataloader(self) -> Any:
            draw()
            CALLS["train"] += 1
            return mapped()

        def val_dataloader(self) -> Any:
            CALLS["val"] += 1
            return DataLoader(Augmented(8), batch_size=4)

    CALLS.clear()
    make_trainer(MemFit(verbose=False, mode=mode, **AS_IT_IS), max_epochs=2).fit(WithLoaders())
    assert CALLS == {"train": 1, "val": 1}


CALLS: Counter[str] = Counter()
"""Outside of the module, so that nothing restores it."""


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files and children are read from /proc")
def test_real_probing_leaves_no_child_process_and_no_open_file(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported in pytorch/pytorch#91252."""
    monkeypatch.undo()  # the operators are probed for real here

    def state() -> tuple[int, list[int]]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), [child.pid for child in psutil.Process().children()]

    before = state()
    plugin = MemFit(effective_batch_size=8, micro_batch_size=2, cache_dir=tmp_path / "cache", verbose=False, **AS_IT_IS)
    make_trainer(plugin, max_steps=1).fit(Small(), DataLoader(torch.randn(8, 4), batch_size=8))
    assert plugin.measured is not None
    assert list((tmp_path / "cache").glob("operators-*.json"))  # it did probe
    assert state() == before
