"""What a trace covers, and that it leaves no trace of itself. Run: ``pytest tests/trace/test_training_step.py``."""

from __future__ import annotations

import copy
import resource
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from lightning_memfit.errors import ConfigurationError, TraceError
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.timeline import Free, Operation, Timeline
from lightning_memfit.trace.training_step import optimizers_of, program_of, trace_window

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


def total(module: nn.Module, batch: Any) -> Tensor:
    return module(batch).sum()


def traced(module: nn.Module, batch: Any, loss: Any = total, optimizer: Any = SGD, **options: Any) -> Timeline:
    return trace_window(program_of(module, loss=loss, optimizer=optimizer), batch, **options)


def resident(timeline: Timeline) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for entry in timeline.residents:
        sizes[entry.category] += entry.allocated_bytes
    return sizes


# What counts, and how often.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_tied_weights_are_counted_once() -> None:
    """Reported in pytorch/torchtitan#3225."""
    timeline = traced(Tied(), torch.zeros(3, dtype=torch.long))
    assert timeline.num_parameters == 40
    assert resident(timeline) == {"parameters": 160, "gradients": 160, "optimizer_states": 160, "inputs": 24}


def test_frozen_and_unused_parameters_have_neither_gradients_nor_states() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    # 4 x 4 + 4 = 20 elements = 80 B each.
    timeline = traced(Partly(), torch.zeros(2, 4))
    assert resident(timeline) == {"parameters": 240, "gradients": 80, "optimizer_states": 80, "inputs": 32}


def test_buffers_count_also_those_that_are_not_saved_and_plain_attributes() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("kept", torch.zeros(5))
    module.register_buffer("passing", torch.zeros(7), persistent=False)
    module.table = torch.zeros(9)
    module.nested = {"tables": [torch.zeros(11), module.table]}
    assert resident(traced(module, torch.zeros(2, 4)))["buffers"] == 4 * (5 + 7 + 9 + 11)


def test_tensors_that_share_a_storage_are_counted_once() -> None:
    module = nn.Linear(4, 4, bias=False)
    flat = torch.zeros(100)
    module.register_buffer("first", flat[:50])
    module.register_buffer("second", flat[25:])
    module.register_buffer("whole", flat)
    assert resident(traced(module, torch.zeros(2, 4)))["buffers"] == 400


def test_a_batch_of_views_counts_its_storages() -> None:
    storage = torch.zeros(64, 4)
    batch = {"x": storage[:2], "again": storage[:2], "rest": (storage[2:], ["text", 3])}
    timeline = traced(nn.Linear(4, 4), batch, lambda m, b: m(b["x"]).sum())
    assert resident(timeline)["inputs"] == 64 * 4 * 4


def test_a_second_batch_in_the_loop_is_counted() -> None:
    assert resident(traced(nn.Linear(4, 4), torch.zeros(2, 4), resident_batches=2))["inputs"] == 64


def test_a_second_batch_waits_as_the_loader_gave_it() -> None:
    waiting = torch.zeros(2, 4, dtype=torch.uint8)
    timeline = traced(nn.Linear(4, 4), torch.zeros(2, 4), resident_batches=3, waiting_batch=waiting)
    assert resident(timeline)["inputs"] == 32 + 2 * 8


def test_a_function_that_divides_by_values_may_copy() -> None:
    def halves(batch: Tensor) -> list[Tensor]:
        return [batch[batch[:, 0] < 2], batch[batch[:, 0] >= 2]]

    batch = torch.arange(4.0)[:, None].expand(4, 4).contiguous()
    timeline = traced(nn.Linear(4, 4), batch, divide=halves)
    assert timeline.micro_steps == 2
    assert resident(timeline)["inputs"] == 64 + 2 * 32  # the batch, and two slices that are no views of it


def test_a_step_counter_is_a_state_of_four_bytes_per_parameter() -> None:
    # AdamW: two moments as large as the parameters (80 B) and a float32 step for each of two.
    timeline = traced(nn.Linear(4, 4), torch.zeros(2, 4), optimizer=torch.optim.AdamW)
    assert resident(timeline)["optimizer_states"] == 2 * 80 + 2 * 4


def test_a_module_on_meta_is_traced_as_one_on_the_cpu_without_its_memory() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))

    real = traced(build(), torch.zeros(8, 16))
    with torch.device("meta"):
        module, batch = build(), torch.zeros(8, 16)
    assert traced(module, batch) == real


def test_a_model_larger_than_the_machine_is_traced_in_little_memory() -> None:
    # 4 x 65536 x 65536 float32 are 64 GiB; parameters, gradients and momentum 192 GiB.
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(4)))
        batch = torch.zeros(2, 65536)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = predict_memory(traced(module, batch)).peak_allocated_bytes
    assert peak >= 192 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


# Windows.


def test_of_many_slices_two_are_followed() -> None:
    module = nn.Linear(8, 8)
    few = traced(module, torch.zeros(16, 8), divide=lambda batch: batch.split(8))
    many = traced(module, torch.zeros(16, 8), divide=lambda batch: batch.split(1))
    assert many.num_operations == few.num_operations


def test_what_a_step_returns_beside_the_loss_is_held_until_the_window_ends() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Any:
        output = module(batch)
        return {"loss": output.sum(), "predictions": output.detach().clone(), "parts": [torch.zeros(10)]}

    timeline = traced(nn.Linear(8, 8), torch.zeros(4, 8), loss)
    freed = {event.storage: event.phase for event in timeline.events if isinstance(event, Free)}
    # The second copy is that of the loss.
    clone, _ = (e for e in timeline.events if isinstance(e, Operation) and e.op == "aten.clone.default")
    (zeros,) = (e for e in timeline.events if isinstance(e, Operation) and e.op == "aten.zeros.default")
    assert freed.get(clone.outputs[0].storage) in (None, "optimizer_step")
    assert freed.get(zeros.outputs[0].storage) in (None, "optimizer_step")


def test_old_gradients_live_through_the_first_forward_only() -> None:
    timeline = traced(nn.Linear(8, 8), torch.zeros(4, 8), divide=lambda batch: batch.split(2))
    old = {entry.storage for entry in timeline.residents if entry.category == "gradients"}
    assert {event.phase for event in timeline.events if isinstance(event, Free) and event.storage in old} == {
        "zero_grad"
    }


def test_zeroing_early_saves_the_old_gradients_in_the_forward() -> None:
    timeline = traced(nn.Linear(8, 8), torch.zeros(4, 8))
    late, early = predict_memory(timeline), predict_memory(timeline, zero_gradients_early=True)
    assert late.by_phase["forward"] - early.by_phase["forward"] == 72 * 4
    assert late.by_phase["backward"] == early.by_phase["backward"]


def test_set_to_none_false_keeps_the_old_gradients() -> None:
    class Keeps(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.inner(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

    timeline = trace_window(program_of(Keeps()), torch.zeros(4, 8))
    old = {entry.storage for entry in timeline.residents if entry.category == "gradients"}
    assert not [event for event in timeline.events if isinstance(event, Free) and event.storage in old]


# Lightning modules, values, metrics.


class Lit(LightningModule):
    """Logs, reads its loss, updates metrics and buffers, keeps things."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.metric = MeanMetric()
        self.seen: list[Any] = []
        self.fails = fails
        self.calls = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.calls += 1
        self.seen.append(batch)
        self.last = batch
        loss = self.inner(batch).square().mean()
        self.metric(loss)
        self.metric.update(loss)
        self.log("loss", loss)
        self.log_dict({"again": loss})
        if loss.item() < 0 or torch.isnan(loss):
            raise ValueError("a bad loss")
        np.random.rand()
        torch.rand(3)
        if self.fails:
            raise KeyError("on purpose")
        return {"loss": loss, "metric": self.metric.compute()}

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def attributes(module: nn.Module) -> dict[str, Any]:
    """Every submodule's attributes, containers copied, tensors as identity and contents."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return id(value), value._version, value.detach().clone().numpy().tobytes(), id(value.grad)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return id(value) if isinstance(value, nn.Module) or callable(value) else repr(value)

    return {name: plain(dict(vars(part))) for name, part in module.named_modules()}


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_as_before_also_when_the_step_raises(fails: bool) -> None:
    module = Lit(fails=fails)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = attributes(module)
    grads = [parameter.grad for parameter in module.parameters()]
    random_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr,index]
    if fails:
        with pytest.raises(TraceError, match=r"KeyError: 'on purpose'"):
            trace_window(program_of(module), torch.zeros(6, 4))
    else:
        trace_window(program_of(module), torch.zeros(6, 4))
    assert attributes(module) == before
    assert all(p.grad is g and bool((g == 3).all()) for p, g in zip(module.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert (np.random.get_state()[1] == random_before[1]).all()  # type: ignore[index]


def test_reading_the_loss_is_answered_and_said() -> None:
    timeline = trace_window(program_of(Lit()), torch.zeros(6, 4))
    (note,) = timeline.notes
    assert note == (
        "the step reads 2 values of tensors (such as loss.item()); the trace answers as a healthy step would: 1 for "
        "numbers, False for flags"
    )


def test_metrics_neither_count_nor_change() -> None:
    module = Lit()
    module.metric.update(torch.tensor(5.0))
    timeline = trace_window(program_of(module), torch.zeros(6, 4))
    assert module.metric.compute() == 5.0
    assert not [e for e in timeline.events if isinstance(e, Operation) and e.module == "metric"]


def test_a_collection_of_metrics_is_left_out_too() -> None:
    """It would compare the states of its metrics, which fakes do not have."""

    class WithCollection(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.collection = MetricCollection({"mean": MeanMetric(), "again": MeanMetric()})

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            self.collection.update(output["loss"])
            self.log_dict(self.collection(output["loss"]))
            return output

    module = WithCollection()
    module.collection.update(torch.tensor(5.0))
    trace_window(program_of(module), torch.zeros(6, 4))
    assert module.collection.compute() == {"mean": 5.0, "again": 5.0}
    assert "update" not in vars(module.collection)


def test_a_step_without_a_batch_index_and_one_with_another_name_are_called() -> None:
    class Short(Lit):
        def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
            return self.inner(batch).sum()

    class Other(Lit):
        def training_step(self, batch: Tensor, i: int) -> Tensor:  # type: ignore[override]
            assert i == 0
            return self.inner(batch).sum()

    for kind in (Short, Other):
        assert trace_window(program_of(kind()), torch.zeros(6, 4)).num_parameters == 65


def test_a_step_of_loss_none_is_refused() -> None:
    class Skips(Lit):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            return None

    with pytest.raises(TraceError, match="training_step returned NoneType instead of a loss"):
        trace_window(program_of(Skips()), torch.zeros(6, 4))


# What cannot be traced.


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda m, b: m(b[b[:, 0] > 0]).sum(), "DynamicOutputShapeException: aten.nonzero.default"),
        (lambda m, b: m(b).sum() * b.nonzero().sum(), "DynamicOutputShapeException: aten.nonzero.default"),
        (lambda m, b: m(b).sum() * float(m(b).detach().numpy().sum()), "numpy"),
        (lambda m, b: m(b).sum() + torch.unique(b).sum(), "DynamicOutputShapeException"),
    ],
)
def test_a_step_that_needs_values_says_which(loss: Callable[..., Tensor], reason: str) -> None:
    module = nn.Linear(4, 4)
    before = attributes(module)
    with pytest.raises(TraceError, match=reason):
        traced(module, torch.zeros(6, 4), loss)
    assert attributes(module) == before


def test_a_sparse_gradient_is_refused_with_a_reason() -> None:
    module = nn.Sequential(nn.Embedding(100, 8, sparse=True))
    with pytest.raises(TraceError) as caught:
        traced(module, torch.zeros(6, dtype=torch.long), optimizer=partial(torch.optim.SparseAdam, lr=0.1))
    assert str(caught.value)


def test_parameters_collected_too_early_are_refused() -> None:
    module = nn.Linear(4, 4)
    parameters = list(module.parameters())
    with pytest.raises(TraceError, match=r"2 tensors that are not parameters of the module now.*\(4, 4\)"):
        traced(module, torch.zeros(2, 4), optimizer=lambda _: SGD(parameters))


def test_two_optimizers_are_refused() -> None:
    class Two(Lit):
        def configure_optimizers(self) -> Any:
            return [SGD(self.inner.parameters()), SGD(self.inner.parameters())]

    with pytest.raises(TraceError, match="2 optimizers; one is traced"):
        trace_window(program_of(Two()), torch.zeros(6, 4))


def test_a_plain_module_needs_a_loss_and_an_optimizer() -> None:
    with pytest.raises(ConfigurationError, match=r"Linear has no training_step. Pass loss="):
        program_of(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"Linear has no configure_optimizers. Pass optimizer="):
        program_of(nn.Linear(2, 2), loss=total)


def test_optimizers_are_found_in_every_form() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    forms: list[Any] = [
        optimizer,
        [optimizer],
        (optimizer,),
        {"optimizer": optimizer},
        {"optimizer": optimizer, "lr_scheduler": scheduler},
        ([optimizer], [scheduler]),
        ({"optimizer": optimizer, "frequency": 1},),
        ([optimizer], [{"scheduler": scheduler, "interval": "step"}]),
    ]
    for form in forms:
        assert optimizers_of(form) == [optimizer], form
    assert optimizers_of(None) == []


def test_tracing_twice_gives_the_same_timeline() -> None:
    module = Lit()
    first = trace_window(program_of(module), torch.zeros(6, 4))
    assert trace_window(program_of(copy.deepcopy(module)), torch.zeros(6, 4)) == first
