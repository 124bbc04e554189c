"""Forecasts derived from few recorded steps, traced, or measured small. Run: ``pytest tests/test_forecaster.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_memfit import forecaster as forecaster_module
from lightning_memfit import recorded_steps
from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed
from lightning_memfit.errors import BatchStructureError, ConfigurationError, TraceError
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import BatchSplit, Candidate, Forecast, balanced_slices
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.step_program import Unobserved, program_of, run_window

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Lit(LightningModule):
    """Three equal blocks and a head; no Trainer."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = SGD) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.head = nn.Linear(64, 10)
        self.optimizer = optimizer

    def prepared(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.prepared(batch)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Masked(Lit):
    """Its step needs values."""

    def prepared(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"][batch["y"] >= 0]


class OneOnly(Lit):
    """Takes another way through for small slices."""

    def prepared(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].tanh() if len(batch["x"]) < 10 else batch["x"]


class Squared(Lit):
    """Compares every sample with every other: memory grows with the square of the batch."""

    def prepared(self, batch: dict[str, Tensor]) -> Tensor:
        scaled = batch["x"] * self.head.bias.exp().sum()
        return scaled + (scaled @ scaled.t()).exp().sum()


def batch_of(samples: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(samples, 64), "y": torch.randint(0, 10, (samples,))}


def candidate(samples: int, slices: int = 1, *, blocks: int = 0, early: bool = False, **levers: Any) -> Candidate:
    return Candidate(
        **{
            "precision": "32-true",
            "activation_checkpointing": "blocks" if blocks else "none",
            "checkpointed_modules": BLOCKS[:blocks],
            "split": BatchSplit(
                effective_batch_size=samples, loader_batch_size=samples, slice_sizes=balanced_slices(samples, slices)
            ),
            "zero_gradients_early": early,
            **levers,
        }
    )


def forecaster_of(module: nn.Module, samples: int, **options: Any) -> Forecaster:
    return Forecaster(program_of(module), batch_of(samples), **{"prober": None, **options})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often steps were recorded, traced, and the optimizer's step traced."""
    counts = {"record_window": 0, "trace_window": 0, "trace_optimizer_step": 0}

    def counting(name: str, real: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*args, **options)

        return run

    for module, name in (
        (recorded_steps, "record_window"),
        (forecaster_module, "trace_window"),
        (forecaster_module, "trace_optimizer_step"),
    ):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counts


def alike(one: Forecast, two: Forecast) -> bool:
    return (one.memory.by_phase, one.memory.by_category, one.flops, one.recomputed_flops) == (
        two.memory.by_phase, two.memory.by_category, two.flops, two.recomputed_flops,
    )  # fmt: skip


def test_an_estimate_is_what_a_trace_of_the_candidate_says(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Lit(), 32)
    candidates = [
        candidate(32, slices, blocks=blocks, early=early, precision=precision)
        for precision, slices, blocks, early in itertools.product(
            ("32-true", "bf16-mixed"), (1, 3, 8), (0, 1, 3), (False, True)
        )
    ]
    estimates = [forecaster.estimate(each) for each in candidates]
    assert counted == {"record_window": 2, "trace_window": 0, "trace_optimizer_step": 1}
    assert not any(estimate.confirmed or estimate.notes for estimate in estimates)
    for estimate in estimates[::5]:
        traced = forecaster(estimate.candidate)
        assert traced.confirmed
        assert alike(estimate, traced), estimate.candidate


def test_an_estimate_with_probes_is_what_a_trace_of_the_candidate_says(tmp_path: Any) -> None:
    with OperatorProber(cache_dir=tmp_path) as prober:
        forecaster = forecaster_of(Lit(), 16, prober=prober)
        for each in (candidate(16), candidate(16, 4, blocks=3)):
            assert alike(forecaster.estimate(each), forecaster(each))


def test_implementations_are_an_exact_lever(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Lit(torch.optim.AdamW), 2)
    elements = 3 * (2 * 64 * 256 + 256 + 64) + 64 * 10 + 10
    peaks = {}
    for implementation in ("as-configured", "single-tensor", "foreach", "fused"):
        each = candidate(2, early=True, optimizer_implementation=implementation)
        estimate = forecaster.estimate(each)
        assert alike(estimate, forecaster(each))
        peaks[implementation] = estimate.memory.by_phase["optimizer_step"]
    assert counted["record_window"] == 1 and counted["trace_optimizer_step"] == 4
    assert peaks["as-configured"] == peaks["single-tensor"]  # torch chooses that for parameters on a CPU
    assert peaks["single-tensor"] - peaks["fused"] >= 4 * 64 * 256  # a copy of the largest parameter at least
    assert 4 * elements <= peaks["foreach"] - peaks["fused"] < 4 * elements + 1000  # one of all of them


def test_the_optimizer_is_prepared_as_the_caller_wants() -> None:
    seen = []

    def prepare(optimizer: torch.optim.Optimizer, asked: Candidate) -> torch.optim.Optimizer:
        seen.append(asked.optimizer_states)
        return (
            torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
            if asked.optimizer_states == "8bit"
            else optimizer
        )

    forecaster = forecaster_of(Lit(), 4, prepare_optimizer=prepare)
    plain, other = candidate(4), candidate(4, optimizer_states="8bit")
    assert "optimizer_states" in forecaster.estimate(plain).memory.by_category
    assert "optimizer_states" not in forecaster.estimate(other).memory.by_category
    assert "optimizer_states" not in forecaster(other).memory.by_category
    assert set(seen) == {"as-configured", "8bit"}


def test_one_step_serves_early_and_late_zeroing(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Lit(), 8)
    late, early = forecaster(candidate(8)), forecaster(candidate(8, early=True))
    assert counted["trace_window"] == 1
    assert early.memory.by_phase["forward"] < late.memory.by_phase["forward"]


def test_modules_that_were_not_followed_are_recorded_when_they_are_asked_for(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Lit(), 8)
    forecaster.estimate(candidate(8))
    other = replace(candidate(8), activation_checkpointing="patterns", checkpointed_modules=("blocks.1.0", "head"))
    assert not forecaster.estimate(other).confirmed
    assert counted["record_window"] == 2
    assert not forecaster.estimate(candidate(8, blocks=3)).confirmed
    assert counted["record_window"] == 2


def test_slices_that_run_other_operators_are_recorded_at_every_size(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(OneOnly(), 32)
    for slices, records in ((1, 1), (2, 2), (2, 2), (8, 3)):
        each = candidate(32, slices, blocks=2)
        estimate = forecaster.estimate(each)
        assert not estimate.confirmed and counted["record_window"] == records
        assert alike(estimate, forecaster(each))
    (note,) = estimate.notes
    assert note.startswith(
        "every size of a slice is traced on its own: slices of 32 and 8 samples run different operators (aten."
    )


def test_a_size_that_does_not_lie_on_the_line_is_recorded_once_a_trace_says_so(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Squared(), 256)
    each = candidate(256, 2)
    wrong, traced = forecaster.estimate(each), forecaster(each)
    # 256 and 64 samples were recorded; between two points of a parabola the line lies above it.
    assert wrong.memory.peak_allocated_bytes > 1.001 * traced.memory.peak_allocated_bytes
    assert counted["record_window"] == 1
    assert alike(forecaster.estimate(each), traced) and counted["record_window"] == 2
    assert alike(
        forecaster.estimate(replace(each, zero_gradients_early=True)),
        forecaster(replace(each, zero_gradients_early=True)),
    )


class Cache:
    """Keeps keys of every layer, as transformers does unless it is told not to."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def get_seq_length(self) -> int:
        return 0

    def update(self, keys: Tensor) -> Tensor:
        self.keys.append(torch.cat([torch.empty(0, keys.shape[1]), keys]))
        return self.keys[-1]


class Caching(Lit):
    """Its blocks are given a cache, by name."""

    def __init__(self) -> None:
        super().__init__()

        class Block(nn.Sequential):
            def forward(self, hidden: Tensor, *, cache: Cache | None = None) -> Tensor:
                hidden = self[0](hidden)
                return self[2]((hidden if cache is None else cache.update(hidden)).square())

        self.blocks = nn.ModuleList(Block(*block) for block in self.blocks)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden, cache = batch["x"], Cache()
        for block in self.blocks:
            hidden = hidden + block(hidden, cache=cache)
        return nn.functional.cross_entropy(self.head(hidden), batch["y"])


def test_blocks_with_caches_are_derived_from_a_record_of_their_own(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Caching(), 512)
    for blocks, records in ((0, 1), (3, 2), (1, 2)):
        each = candidate(512, 2, blocks=blocks)
        estimate, traced = forecaster.estimate(each), forecaster(each)
        assert not estimate.confirmed and counted["record_window"] == records
        if blocks == 1:  # blocks that are not recomputed do copy their keys into the cache
            difference = traced.memory.peak_allocated_bytes - estimate.memory.peak_allocated_bytes
            assert abs(difference) < 0.001 * traced.memory.peak_allocated_bytes
        else:
            assert alike(estimate, traced)


def test_what_cannot_be_derived_is_traced_and_says_why(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Lit(), 8)
    inner = replace(candidate(8), activation_checkpointing="patterns", checkpointed_modules=("blocks.0", "blocks.0.0"))
    found = forecaster.estimate(inner)
    assert found.confirmed and counted["trace_window"] == 1
    (note,) = found.notes
    assert note == (
        "not derived from the trace of another setting, but traced: blocks.0.0 lies in another block that is recomputed"
    )
    assert not forecaster(inner).notes


def test_a_batch_of_one_sample_is_derived_too(counted: dict[str, int]) -> None:
    forecaster = forecaster_of(Lit(), 1)
    for blocks in (0, 3):
        assert alike(forecaster.estimate(candidate(1, blocks=blocks)), forecaster(candidate(1, blocks=blocks)))
    split = BatchSplit(effective_batch_size=4, loader_batch_size=1, accumulate_grad_batches=4, slice_sizes=(1,))
    accumulated = replace(candidate(1), split=split)
    assert alike(forecaster.estimate(accumulated), forecaster(accumulated))
    assert counted["record_window"] == 1


def test_a_batch_smaller_than_the_loaders_is_divided_into_slices_of_its_own() -> None:
    forecaster = forecaster_of(Lit(), 10)
    each = candidate(16, 4)  # slices of 4: 4, 3, 3 of this batch
    assert alike(forecaster.estimate(each), forecaster(each))


def test_a_batch_of_an_unknown_structure_is_forecast_undivided() -> None:
    def fail(*_: Any) -> Any:
        raise BatchStructureError("no samples here")

    forecaster = forecaster_of(Lit(), 8, divide=fail, samples_of=fail)
    assert alike(forecaster.estimate(candidate(8)), forecaster_of(Lit(), 8)(candidate(8)))
    with pytest.raises(BatchStructureError, match="no samples here"):
        forecaster.estimate(candidate(8, 2))


def test_the_users_own_division_is_used() -> None:
    asked = []

    def divide(batch: dict[str, Tensor], sizes: Any) -> list[Any]:
        asked.append(tuple(sizes))
        parts = [{name: value.split(sizes[0]) for name, value in batch.items()}]
        return [{name: part[i] for name, part in parts[0].items()} for i in range(len(parts[0]["x"]))]

    forecaster = forecaster_of(Lit(), 16, divide=divide)
    each = candidate(16, 4)
    assert alike(forecaster.estimate(each), forecaster(each))
    assert (4, 12) in asked and (4, 4, 4, 4) in asked


def test_a_step_that_needs_values_is_measured_small_and_the_module_is_as_before() -> None:
    module, batch = Masked(), batch_of(64)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = [dict(vars(part)) for part in module.modules()]
    random_state = torch.get_rng_state()
    forecaster = Forecaster(program_of(module), batch, prober=None)
    found = forecaster.estimate(candidate(64))
    assert found.method == "extrapolated" and found == forecaster(candidate(64))
    assert forecaster.untraceable is not None and "aten.nonzero.default" in forecaster.untraceable
    assert found.notes[0].startswith("the step could not be traced (DynamicOutputShapeException: aten.nonzero.default)")
    assert "real steps of 2 and 4 samples, and the warm-up will tell" in found.notes[0]
    assert len(found.notes) == 1
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [dict(vars(part)) for part in module.modules()] == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    # The line is not far off, and slices lower it; a lighter optimizer does too.
    assert found.memory.peak_allocated_bytes == pytest.approx(measured_peak(module, batch), rel=0.1)
    assert forecaster.estimate(candidate(64, 4)).predicted_peak_bytes < found.predicted_peak_bytes
    heavy = Forecaster(program_of(Masked(torch.optim.AdamW)), batch, prober=None).estimate(candidate(64, early=True))
    assert heavy.predicted_peak_bytes > forecaster.estimate(candidate(64, early=True)).predicted_peak_bytes


def measured_peak(module: Lit, batch: Any) -> int:
    program = program_of(module)
    with unlogged(module):
        optimizer = program.make_optimizer()
        with AllocationMeter(storage_bytes([*module.parameters(), *batch.values()])) as meter:
            for _ in range(3):
                run_window(program, optimizer, [batch], Unobserved())
    return meter.peak_allocated_bytes


def test_what_can_be_neither_traced_nor_run_says_both() -> None:
    with torch.device("meta"):
        module = Masked()
    with pytest.raises(TraceError, match=r"could not be traced \(Dynamic.*nonzero.*\), and small .* tensors on meta"):
        forecaster_of(module, 8).estimate(candidate(8))
    with pytest.raises(TraceError, match=r"parameters are torch.float32, and real steps need them in torch.bfloat16"):
        forecaster_of(Masked(), 8).estimate(candidate(8, precision="bf16-true"))


def test_of_an_optimizer_that_runs_the_step_itself_nothing_is_measured_small() -> None:
    with pytest.raises(TraceError) as caught:
        forecaster_of(Masked(torch.optim.LBFGS), 8).estimate(candidate(8))
    assert str(caught.value) == (
        "The step could not be traced (DynamicOutputShapeException: aten.nonzero.default), and of an optimizer that "
        "runs forward and backward itself no small real steps are measured instead. Use a step that needs no values."
    )


def test_what_the_user_set_and_cannot_be_used_is_raised_as_it_is() -> None:
    def refuse(parameters: Any) -> torch.optim.Optimizer:
        raise ConfigurationError("no such optimizer")

    for ask in (lambda f: f.estimate(candidate(8)), lambda f: f(candidate(8)), lambda f: f.facts):
        with pytest.raises(ConfigurationError, match="no such optimizer"):
            ask(forecaster_of(Lit(refuse), 8))


def test_true_bfloat16_halves_everything_but_the_targets() -> None:
    forecaster = forecaster_of(Lit(), 64)
    single, half = forecaster.estimate(candidate(64)), forecaster.estimate(candidate(64, precision="bf16-true"))
    assert alike(half, forecaster(candidate(64, precision="bf16-true")))
    halved = {name: 2 * half.memory.by_category[name] for name in ("parameters", "optimizer_states")}
    assert halved == {name: single.memory.by_category[name] for name in halved}
    assert half.memory.by_category["inputs"] == 64 * 64 * 2 + 64 * 8


def test_sixteen_bit_mixed_takes_as_much_as_bfloat16_mixed() -> None:
    forecaster = forecaster_of(Lit(), 64)
    one, other = (forecaster.estimate(candidate(64, precision=precision)) for precision in ("16-mixed", "bf16-mixed"))
    assert alike(one, other)
    assert alike(one, forecaster(candidate(64, precision="16-mixed")))


def test_the_optimizer_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster = forecaster_of(Lit(torch.optim.AdamW), 8)
    facts = forecaster.facts
    assert facts.name == "torch.optim.AdamW"
    assert set(facts.implementations) >= {"foreach", "fused"}
    monkeypatch.setattr(forecaster_module, "look_at_optimizer", lambda *_: pytest.fail("looked at again"))
    assert forecaster.facts is facts


def test_what_the_fingerprint_says_of_the_optimizer_is_none_where_it_cannot_be_made() -> None:
    def fail(parameters: Any) -> torch.optim.Optimizer:
        raise ValueError("not now")

    words = forecaster_of(Lit(), 8).optimizer_words
    assert words is not None and words.startswith("SGD of 99,914 elements in 14 tensor(s)")
    forecaster = forecaster_of(Lit(fail), 8)
    assert forecaster.optimizer_words is None
    with pytest.raises(TraceError, match="ValueError: not now"):
        assert forecaster.facts


def test_another_batch_is_forecast_on_its_own_with_the_same_optimizer(counted: dict[str, int]) -> None:
    small = forecaster_of(Lit(), 8)
    assert small.facts and not small.estimate(candidate(8)).confirmed
    large = small.for_batch(batch_of(64))
    assert alike(large.estimate(candidate(64, 2)), forecaster_of(Lit(), 64)(candidate(64, 2)))
    assert alike(small.estimate(candidate(8)), forecaster_of(Lit(), 8)(candidate(8)))
    assert large.facts is small.facts
    assert counted["record_window"] == 2 and counted["trace_optimizer_step"] == 3  # two of them the new forecasters'


def test_the_forwards_context_is_that_of_the_precision() -> None:
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        with autocast_context(precision)():  # type: ignore[arg-type]
            assert torch.get_autocast_dtype("cpu") is dtype
            assert not torch.is_autocast_cache_enabled()
    with autocast_context("32-true")():
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyError), autocast_context("bf16-true")():
        assert torch.get_default_dtype() is torch.bfloat16
        raise KeyError
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(
        ConfigurationError, match=r"precision='64-true' is not forecast. Choose '32-true', 'bf16-mixed'"
    ):
        autocast_context("64-true")  # type: ignore[arg-type]


def test_checkpointed_is_undone_when_the_body_raises() -> None:
    module = Lit()
    with pytest.raises(KeyError), checkpointed(module, ("blocks.0",)):
        assert "forward" in vars(module.blocks[0])
        raise KeyError
    assert "forward" not in vars(module.blocks[0])
