"""Predicted peaks equal measured ones: optimizers, clipping, windows. Run: ``pytest tests/trace/test_accuracy.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memfit.batch_tree import split_by_sizes

Compare = Callable[..., Any]
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
AdamW = partial(torch.optim.AdamW, lr=1e-4)


def mlp(width: int = 256, depth: int = 2) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(*layers)


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    output = module(batch)
    return F.mse_loss(output, torch.zeros_like(output))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD momentum nesterov foreach": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "Adam": torch.optim.Adam,
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop centered": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_peak_is_exact_under_every_optimizer(compare: Compare, name: str) -> None:
    """Reported in deepspeedai/DeepSpeed#3598."""
    result = compare(mlp(), torch.randn(16, 256), loss=mean_square, optimizer=OPTIMIZERS[name])
    assert abs(result.error) < 0.0005, (result.error, result.predicted)


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_the_peak_is_exact_with_clipped_gradients(compare: Compare, kind: str, optimizer: Any) -> None:
    module = mlp()

    def clip(_: torch.optim.Optimizer) -> None:
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        else:
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.5)

    result = compare(module, torch.randn(16, 256), loss=mean_square, optimizer=optimizer, clip=clip)
    assert abs(result.error) < 0.0005, (result.error, result.predicted)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("sizes", "accumulate"),
    [((8, 8), 1), ((6, 5, 5), 1), ((16,), 2), ((6, 5, 5), 2)],
)
def test_the_peak_of_a_window_of_slices_is_exact(
    compare: Compare, sizes: tuple[int, ...], accumulate: int, early: bool
) -> None:
    result = compare(
        mlp(),
        torch.randn(16, 4, 256),
        loss=mean_square,
        optimizer=SGD,
        divide=lambda batch: [batch] if len(sizes) == 1 else split_by_sizes(batch, sizes),
        accumulate=accumulate,
        early=early,
    )
    assert abs(result.error) < 0.001, (result.error, result.predicted)


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (6, 5, 5)])
def test_the_peak_is_exact_where_outputs_are_kept(compare: Compare, sizes: tuple[int, ...]) -> None:
    def loss(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        output = module(batch)
        return {"loss": output.square().mean(), "predictions": output.detach().clone()}

    result = compare(
        mlp(), torch.randn(16, 16, 256), loss=loss, optimizer=SGD, divide=lambda batch: split_by_sizes(batch, sizes)
    )
    # With a remainder the slices that are not run count as the larger one: at most one sample's outputs too much.
    assert abs(result.error) < (0.0005 if len(set(sizes)) == 1 else 0.01), (result.error, result.predicted)
    assert result.error > -0.0005


def test_the_peak_is_exact_with_recomputed_blocks(compare: Compare) -> None:
    module = nn.Sequential(*(nn.Sequential(mlp(128, 2), nn.Dropout(0.1)) for _ in range(3)))
    options = {"loss": mean_square, "optimizer": SGD}
    plain = compare(module, torch.randn(256, 128), **options)
    recomputed = compare(module, torch.randn(256, 128), checkpoint=("0", "1", "2"), **options)
    assert abs(plain.error) < 0.0005 and abs(recomputed.error) < 0.0005
    assert recomputed.measured_bytes < plain.measured_bytes
