"""What makes two runs equal, so that one plan does for both: the words behind the key of a kept plan."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

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
    ],
)
def test_plain_attributes_count_by_what_they_may_change(
    before: dict[str, Any], after: dict[str, Any], is_same: bool
) -> None:
    assert (words(Net(**before)) == words(Net(**after))) is is_same


def imported(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_source_of_the_users_classes_counts_also_that_of_a_base(tmp_path: Path) -> None:
    text = """
from torch import nn
class Base(nn.Module):
    def step(self): return 1
class Model(Base):
    pass
"""
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    found = {}
    for folder, source in ((first, text), (second, text), (third, text.replace("return 1", "return 2"))):
        folder.mkdir()
        model = imported(folder / "model.py", source)
        model.Base.__module__ = model.Model.__module__ = "model"
        sys.modules["model"] = model
        found[folder] = words(model.Model())["code"]
        sys.modules.pop("model")
        sys.modules.pop(model.__name__)
    assert found[first] == found[second] != found[third]


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
