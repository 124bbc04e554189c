"""What is taken over from Hydra's own sweeper and launcher; fails where Hydra moves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memfit.sweep.basic_hydra import runs_one_by_one, sweep_overrides
from tests.sweep.conftest import composing


def test_the_private_names_are_where_they_were() -> None:
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    assert callable(BasicSweeper.split_arguments)
    assert runs_one_by_one(BasicLauncher()) and not runs_one_by_one(object())


def test_the_grammar_and_the_order_are_those_of_hydras_own_sweeper(tmp_path: Path) -> None:
    with composing(tmp_path / "conf", "a: 1\nb: 2\nc: 3") as (_, loader):
        jobs = sweep_overrides(["a=1,2", "b=range(3)", "c=x", "c=[1,2]"], loader)
    # The last override varies fastest; of two for one key the later one counts.
    assert jobs[:4] == [
        ("a=1", "b=0", "c=[1,2]"),
        ("a=1", "b=1", "c=[1,2]"),
        ("a=1", "b=2", "c=[1,2]"),
        ("a=2", "b=0", "c=[1,2]"),
    ]
    assert len(jobs) == 6


def test_what_has_no_values_to_go_through_is_refused_as_there(tmp_path: Path) -> None:
    from hydra.errors import HydraException

    with composing(tmp_path / "conf", "a: 1") as (_, loader), pytest.raises(HydraException, match="INTERVAL"):
        sweep_overrides(["a=interval(0,1)"], loader)
