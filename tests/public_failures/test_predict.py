"""Failures of predictions that users reported in public: wrong sums, wrong device numbers, a profile of something else.

``docs/public-failures.md`` has the whole table; reports are cited as ``owner/repo#number``.
Run with ``pytest tests/public_failures/test_predict.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_memfit
from lightning_memfit import forecast
from lightning_memfit.plan import MemoryBreakdown
from tests.public_failures.network import Network, is_real, loader, quiet, samples

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]


def test_the_breakdown_shows_what_an_optimizer_adds() -> None:
    """keras-team/keras-hub#1628: why AdamW does not fit where SGD does.

    Reported in MIC-DKFZ/nnUNet#173, MIC-DKFZ/nnUNet#1152.
    """
    layer, batch = nn.Linear(512, 256), torch.zeros(8, 512)
    parameters = 512 * 256 + 256

    def breakdown(optimizer: Callable[[Any], Any]) -> MemoryBreakdown:
        return forecast(
            layer, batch, loss=lambda module, x: module(x).sum(), optimizer=optimizer, probe_operators=False
        )

    plain, momentum, adam = (
        breakdown(make)
        for make in (
            lambda each: torch.optim.SGD(each, lr=0.1),
            lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
            lambda each: torch.optim.AdamW(each),
        )
    )
    # One moment of 4 bytes; two moments, and a step counter of 4 bytes for each of the two tensors.
    states = [memory.by_category.get("optimizer_states", 0) for memory in (plain, momentum, adam)]
    assert states == [0, 4 * parameters, 8 * parameters + 2 * 4]
    for memory in (plain, momentum, adam):
        assert memory.by_category["parameters"] == memory.by_category["gradients"] == 4 * parameters
        assert sum(memory.by_category.values()) == memory.peak_allocated_bytes


def test_models_larger_than_any_machine_have_exact_positive_sums() -> None:
    """MIC-DKFZ/nnUNet#23: an overflow of 32-bit numbers made the estimate negative."""
    features = 2**21
    with torch.device("meta"):
        layer, x = nn.Linear(features, features, bias=False), torch.zeros(16, features)
    memory = forecast(
        layer,
        x,
        loss=lambda module, each: module(each).sum(),
        optimizer=lambda each: torch.optim.AdamW(each, foreach=False),
        probe_operators=False,
    )
    # 2^42 parameters: 16 TiB of weights, as much of gradients, twice as much of moments.
    assert memory.num_parameters == 2**42
    assert memory.by_category["parameters"] == memory.by_category["gradients"] == 2**44
    assert memory.by_category["optimizer_states"] == 2**45 + 4
    assert memory.peak_allocated_bytes >= 2**46


def test_no_forecast_needs_private_tools_of_torch_distributed() -> None:
    """pytorch/pytorch#140410."""
    root = Path(lightning_memfit.__file__).parent
    private = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "torch.distributed._tools" in path.read_text(encoding="utf-8")
    }
    # One adapter, for exchanges with other ranks within a step that is followed; no estimator of memory is used.
    assert private == {"trace/fake_collectives.py"}


SEEN: list[tuple[Any, ...]] = []
"""What each real step ran with, outside of the module, so that nothing restores it."""


class Looks(Network):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.drop(self.blocks[0](batch[0]))
        if is_real(out):
            modes = self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
            SEEN.append((*modes, out.dtype, torch.equal(batch[0], samples(64)[:][0])))
        return super().training_step(batch, batch_idx)


def test_the_proof_runs_the_step_that_training_runs(make_trainer: MakeTrainer) -> None:
    """vllm-project/vllm-ascend#674: a profile run on stand-ins skipped the real path."""
    SEEN.clear()
    plugin = quiet(precision="bf16-mixed")
    make_trainer(plugin).fit(Looks(), loader(64, 64))
    assert plugin.measured is not None and plugin.measured.profiled_steps == 2
    assert len(SEEN) >= 4, "two profiled steps, one that is timed, one of training"
    assert [(True, True, True, torch.bfloat16, True)] * len(SEEN) == SEEN


class Sentences(Dataset[Any]):
    """Samples of very different length; the longest come late, and not together."""

    lengths = [3, 4, 5, 3] * 8 + [30, 3, 3, 41]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.lengths[index], 64), 0.01 * index)


def padded(sentences: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


class Reads(Network):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


def test_a_long_tail_of_lengths_is_planned_by_its_longest_batch(make_trainer: MakeTrainer) -> None:
    """lhotse-speech/lhotse#943, OpenNMT/OpenNMT-tf#296, NVIDIA-NeMo/Speech#15847."""
    plugin, longest = quiet(), quiet(worst_batch=lambda: torch.zeros(4, 41, 64))
    for each in (plugin, longest):
        make_trainer(each).fit(Reads(), DataLoader(Sentences(), 4, collate_fn=padded))
    assert plugin.plan is not None and plugin.measured is not None and longest.measured is not None
    assert plugin.plan.planned_batch is not None and "(4, 41, 64)" in plugin.plan.planned_batch
    assert plugin.measured.measured_peak_allocated_bytes == longest.measured.measured_peak_allocated_bytes


def test_bytes_per_sample_are_never_carried_beyond_the_sizes_without_a_trial(make_trainer: MakeTrainer) -> None:
    """ultralytics/ultralytics#1451: memory that grows faster than samples was extrapolated from small batches."""

    class Quadratic(Network):
        """Compares every sample with every other, so that nothing is a straight line; its values cannot be traced."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0][batch[0][:, 0] > -100]
            distances = (x[:, None, :] - x[None, :, :]).square().mean()
            return super().training_step((x, batch[1]), batch_idx) + 0 * distances

    plugin = quiet()
    make_trainer(plugin).fit(Quadratic(), loader(64, 64))
    assert plugin.plan is not None and plugin.measured is not None
    assert plugin.plan.forecast.method == "extrapolated"
    assert any("real steps of 2 and 4 samples" in note for note in plugin.plan.notes)
    # 64 x 64 x 64 differences of 4 bytes are 1 MiB, which two and four samples do not show.
    assert plugin.plan.forecast.memory.peak_allocated_bytes < 2**20 < plugin.measured.measured_peak_allocated_bytes
    assert plugin.plan.forecast.predicted_peak_bytes == plugin.measured.measured_peak_allocated_bytes
    below = plugin.measured.measured_peak_allocated_bytes - 1
    smaller = quiet(budget=below)
    make_trainer(smaller).fit(Quadratic(), loader(64, 64))
    assert smaller.plan is not None and smaller.measured is not None
    assert smaller.plan.passed_over[0].reason.endswith(" over the budget")
    assert smaller.measured.measured_peak_allocated_bytes <= below
