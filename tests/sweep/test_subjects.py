"""What a job trains, by the user's own function; and what makes jobs equal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.job import SweepJob, compose_jobs
from lightning_memfit.sweep.subjects import subject_function, subject_of_job, told_settings
from tests.sweep.conftest import composing

CONFIG = "width: 8\nmemfit: {budget: 1GiB}"


def job_of(tmp_path: Path, config: str = CONFIG, *overrides: str) -> SweepJob:
    with composing(tmp_path / "conf", config) as (sweep_config, loader):
        return compose_jobs(sweep_config, [overrides], loader)[0]


def pair(config: Any) -> Any:
    return nn.Linear(config.width, 2), torch.zeros(6, config.width)


def test_a_function_makes_module_and_batch_of_a_jobs_config(tmp_path: Path) -> None:
    with subject_of_job(job_of(tmp_path, CONFIG, "width=4"), pair, real=False) as subject:
        assert subject.module.in_features == 4 and subject.batch.shape == (6, 4)
        assert subject.settings == {"budget": "1GiB", "effective_batch_size": 6}
        assert subject.words == "width=4" and not subject.on_meta and subject.loss is None


def test_a_job_is_not_left_out_where_a_setting_that_no_forecast_counts_with_may_make_it_fit(tmp_path: Path) -> None:
    with subject_of_job(job_of(tmp_path), pair, real=False) as subject:
        assert subject.may_need_less_by == ()
    free = job_of(
        tmp_path, CONFIG, "+memfit.allow_inexact_slicing=true", "+memfit.max_length=9", "+memfit.offload=auto"
    )
    with subject_of_job(free, pair, real=False) as subject:
        assert subject.may_need_less_by == ("memfit.offload", "memfit.max_length", "memfit.allow_inexact_slicing")


def test_the_jobs_cache_folder_is_that_of_its_forecast(tmp_path: Path) -> None:
    for word, folder in (("null", None), (str(tmp_path / "kept"), tmp_path / "kept")):
        with subject_of_job(job_of(tmp_path, CONFIG, f"+memfit.cache_dir={word}"), pair, real=False) as subject:
            assert subject.settings["cache_dir"] == folder


def test_a_function_that_seeds_leaves_the_random_state_of_the_process(tmp_path: Path) -> None:
    def seeding(config: Any) -> Any:
        torch.manual_seed(3)
        return pair(config)

    before = torch.get_rng_state()
    with subject_of_job(job_of(tmp_path), seeding, real=False):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_more_can_be_told_by_attributes(tmp_path: Path) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        return module(batch).sum()

    def whole(config: Any) -> Any:
        module, batch = pair(config)
        settings = {"effective_batch_size": 12}
        return SimpleNamespace(module=module, batch=batch, loss=loss, optimizer=torch.optim.SGD, settings=settings)

    with subject_of_job(job_of(tmp_path), whole, real=False) as subject:
        assert subject.loss is loss and subject.optimizer is torch.optim.SGD
        assert subject.settings["effective_batch_size"] == 12 and subject.optimizer_steps is None


@pytest.mark.parametrize("made", [None, 3, (1, 2, 3), ("no module", 2)])
def test_something_else_is_refused_with_the_functions_name(tmp_path: Path, made: Any) -> None:
    def wrong(config: Any) -> Any:
        return made

    with (
        pytest.raises(ConfigurationError, match=r"hydra\.sweeper\.subject \(.*wrong\) (raised|gave)"),
        subject_of_job(job_of(tmp_path), wrong, real=False),
    ):
        pass


def test_a_job_that_memfit_is_off_in_is_not_planned(tmp_path: Path) -> None:
    job = job_of(tmp_path, CONFIG, "+memfit.mode='off'")
    with pytest.raises(ConfigurationError, match=r"memfit\.mode='off'"), subject_of_job(job, pair, real=False):
        pass


def test_without_a_function_the_parts_of_the_config_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as raised, subject_of_job(job_of(tmp_path), None, real=False):
        pass
    assert "has no 'model'" in str(raised.value) and "set hydra.sweeper.subject to a function" in str(raised.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [("no.such.module", "cannot be imported"), ("math.pi", "is a float"), ("math.cosine", "cannot be imported")],
)
def test_a_path_that_names_no_function_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        subject_function(path)


def test_a_path_that_names_a_function_is_imported() -> None:
    assert subject_function("math.sqrt") is __import__("math").sqrt
    assert subject_function(None) is None


def test_settings_of_the_model_tell_jobs_apart_but_for_those_that_take_no_memory(tmp_path: Path) -> None:
    def told(*overrides: str, whole: bool = False) -> list[str]:
        config = "seed: 0\nwidth: 8\nmodel: {width: '${width}', dropout: 0.1, learning_rate: 0.1, parts: [{lr: 1}]}"
        return told_settings(job_of(tmp_path, config, *overrides).config, whole=whole)

    assert told() == told("model.learning_rate=0.2", "seed=3", "model.parts=[{lr: 2}]")
    assert told() != told("model.dropout=0.2")
    assert told() != told("width=16")
    assert told(whole=True) != told("width=16", whole=True)
    assert told("seed=1", whole=True) == told("seed=2", whole=True)
