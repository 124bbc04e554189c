"""Standard output holds what the command says, whoever else writes there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memfit.cli.standard_output import kept_for_the_command

ROOT = Path(__file__).parents[2]
NOISY = """
import os, subprocess, sys
from lightning_memfit.cli.standard_output import kept_for_the_command
print("before")
with kept_for_the_command():
    print("python")
    sys.__stdout__.write("raw\\n")
    sys.__stdout__.flush()
    os.write(1, b"descriptor\\n")
    subprocess.run(["echo", "child"], check=True)
print("after")
"""


def test_only_the_command_itself_writes_there() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NOISY]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "before\nafter\n"
    assert sorted(ran.stderr.splitlines()[-4:]) == ["child", "descriptor", "python", "raw"]


def test_what_replaced_standard_output_is_kept_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), kept_for_the_command():
        print("inside")
        raise KeyError
    print("after")
    assert capsys.readouterr() == ("after\n", "inside\n")
