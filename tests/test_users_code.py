"""The files of a user's code are followed from one to the next, and libraries are not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memfit import users_code
from lightning_memfit.users_code import file_of, is_of_a_library, used_files

HELPER = "RANK = 8\ndef step(): return RANK\n"
MODEL = """
import torch
from helper_of_a_user import step
class Model(torch.nn.Module):
    def training_step(self): return step()
"""


def files(folder: Path, model: str, helper: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is found of a user's code in two files."""
    folder.mkdir()
    for name, text in (("model_of_a_user", model), ("helper_of_a_user", helper)):
        (folder / f"{name}.py").write_text(text)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        found = sorted(used_files([importlib.import_module("model_of_a_user").Model]))
    for name in ("model_of_a_user", "helper_of_a_user"):
        sys.modules.pop(name)
    return found


def test_a_file_counts_with_those_that_it_uses_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = files(tmp_path / "a", MODEL, HELPER, monkeypatch)
    assert first == [f"helper_of_a_user.py {HELPER}", f"model_of_a_user.py {MODEL}"], "and torch does not"
    assert files(tmp_path / "b", MODEL, HELPER, monkeypatch) == first
    assert files(tmp_path / "c", MODEL, HELPER.replace("8", "1"), monkeypatch) != first


def test_each_module_is_asked_for_its_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of names lead to a few modules, at every fit."""
    asked: list[Any] = []

    def counted(definition: Any) -> Path | None:
        asked.append(definition)
        return file_of(definition)

    monkeypatch.setattr(users_code, "file_of", counted)
    files(tmp_path / "a", f"{MODEL}import torch.nn as nn, torch as other\nstep_again = step\n", HELPER, monkeypatch)
    assert len(asked) == len({id(each) for each in asked}) == 4  # the two files, torch and torch.nn


def test_libraries_and_what_is_built_in_have_no_files_of_the_users() -> None:
    assert list(used_files([torch.nn.Linear, int, len])) == []
    assert file_of(int) is None
    path = file_of(torch.nn.Linear)
    assert path is not None and is_of_a_library(path)
