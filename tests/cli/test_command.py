"""The entry point, and what is read from the command line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_memfit.cli import command, main
from lightning_memfit.cli.arguments import BAD_REQUEST, parse

ROOT = Path(__file__).parents[2]
Memfit = Callable[..., Any]


def test_the_module_runs_as_a_process_in_the_users_folder(memfit: Memfit, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "lightning_memfit.cli", "plan", "--model", "models_of_a_user:lit", "--batch",
        "inputs=4x8,targets=4:int64[0..8]", "--device", "a100-40gb", "--budget", "1KiB",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "does not fit: " in ran.stdout


def test_the_console_script_is_this_function() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["memfit"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_the_help_names_every_exit_code_and_the_syntax_of_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for words in ("0  fits on", "1  does not fit", "2  the request", "3  cannot tell", "SIZExSIZE"):
        assert words in text


@pytest.mark.parametrize(
    "words",
    [(), ("train",), ("plan", "--devise", "t4"), ("plan", "--effective-batch-size", "many"), ("hardware", "-x")],
)
def test_options_that_do_not_exist_end_with_two(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == BAD_REQUEST
    assert capsys.readouterr().out == ""


def test_overrides_keep_their_order_around_options() -> None:
    arguments = parse(["plan", "a=1", "--device", "t4", "+b=2", "~c", "--json", "d=3"])
    assert arguments.overrides == ["a=1", "+b=2", "~c", "d=3"]
    assert arguments.device == ["t4"] and arguments.json


def test_what_processes_print_that_a_command_starts_is_not_in_the_document(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def starting_a_process(arguments: Any, *, say: Any) -> tuple[int, str]:
        subprocess.run([sys.executable, "-c", "print('epoch 1')"], check=True)
        return 0, "{}"

    monkeypatch.setitem(command._COMMANDS, "sweep", starting_a_process)
    assert main(["sweep", "--json"]) == 0
    assert capfd.readouterr() == ("{}\n", "epoch 1\n")
    subprocess.run([sys.executable, "-c", "print('later')"], check=True)
    assert capfd.readouterr().out == "later\n"


def test_an_error_of_the_users_training_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(arguments: Any, *, say: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setitem(command._COMMANDS, "fit", failing)
    assert main(["fit"]) == 3
    assert (
        capsys.readouterr().err == "memfit: training failed: RuntimeError: shapes do not match. --debug shows where.\n"
    )
