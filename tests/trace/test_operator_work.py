"""FLOPs, inner calls and views of operators, worked out by hand. Run: ``pytest tests/trace/test_operator_work.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import flop_counter

from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.operator_work import flops_of
from lightning_memfit.trace.timeline import Operation
from lightning_memfit.trace.tracer import StepTracer


def operations(run: Callable[[], Any]) -> list[Operation]:
    """What a function dispatches, on fakes."""
    with new_fake_mode(), torch.random.fork_rng(devices=[]):
        with StepTracer({}) as tracer:
            run()
        return [event for event in tracer.events if isinstance(event, Operation)]


def one(run: Callable[[], Any], name: str) -> Operation:
    (found,) = (each for each in operations(run) if each.op == f"aten.{name}.default")
    return found


def convolve(channels: int, groups: int, *, transposed: bool = False) -> Callable[[], Any]:
    def run() -> None:
        image = torch.zeros(2, channels, 6, 6, requires_grad=True)
        weight = torch.zeros(channels, channels // groups, 3, 3, requires_grad=True)
        function: Any = F.conv_transpose2d if transposed else F.conv2d
        function(image, weight, padding=1, groups=groups).sum().backward()

    return run


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolutions_gradients_cost_twice_its_forward(transposed: bool) -> None:
    # 2 x 4 x 6 x 6 results, each a sum of 4 x 3 x 3 products.
    forward = 2 * (2 * 4 * 6 * 6) * (4 * 9)
    run = convolve(4, 1, transposed=transposed)
    assert one(run, "convolution").flops == forward
    assert one(run, "convolution_backward").flops == 2 * forward


def test_each_group_of_a_convolution_meets_its_own_channels_only() -> None:
    # Depthwise: each result is a sum of 1 x 3 x 3 products. torch's own formula gives the backward 4 times as much.
    forward = 2 * (2 * 4 * 6 * 6) * 9
    assert one(convolve(4, 4), "convolution").flops == forward
    assert one(convolve(4, 4), "convolution_backward").flops == 2 * forward


def test_a_gradient_that_nobody_wants_costs_nothing() -> None:
    def run() -> None:
        weight = torch.zeros(4, 4, 3, 3, requires_grad=True)
        F.conv2d(torch.zeros(2, 4, 6, 6), weight, padding=1).sum().backward()

    assert one(run, "convolution_backward").flops == one(run, "convolution").flops


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN computes the layers, and is not built in")
def test_a_recurrent_layer_multiplies_every_row_by_both_matrices_step_after_step() -> None:
    # 5 time steps of 2 rows; the four gates of 6 units see 3 inputs and 6 hidden values: matrices of 24 x (3 + 6).
    def run() -> None:
        nn.LSTM(3, 6)(torch.zeros(5, 2, 3, requires_grad=True))[0].sum().backward()

    forward, backward = one(run, "mkldnn_rnn_layer"), one(run, "mkldnn_rnn_layer_backward")
    assert forward.flops == 2 * (5 * 2) * 24 * (3 + 6)
    assert backward.flops == 2 * forward.flops
    assert forward.inner_calls == backward.inner_calls == 5


def test_attention_is_two_products_and_its_backward_five() -> None:
    # 2 x 3 heads, 4 queries by 4 keys of 8 features: a product is 2 x 4 x 4 x 8 FLOPs per head.
    def run() -> None:
        query, key, value = (torch.zeros(2, 3, 4, 8, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(query, key, value).sum().backward()

    product = 2 * 3 * 2 * 4 * 4 * 8
    assert one(run, "_scaled_dot_product_flash_attention_for_cpu").flops == 2 * product
    assert one(run, "_scaled_dot_product_flash_attention_for_cpu_backward").flops == 5 * product


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((12, 8), (3, 8, 16), 2 * 12 * 8 * 16),  # every row meets the matrix of its group
        ((8, 12), (12, 16), 2 * 8 * 12 * 16),  # every group has its part of the 12
        ((3, 12, 8), (3, 8, 16), 3 * 2 * 12 * 8 * 16),
        ((3, 8, 16), (16, 24), 2 * 8 * 16 * 24),  # every group has its part of the 24 columns
    ],
)
def test_each_group_of_experts_meets_its_own_part(left: tuple[int, ...], right: tuple[int, ...], flops: int) -> None:
    grouped = torch.ops.aten._grouped_mm.default
    assert flops_of(grouped, (torch.ones(left), torch.ones(right)), {}, None) == flops


def test_a_list_counts_its_tensors() -> None:
    def run() -> None:
        torch._foreach_add([torch.zeros(2), torch.zeros(3), torch.zeros(4)], 1.0)

    (added,) = (each for each in operations(run) if each.op == "aten._foreach_add.Scalar")
    assert added.inner_calls == 3
    # 36 bytes of arguments and as many of results.
    assert added.moved_bytes == 72


def test_views_count_towards_the_operator_that_follows_them() -> None:
    def run() -> None:
        a = torch.zeros(4, 6)
        a.t().reshape(24).add(1)  # rows of a transposed tensor can only be joined in a copy
        a.view(6, 4).view(24).neg()

    found = operations(run)
    assert [(each.op, each.views) for each in found if each.op != "aten.zeros.default"] == [
        ("aten.clone.default", 1),
        ("aten.add.Tensor", 1),
        ("aten.neg.default", 2),
    ]


@pytest.mark.parametrize(
    ("owner", "name"), [(flop_counter, "flop_registry"), (torch.ops.aten.add.Tensor, "_overloadpacket")]
)
def test_torch_still_has_the_private_names_that_counting_uses(owner: Any, name: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {name}: trace/operator_work.py must be changed"
