"""The public functions that need no Trainer, and the way out. Run: ``pytest tests/test_forecasting.py``."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError, TraceError
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.forecasting import forecast, make_plan, make_plans, resident_bytes, trace_step
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import BatchSplit, Candidate, Plan, balanced_slices
from lightning_memfit.targets import CudaTarget, FormulaProber, target_of
from lightning_memfit.trace.step_program import program_of, run_window

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Lit(LightningModule):
    """Two equal blocks and a head; no Trainer."""

    def __init__(self, masks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.head = nn.Linear(64, 10)
        self.masks = masks

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = batch["x"]
        if self.masks:
            hidden = hidden[batch["y"] >= 0]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


def batch_of(samples: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(samples, 64), "y": torch.randint(0, 10, (samples,))}


def candidate(samples: int, slices: int = 1, *, modules: tuple[str, ...] = (), early: bool = False) -> Candidate:
    return Candidate(
        precision="32-true",
        activation_checkpointing="blocks" if modules else "none",
        checkpointed_modules=modules,
        split=BatchSplit(
            effective_batch_size=samples, loader_batch_size=samples, slice_sizes=balanced_slices(samples, slices)
        ),
        zero_gradients_early=early,
    )


def measured_peak(module: Lit, batch: Any) -> int:
    program = program_of(module)

    class Unobserved:
        enter: Callable[[Any], None] = staticmethod(lambda phase: None)
        after_forward = after_backward = staticmethod(lambda: None)

    with unlogged(module):
        optimizer = program.make_optimizer()
        with AllocationMeter(storage_bytes([*module.parameters(), *batch.values()])) as meter:
            for _ in range(3):
                run_window(program, optimizer, [batch], Unobserved())
    return meter.peak_allocated_bytes


def test_a_forecast_is_what_a_real_step_needs(tmp_path: Any) -> None:
    module, batch = Lit(), batch_of(128)
    memory = forecast(module, batch, cache_dir=tmp_path)
    assert memory.peak_allocated_bytes == pytest.approx(measured_peak(module, batch), rel=0.001)
    assert memory.by_category["parameters"] == memory.by_category["optimizer_states"] == 4 * memory.num_parameters
    assert memory.peak_reserved_bytes is None
    assert list(tmp_path.glob("operators-*.json"))


def test_levers_save_what_they_promise() -> None:
    module, batch = Lit(), batch_of(512)

    def peak(**options: Any) -> int:
        return forecast(module, batch, probe_operators=False, **options).peak_allocated_bytes

    assert peak(activation_checkpointing="blocks") < peak()
    assert peak(micro_batch_size=128) < peak(micro_batch_size=256) < peak() == peak(micro_batch_size=512)
    assert peak(activation_checkpointing=("blocks.0",)) < peak()
    assert peak(precision="bf16-mixed") < peak()


def test_checkpointing_is_taken_back_after_a_trace() -> None:
    module = Lit()
    timeline = trace_step(module, batch_of(8), activation_checkpointing="blocks")
    assert timeline.recomputed_flops == 3 * 2 * 8 * 64 * 256  # the first product of each block; none needs the last
    assert not [part for part in module.modules() if "forward" in vars(part)]


def test_a_step_can_be_followed_as_that_of_a_gpu() -> None:
    module, batch = Lit(), batch_of(8)
    timeline, target = trace_step(module, batch, device="a100-40gb"), target_of(detect_device("a100-40gb"))
    assert isinstance(target, CudaTarget)
    probes = FormulaProber(target.architecture).probe(timeline.signatures)
    assert target.memory(timeline, probes.results) == forecast(module, batch, device="a100-40gb")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer_states": "8bit", "optimizer_implementation": "fused"},
            "optimizer_implementation='fused' cannot be had with optimizer_states='8bit'",
        ),
        ({"precision": "64-true"}, "precision='64-true' is not known"),
        ({"micro_batch_size": 9}, "micro_batch_size=9 is more than the 8 samples"),
    ],
)
def test_what_cannot_be_forecast_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        forecast(Lit(), batch_of(8), probe_operators=False, **options)


@pytest.mark.parametrize(
    "setting", ["precision", "activation_checkpointing", "optimizer_states", "optimizer_implementation"]
)
def test_a_forecast_is_of_one_setting(setting: str) -> None:
    options: Any = {setting: "auto"}
    with pytest.raises(ConfigurationError) as caught:
        forecast(Lit(), batch_of(8), probe_operators=False, **options)
    assert str(caught.value) == (
        f"{setting}='auto' leaves a choice, and a forecast is of one setting. Name one, or let make_plan choose."
    )


def test_one_trace_serves_early_and_late_zeroing(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster = Forecaster(program_of(Lit()), batch_of(8), prober=None)
    late = forecaster(candidate(8))
    monkeypatch.setattr("lightning_memfit.forecaster.trace_window", lambda *a, **k: pytest.fail("traced again"))
    early = forecaster(candidate(8, early=True))
    assert early.memory.by_phase["forward"] < late.memory.by_phase["forward"]


def test_a_step_that_needs_values_is_measured_small_and_the_module_is_as_before() -> None:
    module, batch = Lit(masks=True), batch_of(64)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = [dict(vars(part)) for part in module.modules()]
    random_state = torch.get_rng_state()
    forecaster = Forecaster(program_of(module), batch, prober=None)
    found = forecaster(candidate(64))
    assert found.method == "extrapolated"
    assert forecaster.untraceable is not None and "aten.nonzero.default" in forecaster.untraceable
    assert found.notes[0].startswith("the step could not be traced (DynamicOutputShapeException: aten.nonzero.default)")
    assert "real steps of 2 and 4 samples, and the warm-up will tell" in found.notes[0]
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [dict(vars(part)) for part in module.modules()] == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    # The line is not far off, and slices and checkpointing lower it.
    assert found.memory.peak_allocated_bytes == pytest.approx(measured_peak(module, batch), rel=0.1)
    assert forecaster(candidate(64, 4)).predicted_peak_bytes < found.predicted_peak_bytes


def test_what_can_be_neither_traced_nor_run_says_both() -> None:
    with torch.device("meta"):
        module = Lit(masks=True)
    with pytest.raises(TraceError, match=r"could not be traced \(Dynamic.*nonzero.*\), and small .* tensors on meta"):
        forecast(module, batch_of(8), probe_operators=False)


def test_a_plan_slices_until_it_fits() -> None:
    module, batch = Lit(), batch_of(256)
    whole = forecast(module, batch, probe_operators=False).peak_allocated_bytes
    sliced = forecast(module, batch, micro_batch_size=64, probe_operators=False).peak_allocated_bytes
    plan = make_plan(
        module,
        batch,
        effective_batch_size=512,
        budget=(whole + sliced) // 2,
        precision="32-true",
        activation_checkpointing="none",
        optimizer_implementation="as-configured",
        probe_operators=False,
    )
    assert plan.split.effective_batch_size == 512
    assert plan.split.accumulate_grad_batches == 2
    assert plan.split.num_slices > 1 and plan.candidate.activation_checkpointing == "none"
    assert plan.forecast.predicted_peak_bytes <= plan.budget.budget_bytes
    assert plan.forecast.recomputed_flops == 0 and plan.forecast.flops


def sliced_plan(module: nn.Module, batch: Any) -> Plan:
    """A plan within what the batch needs in quarters."""
    room = forecast(module, batch, micro_batch_size=64, probe_operators=False).peak_allocated_bytes
    return make_plan(
        module,
        batch,
        effective_batch_size=256,
        budget=room,
        precision="32-true",
        activation_checkpointing="none",
        optimizer_implementation="as-configured",
        probe_operators=False,
    )


def test_a_plan_with_slices_says_that_nobody_compared_them() -> None:
    note = "slices were not compared with the undivided batch; MemFit compares them before it trains"
    plan = sliced_plan(Lit(), batch_of(256))
    assert plan.split.num_slices > 1 and plan.notes == (note,)
    whole = make_plan(Lit(), batch_of(8), effective_batch_size=8, probe_operators=False)
    assert whole.split.num_slices == 1 and note not in whole.notes


def test_a_plan_does_not_slice_what_is_normalised_over_the_batch() -> None:
    class Normalised(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))

    with pytest.raises(
        NoFeasiblePlanError, match=r"the batch is not sliced: head\.0 normalises over the batch in train mode"
    ):
        sliced_plan(Normalised(), batch_of(256))
    module = Normalised()
    module.head[0].eval()
    assert sliced_plan(module, batch_of(256)).split.num_slices > 1


def test_a_plan_that_cannot_be_says_so() -> None:
    with pytest.raises(NoFeasiblePlanError, match=r"No plan fits the budget of 300\.0 KiB"):
        make_plan(Lit(), batch_of(16), effective_batch_size=16, budget="300KiB", probe_operators=False)


def test_a_headroom_that_is_asked_for_comes_off_the_budget() -> None:
    asked = {"effective_batch_size": 16, "budget": "10MiB", "probe_operators": False}
    plan = make_plan(Lit(), batch_of(16), headroom="4MiB", **asked)  # type: ignore[arg-type]
    assert plan.budget.budget_bytes == 6 * 2**20
    assert make_plan(Lit(), batch_of(16), headroom=0, **asked).budget.headroom_bytes == 0  # type: ignore[arg-type]


def test_an_effective_batch_that_is_no_multiple_names_its_neighbours() -> None:
    with pytest.raises(ConfigurationError, match=r"effective_batch_size=20 .* 8 samples. Nearest: 16 and 24"):
        make_plan(Lit(), batch_of(8), effective_batch_size=20)


def test_resident_bytes_counts_each_storage_once_and_nothing_on_meta() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("again", module.weight.detach()[1:])
    assert resident_bytes(module, [torch.zeros(5), torch.zeros(5, device="meta")]) == 80 + 20


def test_the_forwards_context_casts_without_a_cache() -> None:
    with autocast_context("bf16-mixed")():
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
    with autocast_context("32-true")():
        assert not torch.is_autocast_enabled("cpu")


def test_checkpointed_is_undone_when_the_body_raises() -> None:
    module = Lit()
    with pytest.raises(KeyError), checkpointed(module, ("blocks.0",)):
        assert "forward" in vars(module.blocks[0])
        raise KeyError
    assert "forward" not in vars(module.blocks[0])


class Recomputing(Lit):
    """Calls torch's own function around its blocks, which cannot be seen without a trace."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch["x"]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(hidden), batch["y"])


class Switched(Lit):
    """Recomputes by a switch, as models of transformers and diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.gradient_checkpointing = True
            block.forward = types.MethodType(_recomputing_forward, block)


def _recomputing_forward(block: nn.Module, hidden: Tensor) -> Tensor:
    return checkpoint(type(block).forward, block, hidden, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Recomputing, Switched])
@pytest.mark.parametrize("asked", ["auto", "blocks", ("blocks.*",)])
def test_blocks_that_the_model_recomputes_are_not_recomputed_twice(kind: type[Lit], asked: Any) -> None:
    plan = make_plan(
        kind(), batch_of(16), effective_batch_size=16, activation_checkpointing=asked, probe_operators=False
    )
    assert plan.candidate.checkpointed_modules == ()
    modules = "3 modules (blocks.0, blocks.1, blocks.2)"
    note = f"the model recomputes activations of {modules} by itself: that is left as it is"
    assert any(each.startswith(note) for each in plan.notes)
    (choice,) = [choice for choice in plan.choices if choice.lever == "activation_checkpointing"]
    assert choice.reason == f"the model itself recomputes {modules}"
    assert plan.forecast.recomputed_flops
    without = make_plan(
        kind(), batch_of(16), effective_batch_size=16, activation_checkpointing="none", probe_operators=False
    )
    assert without.forecast.memory == plan.forecast.memory


def test_the_users_own_switch_stays_on_where_nothing_is_to_be_recomputed_by_memfit() -> None:
    plan = make_plan(
        Switched(), batch_of(16), effective_batch_size=16, activation_checkpointing="none", probe_operators=False
    )
    (choice,) = [choice for choice in plan.choices if choice.lever == "activation_checkpointing"]
    assert choice.value == "none" and choice.reason.startswith("as given; the model itself recomputes ")
    assert any("by itself: that is left as it is and part of the forecast" in note for note in plan.notes)


def test_a_forecast_with_blocks_recomputes_nothing_twice() -> None:
    asked = forecast(Recomputing(), batch_of(16), activation_checkpointing="blocks", probe_operators=False)
    assert asked == forecast(Recomputing(), batch_of(16), probe_operators=False)


class Attentive(Lit):
    """Half-precision attention, which GPUs compute by different kernels."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        heads = self.blocks[0](batch["x"]).unflatten(-1, (4, 1, 16))
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        hidden = self.blocks[2](self.blocks[1](mixed.flatten(1)))
        return nn.functional.cross_entropy(self.head(hidden), batch["y"])


GPUS = ("t4", "a100-40gb", "a100-80gb")


def test_plans_of_several_devices_are_those_of_each() -> None:
    options: Any = {"effective_batch_size": 512, "budget": "9MiB", "optimizer_implementation": "as-configured"}
    options["probe_operators"] = False
    plans = make_plans(Attentive(), batch_of(512), devices=GPUS, **options)
    assert tuple(plans) == GPUS
    for device, plan in plans.items():
        try:
            alone: Any = make_plan(Attentive(), batch_of(512), device=device, **options)
        except NoFeasiblePlanError as error:
            assert isinstance(plan, NoFeasiblePlanError)
            assert (str(plan), plan.best_peak_bytes) == (str(error), error.best_peak_bytes)
            continue
        assert isinstance(plan, Plan)
        assert plan == alone


def test_gpus_that_compute_alike_share_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    for name, where in (("record_window", "recorded_steps"), ("trace_optimizer_step", "forecaster")):
        place = f"lightning_memfit.{where}.{name}"
        real = getattr(importlib.import_module(f"lightning_memfit.{where}"), name)
        monkeypatch.setattr(place, lambda *a, name=name, real=real, **k: traced.append(name) or real(*a, **k))
    options: Any = {
        "effective_batch_size": 512, "optimizer_implementation": "as-configured", "probe_operators": False
    }  # fmt: skip
    make_plans(Attentive(), batch_of(512), devices=["a100-40gb"], **options)
    alone, traced[:] = list(traced), []
    make_plans(Attentive(), batch_of(512), devices=["a100-40gb", "a100-80gb", "mi300x"], **options)
    assert traced == alone
    traced.clear()
    make_plans(Attentive(), batch_of(512), devices=["a100-40gb", "rtx-3090"], **options)
    # Two precisions recorded under other rules; the optimizer steps alike.
    assert traced.count("record_window") == 2 * alone.count("record_window")
    assert traced.count("trace_optimizer_step") == alone.count("trace_optimizer_step")


def test_an_impossible_budget_is_the_answer_of_its_device_alone() -> None:
    plans = make_plans(
        Attentive(), batch_of(8), devices=["a100-40gb", "t4"], effective_batch_size=8, budget="100KiB",
        probe_operators=False,
    )  # fmt: skip
    assert all(isinstance(plan, NoFeasiblePlanError) for plan in plans.values())


def _adam_of(module: nn.Module) -> Any:
    return torch.optim.Adam(module.parameters())


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda parameters: None, "optimizer= returned NoneType. Pass a function"),
        (lambda parameters: [torch.optim.Adam(parameters)], "optimizer= returned list. Pass a function"),
        (_adam_of(nn.Linear(1, 1)), "optimizer= is of type Adam. Pass a function of the parameters, such as"),
    ],
)
def test_what_is_no_function_that_returns_an_optimizer_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _forecast_for_t4(nn.Linear(2, 2), torch.zeros(2, 2), optimizer=optimizer)


@pytest.mark.parametrize("value", [None, True, [1], "block"])
def test_activation_checkpointing_that_is_no_choice_and_no_patterns_names_both(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'blocks', or (a list of )?patterns of module names such as \["):
        _forecast_for_t4(nn.Linear(2, 2), torch.zeros(2, 2), activation_checkpointing=value)


@pytest.mark.parametrize(
    ("effective_batch_size", "devices", "message"),
    [
        (None, ("t4",), "effective_batch_size=None: without a Trainer, give the samples per optimizer step."),
        (3, ("t4",), "effective_batch_size=3 is not a multiple of the batch of 4 samples. Nearest: 4.$"),
        (4, "t4", r"devices='t4' is one text. Write devices=\('t4',\), or call make_plan."),
    ],
)
def test_requests_for_plans_that_cannot_be_say_what_to_write(
    effective_batch_size: Any, devices: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plans(
            nn.Linear(2, 2),
            torch.zeros(4, 2),
            devices=devices,
            effective_batch_size=effective_batch_size,
            loss=_sum_of,
            optimizer=torch.optim.SGD,
        )


@pytest.mark.parametrize(
    ("loss", "way_out"),
    [
        (lambda module, x: module(x.to("cuda")).sum(), "Write x.device in place of 'cuda' in the step"),
        (lambda module, x: module(x)[module(x) > 0].sum(), "Use a step that needs no values of tensors"),
        (lambda module, x: module(x[:, 1:]).sum(), "See that the step runs as it is given here"),
    ],
)
def test_the_way_out_of_a_step_that_cannot_be_traced_follows_from_its_error(loss: Any, way_out: str) -> None:
    with pytest.raises(TraceError, match=way_out):
        _forecast_for_t4(nn.Linear(2, 2), torch.zeros(2, 2), loss=loss)


def test_forecasts_in_several_threads_are_those_of_one_and_leave_nothing_behind() -> None:
    modules = [nn.Linear(64, 64) for _ in range(6)]
    output, random_state = sys.stdout, torch.get_rng_state
    alone = _forecast_for_t4(nn.Linear(64, 64), torch.zeros(8, 64))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda module: _forecast_for_t4(module, torch.zeros(8, 64)), modules))
    assert found == [alone] * 6
    assert sys.stdout is output and torch.get_rng_state is random_state
    assert {type(parameter) for module in modules for parameter in module.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_forecast_needs_no_gradients_around_it(context: Any) -> None:
    module, batch = nn.Linear(64, 64), torch.zeros(8, 64)
    alone = _forecast_for_t4(module, batch)
    with context():
        assert _forecast_for_t4(module, batch) == alone
        assert not torch.is_grad_enabled()


def test_a_default_device_changes_no_forecast() -> None:
    alone = _forecast_for_t4(nn.Linear(64, 64), torch.zeros(8, 64))
    module, batch = nn.Linear(64, 64), torch.zeros(8, 64)
    with torch.device("meta"):
        assert _forecast_for_t4(module, batch) == alone


@pytest.mark.parametrize("capturable", [False, True])
def test_a_learning_rate_may_be_a_tensor(capturable: bool) -> None:
    def made(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), foreach=capturable, capturable=capturable)

    memory = _forecast_for_t4(nn.Linear(64, 64, bias=False), torch.zeros(8, 64), optimizer=made)
    assert memory.by_category["parameters"] == 64 * 64 * 4


def _sum_of(module: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = module(x).sum()
    return total


def _forecast_for_t4(module: nn.Module, batch: Tensor, **options: Any) -> Any:
    return forecast(module, batch, **{"loss": _sum_of, "optimizer": torch.optim.AdamW, "device": "t4"} | options)
