"""Levers of the optimizer, real and under fakes, to the byte. Run: ``pytest tests/apply/test_optimizer_levers.py``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from lightning_memfit.apply.optimizer_levers import (
    OptimizerFacts,
    faked_quantisation,
    joint_facts,
    optimizer_facts,
    with_levers,
)
from lightning_memfit.apply.quantised_states import verify_quantised
from lightning_memfit.batch_tree import tensors_of
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.training_step import program_of, run_window, trace_window

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes", exc_type=ImportError)
PACKAGE = Path(__file__).parents[2] / "lightning_memfit"
Make = Callable[[Any], Optimizer]
O = torch.optim  # noqa: E741
SGD = partial(O.SGD, lr=0.1, momentum=0.9)


class Text(nn.Module):
    """Matrices of 25,600, 4097 and 850 elements behind an embedding of 6400."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 128)
        self.large = nn.Linear(128, 200)
        self.odd = nn.Parameter(torch.ones(4097))
        self.head = nn.Linear(200, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.large(self.embedding(tokens))) * self.odd.mean()
        return out


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = module(batch)
    return out.square().mean()


class Unobserved:
    def enter(self, phase: Any) -> None: ...

    def after_forward(self) -> None: ...

    def after_backward(self) -> None: ...


@pytest.fixture(scope="module")
def prober() -> Iterator[OperatorProber]:
    with OperatorProber() as prober:
        yield prober


# To the byte


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    **{
        f"{name} in 8 bits": (make, {"optimizer_states": "8bit", "implementation": "as-configured"})
        for name, make in {
            "AdamW": O.AdamW,
            "Adam": O.Adam,
            "SGD": SGD,
            "RMSprop": O.RMSprop,
            "Lion": bnb.optim.Lion,
            "AdEMAMix": bnb.optim.AdEMAMix,
            "scheduled AdEMAMix": partial(bnb.optim.AdEMAMix, t_alpha=9, t_beta3=9),
        }.items()
    },
    **{
        f"{name} {way}": (make, {"optimizer_states": "as-configured", "implementation": way})
        for name, make, ways in (
            ("AdamW", O.AdamW, ("foreach", "fused")),
            ("AdamW configured foreach", partial(O.AdamW, foreach=True), ("single-tensor",)),
            ("SGD", SGD, ("foreach", "fused")),
            ("Adagrad", O.Adagrad, ("fused",)),
            ("RMSprop", O.RMSprop, ("foreach",)),
        )
        for way in ways
    },
}
HALF = ("AdamW in 8 bits", torch.bfloat16)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), HALF])
def test_the_predicted_peak_is_the_measured_one(prober: OperatorProber, name: str, dtype: torch.dtype) -> None:
    make, levers = CASES[name]
    module, batch = Text().to(dtype), torch.randint(0, 50, (4, 16))
    program = program_of(module, loss=mean_square, optimizer=lambda p: with_levers(make(p), module, **levers))
    timeline = trace_window(program, batch)
    probes = prober.probe(timeline.signatures)
    assert not probes.failures
    predicted = predict_memory(timeline, probes.results)
    with AllocationMeter(storage_bytes([*module.parameters(), *tensors_of(batch)])) as meter:
        optimizer = program.make_optimizer()
        for _ in range(3):
            run_window(program, optimizer, [batch], Unobserved())
    assert predicted.peak_allocated_bytes == meter.peak_allocated_bytes
    if levers["optimizer_states"] == "8bit":
        assert predicted.peak_phase == "optimizer_step"
        assert verify_quantised(optimizer, module).quantised_parameters == 25_600 + 4097


def test_what_bitsandbytes_needs_within_a_step_is_found_by_probing(prober: OperatorProber) -> None:
    # Both moments dequantised, the scaled gradient, a root and the denominator: five times 4 bytes per element; and a
    # few bytes for numbers that operators wrap in tensors.
    module, batch = Text(), torch.randint(0, 50, (4, 16))
    levers = CASES["AdamW in 8 bits"][1]
    program = program_of(module, loss=mean_square, optimizer=lambda p: with_levers(O.AdamW(p), module, **levers))
    timeline = trace_window(program, batch)
    found = prober.probe(timeline.signatures).results
    peaks = [
        found[number].peak_bytes
        for number, signature in enumerate(timeline.signatures)
        if signature.op == "bitsandbytes.optimizer_update_8bit_blockwise.default"
    ]
    assert [peak // 64 for peak in sorted(peaks)] == [5 * 4 * 4097 // 64, 5 * 4 * 25_600 // 64]
    blind = predict_memory(timeline, {})
    assert blind.peak_allocated_bytes + 4 * 4 * 25_600 < predict_memory(timeline, found).peak_allocated_bytes


# What can be chosen


def test_facts_name_the_optimizer_and_what_can_be_chosen() -> None:
    module = Text()
    facts = optimizer_facts(O.AdamW(module.parameters()), module)
    assert facts.name == "torch.optim.AdamW"
    assert facts.implementations == ("foreach", "fused")
    assert facts.quantisation_obstacle is None


def test_facts_name_what_stands_against_it() -> None:
    module = Text()
    facts = optimizer_facts(O.LBFGS(module.parameters()), module)
    assert facts.implementations == ()
    assert facts.quantisation_obstacle == (
        "torch.optim.LBFGS cannot be quantised: no 8-bit form is known to follow its update rule"
    )


def test_facts_change_nothing() -> None:
    module = Text()
    optimizer = O.AdamW(module.parameters())
    before = str(vars(optimizer))
    optimizer_facts(optimizer, module)
    assert str(vars(optimizer)) == before


def test_several_optimizers_have_what_each_can_have_and_are_quantised_where_one_can_be() -> None:
    module = Text()
    adam, lbfgs = (optimizer_facts(make(module.parameters()), module) for make in (O.AdamW, O.LBFGS))
    why = "torch.optim.LBFGS cannot be quantised: no 8-bit form is known to follow its update rule"
    both = joint_facts([adam, lbfgs])
    assert (both.name, both.implementations, both.needs_closure) == ("torch.optim.AdamW, torch.optim.LBFGS", (), True)
    assert (both.quantisation_obstacle, both.left_as_configured) == (None, why)
    twice = joint_facts([adam, adam])
    assert (twice.implementations, twice.needs_closure) == (("foreach", "fused"), False)
    assert (twice.quantisation_obstacle, twice.left_as_configured) == (None, None)
    neither = joint_facts([lbfgs, lbfgs])
    assert (neither.quantisation_obstacle, neither.left_as_configured) == (why, None)
    assert joint_facts([adam]).implementations == adam.implementations


def test_of_no_optimizer_nothing_can_be_chosen() -> None:
    assert joint_facts([]) == OptimizerFacts(
        name="no optimizer", implementations=(), quantisation_obstacle="configure_optimizers returned no optimizer"
    )


def test_an_embedding_with_sparse_gradients_is_not_fused() -> None:
    module = nn.Sequential(nn.Embedding(50, 128, sparse=True))
    optimizer = SGD(module.parameters())
    assert optimizer_facts(optimizer, module).implementations == ("foreach",)
    with pytest.raises(ConfigurationError, match=r"'fused' cannot be had for torch.optim.SGD: an embedding has sparse"):
        with_levers(optimizer, module, optimizer_states="as-configured", implementation="fused")


def test_without_levers_the_optimizer_is_returned_as_it_is() -> None:
    module = Text()
    optimizer = O.AdamW(module.parameters())
    before = str(vars(optimizer))
    same = with_levers(optimizer, module, optimizer_states="as-configured", implementation="as-configured")
    assert same is optimizer and str(vars(optimizer)) == before


def test_an_implementation_is_set_on_the_optimizer_itself_and_8_bit_states_on_another() -> None:
    module = Text()
    optimizer = O.AdamW(module.parameters())
    assert with_levers(optimizer, module, optimizer_states="as-configured", implementation="fused") is optimizer
    assert optimizer.param_groups[0]["fused"] is True
    optimizer = O.AdamW(module.parameters())
    other = with_levers(optimizer, module, optimizer_states="8bit", implementation="as-configured")
    assert type(other) is bnb.optim.AdamW8bit and type(optimizer) is O.AdamW


@pytest.mark.parametrize(
    ("make", "levers", "words"),
    [
        (O.AdamW, ("8bit", "fused"), "'fused' cannot be had with optimizer_states='8bit'.* Leave one of the two out"),
        (partial(O.Adam, weight_decay=0.1), ("8bit", "as-configured"), "torch.optim.Adam with weight_decay=0.1 cannot"),
        (O.RMSprop, ("as-configured", "fused"), "'fused' cannot be had for RMSprop .* 'as-configured', 'foreach'"),
    ],
)
def test_what_cannot_be_had_is_an_error(make: Make, levers: tuple[Any, Any], words: str) -> None:
    module = Text()
    with pytest.raises(ConfigurationError, match=words):
        with_levers(make(module.parameters()), module, optimizer_states=levers[0], implementation=levers[1])


# Under fakes


def step_under_fakes(make: Callable[[nn.Module], Optimizer]) -> tuple[Optimizer, nn.Module]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = Text()
        optimizer = make(module)
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.step()
    return optimizer, module


@pytest.mark.parametrize("name", CASES)
def test_optimizers_with_levers_are_made_and_stepped_under_fakes(name: str) -> None:
    make, levers = CASES[name]
    optimizer, module = step_under_fakes(lambda m: with_levers(make(m.parameters()), m, **levers))
    state = optimizer.state[module.large.weight]
    assert any(isinstance(value, FakeTensor) for value in state.values())
    if levers["optimizer_states"] == "8bit":
        assert verify_quantised(optimizer, module).quantised_parameters == 25_600 + 4097


def test_the_users_own_quantised_optimizer_works_under_fakes() -> None:
    with pytest.raises(Exception, match=r"item|_local_scalar_dense"):
        step_under_fakes(lambda module: bnb.optim.AdamW8bit(module.parameters()))
    with faked_quantisation():
        optimizer, module = step_under_fakes(lambda module: bnb.optim.AdamW8bit(module.parameters()))
    table = optimizer.state[module.large.weight]["qmap1"]
    assert not isinstance(table, FakeTensor) and table.unique().numel() == 256


def test_nothing_is_left_of_faking_also_after_an_error() -> None:
    library = sys.modules["bitsandbytes.functional"]
    before = library.create_dynamic_map, list(sys.meta_path)
    with pytest.raises(KeyError), faked_quantisation():
        assert library.create_dynamic_map is not before[0]
        raise KeyError
    assert (library.create_dynamic_map, sys.meta_path) == before


IMPORTED_WITHIN = """
# Without Lightning and without compilers, which take longer to import than everything else here.
import sys, types, torch
torch.compile = lambda function=None, **options: function or (lambda same: same)
package = types.ModuleType("lightning_memfit")
package.__path__ = sys.argv[1:]
sys.modules["lightning_memfit"] = package
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from lightning_memfit.apply.optimizer_levers import faked_quantisation
module, before = nn.Linear(64, 64), list(sys.meta_path)
with faked_quantisation(), FakeTensorMode(allow_non_fake_inputs=True):
    import bitsandbytes
    weight = nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.ones(64, 64)
    optimizer = bitsandbytes.optim.AdamW8bit([weight])
    optimizer.step()
assert isinstance(optimizer.state[weight]["state1"], FakeTensor)
assert not isinstance(optimizer.state[weight]["qmap1"], FakeTensor)
assert not any(isinstance(table, FakeTensor) for table in sys.modules["bitsandbytes.backends.utils"].CODE.values())
assert sys.meta_path == before
assert "exec_module" not in vars(bitsandbytes.__spec__.loader)
assert bitsandbytes.functional.create_dynamic_map.__module__ == "bitsandbytes.functional"
"""


def test_a_library_that_the_user_imports_under_fakes_is_not_spoilt_for_the_process() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORTED_WITHIN, str(PACKAGE)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_bitsandbytes_still_has_the_function_that_is_faked() -> None:
    hint = f"bitsandbytes {bnb.__version__}: change apply/optimizer_levers.py"
    assert bnb.optim.optimizer.F is sys.modules["bitsandbytes.functional"], hint
    assert bnb.functional.create_dynamic_map().shape == (256,), hint
