"""Derived variants equal traced ones to the byte: peak, phases, categories and FLOPs, for several kinds of models.

Run: ``pytest tests/trace/test_derived_variants.py``; all models with ``-m "slow or not slow"``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memfit.applied_in_a_trace import autocast_context, checkpointed
from lightning_memfit.batch_tree import split_by_sizes
from lightning_memfit.plan import Precision
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.optimizer_step import optimizer_step_cost
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.optimizer_step import trace_optimizer_step
from lightning_memfit.trace.recording import record_window
from lightning_memfit.trace.step_program import program_of
from lightning_memfit.trace.training_step import trace_window

SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def mean_square(module: nn.Module, batch: Tensor) -> Tensor:
    output = module(batch)
    return F.mse_loss(output, torch.zeros_like(output))


class Residual(nn.Module):
    """A block around a shortcut whose own output is saved, as in a ResNet."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(hidden + self.body(hidden))


class Attention(nn.Module):
    """Pre-norm attention with a scale that all blocks are given, by name; dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, hidden: Tensor, *, scale: Tensor) -> Tensor:
        query, key, value = (self.qkv(self.norm(hidden)) * scale).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        return hidden + F.dropout(self.out(mixed), 0.1)


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(96))

    def forward(self, hidden: Tensor) -> Tensor:
        scale = self.scale.exp()
        for block in self.blocks:
            hidden = block(hidden, scale=scale) if isinstance(block, Attention) else block(hidden)
        return hidden


class Shared(nn.Module):
    """One block called three times, a second one once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for number in (0, 1, 0, 0):
            hidden = hidden + self.blocks[number](hidden)
        return hidden


class Counting(nn.Module):
    """Keeps running statistics and counts in buffers, has a frozen layer, and drops half of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.inner = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 64)
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(5))
        self.register_buffer("table", torch.ones(32))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        first, _ = self.inner(self.frozen(self.norm(hidden)) * self.table).tanh().chunk(2, dim=-1)
        return hidden + first


class LSTMBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.lstm(hidden)[0]


def convolution() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
    )
    return Residual(body)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "feed-forward": (
        lambda: Stack(lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32))),
        lambda: torch.randn(8, 5, 32),
    ),
    "attention": (lambda: Stack(Attention), lambda: torch.randn(8, 12, 32)),
    "convolutions": (lambda: Stack(convolution), lambda: torch.randn(8, 8, 10, 10)),
    "shared": (Shared, lambda: torch.randn(8, 32)),
    "counting": (lambda: Stack(Counting), lambda: torch.randn(8, 32)),
    "lstm": (lambda: Stack(LSTMBlock, 2), lambda: torch.randn(8, 6, 32)),
}


SPLITS = (((8,), 1), ((3, 3, 2), 1), ((4, 4), 2))


def check(name: str, precision: Precision, settings: Sequence[tuple[tuple[tuple[int, ...], int], slice]]) -> None:
    """Derive and trace at settings of (slices of a batch and batches, which blocks are recomputed)."""
    make_module, make_batch = MODELS[name]
    module, batch = make_module(), make_batch()
    program = program_of(module, loss=mean_square, optimizer=SGD, step_context=autocast_context(precision))
    blocks = find_repeated_blocks(module)

    recorded = record_window(
        program, batch, slices_of=lambda b: [b, split_by_sizes(b, (2, 6))[0]], samples=(8, 2), blocks=blocks,
        collect_signatures=False,
    )  # fmt: skip
    variants = StepVariants(recorded)
    step = optimizer_step_cost(trace_optimizer_step(program, gradients=recorded.layouts, collect_signatures=False))
    for (sizes, batches), which in settings:
        recomputed = blocks[which]
        with checkpointed(module, recomputed):
            traced = trace_window(
                program, batch, divide=lambda b, s=sizes: [b] if len(s) == 1 else split_by_sizes(b, s),
                micro_steps=len(sizes) * batches, collect_signatures=False,
            )  # fmt: skip
        for early in (False, True):
            variant = Variant(
                slice_sizes=sizes, accumulate_grad_batches=batches, recomputed=recomputed, zero_gradients_early=early
            )
            derived, real = variants.memory(variant, step), predict_memory(traced, zero_gradients_early=early)
            assert derived.by_phase == real.by_phase, variant
            assert derived.peak_allocated_bytes == real.peak_allocated_bytes
            assert derived.by_category == real.by_category, variant
        if batches == 1:  # a trace counts all further slices like the second; the derived number is exact
            assert variants.flops(variant) == (traced.flops, traced.recomputed_flops)


@pytest.fixture(autouse=True)
def no_cache_of_fakes() -> Iterator[None]:
    """A fake run of an RNN's backward gives two of its results one storage, one from the cache gives them two."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_a_variant_is_what_its_own_trace_gives(name: str) -> None:
    check(name, "32-true", [(SPLITS[0], slice(0)), (SPLITS[0], slice(1)), (SPLITS[1], slice(None))])


@pytest.mark.parametrize("name", ["attention", "counting"])
def test_a_variant_is_what_its_own_trace_gives_in_mixed_precision(name: str) -> None:
    check(name, "bf16-mixed", [(SPLITS[0], slice(None)), (SPLITS[2], slice(1))])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_every_variant_is_what_its_own_trace_gives(name: str, precision: Precision) -> None:
    check(name, precision, list(itertools.product(SPLITS, (slice(0), slice(1), slice(None)))))


def test_with_probes_a_derived_variant_is_what_its_own_trace_gives(prober: OperatorProber) -> None:
    make_module, make_batch = MODELS["convolutions"]
    module, batch = make_module(), make_batch()
    program = program_of(module, loss=mean_square, optimizer=SGD)
    record = record_window(program, batch, samples=(8,), blocks=("blocks.0", "blocks.2"))
    step = trace_optimizer_step(program, gradients=record.layouts)
    cost = optimizer_step_cost(step, prober.probe(step.signatures).results)
    recomputed = ("blocks.0", "blocks.2")
    derived = StepVariants(record, prober.probe(record.signatures).results).memory(
        Variant(slice_sizes=(8,), recomputed=recomputed), cost
    )
    with checkpointed(module, recomputed):
        traced = trace_window(program, batch)
    assert derived.by_phase == predict_memory(traced, prober.probe(traced.signatures).results).by_phase
    assert derived.by_phase != predict_memory(traced).by_phase  # probes found something


def test_a_block_that_recomputes_itself_is_not_derived() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, hidden: Tensor) -> Any:
            return checkpoint(lambda x: self.inner(x).tanh(), hidden, use_reentrant=False)

    module = Stack(Inner)
    program = program_of(module, loss=mean_square, optimizer=SGD)
    variants = StepVariants(record_window(program, torch.zeros(8, 32), samples=(8,), blocks=("blocks.0",)))
    assert variants.obstacle(Variant(slice_sizes=(8,))) is None
    reason = variants.obstacle(Variant(slice_sizes=(8,), recomputed=("blocks.0",)))
    assert reason == "recomputing blocks.0 cannot be derived: it recomputes activations itself"


def test_a_block_whose_gradient_is_taken_in_the_forward_is_not_derived() -> None:
    def penalty(module: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(module(batch).sum(), batch, create_graph=True)
        return gradient.square().sum()

    module = Stack(lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    program = program_of(module, loss=penalty, optimizer=SGD)
    variants = StepVariants(record_window(program, torch.zeros(8, 32), samples=(8,), blocks=("blocks.0",)))
    reason = variants.obstacle(Variant(slice_sizes=(8,), recomputed=("blocks.0",)))
    assert reason is not None and "asked for within the forward" in reason
