"""What makes two runs equal, so that one plan does for both: the words behind the key of a kept plan."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memfit import run_key, users_code
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
        ({"mask_rate": 0.1}, {"mask_rate": 0.2}, False),
        ({"learning_rate": 0.1}, {"learning_rate": 0.2}, True),
        ({"training": True}, {"training": False}, False),
        ({"hparams": {"repeats": 1}}, {"hparams": {"repeats": 2}}, False),
        ({"hparams": {"lr": 0.1, "seed": 1}}, {"hparams": {"lr": 0.2, "seed": 2}}, True),
        ({"config": SimpleNamespace(attention="eager")}, {"config": SimpleNamespace(attention="sdpa")}, False),
        ({"blocks": [{"kind": "a"}]}, {"blocks": [{"kind": "b"}]}, False),
        ({"activation": functional.gelu}, {"activation": functional.relu}, False),
        ({"act": partial(functional.gelu, approximate="tanh")}, {"act": partial(functional.gelu)}, False),
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
from torch.nn import functional
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


def test_of_torchs_own_modules_a_rate_counts_by_whether_it_is_0() -> None:
    def dropping(rate: float) -> dict[str, str]:
        return words(nn.Sequential(nn.Dropout(rate)))

    assert dropping(0.1) == dropping(0.2) != dropping(0.0)


def test_the_hyperparameters_and_the_config_of_a_model_count() -> None:
    class Saved(lightning.LightningModule):
        def __init__(self, repeats: int, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert words(Saved(1)) == words(Saved(1, lr=0.2)) != words(Saved(2))
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    found = [
        words(transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, vocab_size=8, attn_implementation=kind)))
        for kind in ("eager", "eager", "sdpa")
    ]
    assert found[0] == found[1] != found[2]


def test_what_a_class_was_compiled_to_counts_where_it_has_no_source() -> None:
    def typed_in(step: str) -> dict[str, str]:
        names: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
        exec(f"class Typed(nn.Module):\n    def step(self, x):\n        return {step}", names)
        return words(names["Typed"]())

    assert typed_in("x.exp()") == typed_in("x.exp()") != typed_in("x.sin()")
    assert typed_in("x in {1, 2}") != typed_in("x in {1, 3}")


def test_another_version_of_a_library_makes_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for text in ("return 1", "return 2"):
        folder = tmp_path / text.replace(" ", "_")
        folder.mkdir()
        monkeypatch.setattr(users_code, "_LIBRARIES", (folder.resolve(),))
        source = f"from torch import nn\nclass Layer(nn.Module):\n    def step(self): {text}\n"
        library = imported(folder / "library.py", source)
        monkeypatch.setattr(library.Layer, "__module__", "library")
        monkeypatch.setitem(sys.modules, "library", library)
        found.append(words(library.Layer()))
    assert found[0] != found[1]


def test_a_partial_application_counts_by_its_function() -> None:
    def weight(batch: object, factor: int) -> int:
        return factor

    def other(batch: object, factor: int) -> int:
        return -factor

    assert words(None, partial(weight, factor=1)) != words(None, partial(other, factor=1))


def test_what_decides_an_allocator_or_an_operator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = words()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert words() != before
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert words() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert words() != before


class Settings:
    """A user's own way to hold settings."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_objects_of_the_users_own_count_by_what_they_hold() -> None:
    assert words(Net(cfg=Settings(8))) == words(Net(cfg=Settings(8)))
    assert words(Net(cfg=Settings(8))) != words(Net(cfg=Settings(1)))


def test_a_module_that_keeps_its_data_is_told_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_key, "_MOST_ATTRIBUTES", 10)
    assert words(Net(data=[{"x": n} for n in range(99)])) == words(Net(data=[{"x": n} for n in range(100)]))
