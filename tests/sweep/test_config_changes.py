"""What changed in a job's config since it ran: the keys, with both values."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sweep.config_changes import changes_words
from lightning_memfit.sweep.job import SweepJob
from lightning_memfit.sweep.job_end import write_job_end
from lightning_memfit.sweep.sweep_file import completed_before
from tests.sweep.rowmaking import end, job

NOW = {"a": 1, "model": {"width": 16, "kind": "${a}"}, "added": [1], "hydra": {"output_subdir": ".hydra"}}


def ran_with(folder: Path, text: str) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(text)
    return folder


def test_keys_that_differ_are_told_with_both_values_as_they_are_written(tmp_path: Path) -> None:
    folder = ran_with(tmp_path, "a: 1\nmodel: {width: 8, kind: '${a}'}\nlost: 2")
    words = changes_words(OmegaConf.create(NOW), folder)
    assert words == "model.width was 8 and is 16, lost is gone, added is new"


def test_of_many_keys_the_first_are_told(tmp_path: Path) -> None:
    folder = ran_with(tmp_path, "{b: 1, c: 1, d: 1, e: 1, a: 1, model: {width: 16, kind: '${a}'}, added: [1]}")
    assert changes_words(OmegaConf.create(NOW), folder) == "b is gone, c is gone, d is gone and 1 more"


@pytest.mark.parametrize("text", ["[", "- 1"])
def test_where_nothing_can_be_compared_nothing_is_told(tmp_path: Path, text: str) -> None:
    assert changes_words(OmegaConf.create(NOW), ran_with(tmp_path / "0", text)) == ""
    assert changes_words(OmegaConf.create(NOW), tmp_path / "nowhere") == ""
    assert changes_words(None, tmp_path) == ""


def test_the_refusal_of_a_changed_config_says_what_changed(tmp_path: Path) -> None:
    ran_with(tmp_path / "0", "a: 1\nmodel: {width: 8, kind: '${a}'}\nadded: [1]")
    write_job_end(tmp_path / "0", end(job(0, "a=1", config_digest="changed")))
    now = SweepJob(number=0, overrides=("a=1",), subdir="0", config_digest="d", config=OmegaConf.create(NOW))
    with pytest.raises(ConfigurationError, match=r"Of job 0, model.width was 8 and is 16\. Running them"):
        completed_before(tmp_path, [now])
