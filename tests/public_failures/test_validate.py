"""Failures of trials that users reported in public: what a trial misses, leaves behind, or takes for success.

``docs/public-failures.md`` has the whole table; reports are cited as ``owner/repo#number``.
Run with ``pytest tests/public_failures/test_validate.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_memfit import proving
from lightning_memfit.errors import NoFeasiblePlanError
from tests.public_failures.network import (
    FEATURES,
    Network,
    is_real,
    loader,
    predicted_peak,
    quiet,
)

pytestmark = pytest.mark.usefixtures("no_probing")

MakeTrainer = Callable[..., Any]


SEEN: list[int] = []
"""Samples of each real training step, outside of the module, so that nothing restores it."""


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


class Limited(Network):
    """Runs out of memory above so many samples, as a device would; a trace, which allocates nothing, does not."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.most = most

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_real(batch[0]):
            SEEN.append(len(batch[0]))
            if len(batch[0]) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("most", [48, 24])
def test_a_first_size_that_does_not_fit_leads_to_a_smaller_one(most: int, make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#3103, Lightning-AI/pytorch-lightning#11299."""
    plugin = quiet(budget=predicted_peak(Network()))
    trainer = make_trainer(plugin)
    trainer.fit(Limited(most), loader())
    assert SEEN[0] == 64, "the first trial fails"
    assert plugin.plan is not None
    assert 1 < plugin.plan.split.micro_batch_size <= most, "the search does not fall back to single samples"
    assert trainer.global_step == 2


def test_sizes_that_were_not_tried_are_named_where_every_trial_fails(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#3103.

    Reported in Lightning-AI/pytorch-lightning#11299.
    """
    plugin = quiet(budget=predicted_peak(Network()))
    with pytest.raises(NoFeasiblePlanError) as caught:
        make_trainer(plugin).fit(Limited(4), loader())  # four samples are compared with two and two
    tried = sorted({size for size in SEEN if size > 4}, reverse=True)
    assert tried[0] == 64 and tried[-1] < 22
    assert str(caught.value).endswith(
        f"\nOne fit runs at most {proving.MAX_ATTEMPTS} warm-ups, so that slices of fewer than {tried[-1]} samples "
        "were not tried: micro_batch_size= begins with them."
    )


class Counters(Callback):
    """What Lightning counts, when training starts and after each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, trainer: Any) -> None:
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress, loop.epoch_progress, loop.epoch_loop.val_loop.batch_progress
        states = [counter.state_dict() for counter in progress]
        self.seen.append((trainer.current_epoch, trainer.global_step, trainer.fit_loop.total_batch_idx, states))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.look(trainer)


def test_progress_counters_are_those_of_a_run_without_trials(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#3260."""
    seen = []
    for plugin in (quiet(micro_batch_size=16), None):
        counters = Counters()
        make_trainer(plugin, max_epochs=2, callbacks=[counters]).fit(Network(), loader(), loader())
        seen.append(counters.seen)
    assert seen[0] == seen[1]
    assert seen[0][0][:2] == (0, 0) and len(seen[0]) == 1 + 4


def test_the_size_handed_over_was_itself_run(make_trainer: MakeTrainer) -> None:
    """Lightning-AI/pytorch-lightning#9625."""
    plugin = quiet(budget=predicted_peak(Network()))
    trials: list[list[int]] = []

    class Starts(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trials.append(list(SEEN))

    make_trainer(plugin, callbacks=[Starts()]).fit(Limited(24), loader())
    assert plugin.plan is not None
    sizes = list(plugin.plan.split.slice_sizes)
    # Two profiled steps and at least a timed one, each a whole window.
    assert trials[0][-3 * len(sizes) :] == 3 * sizes


class CountsSteps(torch.optim.SGD):
    """Counts its steps outside of what is restored."""

    def step(self, closure: Any = None) -> Any:
        if is_real(self.param_groups[0]["params"][0]):
            SEEN.append(0)
        return super().step(closure)


class Counted(Network):
    def configure_optimizers(self) -> Any:
        return CountsSteps(self.parameters(), lr=0.1)


def test_every_trial_really_steps_however_far_the_run_is(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#21903: a limit on all steps of a run must not end the steps of a trial."""
    trainer = make_trainer(max_steps=2, max_epochs=3)
    trainer.fit(Counted(), loader())
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    SEEN.clear()
    plugin = quiet(num_profiled_steps=3)
    trainer = make_trainer(plugin, max_steps=3, max_epochs=3)
    trainer.fit(Counted(), loader(), ckpt_path=tmp_path / "second.ckpt")
    assert plugin.measured is not None and plugin.measured.profiled_steps == 3
    # Three profiled, one to five that are timed, and the one that is left of the run.
    assert 3 + 1 + 1 <= len(SEEN) <= 3 + 5 + 1
    assert trainer.global_step == 3


WATCHED: list[weakref.ref[Tensor]] = []


class Marked(nn.Module):
    """Stands for the activations that live in the frames of a step: a local variable that refers to a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.repeat(1, 2)
        if is_real(x):
            WATCHED.append(weakref.ref(large))
            if len(x) > 24:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.tanh(large[:, :FEATURES])


def test_a_caught_out_of_memory_error_keeps_no_tensor_alive(make_trainer: MakeTrainer) -> None:
    """facebookresearch/ParlAI#2704, pytorch/pytorch#27600, pytorch/pytorch#18853.

    The traceback of the error holds the frames of the step, and these its tensors.
    """
    held: list[int] = []

    class Watching(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_real(batch[0]):
                held.append(sum(one() is not None for one in WATCHED))
                WATCHED.clear()
            return super().training_step(batch, batch_idx)

    WATCHED.clear()
    plugin = quiet(budget=predicted_peak(Network(Marked)))
    gc.disable()  # garbage collection must not be what frees them
    try:
        make_trainer(plugin).fit(Watching(Marked), loader())
    finally:
        gc.enable()
    assert plugin.plan is not None and plugin.plan.passed_over[0].reason == "warm-up: the warm-up ran out of memory"
    assert len(held) > 4 and sum(held) == 0


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if is_real(gradient) and len(gradient) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient


def test_an_out_of_memory_error_in_the_backward_leaves_nothing_to_the_next_trial(make_trainer: MakeTrainer) -> None:
    """pytorch/pytorch#82218."""

    held: list[int] = []

    class FailsInBackward(Network):
        def forward(self, x: Tensor) -> Tensor:
            early = torch.exp(x.requires_grad_() / 10)  # saved for the sine, which the failed backward does not reach
            if is_real(x):
                held.append(sum(one() is not None for one in WATCHED))
                WATCHED[:] = [weakref.ref(early)]
            return super().forward(OutOfMemoryInBackward.apply(early.sin()))

    WATCHED.clear()
    budget = predicted_peak(FailsInBackward())
    retried = quiet(budget=budget)
    gc.disable()
    try:
        make_trainer(retried).fit(FailsInBackward(), loader())
    finally:
        gc.enable()
    assert retried.plan is not None and retried.measured is not None
    assert retried.plan.passed_over[0].reason == "warm-up: the warm-up ran out of memory"
    assert len(held) > 4 and sum(held) == 0
    alone = quiet(budget=budget, micro_batch_size=retried.plan.split.micro_batch_size)
    make_trainer(alone).fit(FailsInBackward(), loader())
    assert alone.measured is not None
    assert retried.measured.measured_peak_allocated_bytes == alone.measured.measured_peak_allocated_bytes


def test_trainer_and_loader_run_what_the_plan_says(make_trainer: MakeTrainer) -> None:
    """huggingface/accelerate#1830, huggingface/transformers#27830: two sources of batch size and accumulation."""
    plugin, found = quiet(effective_batch_size=96), []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found.append((trainer.accumulate_grad_batches, trainer.train_dataloader.batch_size))

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            found.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    make_trainer(plugin, callbacks=[Looks()]).fit(Network(), loader(64, 192))
    assert plugin.plan is not None
    split = plugin.plan.split
    assert (split.accumulate_grad_batches, split.loader_batch_size) == (2, 48) == found[0]
    assert found[1:] == [2, 4], "a step after every second batch"


class GrowsInItsSecondStep(torch.optim.SGD):
    """Makes its states as late as possible, and they are large."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        first = self.param_groups[0]["params"][0]
        state = self.state[first]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 2 and is_real(first):
            state["late"] = torch.zeros(100_000)
        return loss


def test_what_only_a_second_step_allocates_is_measured(make_trainer: MakeTrainer) -> None:
    """NVIDIA/Megatron-LM#640: the first effective batch fits, the second runs out of memory.

    Reported in verl-project/verl#1349.
    """

    class Late(Network):
        def configure_optimizers(self) -> Any:
            return GrowsInItsSecondStep(self.parameters(), lr=0.1)

    budget = predicted_peak(Late()) + 100_000  # of the 400,000 bytes that come late
    with pytest.raises(NoFeasiblePlanError, match=r"\(measured, allocated\)"):
        make_trainer(quiet(budget=budget, micro_batch_size=64)).fit(Late(), loader())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are read from /proc")
def test_loaders_with_workers_that_stay_leave_no_file_open(make_trainer: MakeTrainer) -> None:
    """pytorch/pytorch#91252."""

    def open_files() -> int:
        gc.collect()
        for worker in multiprocessing.active_children():  # torch told it to end, and may not have waited for it
            worker.join(10)
        return len(list(Path("/proc/self/fd").iterdir()))

    def fit() -> None:
        workers = loader(64, num_workers=1, persistent_workers=True)
        make_trainer(quiet(effective_batch_size=32)).fit(Network(), workers)  # rebuilt with batches of 32

    fit()  # once for what the process keeps after its first worker
    before = open_files()
    children = psutil.Process().children()  # such as a server of other tests
    for _ in range(4):
        fit()
    assert open_files() <= before + 2, "a file for each fit would be seen; what others open is let pass"
    assert set(psutil.Process().children()) <= set(children)


def test_what_other_processes_take_or_free_meanwhile_is_not_counted(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-project/vllm#56830, vllm-project/vllm#2248."""
    peaks = []
    for elsewhere in (10**9, -(10**9)):
        available = psutil.virtual_memory().available

        class Neighbour(Callback):
            def __init__(self, now: int) -> None:
                self.now = now

            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                monkeypatch.setattr(psutil, "virtual_memory", lambda: FakeMemory(10**10))

            def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
                monkeypatch.setattr(psutil, "virtual_memory", lambda: FakeMemory(self.now))

        plugin = quiet()
        make_trainer(plugin, callbacks=[Neighbour(available - elsewhere)]).fit(Network(), loader(), loader())
        assert plugin.measured is not None
        peaks.append(plugin.measured.measured_peak_allocated_bytes)
    assert len(set(peaks)) == 1


class FakeMemory:
    def __init__(self, available: int) -> None:
        self.available, self.total = available, 2 * 10**10
