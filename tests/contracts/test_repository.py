"""What holds for every file: nothing of the machine it was written on, one version, a README that runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import lightning_memfit

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".cpp", ".cfg", ".csv", ""}

FORBIDDEN = {
    "a folder of one machine": r"(?<![\w.])/(?:work|tmp|root|home/\w+|Users/\w+)/",
    "a way of working instead of the product": r"\b(?:this|previous|earlier) session\b|\bissue (?:#?\d+|[A-Z]\b)",
    "work left undone": r"\b(?:TODO|FIXME|XXX)\b",
}


def repository_files() -> list[Path]:
    """Every text file that belongs to the repository, whether or not git is at hand."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        files = [ROOT / name for name in names]
    else:
        not_ours = {".venv", "outputs", "multirun", "build", "dist", "__pycache__"}
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(part in not_ours or part.endswith("_cache") for part in path.relative_to(ROOT).parts)
        ]
    return [path for path in files if path.is_file() and path.suffix in TEXT and path != Path(__file__)]


def violations(text: str) -> list[str]:
    return [
        f"line {number}: {what}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        for match in re.finditer(pattern, line)
    ]


def test_no_file_speaks_of_anything_but_the_project() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in repository_files()
        if (lines := violations(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_the_check_of_words_can_fail() -> None:
    assert len(violations("see /home/someone/notes\nas in issue 7\n# TODO later\nfrom /tmp/x import y")) == 4
    assert violations("owner/repo#7 and /proc/meminfo, https://example.org/issues/7") == []


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    source = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert project["project"]["dynamic"] == ["version"]
    assert lightning_memfit.__version__ in source.read_text(encoding="utf-8")
    assigned = [
        path
        for path in repository_files()
        if path.suffix in (".py", ".toml")
        and re.search(r"^(?:__version__|version) *= *[\"']", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert assigned == [source]


def test_the_installed_version_is_that_of_the_source() -> None:
    try:
        installed = metadata.version("lightning-memfit")
    except metadata.PackageNotFoundError:
        pytest.skip("lightning-memfit runs from its source tree and is not installed")
    assert installed == lightning_memfit.__version__


def test_the_constraints_name_no_build_of_one_machine() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [pin for pin in pins if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin)] == []


def readme_blocks() -> list[str]:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", readme_blocks())
def test_every_python_block_of_the_readme_runs(block: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
