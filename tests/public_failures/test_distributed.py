"""Failures over several devices that users reported in public: what the forecasts and plans of several devices answer.

``docs/public-failures.md`` has the whole table; reports are cited as ``owner/repo#number``.
Run with ``pytest tests/public_failures/test_distributed.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memfit import ConfigurationError, Sharding, forecast, make_plan
from lightning_memfit.plan import MemoryBreakdown, Plan

WIDTH = 1024


class Tied(nn.Module):
    """An embedding that is the output layer too, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(ids)))


def squared(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def layers(*, rows: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, rows), nn.GELU(), nn.Linear(rows, WIDTH))


def needs(module: nn.Module, batch: Tensor, sharding: Sharding | None) -> MemoryBreakdown:
    return forecast(
        module, batch, loss=squared, optimizer=torch.optim.AdamW, device="a100-40gb", sharding=sharding,
    )  # fmt: skip


def planned(num_devices: int, effective_batch_size: int, **settings: Any) -> Plan:
    settings.setdefault("optimizer", torch.optim.AdamW)
    return make_plan(
        layers(), torch.zeros(4, WIDTH), effective_batch_size=effective_batch_size, loss=squared,
        device="a100-40gb", num_devices=num_devices, **settings,
    )  # fmt: skip


def test_the_batch_of_all_devices_is_asked_for_and_that_of_each_follows() -> None:
    """Lightning-AI/pytorch-lightning#3953: a total batch is given, batch per process and accumulation are derived."""
    split = planned(3, 36).split
    assert split.effective_batch_size == 36 == split.ranks * split.accumulate_grad_batches * split.loader_batch_size
    assert (split.ranks, split.accumulate_grad_batches, split.loader_batch_size) == (3, 3, 4)
    with pytest.raises(ConfigurationError, match=r"40 is not a multiple of 12 samples: .* Nearest: 36 and 48\."):
        planned(3, 40)


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_stage_2"])
def test_8_bit_states_are_refused_where_parameters_are_divided(strategy: str) -> None:
    """bitsandbytes-foundation/bitsandbytes#89, huggingface/accelerate#1902: they fail there, or become others."""
    with pytest.raises(ConfigurationError, match=rf"optimizer_states='8bit' cannot be had with strategy='{strategy}'"):
        planned(2, 8, strategy=strategy, optimizer_states="8bit")


def test_8_bit_states_are_planned_over_whole_parameters_alone() -> None:
    """bitsandbytes-foundation/bitsandbytes#2080: over shards it would hang on the wrapping which states have 8 bits."""
    plan = planned(2, 8, optimizer_states="8bit")
    assert plan.candidate.sharding is not None and plan.candidate.sharding.engine == "ddp"


def test_an_optimizer_that_looks_at_matrices_is_not_given_flat_tensors() -> None:
    """jiaweizzhao/GaLore#2: special optimizers break over the flattened parameters of DeepSpeed."""

    def adafactor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)

    plan = planned(2, 8, optimizer=adafactor)
    assert any("Adafactor factors the second moments of matrices, and under ZeRO" in note for note in plan.notes)
    with pytest.raises(ConfigurationError, match="strategy='deepspeed_stage_1' cannot be had: Adafactor factors"):
        planned(2, 8, optimizer=adafactor, strategy="deepspeed_stage_1")


def test_the_forecast_of_ddp_has_its_buckets() -> None:
    """ludwig-ai/ludwig#2934: what was found on one device lacked the buffers of the exchange, and the run died."""
    module, batch = layers(), torch.zeros(8, WIDTH)
    alone, ranked = needs(module, batch, None), needs(module, batch, Sharding(engine="ddp", ranks=2))
    parameters = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
    assert ranked.peak_allocated_bytes - alone.peak_allocated_bytes == parameters


def test_the_rank_that_holds_most_is_forecast() -> None:
    """vllm-project/vllm#14011: the first of the ranks needs more than the others."""
    # 1025 rows over 2 ranks: 513 and 512; the second layer's 1024 rows are divided evenly.
    memory = needs(layers(rows=1025), torch.zeros(8, WIDTH), Sharding(engine="fsdp2", ranks=2, shard_groups=("",)))
    shard = 4 * (513 * WIDTH + 513 + 512 * 1025 + 512)
    assert 2 * shard <= memory.by_category["optimizer_states"] < 2 * shard + 4096  # and step counters, rounded


def test_tied_parameters_are_divided_once() -> None:
    """huggingface/accelerate#4171: FSDP2 failed on an embedding that is the output layer too."""
    memory = needs(Tied(), torch.zeros(4, 8, dtype=torch.long), Sharding(engine="fsdp2", ranks=2, shard_groups=("",)))
    shard = 4 * (256 * WIDTH + 512 * WIDTH + 512)
    assert 2 * shard <= memory.by_category["optimizer_states"] < 2 * shard + 4096
