"""Failures of sweeps that users reported in public: jobs that disturb each other, and processes that run a sweep again.

``docs/public-failures.md`` has the whole table; reports are cited as ``owner/repo#number``.
Run with ``pytest tests/public_failures/test_sweep.py``; ``-m slow`` runs what starts most processes.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import pickle
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import default_collate

import lightning_memfit
from lightning_memfit import objective
from lightning_memfit.no_fit import load_no_fit
from tests.forked_programs import ForkedPrograms
from tests.public_failures.network import FEATURES, Network, is_real, loader, predicted_peak, quiet, weights
from tests.sweep.conftest import Application

ROOT = Path(__file__).parents[2]
MakeTrainer = Callable[..., Any]


# Jobs of one process, one after another.


class Roomy(nn.Module):
    """A block with as many weights as the network's own, and many times its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.layer(x).repeat(1, 16)).sin()
        return wide.view(len(x), 16, FEATURES).mean(1)


@pytest.mark.usefixtures("no_probing")
def test_each_job_of_a_sweep_is_planned_for_its_own_model(make_trainer: MakeTrainer) -> None:
    """mlcommons/GaNDLF#725: no batch size that is chosen by hand holds for all jobs of a search."""
    budget = predicted_peak(Network(Roomy), 32)
    slices = []
    for module in (Network(), Network(Roomy), Network()):
        plugin = quiet(budget=budget)
        trainer = make_trainer(plugin)
        trainer.fit(module, loader(64))
        assert plugin.plan is not None and plugin.plan.split.effective_batch_size == 64 and trainer.global_step == 2
        slices.append(plugin.plan.split.num_slices)
    assert slices[0] == slices[2] == 1 and slices[1] >= 2


@pytest.mark.usefixtures("no_probing")
def test_the_peak_of_a_job_behind_a_larger_one_is_its_own(make_trainer: MakeTrainer) -> None:
    """hydra-ecosystem/hydra#2631: peaks of earlier jobs of one process were reported for later ones."""
    peaks = []
    for module in (Network(), Network(Roomy), Network()):
        plugin = quiet()
        make_trainer(plugin).fit(module, loader())
        assert plugin.measured is not None
        peaks.append(plugin.measured.measured_peak_allocated_bytes)
    assert peaks[0] == peaks[2] < peaks[1] / 4


@pytest.mark.usefixtures("no_probing")
@pytest.mark.parametrize("budget", ["1GiB", "1KiB"], ids=["fits", "does not fit"])
def test_nothing_of_a_job_lives_on_in_what_memfit_leaves(budget: str, make_trainer: MakeTrainer) -> None:
    """mit-ll-responsible-ai/hydra-zen#152: sweeps keep what their jobs return until they end."""
    plugin = quiet(budget=budget, on_no_fit="skip")
    trainer, module, data = make_trainer(plugin), Network(), loader()
    trainer.fit(module, data, loader(32))
    returned = objective(trainer, "val_loss")
    watched = [weakref.ref(each) for each in (trainer, module, data, *trainer.optimizers, *module.parameters())]
    del trainer, module, data
    gc.collect()
    assert len(watched) >= 13 and [reference() for reference in watched] == [None] * len(watched)
    assert type(returned) is float and math.isnan(returned) == (plugin.no_fit is not None)
    assert (plugin.plan is None) == (plugin.measured is None) == (plugin.no_fit is not None) == (budget == "1KiB")
    left = pickle.dumps((plugin.plan, plugin.measured, plugin.no_fit))
    assert len(left) < 50_000 and b"torch._utils" not in left, "plain data without tensors"


class Exhausting(Network):
    """Has no room for more than four samples, as a device that is nearly full; a trace allocates nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_real(batch[0]) and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("no_probing")
def test_a_trial_that_runs_out_of_memory_is_a_result_and_later_ones_are_as_alone(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """ray-project/ray#4061: one trial without memory made all later ones fail."""

    def job(module: Network) -> tuple[Any, float]:
        plugin = quiet(budget=budget, on_no_fit="value", no_fit_value=1e9)
        trainer = make_trainer(plugin)
        trainer.fit(module, loader(), loader(32))
        return plugin, objective(trainer, "val_loss")

    budget = predicted_peak(Network())
    alone, behind = Network(), Network()
    plain, expected = job(alone)
    refused, penalty = job(Exhausting())
    assert penalty == 1e9 and refused.plan is None
    assert refused.no_fit is not None and refused.no_fit == load_no_fit(tmp_path / "no_fit.yaml")
    assert refused.no_fit.budget_bytes == budget and "ran out of memory" in refused.no_fit.reason
    found, value = job(behind)
    assert value == expected and found.no_fit is None
    assert found.plan.candidate == plain.plan.candidate
    assert found.measured.measured_peak_allocated_bytes == plain.measured.measured_peak_allocated_bytes
    assert all(torch.equal(one, other) for one, other in zip(weights(alone), weights(behind), strict=True))


class Pruned(Exception):
    """What a search raises in a trial that it gives up."""


class GivesUp(Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        raise Pruned


@pytest.mark.usefixtures("no_probing")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are read from /proc")
def test_many_jobs_with_loader_workers_leave_no_file_open(make_trainer: MakeTrainer) -> None:
    """optuna/optuna#5337: too many open files after some trials, most of them given up early."""

    def job(how: str) -> None:
        plugin = quiet(budget="1KiB" if how == "does not fit" else "1GiB", on_no_fit="skip")
        trainer = make_trainer(plugin, callbacks=[GivesUp()] if how == "pruned" else [])
        try:
            trainer.fit(Network(), loader(num_workers=1, persistent_workers=True))
        except Pruned:
            assert how == "pruned"

    def open_files() -> int:
        gc.collect()
        for worker in multiprocessing.active_children():  # torch told it to end, and may not have waited for it
            worker.join(10)
        return len(list(Path("/proc/self/fd").iterdir()))

    job("trains")  # once for what the process keeps after its first worker
    before, counts = open_files(), []
    children = psutil.Process().children()  # such as a server of other tests
    for how in ("pruned", "does not fit", "trains", "pruned", "pruned"):
        job(how)
        counts.append(open_files())
    assert max(counts) <= before + 2, "five jobs that leave one file each would be seen; what others open is let pass"
    assert set(psutil.Process().children()) <= set(children)


@pytest.mark.usefixtures("no_probing")
@pytest.mark.parametrize(("effective", "size", "largest"), [(None, 16, 16), (1024, 8, 8), (96, 64, 48)])
def test_a_small_model_gets_no_larger_batches_than_its_loader_has(
    effective: int | None, size: int, largest: int, make_trainer: MakeTrainer
) -> None:
    """Lightning-AI/pytorch-lightning#11295: a search for all that fits filled the host with batches of the data."""
    loaded: list[int] = []
    stepped: list[int] = []

    class Seen(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_real(batch[0]):
                stepped.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    def collate(samples: list[Any]) -> Any:
        loaded.append(len(samples))
        return default_collate(samples)

    plugin = quiet(budget="100GiB", effective_batch_size=effective)
    make_trainer(plugin).fit(Seen(), loader(size, collate_fn=collate))
    assert plugin.plan is not None and plugin.plan.split.effective_batch_size == (effective or size)
    # The first batch is looked at as the loader has it; 96 samples are two batches of 48.
    assert max(loaded) == size and max(stepped) == largest <= size


# Processes.


def test_no_process_that_memfit_starts_is_made_of_the_command_line(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lightning-AI/pytorch-lightning#2727: quotes of Hydra's overrides broke where ranks were started with them."""
    words = ["train.py", "-m", "name='a b'", 'note="x, y=[1,2]"', "size=8,16"]
    started: list[list[str]] = []

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, command: Any, **settings: Any) -> None:
            super().__init__(command, **settings)
            started.append(command)

    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    trainer = make_trainer(quiet(cache_dir=tmp_path / "cache"))
    trainer.fit(Network(), loader())
    assert trainer.global_step == 2 and list((tmp_path / "cache").glob("operators-*.json")), "operators were probed"
    worker = Path(lightning_memfit.__file__).parent / "trace" / "op_probe_worker.py"
    assert started == [[sys.executable, str(worker)]]


def test_only_the_command_line_itself_reads_the_command_line() -> None:
    """Lightning-AI/pytorch-lightning#2727.

    Reading it anywhere else would be the first step to starting it again.
    """
    package = Path(lightning_memfit.__file__).parent
    sources = [*package.rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]
    assert len(sources) > 100
    reading = {path.parent.name for path in sources if "sys.argv" in path.read_text(encoding="utf-8")}
    assert reading == {"cli"}


# Several ranks.

SMALL = [
    *("trainer=cpu_short", "trainer.max_steps=1", "trainer.limit_val_batches=1", "memfit.verbose=false"),
    *("data=stdlib_excerpt", "data.max_bytes=100000", "model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *(
        "objective=null",
        "memfit.precision=32-true",
        "memfit.optimizer_implementation=as-configured",
        "memfit.micro_batch_size=8",
    ),
    *("memfit.optimizer_states=as-configured", "memfit.activation_checkpointing=none", "memfit.budget=64MiB"),
]


def processes_of(folder: Path) -> list[str]:
    """Command lines that name a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def test_a_job_of_several_ranks_is_refused_before_any_rank_is_started_and_the_sweep_goes_on(
    forked_programs: ForkedPrograms, programs_cache: Path, tmp_path: Path
) -> None:
    """Lightning-AI/pytorch-lightning#11300: the second job was killed.

    ashleve/lightning-hydra-template#226 and ashleve/lightning-hydra-template#393: it began before the first had ended.
    hydra-ecosystem/hydra#2070: every rank ran the whole sweep, in folders of its own.
    """
    sweep = tmp_path / "sweep"
    words = ["-m", "hydra/sweeper=memfit", "trainer.devices=2,1", f"hydra.sweep.dir={sweep}", *SMALL]
    environment = {"XDG_CACHE_HOME": str(programs_cache)}
    done = forked_programs.run(ROOT / "scripts" / "train.py", *words, folder=tmp_path, environment=environment)
    assert done.returncode != 0
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "completed"], done.stderr[-2000:]
    refusal = "UnsupportedError: This job of a sweep is to train on 2 devices, whose ranks Lightning starts by running"
    assert jobs[0]["reason"].startswith(refusal)
    assert done.stderr.count(refusal) == 1 and "GLOBAL_RANK" not in done.stderr + done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"sweep"}
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}
    assert not list(sweep.rglob("*train_ddp_process*")) and processes_of(tmp_path) == []


OWN = """
import hydra


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    import lightning
    from tests.public_failures.network import Network, loader, quiet
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[quiet(cache_dir=None)],
    )
    trainer.fit(Network(), loader(config.size))
    print("TRAINED", flush=True)


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_jobs_of_several_ranks_in_an_application_of_the_users_own_follow_each_other(tmp_path: Path) -> None:
    """hydra-ecosystem/hydra#2070: the rank that Lightning starts runs the whole sweep, job by job beside the first."""
    application = Application(tmp_path / "application", OWN, "size: 64\n")
    ran = application.sweep("size=64,32")
    assert ran.code == 0, ran.err
    assert ran.out.count("TRAINED") == 4  # two jobs of two ranks
    assert processes_of(application.folder) == []


# Workers of launchers.


@pytest.fixture
def folder(programs_cache: Path, tmp_path: Path) -> Path:
    """A folder whose cache knows how fast this machine is, if another test has measured it, and no operator."""
    (tmp_path / "cache").mkdir()
    for rates in programs_cache.glob("lightning_memfit/rates-*.json"):
        shutil.copy(rates, tmp_path / "cache")
    return tmp_path


def outcomes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    assert list(folder.glob("cache/operators-*.json")), "operators were probed"
    assert found.pop("children") == []
    return found


def test_a_daemonic_process_probes_and_trains_and_torchs_word_on_loader_workers_is_the_last(
    forked_programs: ForkedPrograms, folder: Path
) -> None:
    """hydra-ecosystem/hydra#964: with MemFit such a process does what it does without."""
    done = forked_programs.run(ROOT / "tests" / "public_failures" / "in_a_worker.py", str(folder), folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    found = outcomes(folder)
    assert found["memfit, no workers"] == 2
    assert found["plain"] == "AssertionError: daemonic processes are not allowed to have children"
    assert found["memfit"] == found["memfit, forked"] == found["plain, forked"] == found["plain"]


JOBLIB = """
from pathlib import Path
import hydra


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    from tests.public_failures.in_a_worker import write_outcomes
    write_outcomes(Path(hydra.utils.get_original_cwd()).parent)


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_a_job_of_the_joblib_launcher_trains_with_loader_workers_where_it_would_without_memfit(folder: Path) -> None:
    """hydra-ecosystem/hydra#964: workers of loky start processes in a way of their own."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    application = Application(folder / "application", JOBLIB, "job: 0\n")
    ran = application.sweep("job=0", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert ran.code == 0, ran.err
    found = outcomes(folder)
    assert found["memfit, forked"] == found["plain, forked"] == found["memfit, no workers"] == 2
    assert found["memfit"] == found["plain"], "torch's own error, or none where loky can start them"
