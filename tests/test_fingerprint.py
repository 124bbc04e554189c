"""What a plan was made for: the same text for the same run, another one for each thing that makes a plan stale."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError, StalePlanError
from lightning_memfit.fingerprint import (
    check_fresh,
    fingerprint_key,
    fingerprint_of,
    harmless_differences,
    optimizer_words,
    sharding_facts,
    stale_reasons,
    trainer_facts_of,
)
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import BatchSplit, Budget, Candidate, Forecast, MemoryBreakdown, Plan, PlanRequest
from lightning_memfit.sharding import Sharding

DEVICE = DeviceSpec(name="Example 9000", kind="cpu", capacity_bytes=9, available_bytes=8, process_bytes=1, cores=2)
PACKAGE = Path(__file__).parents[1] / "lightning_memfit"


class Net(nn.Module):
    def __init__(self, *, hidden: int = 4, stride: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, hidden, 2, stride=stride, dtype=dtype)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 2, bias=False)
        self.calls = 0


def batch(samples: int = 8, length: int = 16) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(samples, 3, length), "y": torch.zeros(samples, dtype=torch.int64)}


def fingerprint(**changes: Any) -> dict[str, str]:
    module = changes.pop("module", None) or Net()
    settings: dict[str, Any] = {
        "device": DEVICE,
        "request": PlanRequest(),
        "optimizer": optimizer_words(torch.optim.AdamW(module.parameters())),
        "loader_batch_size": 8,
        "accumulate_grad_batches": 2,
        "trainer_facts": {"gradient clipping": "off", "strategy": "SingleDeviceStrategy"},
    }
    return fingerprint_of(module, changes.pop("batch", batch()), **{**settings, **changes})


def plan_for(made_for: dict[str, str]) -> Plan:
    split = BatchSplit(effective_batch_size=16, loader_batch_size=8, accumulate_grad_batches=2, slice_sizes=(4, 4))
    return Plan(
        request=PlanRequest(),
        device=DEVICE,
        budget=Budget(budget_bytes=9, capacity_bytes=9, headroom_bytes=0, non_torch_bytes=0, reason="as given"),
        forecast=Forecast(
            candidate=Candidate(precision="32-true", split=split),
            memory=MemoryBreakdown(peak_allocated_bytes=5, peak_phase="forward", num_parameters=1),
        ),
        choices=(),
        fingerprint=made_for,
    )


# --- what is told


def test_every_part_is_named_and_readable() -> None:
    told = fingerprint()
    digests = {
        name: told[name].partition(" [")[0] for name in ("model", "parameters", "trainable parameters", "buffers")
    }
    # Conv1d 3 x 4 x 2 + 4 = 28, BatchNorm 4 + 4, Linear 4 x 2: 44; its buffers are 4 + 4 and one counter.
    assert digests == {
        "model": "Net of 4 modules",
        "parameters": "44 elements of float32 in 5 tensor(s)",
        "trainable parameters": "44 elements of float32 in 5 tensor(s)",
        "buffers": "9 elements of float32, int64 in 3 tensor(s)",
    }
    assert told["batch"] == "dict('x': float32 of 3 dimension(s), 'y': int64 of 1 dimension(s))"
    assert told["batch shapes"] == "(8, 3, 16), (8,); 392 elements"  # 8 x 3 x 16 + 8
    assert told["effective_batch_size"] == "16"  # 2 x 8
    assert told["device"] == "Example 9000 (cpu)"
    assert told["torch"] == torch.__version__
    assert list(told) == [
        *digests, "batch", "batch shapes", "effective_batch_size", "loader batch size", "ranks", "precision",
        "optimizer", "gradient clipping", "strategy", "device", "cores", "torch", "lightning", "lightning_memfit",
        "python",
    ]  # fmt: skip
    assert {type(text) for text in told.values()} == {str}


def test_the_effective_batch_that_is_asked_for_counts() -> None:
    assert fingerprint(request=PlanRequest(effective_batch_size=64))["effective_batch_size"] == "64"
    assert fingerprint(ranks=3)["effective_batch_size"] == "48"  # 3 x 2 x 8


def test_values_counters_and_modes_have_no_part_in_it() -> None:
    first, second = Net(), Net().eval()
    with torch.no_grad():
        second.head.weight.fill_(7)
    second.calls = 100
    other_values = {name: tensor + 1 for name, tensor in batch().items()}
    assert fingerprint(module=first) == fingerprint(module=second, batch=other_values)


def test_another_process_gives_the_same_text() -> None:
    # The package is found, and not imported as a whole: a fingerprint needs no Lightning.
    code = (
        "import importlib.util, sys, types\n"
        "package = sys.modules['lightning_memfit'] = types.ModuleType('lightning_memfit')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "spec = importlib.util.spec_from_file_location('elsewhere', sys.argv[2])\n"
        "module = sys.modules['elsewhere'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "told = module.fingerprint()\n"
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)\n"
        "print(module.fingerprint_key(told))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(PACKAGE), __file__],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == fingerprint_key(fingerprint())


def test_a_key_is_the_same_for_another_order_and_another_for_another_text() -> None:
    told = fingerprint()
    key = fingerprint_key(told)
    assert len(key) == 16
    assert int(key, 16) >= 0
    assert fingerprint_key(dict(reversed(told.items()))) == key
    assert fingerprint_key({**told, "device": "another"}) != key


# --- what makes a plan stale


def frozen() -> nn.Module:
    module = Net()
    module.head.weight.requires_grad = False
    return module


def with_another_activation() -> nn.Module:
    module = Net()
    module.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)  # type: ignore[assignment]
    return module


def tied() -> nn.Module:
    module = Net()
    module.norm.bias = module.norm.weight
    return module


def adam() -> str:
    return optimizer_words(torch.optim.Adam(Net().parameters()))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (lambda: {"module": Net(hidden=5)}, {"parameters", "trainable parameters", "buffers", "model", "optimizer"}),
        (lambda: {"module": Net(stride=2)}, {"model"}),
        (lambda: {"module": Net(dtype=torch.float64)}, {"parameters", "trainable parameters"}),
        (lambda: {"module": with_another_activation()}, {"model"}),
        (lambda: {"module": frozen()}, {"trainable parameters"}),
        (lambda: {"module": tied()}, {"parameters", "trainable parameters", "optimizer"}),
        (lambda: {"batch": tuple(batch().values())}, {"batch"}),
        (lambda: {"batch": {**batch(), "y": torch.zeros(8)}}, {"batch"}),
        (lambda: {"batch": {**batch(), "mask": None}}, {"batch"}),
        (lambda: {"batch": batch(length=17)}, {"batch shapes"}),
        (lambda: {"request": PlanRequest(effective_batch_size=64)}, {"effective_batch_size"}),
        (lambda: {"loader_batch_size": 16, "accumulate_grad_batches": 1}, {"loader batch size"}),
        (lambda: {"ranks": 2, "accumulate_grad_batches": 1}, {"ranks"}),
        (lambda: {"optimizer": adam()}, {"optimizer"}),
        (lambda: {"device": dataclasses.replace(DEVICE, name="Example 9001")}, {"device"}),
        (lambda: {"device": dataclasses.replace(DEVICE, kind="cuda")}, {"device"}),
        (lambda: {"trainer_facts": {"gradient clipping": "by norm", "strategy": "SingleDeviceStrategy"}},
         {"gradient clipping"}),
    ],
)  # fmt: skip
def test_each_change_is_told_by_its_name(changes: Callable[[], dict[str, Any]], parts: set[str]) -> None:
    before, now = fingerprint(), fingerprint(**changes())
    reasons = stale_reasons(plan_for(before), now)
    assert {reason.partition(":")[0] for reason in reasons} == parts
    for reason in reasons:
        part = reason.partition(":")[0]
        assert f"{part}: planned for {before[part]}, now {now[part]}" in reason
    assert harmless_differences(plan_for(before), now) == ()


def test_a_refusal_names_the_source_every_change_and_the_way_out() -> None:
    plan = plan_for(fingerprint())
    now = fingerprint(
        device=dataclasses.replace(DEVICE, name="Example 9001"), request=PlanRequest(effective_batch_size=64)
    )
    with pytest.raises(StalePlanError) as caught:
        check_fresh(plan, now, source="plan='runs/plan.yaml'")
    assert str(caught.value) == (
        "plan='runs/plan.yaml' was not made for this run:\n"
        "  - effective_batch_size: planned for 16, now 64\n"
        "  - device: planned for Example 9000 (cpu), now Example 9001 (cpu)\n"
        "Plan again: leave plan= out. Or give the run back what the plan was made for."
    )
    assert caught.value.reasons == stale_reasons(plan, now)
    assert isinstance(caught.value, ConfigurationError)


def test_a_plan_for_this_very_run_is_fresh() -> None:
    assert check_fresh(plan_for(fingerprint()), fingerprint(), source="x") == ()


def test_a_plan_survives_a_file_fresh(tmp_path: Path) -> None:
    plan = Plan.load(plan_for(fingerprint()).save(tmp_path / "plan.yaml"))
    assert check_fresh(plan, fingerprint(), source="x") == ()


@pytest.mark.parametrize(
    ("before", "now", "stale"),
    [
        ("2.13.0", "2.14.0", True),
        ("2.13.0", "3.13.0", True),
        ("2.13.0", "2.13.1", False),
        ("2.13.0+cpu", "2.13.0", False),
    ],
)
def test_of_torch_the_minor_version_counts(before: str, now: str, stale: bool) -> None:
    plan, present = plan_for({**fingerprint(), "torch": before}), {**fingerprint(), "torch": now}
    line = f"torch: planned for {before}, now {now}"
    assert stale_reasons(plan, present) == ((line,) if stale else ())
    assert harmless_differences(plan, present) == (() if stale else (line,))


@pytest.mark.parametrize("part", ["lightning", "lightning_memfit", "python", "cores"])
def test_what_the_proof_covers_is_only_told(part: str) -> None:
    plan = plan_for({**fingerprint(), part: "9"})
    assert check_fresh(plan, fingerprint(), source="x") == (f"{part}: planned for 9, now {fingerprint()[part]}",)


def test_a_pinned_precision_is_not_the_fingerprints_matter() -> None:
    now = fingerprint(request=PlanRequest(precision="32-true"))
    assert check_fresh(plan_for(fingerprint()), now, source="x") == ()
    assert fingerprint_key(now) != fingerprint_key(fingerprint())


@pytest.mark.parametrize(
    ("samples", "length", "stale"),
    [(4, 16, False), (8, 15, False), (9, 16, True), (8, 17, True), (4, 17, True), (1, 1, False)],
)
def test_a_smaller_batch_is_told_and_a_larger_one_refused(samples: int, length: int, stale: bool) -> None:
    plan, now = plan_for(fingerprint()), fingerprint(batch=batch(samples, length))
    line = (
        f"batch shapes: planned for (8, 3, 16), (8,); 392 elements, now ({samples}, 3, {length}), ({samples},); "
        f"{samples * 3 * length + samples} elements, which is "
    )
    if stale:
        assert stale_reasons(plan, now) == (f"{line}larger: plan for the largest batch that occurs",)
    else:
        assert check_fresh(plan, now, source="x") == (f"{line}no larger",)


def test_lists_of_other_lengths_are_compared_by_their_elements() -> None:
    def images(*sizes: int) -> list[torch.Tensor]:
        return [torch.zeros(3, size) for size in sizes]

    plan = plan_for(fingerprint(batch=images(10, 10)))
    assert stale_reasons(plan, fingerprint(batch=images(5, 5, 5))) == ()  # 45 elements instead of 60
    assert len(stale_reasons(plan, fingerprint(batch=images(10, 10, 1)))) == 1
    many = plan_for(fingerprint(batch=images(*[4] * 20)))
    assert many.fingerprint["batch shapes"].endswith("(3, 4) and 12 more; 240 elements")
    assert len(stale_reasons(many, fingerprint(batch=images(*[4] * 19, 5)))) == 1


def test_a_plan_without_a_fingerprint_is_not_taken_on_trust() -> None:
    assert stale_reasons(plan_for({}), fingerprint()) == (
        "nothing is recorded of the model, batch and device that the plan was made for",
    )


def test_a_part_that_is_not_recorded_makes_a_plan_stale_only_where_it_must_be_equal() -> None:
    made_for = fingerprint()
    del made_for["model"], made_for["gradient clipping"]
    plan, now = plan_for(made_for), fingerprint()
    assert stale_reasons(plan, now) == (f"model: not recorded in the plan, now {now['model']}",)
    assert harmless_differences(plan, now) == ("gradient clipping: not recorded in the plan, now off",)


def test_a_part_that_is_not_known_now_is_told() -> None:
    plan, now = plan_for(fingerprint()), fingerprint(optimizer=None)
    assert check_fresh(plan, now, source="x") == (
        f"optimizer: planned for {fingerprint()['optimizer']}, now not known",
    )


@pytest.mark.parametrize(
    "text", ["", ";", "(9" * 5000, f"({'9' * 5000}); 1", "; " + "9" * 5000, "(8, 3, 16); elements"]
)
def test_a_hostile_text_in_the_place_of_shapes_raises_nothing_but_staleness(text: str) -> None:
    plan = plan_for({**fingerprint(), "batch shapes": text})
    assert len(stale_reasons(plan, fingerprint())) + len(harmless_differences(plan, fingerprint())) == 1


def test_a_text_without_end_is_cut_in_the_message() -> None:
    plan = plan_for({**fingerprint(), "device": "x" * 10**6, "y" * 10**6: "z" * 10**6})
    with pytest.raises(StalePlanError) as caught:
        check_fresh(plan, fingerprint(), source="x")
    assert len(str(caught.value)) < 1000
    assert [len(line) < 2000 for line in harmless_differences(plan, fingerprint())] == [True]


# --- models and batches of other kinds


def test_a_lazy_model_has_a_fingerprint() -> None:
    told = fingerprint_of(
        nn.Sequential(nn.LazyLinear(3)), torch.zeros(2), device=DEVICE, request=PlanRequest(), optimizer=None,
        loader_batch_size=2,
    )  # fmt: skip
    assert told["parameters"].startswith("0 elements of float32 in 2 tensor(s) [")


def test_a_model_without_parameters_has_a_fingerprint() -> None:
    told = fingerprint_of(
        nn.ReLU(), torch.zeros(2), device=DEVICE, request=PlanRequest(), optimizer=None, loader_batch_size=2
    )
    assert (told["parameters"], told["buffers"]) == ("none", "none")


def test_a_shared_module_is_told_from_two_equal_ones() -> None:
    def two(*, shared: bool) -> nn.Module:
        first = nn.Linear(2, 2)
        return nn.Sequential(first, first if shared else nn.Linear(2, 2))

    assert fingerprint(module=two(shared=True))["parameters"] != fingerprint(module=two(shared=False))["parameters"]


def test_which_parameters_are_tied_to_which_is_told() -> None:
    def three(*, tied_to_first: int) -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
        layers[tied_to_first].weight = layers[0].weight
        return layers

    second, third = (fingerprint(module=three(tied_to_first=number))["parameters"] for number in (1, 2))
    assert second.partition(" [")[0] == third.partition(" [")[0] == "8 elements of float32 in 2 tensor(s)"
    assert second != third


Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: str


class Graph:
    def __init__(self) -> None:
        self.nodes = torch.zeros(3, 2)
        self.name = "g"


@pytest.mark.parametrize(
    ("node", "structure", "shapes"),
    [
        (torch.zeros(2), "float32 of 1 dimension(s)", "(2,); 2 elements"),
        (Point(torch.zeros(2), 1.5), "Point(x: float32 of 1 dimension(s), y: float)", "(2,); 2 elements"),
        (Sample(torch.zeros(2), "a"), "Sample(image: float32 of 1 dimension(s), label: str)", "(2,); 2 elements"),
        (Graph(), "Graph(float32 of 2 dimension(s))", "(3, 2); 6 elements"),
        (["a", "b", "c"], "list(str)", "; 0 elements"),
        ({(1, 2): 3, "b": None}, "dict('b': NoneType, tuple: int)", "; 0 elements"),
        (None, "NoneType", "; 0 elements"),
        (
            nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]),
            "PackedSequence(data: float32 of 1 dimension(s), batch_sizes: int64 of 1 dimension(s), sorted_indices: "
            "NoneType, unsorted_indices: NoneType)",
            "(5,), (3,); 8 elements",
        ),
    ],
)
def test_batches_of_every_structure_are_told(node: Any, structure: str, shapes: str) -> None:
    told = fingerprint(batch=node)
    assert (told["batch"], told["batch shapes"]) == (structure, shapes)


def test_a_batch_of_a_hundred_names_is_cut_and_the_rest_still_counts() -> None:
    def wide(last: torch.dtype) -> dict[str, torch.Tensor]:
        names = {f"feature_{number:03}": torch.zeros(2) for number in range(100)}
        return {**names, "z": torch.zeros(2, dtype=last)}

    first, second = fingerprint(batch=wide(torch.float32)), fingerprint(batch=wide(torch.float64))
    assert len(first["batch"]) < 330
    assert first["batch"] != second["batch"]
    assert stale_reasons(plan_for(first), second) == (f"batch: planned for {first['batch']}, now {second['batch']}",)


# --- optimizers


def one(optimizer_class: Any, **settings: Any) -> str:
    return optimizer_words(optimizer_class([torch.zeros(3)], **settings))


def test_learning_rates_have_no_part_in_it_also_when_a_scheduler_added_settings() -> None:
    slow = torch.optim.SGD([torch.zeros(3)], lr=0.1, momentum=0.9)
    fast = torch.optim.SGD([torch.zeros(3)], lr=0.3, momentum=0.8)
    torch.optim.lr_scheduler.OneCycleLR(fast, max_lr=1.0, total_steps=10)
    assert optimizer_words(slow) == optimizer_words(fast)


def test_a_tensor_as_learning_rate_has_no_part_in_it() -> None:
    assert one(torch.optim.AdamW, lr=torch.tensor(0.1)) == one(torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_class", "before", "now"),
    [
        (torch.optim.SGD, {"momentum": 0.0}, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {}, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {}, {"amsgrad": True}),
        (torch.optim.AdamW, {}, {"foreach": True}),
        (torch.optim.AdamW, {}, {"maximize": True}),
        (torch.optim.RMSprop, {}, {"centered": True}),
    ],
)
def test_settings_that_change_memory_or_rule_are_told(optimizer_class: Any, before: Any, now: Any) -> None:
    assert one(optimizer_class, **before) != one(optimizer_class, **now)


def test_groups_and_their_sizes_are_told() -> None:
    def grouped(*sizes: int) -> str:
        return optimizer_words(torch.optim.SGD([{"params": [torch.zeros(size)]} for size in sizes], lr=0.1))

    assert grouped(3, 3) not in (grouped(3), grouped(3, 4))


# --- Trainers


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("settings", "clipping"),
    [
        ({}, "off"),
        ({"gradient_clip_val": 0.0}, "off"),
        ({"gradient_clip_val": 1.0}, "by norm"),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "by value"),
    ],
)
def test_a_trainer_tells_its_strategy_and_how_it_clips(namespace: str, settings: Any, clipping: str) -> None:
    package = pytest.importorskip(namespace)
    trainer = package.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False, **settings
    )
    assert trainer_facts_of(trainer) == {"gradient clipping": clipping, "strategy": "SingleDeviceStrategy"}


def _zero(stage: Literal[1, 2, 3], **settings: Any) -> Sharding:
    return Sharding(engine="deepspeed", ranks=2, zero_stage=stage, **settings)


@pytest.mark.parametrize(
    "others",
    [
        (_zero(1), _zero(2), _zero(3), _zero(2, reduce_bucket_elements=10)),
        (Sharding(engine="ddp", ranks=2), Sharding(engine="ddp", ranks=2, gradient_as_bucket_view=True)),
        tuple(
            Sharding(engine="fsdp2", ranks=2, shard_groups=groups, reshard_after_forward=reshard)
            for groups in (("",), ("", "blocks.0"))
            for reshard in (True, False)
        ),
    ],
)
def test_settings_of_one_strategy_are_told_apart(others: tuple[Sharding, ...]) -> None:
    told = [sharding_facts(each)["sharding"] for each in others]
    assert len(set(told)) == len(told) and all(
        words.startswith(each.label) for words, each in zip(told, others, strict=True)
    )
    assert all(sharding_facts(each) == sharding_facts(each) for each in others)


def test_what_a_strategy_offloads_by_itself_is_told_and_one_device_tells_nothing() -> None:
    assert sharding_facts(_zero(2), "optimizer") == {"sharding": "ZeRO-2 over 2, optimizer on the host"}
    assert sharding_facts(_zero(2)) == {"sharding": "ZeRO-2 over 2"}
    assert sharding_facts(None) == {}
