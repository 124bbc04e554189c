"""Real small steps where a step cannot be traced. Run: ``pytest tests/trace/test_small_steps.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.batch_tree import split_by_sizes
from lightning_memfit.errors import TraceError
from lightning_memfit.trace.small_steps import PeakLine, measure_small_steps
from lightning_memfit.trace.training_step import program_of

SGD = partial(torch.optim.SGD, lr=0.1, foreach=False)


def masked(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch[batch[:, 0] >= 0]).square().sum()


def measured(module: nn.Module, batch: Any, loss: Any = masked) -> PeakLine:
    program = program_of(module, loss=loss, optimizer=SGD)
    return measure_small_steps(
        program, batch, split_by_sizes, samples=len(batch), accumulates=False, zero_gradients_early=False
    )


def test_a_line_passes_through_its_points_and_never_below_the_parameters() -> None:
    line = PeakLine(fixed_bytes=1000, bytes_per_sample=50, sizes=(2, 4), parameter_bytes=400, num_parameters=100)
    memory = line.at(10)
    assert memory.peak_allocated_bytes == 1500
    assert memory.by_category == {"parameters": 400, "unattributed": 1100}
    assert memory.num_parameters == 100
    low = PeakLine(fixed_bytes=-1000, bytes_per_sample=50, sizes=(2, 4), parameter_bytes=400, num_parameters=100)
    assert low.at(1).peak_allocated_bytes == 400


def test_the_slope_is_that_of_what_a_sample_needs() -> None:
    # Per sample: masked copy 64 x 4, comparison 1, hidden 64 x 4 ...: the same for every sample.
    torch.manual_seed(0)
    module, batch = nn.Linear(64, 64), torch.rand(16, 64)
    line = measured(module, batch)
    assert line.sizes == (2, 4)
    assert line.bytes_per_sample >= 2 * 64 * 4
    assert line.parameter_bytes == (64 * 64 + 64) * 4
    assert line.fixed_bytes >= 2 * line.parameter_bytes  # parameters and gradients


def test_two_samples_are_enough_and_one_is_not() -> None:
    assert measured(nn.Linear(4, 4), torch.rand(2, 4)).sizes == (1, 2)
    with pytest.raises(TraceError, match="a batch of 1 sample is too small to measure two sizes"):
        measured(nn.Linear(4, 4), torch.rand(1, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_as_before_also_when_the_step_raises(fails: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    calls = []

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        calls.append(len(batch))
        if fails and len(calls) == 2:
            raise KeyError("on purpose")
        return module(batch).square().sum()

    grad = torch.ones(4, 4)
    module[0].weight.grad = grad
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = [dict(vars(part)) for part in module.modules()]
    batch = torch.rand(8, 4)
    random_state = torch.get_rng_state()
    if fails:
        with pytest.raises(TraceError, match="KeyError: 'on purpose'"):
            measured(module, batch, loss)
    else:
        measured(module, batch, loss)
        assert calls == [2, 2, 4, 4]
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [dict(vars(part)) for part in module.modules()] == attributes
    assert module[0].weight.grad is grad and torch.equal(grad, torch.ones(4, 4))
    assert module[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_module_on_meta_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    with pytest.raises(TraceError, match="tensors on meta cannot be run"):
        measured(module, torch.rand(8, 4))


def test_a_converted_module_gets_a_converted_batch_and_one_that_is_not_is_refused() -> None:
    program = program_of(nn.Linear(64, 64).bfloat16(), loss=masked, optimizer=SGD)

    def run(program: Any) -> PeakLine:
        return measure_small_steps(
            program, torch.rand(16, 64), split_by_sizes, samples=16, accumulates=False, zero_gradients_early=False,
            floating=torch.bfloat16,
        )  # fmt: skip

    line = run(program)
    assert line.parameter_bytes == (64 * 64 + 64) * 2
    assert (
        line.at(16).peak_allocated_bytes < measured(nn.Linear(64, 64), torch.rand(16, 64)).at(16).peak_allocated_bytes
    )
    with pytest.raises(TraceError, match=r"parameters are torch.float32, and real steps need them in torch.bfloat16"):
        run(program_of(nn.Linear(64, 64), loss=masked, optimizer=SGD))
