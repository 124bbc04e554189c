"""Runs on two ranks of which one fails, or is about to do something else."""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_memfit import MemFit, planning, preparation
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import Forecast
from lightning_memfit.ranks import SeveralRanks
from lightning_memfit.real_steps import Ran, RealSteps
from lightning_memfit.units import GIB, MIB
from tests.ranks.trainer_programs import Case, Net, data_of, net_of, plugin_of, weights_of

SECONDS = 20
"""How long ranks wait for each other."""


class FailingNet(Net):
    """Fails on rank 1, at a chosen moment."""

    def __init__(self, case: Case, *, at: str, rank: int) -> None:
        super().__init__(case)
        self.at, self.rank = at, rank
        self.is_training = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.rank == 1 and type(batch[0]) is torch.Tensor:  # and no fake
            if self.at == "in the warm-up" or (self.at == "in a slice" and self.is_training and len(batch[0]) == 2):
                raise ValueError("no such sample")
            if self.at == "out of memory in the warm-up":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.loss(batch)


class Wide(Net):
    """Two million parameters and small activations: what is held whole, DDP cannot make smaller."""

    def __init__(self) -> None:
        super().__init__(Case())
        blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)]
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 512), *blocks])
        self.head = torch.nn.Linear(512, 5)


class Training(lightning.Callback):
    """Notes that training has begun; callbacks take no part in a warm-up."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.is_training = True


def trainer_of(strategy: Any, plugin: MemFit, folder: str, **settings: Any) -> lightning.Trainer:
    """A Trainer of two ranks that shares its loaders among them."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        plugins=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )


def fit(net: Net, *, plugin: MemFit | None = None, case: Case | None = None, loader: Any = None) -> MemFit:
    """One fit under DDP; slices of 3, 3 and 2."""
    case = case or Case(micro_batch_size=3)
    with tempfile.TemporaryDirectory() as folder:
        plugin = plugin or MemFit(
            effective_batch_size=case.effective_batch_size,
            micro_batch_size=case.micro_batch_size,
            precision="32-true",
            optimizer_implementation="as-configured",
            cache_dir=None,
            verbose=False,
        )
        strategy = lightning.pytorch.strategies.DDPStrategy(timeout=datetime.timedelta(seconds=SECONDS))
        trainer_of(strategy, plugin, folder, callbacks=[Training()]).fit(
            net, DataLoader(data_of(case), batch_size=case.loader_batch_size) if loader is None else loader
        )
    return plugin


class OutOfMemoryNet(Net):
    """Runs out of memory on rank 1 of a warm-up, where the other one waits for what it would send."""

    def __init__(self, case: Case, *, rank: int, at: str) -> None:
        super().__init__(case)
        self.rank, self.at = rank, at
        self.has_begun = False

    def on_train_start(self) -> None:
        self.has_begun = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.at == "training" and self.has_begun and self.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.at == "validation" and self.has_begun and self.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.loss(batch)


def out_of_memory_under_zero(rank: int) -> None:
    """Rank 1 runs out of memory in a step of all ranks."""
    import deepspeed

    from tests.ranks.cpu_deepspeed import CPUDeepSpeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo reduces: nothing is compiled
    strategy = CPUDeepSpeed(
        stage=2, allgather_bucket_size=1000, reduce_bucket_size=1000, timeout=datetime.timedelta(seconds=SECONDS)
    )
    _fit_and_validate(Case(micro_batch_size=3), strategy, rank, at="training")


def out_of_memory_evaluating(rank: int) -> None:
    """Rank 1 runs out of memory in an evaluation, whose forward gathers parameters."""
    _fit_and_validate(Case(engine="fsdp2", micro_batch_size=3), _fsdp2(), rank, at="validation")


def validating_longer_on_one_rank(rank: int) -> None:
    """Rank 1 has a batch more to validate than the other, whose parameters it would wait for."""
    case = Case(engine="fsdp2", micro_batch_size=3)
    longer = dataclasses.replace(case, samples=case.samples + 16 * rank)
    validation = DataLoader(data_of(longer), batch_size=case.loader_batch_size)
    _fit_and_validate(case, _fsdp2(), rank, at="never", validation=validation)


def _fsdp2() -> Any:
    return lightning.pytorch.strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, timeout=datetime.timedelta(seconds=SECONDS)
    )


def _fit_and_validate(case: Case, strategy: Any, rank: int, *, at: str, validation: Any = None) -> None:
    torch.manual_seed(0)
    net = OutOfMemoryNet(case, rank=rank, at=at)
    loader = DataLoader(data_of(case), batch_size=case.loader_batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(strategy, plugin_of(case, folder), folder)
        trainer.fit(net, loader, loader if validation is None else validation)


class FailingToCompare(Net):
    """Runs out of memory, or raises, in the midst of a step in which slices are compared."""

    def __init__(self, case: Case, *, error: Exception | None) -> None:
        super().__init__(case)
        wide = [torch.nn.Sequential(torch.nn.Linear(64, 64), *(torch.nn.Tanh() for _ in range(3))) for _ in range(6)]
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 64), *wide])
        self.head = torch.nn.Linear(64, 5)
        self.error = error

    def setup(self, stage: str) -> None:
        self.blocks[3][0].register_forward_hook(self.fail)

    def fail(self, block: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if self.error is not None and self.trainer.optimizers == [] and type(output) is torch.Tensor:  # and no fake
            raise self.error


def comparing(rank: int, errors: dict[int, Exception]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Plan and weights of a fit under FSDP2 whose undivided batch fits with most blocks recomputed alone.

    Slices are nearly as fast, so that they are compared, and the comparison raises the error of a rank.
    """
    case = Case(engine="fsdp2", loader_batch_size=512, samples=2048)
    torch.manual_seed(0)
    net = FailingToCompare(case, error=errors.get(rank))
    plugin = MemFit(
        budget="1.7MiB",
        precision="32-true",
        optimizer_implementation="as-configured",
        cache_dir=None,
        verbose=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(_fsdp2(), plugin, folder)
        trainer.fit(net, DataLoader(data_of(case), batch_size=case.loader_batch_size))
        return plugin.plan, weights_of(net)


def out_of_memory_comparing_on_one_rank(rank: int) -> None:
    """Rank 1 runs out of memory while slices are compared, and rank 0 waits for its parameters."""
    comparing(rank, {1: out_of_memory()})


def failing_to_compare_on_all_ranks(rank: int) -> list[Any]:
    """No rank fails; all run out of memory, or raise, at the same place of the comparison."""
    errors: list[dict[int, Exception]] = [
        {},
        {0: out_of_memory(), 1: out_of_memory()},
        {0: KeyError("not yet"), 1: KeyError("not yet")},
    ]
    return [comparing(rank, each) for each in errors]


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def going_on(rank: int) -> dict[str, Any]:
    """What ranks learn of an error that all had, of one at different places, and of the next one, which is rank 1's."""
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", timeout=timeout)
    ranks, found = SeveralRanks(timeout=timeout), {}
    try:
        with ranks.failing("recomputing"):
            raise KeyError("of all ranks")
    except KeyError as error:
        ranks.alike(error, "block 3", doing="recomputing")
        found["is still told"] = ranks.knows(error)
    unlike = KeyError("elsewhere")
    for number in (1, 2):  # a second handler sees it too, and has nothing to ask
        try:
            ranks.alike(unlike, f"block {rank}", doing="recomputing")
        except KeyError as error:
            found[f"ends {number}"] = (str(error), error.__notes__)
    with ranks.alone():
        ranks.alike(unlike, "nobody waits", doing="recomputing")
    try:
        with ranks.failing("stepping"):
            if rank == 1:
                raise ValueError("another")
            dist.all_reduce(torch.ones(1))
    except Exception as error:
        found["next"] = f"{type(error).__name__}: {error}"
    return found


class Elsewhere(torch.Tensor):
    """Says that it is on an accelerator, which this machine need not have."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)

    def detach(self) -> Any:
        return self

    def cpu(self) -> Any:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


class OwnBatch:
    """Of a class of the user's own."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts


def sending(rank: int) -> dict[str, list[Any]]:
    """The tensors that ranks get of what one of them has on an accelerator, on the host, and on no device."""
    dist.init_process_group("gloo")
    ranks = SeveralRanks()
    x = torch.arange(3.0) + rank
    batch = {"x": x, "own": OwnBatch([OwnBatch(x.as_subclass(Elsewhere))]), "meta": torch.empty(2, device="meta")}
    of_all = ranks.each(lambda: None, doing="sending", tell=lambda nothing: batch).all
    received = {"from rank 1": [ranks.from_rank(1, batch)], "of all": of_all}
    dist.destroy_process_group()
    return {
        how: [
            [(type(each), each.device.type, each.tolist() if each.device.type != "meta" else None) for each in tensors]
            for tensors in ((one["x"], one["own"].parts[0].parts, one["meta"]) for one in batches)
        ]
        for how, batches in received.items()
    }


class Uncountable(torch.nn.Module):
    """Saves other tensors each second time, if it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = False
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return x.tanh() if self.calls % 2 == 0 else x.sin().square()


class UnrecomputableNet(FailingNet):
    """Its blocks cannot be recomputed, on some ranks; in training rank 1 fails."""

    def __init__(self, case: Case, *, rank: int, counts: bool) -> None:
        super().__init__(case, at="in training", rank=rank)
        self.counts = counts
        for block in self.blocks:
            block[1] = Uncountable()

    def on_train_start(self) -> None:  # slices were compared before
        for block in self.blocks:
            block[1].counts = self.counts

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.is_training and self.rank == 1:
            raise ValueError("no such sample")
        return self.loss(batch)


def failing_behind_an_error_of_all_ranks(rank: int) -> None:
    """A given plan recomputes what cannot be recomputed, and another one stands; then rank 1 fails in training."""
    _recompute_in_vain(rank, counts=True)


def unrecomputable_on_one_rank(rank: int) -> None:
    """Rank 1 alone finds that blocks cannot be recomputed, in a backward of all ranks."""
    _recompute_in_vain(rank, counts=rank == 1)


def _recompute_in_vain(rank: int, *, counts: bool) -> None:
    case = Case(engine="fsdp2", micro_batch_size=3, settings={"activation_checkpointing": "blocks"})
    plan = None
    for net in (UnrecomputableNet(case, rank=0, counts=False), UnrecomputableNet(case, rank=rank, counts=counts)):
        with tempfile.TemporaryDirectory() as folder:
            settings = {} if plan is None else {"plan": plan, "activation_checkpointing": "auto"}
            plugin = plugin_of(case, folder, **settings)
            trainer = trainer_of(_fsdp2(), plugin, folder, callbacks=[Training()])
            torch.manual_seed(0)
            trainer.fit(net, DataLoader(data_of(case), batch_size=case.loader_batch_size))
            plan = plugin.plan


def run_all(rank: int) -> dict[str, str]:
    """What each run said in which one rank fails, or is about to do something else, while all are still in touch."""
    case = Case(micro_batch_size=3)
    other = MemFit(effective_batch_size=16 if rank == 0 else 32, cache_dir=None, verbose=False)
    narrow = net_of(case)
    narrow.head = torch.nn.Linear(16, 5, bias=rank == 0)
    longer = dataclasses.replace(case, samples=case.samples + 16 * rank)
    runs: dict[str, Callable[[], Any]] = {
        "looking at its data": lambda: fit(net_of(case), loader=[] if rank == 1 else None),
        "planning": lambda: _planning_fails(rank),
        "warm-up": lambda: fit(FailingNet(case, at="in the warm-up", rank=rank)),
        "memory": lambda: fit(FailingNet(case, at="out of memory in the warm-up", rank=rank)),
        "settings": lambda: fit(net_of(case), plugin=other),
        "model": lambda: fit(narrow),
        "batches": lambda: fit(net_of(case), loader=DataLoader(data_of(longer), batch_size=case.loader_batch_size)),
        "poorest": lambda: _with_less(rank),
        "too little": lambda: fit(Wide(), plugin=MemFit(budget="20MiB", cache_dir=None, verbose=False)),
        "more than predicted": _needs_more_than_predicted,
    }
    return {name: _said(run) for name, run in runs.items()}


UNSEEN_BYTES = 30 * MIB
"""What every warm-up of such a run measures beside what was predicted."""


def _needs_more_than_predicted() -> MemFit:
    """A run that is predicted to fit under DDP, and measured not to, whatever its slices are."""
    measured_for_real = RealSteps.warm_up

    def measured_large(steps: RealSteps, forecast: Forecast, *, timed: bool) -> Ran:
        ran = measured_for_real(steps, forecast, timed=timed)
        assert ran.measurement is not None
        peak = forecast.memory.peak_allocated_bytes + UNSEEN_BYTES
        return dataclasses.replace(
            ran, measurement=dataclasses.replace(ran.measurement, measured_peak_allocated_bytes=peak)
        )

    RealSteps.warm_up = measured_large  # type: ignore[method-assign]
    try:
        return fit(Wide(), plugin=MemFit(budget="48MiB", cache_dir=None, verbose=False))
    finally:
        RealSteps.warm_up = measured_for_real  # type: ignore[method-assign]


def _said(run: Callable[[], Any]) -> str:
    try:
        return str(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _planning_fails(rank: int) -> None:
    search = planning.search_plan

    def raising(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("no such lever")

    if rank == 0:
        planning.search_plan = raising
    try:
        fit(net_of(Case(micro_batch_size=3)))
    finally:
        planning.search_plan = search


def _with_less(rank: int) -> tuple[int, str]:
    """Rank 1 has two gibibytes less than rank 0."""
    detect = preparation.detect_device

    def detect_less(which: str, **settings: Any) -> DeviceSpec:
        device = detect(which, **settings)
        left = 16 * GIB - 4 * GIB * rank  # which the two processes share
        return dataclasses.replace(device, available_bytes=left, capacity_bytes=left + device.process_bytes)

    preparation.detect_device = detect_less  # type: ignore[assignment]
    try:
        plugin = fit(net_of(Case(micro_batch_size=3)))
    finally:
        preparation.detect_device = detect
    assert plugin.plan is not None
    return plugin.plan.budget.budget_bytes, plugin.plan.budget.reason


def failing_in_a_slice(rank: int) -> None:
    """Rank 1 fails in training, while the other waits for its gradients."""
    fit(FailingNet(Case(micro_batch_size=3), at="in a slice", rank=rank))
