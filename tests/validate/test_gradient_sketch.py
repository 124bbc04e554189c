"""Gradients told apart by one number each. Run: ``pytest tests/validate/test_gradient_sketch.py``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_memfit.validate.gradient_sketch import (
    GradientSketch,
    differing_gradient,
    not_finite,
    sketch_gradients,
)

EPS = torch.finfo(torch.float32).eps


def sketch(**values: float) -> GradientSketch:
    """Of gradients that lie in their directions, so that projections are norms."""
    return GradientSketch(projections=values, norms={name: abs(value) for name, value in values.items()})


def of(batch: torch.Tensor, *, sparse: bool = False) -> GradientSketch:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 2))
    module(batch).square().sum().backward()
    return sketch_gradients(module)


def test_sketches_add_up_as_gradients_do() -> None:
    batch = torch.arange(6)
    whole, parts = of(batch), [of(batch[:2]), of(batch[2:])]
    for name, projection in whole.projections.items():
        assert projection == pytest.approx(sum(part.projections[name] for part in parts), rel=1e-4)
    assert differing_gradient(whole, whole, parts, [1.0, 1.0], EPS) is None
    found = differing_gradient(whole, whole, parts, [0.5, 0.5], EPS)
    assert found is not None and found[0] in whole.projections


def test_a_sparse_gradient_is_sketched_as_the_dense_one() -> None:
    batch = torch.arange(6)
    assert of(batch, sparse=True).projections == pytest.approx(of(batch).projections)


@pytest.mark.parametrize(
    ("whole", "again", "part", "eps", "found"),
    [
        ({"a": 1.0}, {"a": 1.0}, {"a": 1.0005}, EPS, None),  # within a thousandth
        ({"a": 1.0}, {"a": 1.0}, {"a": 1.01}, EPS, ("a", 0.01)),
        ({"a": 1.0}, {"a": 1.002}, {"a": 1.01}, EPS, None),  # within 8 times what a repeat differs by
        ({"a": 1.0}, {"a": 1.0}, {"a": 1.01}, torch.finfo(torch.bfloat16).eps, None),  # 8 times 2**-7 of rounding
        ({"a": 1000.0, "b": 0.0}, {"a": 1000.0, "b": 0.0}, {"a": 1000.0, "b": 0.0005}, EPS, None),
        # Against a thousandth of all gradients' norm, 1.
        ({"a": 1000.0, "b": 0.0}, {"a": 1000.0, "b": 0.0}, {"a": 1000.0, "b": 0.01}, EPS, ("b", 0.01)),
        ({"a": 1.0}, {"a": 1.0}, {}, EPS, ("a", 1.0)),
        ({}, {}, {"a": 1.0}, EPS, ("a", math.inf)),
    ],
)
def test_what_stands_out_from_rounding_and_noise(
    whole: dict[str, float],
    again: dict[str, float],
    part: dict[str, float],
    eps: float,
    found: tuple[str, float] | None,
) -> None:
    told = differing_gradient(sketch(**whole), sketch(**again), [sketch(**part)] * 2, [0.5, 0.5], eps)
    assert (None if told is None else (told[0], pytest.approx(told[1]))) == found


def test_the_largest_of_several_differences_is_named() -> None:
    whole, part = sketch(a=1.0, b=1.0, c=1.0), sketch(a=1.1, b=1.5, c=1.2)
    assert differing_gradient(whole, whole, [part], [1.0], EPS) == ("b", pytest.approx(0.5))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_named(value: float) -> None:
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    finite = sketch_gradients(layer)
    assert layer.bias.grad is not None
    layer.bias.grad[1] = value
    assert not_finite([finite, finite]) is None
    assert not_finite([finite, sketch_gradients(layer)]) == "bias"
