"""Jobs as they are composed: numbers, folders, and what tells their configs apart."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.basic_hydra import sweep_overrides
from lightning_memfit.sweep.config_digest import digest_of
from lightning_memfit.sweep.job import compose_jobs, varying_overrides
from tests.sweep.conftest import composing
from tests.sweep.rowmaking import job

CONFIG = "a: 1\nb: ${a}\nfolder: ${hydra:runtime.output_dir}\nhydra: {sweep: {dir: swept}}"


def test_numbers_and_folders_are_those_of_the_sweeps_order(tmp_path: Path) -> None:
    with composing(tmp_path / "conf", CONFIG, "hydra.sweep.subdir=x_${a}_${hydra.job.num}") as (config, loader):
        jobs = compose_jobs(config, [("a=5",), ("a=6", "hydra.verbose=true")], loader)
    assert [(job.number, job.subdir) for job in jobs] == [(0, "x_5_0"), (1, "x_6_1")]
    assert jobs[1].words == "a=6"
    assert jobs[1].config.hydra.job.num == 1


def test_a_config_is_told_by_its_values_and_not_by_where_it_runs(tmp_path: Path) -> None:
    with composing(tmp_path / "conf", CONFIG) as (config, loader):
        first, second, other = compose_jobs(config, [("a=1",), ("a=1", "hydra.verbose=true"), ("a=2",)], loader)
    assert first.config_digest == second.config_digest != other.config_digest
    assert len(first.config_digest) == 16


def test_an_object_that_yaml_cannot_tell_is_not_told_by_where_it_lies_in_memory() -> None:
    from omegaconf import OmegaConf

    def with_an_object() -> object:
        return OmegaConf.create({"a": threading.Lock()}, flags={"allow_objects": True})

    kept = [with_an_object(), with_an_object()]  # both alive: their addresses differ
    assert digest_of(kept[0]) == digest_of(kept[1])


@pytest.mark.parametrize(
    ("memfit", "value"),
    [
        ("{on_no_fit: value, no_fit_value: 9}", 9.0),
        ("{on_no_fit: skip}", None),
        ("{on_no_fit: value, no_fit_value: high}", None),  # refused elsewhere
        ("{on_no_fit: value, no_fit_value: '${oc.env:ONLY_WHERE_THE_JOB_RUNS}'}", None),
        ("true", None),
    ],
)
def test_what_stands_for_the_objective_where_none_fits_is_read_from_the_config(
    tmp_path: Path, memfit: str, value: float | None
) -> None:
    with composing(tmp_path / "conf", f"{CONFIG}\nmemfit: {memfit}") as (config, loader):
        (only,) = compose_jobs(config, [("a=1",)], loader)
    assert only.no_fit_value == value


def test_jobs_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    with (
        composing(tmp_path / "conf", CONFIG, "hydra.sweep.subdir=same") as (config, loader),
        pytest.raises(ConfigurationError) as raised,
    ):
        compose_jobs(config, [("a=1",), ("a=2",)], loader)
    assert "gives 2 of 2 jobs the folder 'same'" in str(raised.value)
    assert "${hydra.job.override_dirname}" in str(raised.value)


def test_overrides_without_a_value_give_no_sweep(tmp_path: Path) -> None:
    with composing(tmp_path / "conf", CONFIG) as (config, loader):
        nothing = sweep_overrides(["a=range(0,0)"], loader)
        with pytest.raises(ConfigurationError, match=r"give no job: one of them has no value, such as range\(0,0\)"):
            compose_jobs(config, nothing, loader)


def test_a_job_that_cannot_be_composed_ends_the_sweep_before_it_begins(tmp_path: Path) -> None:
    from hydra.errors import HydraException

    with composing(tmp_path / "conf", CONFIG) as (config, loader), pytest.raises(HydraException, match="'c'"):
        compose_jobs(config, [("a=1",), ("c=1",)], loader)


@pytest.mark.parametrize(
    ("overrides", "short"),
    [
        ([("model.width=1", "seed=0"), ("model.width=2", "seed=0")], ["width=1", "width=2"]),
        # The last words of two keys are the same: they are told whole.
        ([("a.size=1", "b.size=2"), ("a.size=3", "b.size=4")], ["a.size=1 b.size=2", "a.size=3 b.size=4"]),
        ([("a=1", "hydra.verbose=true")], ["a=1"]),
        ([("a=1",), ("a=1",)], ["", ""]),
    ],
)
def test_a_table_tells_what_differs(overrides: list[tuple[str, ...]], short: list[str]) -> None:
    found = varying_overrides([job(number, *each) for number, each in enumerate(overrides)])
    assert list(found.values()) == short
