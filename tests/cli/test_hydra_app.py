"""A job under Hydra's own entry point, from within a process: what it changes there is taken back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException

from lightning_memfit.cli.hydra_app import composition_words, run_hydra_app
from lightning_memfit.errors import ConfigurationError

CONFIG = """
defaults:
  - memfit_schema
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none
  - _self_
width: 3
hydra:
  run: {dir: run}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    GlobalHydra.instance().clear()
    return tmp_path / "conf"


def test_the_job_runs_with_its_overrides_and_nothing_stays_behind(folder: Path) -> None:
    argv, environment = list(sys.argv), dict(os.environ)
    seen: list[int] = []
    words = ["width=4"]
    run_hydra_app(lambda config: seen.append(config.width), folder=folder, name="config", words=words, program="memfit")
    assert seen == [4]
    assert (sys.argv, dict(os.environ)) == (argv, environment)


def test_what_the_job_raises_is_raised_and_nothing_stays_behind(folder: Path) -> None:
    def job(config: object) -> None:
        raise KeyError("its own")

    argv, environment = list(sys.argv), dict(os.environ)
    with pytest.raises(KeyError, match="its own"):
        run_hydra_app(job, folder=folder, name="config", words=[], program="memfit")
    assert (sys.argv, dict(os.environ)) == (argv, environment)


def test_an_error_of_hydra_that_the_job_raises_is_none_of_composition(folder: Path) -> None:
    def job(config: object) -> None:
        raise InstantiationException("Error in call to target 'their.Model'")

    with pytest.raises(InstantiationException):
        run_hydra_app(job, folder=folder, name="config", words=[], program="memfit")


@pytest.mark.parametrize(
    ("word", "ending"),
    [
        ("memfit.budgit=1", "Did you mean 'budget'? Choose one of: effective_batch_size, "),
        ("memfit.max_length=long", "Value 'long' of type 'str' could not be converted to Integer"),
        ("widht=4", "Could not override 'widht'"),
        ("width==", "Error parsing override 'width=='"),
    ],
)
def test_a_config_that_cannot_be_composed_is_told_in_words(folder: Path, word: str, ending: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run_hydra_app(lambda config: None, folder=folder, name="config", words=[word], program="memfit")
    assert str(caught.value).startswith("The config conf/config cannot be composed: ")
    assert ending in str(caught.value)
    assert ("Choose one of" in str(caught.value)) is word.startswith("memfit.budgit")


def test_an_unknown_key_of_somebody_elses_schema_gets_no_settings_of_memfit() -> None:
    assert "Choose one of" not in composition_words(ValueError("Key 'budgit' not in 'Theirs'"), "conf/config")
