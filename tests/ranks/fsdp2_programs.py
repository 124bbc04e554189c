"""Training that ``fully_shard`` spreads over two ranks, through a plain loop, and the same in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.apply.fsdp2 import Fsdp2Exchange, deferred_bytes, mixed_precision_of, sharding_of
from lightning_memfit.batch_tree import split_by_sizes
from lightning_memfit.observe.meter import AllocationMeter, storage_bytes
from lightning_memfit.predict.fsdp2 import fsdp2_timeline
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.sharded_model import fully_shard
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.optimizer_step import trace_optimizer_step
from lightning_memfit.trace.step_program import StepProgram, Unobserved, program_of, run_window
from lightning_memfit.trace.tensors import held_part
from lightning_memfit.trace.training_step import trace_window

RANKS = 2


class Net(nn.Module):
    """Tied embeddings around two blocks of sizes that two ranks cannot divide evenly."""

    def __init__(self, words: int = 37, width: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2))
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, length)`` to ``(batch, length, words)``."""
        return self.head(self.blocks(self.embed(ids)))


@dataclass(frozen=True, kw_only=True)
class Training:
    """Twenty optimizer steps; the window of a step is so many batches of so many samples on each rank."""

    slices: tuple[int, ...] = (5,)
    """Samples of each slice of one rank's batch."""
    accumulate: int = 1
    """Batches per optimizer step."""
    batches: int = 20
    """Batches on each rank."""
    recomputed: bool = False
    """Whether blocks are recomputed, switched on after they were sharded."""
    deferred: bool = False
    """Whether gradients are exchanged in the last slice of a batch alone."""
    reshard: bool = True
    """``reshard_after_forward``."""
    clip: float | None = None
    """Norm that gradients are clipped to."""

    @property
    def samples(self) -> int:
        """Of one rank's batch."""
        return sum(self.slices)


TRAININGS = {
    "accumulation and a short last window": Training(slices=(2, 2, 1), accumulate=2, batches=39),
    "recomputed after sharding": Training(slices=(3, 2), recomputed=True),
    "exchanged once per batch": Training(slices=(2, 2, 1), deferred=True),
    "kept after the forward, clipped": Training(reshard=False, clip=0.05),
}


def net() -> Net:
    """The same weights every time."""
    torch.manual_seed(0)
    return Net()


def rank_batches(training: Training, rank: int) -> list[Tensor]:
    """What one rank trains on: every second batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(37, (training.batches * RANKS, training.samples, 7), generator=generator)
    return list(ids[rank::RANKS])


def sum_of_losses(module: nn.Module, ids: Tensor) -> Tensor:
    """Sum over samples of the mean loss of each."""
    losses = F.cross_entropy(module(ids).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1).sum()


def train_in_one_process(training: Training) -> list[Tensor]:
    """The weights that plain torch comes to with the whole effective batch at once."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    by_rank = [rank_batches(training, rank) for rank in range(RANKS)]
    for window in _windows(list(zip(*by_rank, strict=True)), training.accumulate):
        whole = torch.cat([batch for batches in window for batch in batches])
        optimizer.zero_grad()
        (sum_of_losses(module, whole) / len(whole)).backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def train_on_rank(training: Training, rank: int) -> list[Tensor]:
    """The whole weights that this rank comes to; slices weighted by their share of a full window, as MemFit does."""
    module = fully_shard(net(), reshard_after_forward=training.reshard)
    if training.recomputed:
        checkpoint_modules(module, find_repeated_blocks(module))
    exchange = Fsdp2Exchange(module, synchronisation="step" if training.deferred else "slice")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    expected = training.samples * training.accumulate
    for window in _windows(rank_batches(training, rank), training.accumulate):
        optimizer.zero_grad()
        for batch in window:
            parts = split_by_sizes(batch, training.slices)
            for index, part in enumerate(parts):
                with exchange.around_slice(is_last=index + 1 == len(parts)):
                    (sum_of_losses(module, part) / expected).backward()
        seen = sum(len(batch) for batch in window)
        if seen != expected:  # a short last window: the weights were those of a full one
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(expected / seen)
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
    return [_whole(parameter) for parameter in module.parameters()]


def _windows(batches: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.detach().full_tensor()
    return whole


# What is told of a live module


@dataclass(frozen=True, kw_only=True)
class Told:
    """Of a module that is sharded already."""

    sharding: Sharding
    """As it was found."""
    predicted_bytes: int
    """Peak of a rank, traced."""
    measured_bytes: int
    """Lowest peak of several steps."""
    deferred_bytes: int
    """Of whole gradients that would wait."""
    forecast_bytes: int
    """Peak traced from the whole module."""


def step_of(module: nn.Module) -> StepProgram:
    """AdamW on the mean loss."""
    return program_of(
        module,
        loss=lambda network, ids: sum_of_losses(network, ids) / len(ids),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank did."""

    trained: dict[str, list[Tensor]]
    """By name of the training: the whole weights."""
    told: list[Told]
    """With ``reshard_after_forward``, and without."""
    mixed: tuple[int, int, int]
    """Peak under a policy of mixed precision: traced, derived from the step of one device, and measured."""


def run(rank: int) -> Rank:
    """Everything, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return Rank(
            trained={name: train_on_rank(training, rank) for name, training in TRAININGS.items()},
            told=_told_of_both(),
            mixed=_mixed(),
        )
    finally:
        dist.destroy_process_group()


def _told_of_both() -> list[Told]:
    with OperatorProber() as prober:
        return [_told(reshard, prober) for reshard in (True, False)]


def _told(reshard: bool, prober: OperatorProber) -> Told:
    torch.manual_seed(0)
    module = fully_shard(Net(words=307, width=129), reshard_after_forward=reshard)
    ids = torch.randint(307, (3, 16))
    sharding = sharding_of(module)
    assert sharding is not None and mixed_precision_of(module) is None
    before = copy.copy(vars(module)), [type(part) for part in module.modules()], list(module.parameters())
    predicted = _predicted(module, ids, sharding, prober)
    assert before == (vars(module), [type(part) for part in module.modules()], list(module.parameters()))
    assert sharding_of(module) == sharding
    return Told(
        sharding=sharding,
        predicted_bytes=predicted,
        measured_bytes=_measured(module, ids),
        deferred_bytes=deferred_bytes(module),
        forecast_bytes=_predicted(Net(words=307, width=129), ids, sharding, prober),
    )


def _mixed() -> tuple[int, int, int]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = fully_shard(Net(words=307, width=129), mixed_precision=policy)
    ids = torch.zeros(3, 16, dtype=torch.long)
    sharding = sharding_of(module)
    assert sharding is not None and mixed_precision_of(module) == policy
    with OperatorProber() as prober:
        traced, derived = _predicted(module, ids, sharding, prober), _derived(module, ids, sharding, prober)
    return traced, derived, _measured(module, ids)


def _predicted(module: nn.Module, ids: Tensor, sharding: Sharding, prober: OperatorProber) -> int:
    timeline = trace_window(step_of(module), ids, sharding=sharding)
    probes = prober.probe(timeline.signatures).results
    return predict_memory(timeline, probes, zero_gradients_early=True).peak_allocated_bytes


def _derived(module: nn.Module, ids: Tensor, sharding: Sharding, prober: OperatorProber) -> int:
    step = replace(step_of(module), group_precision=sharding.group_precision)
    whole, of_shares = trace_window(step, ids, steps=False), trace_optimizer_step(step, sharding=sharding)
    timeline = fsdp2_timeline(whole, sharding, of_shares, collectives="gloo")
    probes = prober.probe(timeline.signatures).results
    return predict_memory(timeline, probes, zero_gradients_early=True).peak_allocated_bytes


def _measured(module: nn.Module, ids: Tensor) -> int:
    program = step_of(module)
    optimizer = program.make_optimizer()
    run_window(program, optimizer, [ids], Unobserved())
    peaks = []
    for _ in range(8):  # gloo's threads let go late at times: the lowest peak is the step's own
        optimizer.zero_grad()
        states = [held_part(value) for state in optimizer.state.values() for value in state.values()]
        there = storage_bytes([*map(held_part, module.parameters()), *states, ids])
        with AllocationMeter(there) as meter:
            run_window(program, optimizer, [ids], Unobserved(), zero_gradients_early=True)
        peaks.append(meter.peak_allocated_bytes)
    return min(peaks)
