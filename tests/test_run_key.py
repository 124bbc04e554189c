"""What makes two runs equal, so that one plan does for both: the words behind the key of a kept plan."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit import run_key
from lightning_memfit.plan import PlanRequest
from lightning_memfit.run_key import corrections_key, plan_key, run_words

FINGERPRINT = {"model": "Net", "torch": "2.13.0"}


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self).update(attributes)


def words(module: nn.Module | None = None, *beside: object) -> dict[str, str]:
    return run_words(FINGERPRINT, module or Net(), beside=beside)


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ({"repeats": 2}, {"repeats": 3}, False),
        ({"mixes": True}, {"mixes": False}, False),
        ({"kind": "a"}, {"kind": "b"}, False),
        ({"sizes": [1, 2]}, {"sizes": [1, 3]}, False),
        ({"rate": 0.1}, {"rate": 0.2}, True),
        ({"dropout": 0.0}, {"dropout": 0.1}, False),
        ({"training": True}, {"training": False}, True),
        ({"log": object()}, {"log": object()}, True),
        ({"cfg": SimpleNamespace(rank=8)}, {"cfg": SimpleNamespace(rank=1)}, False),
        ({"cfg": SimpleNamespace(lr=1, seed=3)}, {"cfg": SimpleNamespace(lr=2, seed=4)}, True),
        ({"cfg": {"deep": [{"rank": 8}]}}, {"cfg": {"deep": [{"rank": 1}]}}, False),
        ({"max_steps": 4}, {"max_steps": 5}, True),
        ({"_seen": 4}, {"_seen": 5}, True),
    ],
)
def test_plain_attributes_count_by_what_they_may_change(
    before: dict[str, Any], after: dict[str, Any], is_same: bool
) -> None:
    assert (words(Net(**before)) == words(Net(**after))) is is_same


HELPER = "RANK = 8\ndef step(): return RANK\n"
MODEL = """
from torch import nn
from helper_of_a_user import step
class Base(nn.Module):
    def training_step(self): return step()
class Model(Base):
    pass
"""


def code_of(folder: Path, model: str, helper: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest of a user's code in two files."""
    folder.mkdir()
    for name, text in (("model_of_a_user", model), ("helper_of_a_user", helper)):
        (folder / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        found = words(importlib.import_module("model_of_a_user").Model())["code"]
    for name in ("model_of_a_user", "helper_of_a_user"):
        sys.modules.pop(name)
    return found


def test_the_files_of_the_users_classes_count_with_those_that_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = code_of(tmp_path / "a", MODEL, HELPER, monkeypatch)
    assert code_of(tmp_path / "b", MODEL, HELPER, monkeypatch) == first, "wherever they are"
    assert code_of(tmp_path / "c", MODEL.replace("return step()", "return 2 * step()"), HELPER, monkeypatch) != first
    assert code_of(tmp_path / "d", MODEL, HELPER.replace("RANK = 8", "RANK = 1"), monkeypatch) != first


def test_a_module_that_keeps_its_data_is_told_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_key, "_MOST_ATTRIBUTES", 10)
    kept = list(range(1000))
    assert words(Net(data=kept)) == words(Net(data=[*kept[:-1], 0])), "the end of it is not looked at"


def test_callbacks_and_functions_beside_the_model_count() -> None:
    def weight(batch: object) -> int:
        return 1

    def other(batch: object) -> int:
        return 2

    assert words(None, weight) != words(None, other)
    assert words(None, nn.Identity()) != words()
    assert words(None, weight, other) == words(None, other, weight)


def test_the_request_is_part_of_a_plans_key_and_not_of_what_corrects_forecasts() -> None:
    found = words()
    plain, pinned = PlanRequest(), PlanRequest(precision="32-true")
    assert plan_key(found, plain) != plan_key(found, pinned)
    assert plan_key(found, plain) == plan_key(found, PlanRequest(mode="report", on_no_fit="skip", num_profiled_steps=3))
    assert plan_key(found, PlanRequest(budget=10)) != plan_key(found, PlanRequest(budget=11))
    assert corrections_key(found) == corrections_key(dict(found))
    assert corrections_key({**found, "torch": "2.12.0"}) != corrections_key(found)


def test_two_models_of_the_same_kind_are_the_same_run() -> None:
    assert words(Net(), nn.Identity()) == words(Net(), nn.Identity())


def test_what_decides_an_allocator_or_an_operator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = words()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert words() != before
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert words() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert words() != before
