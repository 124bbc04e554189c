"""What is alive beside the step itself: the batch that Lightning fetches ahead, and the snapshot of the warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_memfit import MemFit
from lightning_memfit.real_steps import _spare_bytes
from lightning_memfit.validate.warmup import _place

pytestmark = pytest.mark.usefixtures("no_probing")

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(32, 16))


class Linear(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# A batch is (8, 16) float32 = 512 bytes.
@pytest.mark.parametrize(("data", "inputs"), [(torch.zeros(32, 16), 512), (Stream(), 1024)], ids=["sized", "stream"])
def test_a_batch_that_is_fetched_ahead_is_in_the_forecast(
    data: Any, inputs: int, make_trainer: Callable[..., Any]
) -> None:
    plugin = MemFit(verbose=False, **AS_IT_IS)
    make_trainer(plugin, max_steps=1).fit(Linear(), DataLoader(data, batch_size=8))
    assert plugin.plan is not None
    assert plugin.plan.forecast.memory.by_category["inputs"] == inputs


def test_the_snapshot_is_in_memory_only_where_twice_its_size_is_spare() -> None:
    weights = torch.zeros(250)  # 1000 bytes
    assert _place("auto", 2000, [weights]) == "memory"
    assert _place("auto", 1999, [weights]) == "disk"


def test_what_is_spare_is_what_the_process_could_hold_less_the_peak() -> None:
    budget: Any = SimpleNamespace(capacity_bytes=1000, non_torch_bytes=300)
    forecast: Any = SimpleNamespace(predicted_peak_bytes=450)
    host: Any = SimpleNamespace(kind="cpu")
    assert _spare_bytes(host, budget, forecast) == 250  # 1000 - 300 - 450


def test_beside_a_gpu_everything_that_the_host_has_is_spare() -> None:
    gpu: Any = SimpleNamespace(kind="cuda")
    budget: Any = SimpleNamespace(capacity_bytes=1000, non_torch_bytes=300)
    assert _spare_bytes(gpu, budget, SimpleNamespace(predicted_peak_bytes=450)) > 2**20  # type: ignore[arg-type]
