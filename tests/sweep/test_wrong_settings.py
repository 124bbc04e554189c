"""Settings that MemFit refuses wherever a job runs are told before any launch; what is not known here is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.job import SweepJob, compose_jobs
from lightning_memfit.sweep.wrong_settings import batch_is_as_it_will_be, refuse_wrong_settings
from tests.sweep.conftest import composing

CONFIG = "lr: 1\nmemfit: {budget: 64MiB, micro_batch_size: auto}\nmore: {}"


def composed(tmp_path: Path, config: str, *overrides: str) -> list[SweepJob]:
    with composing(tmp_path / "conf", config) as (sweep, loader):
        return compose_jobs(sweep, [(each,) for each in overrides], loader)


def refused(jobs: list[SweepJob]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        refuse_wrong_settings(jobs)
    return str(raised.value)


def test_every_job_with_a_setting_that_cannot_be_used_is_named_with_the_choices(tmp_path: Path) -> None:
    overrides = ("memfit.budget=lots", "memfit.micro_batch_size=0", "lr=2", "+memfit.precision=17")
    first, *lines = refused(composed(tmp_path, CONFIG, *overrides)).splitlines()
    assert first == "No job is launched: 3 of 4 have settings that MemFit cannot use."
    assert lines[0].startswith("  - job 0 (memfit.budget=lots): memfit.budget='lots'")
    assert lines[1].startswith("  - job 1 (memfit.micro_batch_size=0): memfit.micro_batch_size=0")
    assert lines[2].startswith("  - job 3 (+memfit.precision=17): memfit.precision=17") and "bf16-mixed" in lines[2]


def test_a_mistake_that_all_jobs_share_is_told_once_and_in_the_last_line(tmp_path: Path) -> None:
    jobs = composed(tmp_path, CONFIG.replace("64MiB", "lots"), *(f"lr={number}" for number in range(7)))
    words = refused(jobs)
    assert "7 of 7 have settings that MemFit cannot use. jobs 0 (lr=0), 1 (lr=1), " in words
    assert "4 (lr=4) and 2 more: memfit.budget='lots'" in words and "\n" not in words


@pytest.mark.parametrize(
    "memfit",
    [
        "memfit: {_target_: my.Own, budget: lots}",
        "memfit: true",
        "memfit: {budget: '${oc.env:ONLY_WHERE_THE_JOB_RUNS}'}",
        "memfit: null",
        "other: 1",
    ],
)
def test_what_is_no_group_of_settings_that_is_known_here_is_left_to_the_job(tmp_path: Path, memfit: str) -> None:
    refuse_wrong_settings(composed(tmp_path, f"lr: 1\n{memfit}", "lr=1", "lr=2"))


@pytest.mark.parametrize(
    ("trainer", "memfit", "is_sure"),
    [
        ({}, {}, True),
        ({"devices": 1, "accumulate_grad_batches": 4}, {}, True),
        # Four samples for each of several devices may be what is asked for.
        ({"accumulate_grad_batches": 4}, {}, False),
        ({"devices": 2}, {}, False),
        ({"devices": 1, "num_nodes": 2}, {}, False),
        ({"devices": 1}, {"allow_inexact_slicing": True}, False),
    ],
)
def test_a_batch_is_known_for_one_device_that_slices_exactly(
    trainer: dict[str, Any], memfit: dict[str, Any], is_sure: bool
) -> None:
    assert batch_is_as_it_will_be(OmegaConf.create({"trainer": trainer, "memfit": memfit})) is is_sure
