"""Every command and snippet of the documentation runs, and what it shows is what happens.

Blocks of a page are followed in order, in one folder and one Python session. A block with ``title="train.py"`` is
written to that file. In outputs ``...`` stands for what is left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.checked_instead import unknown_extras
from tests.docs.known_machine import pretend
from tests.docs.pages import PAGES, ROOT, Block, blocks_of, read
from tests.docs.running import PageRun

EXEMPT = {
    ("README.md", "plan       2 slices of <= 8, bf16-mixed"): "what the demo prints: its times are of one machine",
    ("README.md", "lightning_memfit/"): "the tree of folders",
    ("docs/architecture.md", "request ──┐"): "a drawing",
}
"""Blocks that nobody runs, by page and first line, each with the reason."""

RUN_ELSEWHERE = {
    ("README.md", "python"): "tests/contracts/test_repository.py::test_every_python_block_of_the_readme_runs",
}
"""Blocks that another test runs, by page and language."""

FILES_OF_ANOTHER_PAGE = {"README.md": "docs/command-line.md", "docs/sweeps.md": "docs/quick-start-hydra.md"}
"""Pages whose commands use the files that another page shows."""

LONG = {"docs/command-line.md", "docs/sweeps.md"}
"""Pages whose commands take half a minute and more."""

WITH_THE_REPOSITORYS_CONFIG = {"docs/command-line.md"}
"""Pages whose commands are typed at the root of the repository: they find its ``conf`` there."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What MemFit remembers between runs, of all pages together."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def reader(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRun]:
    """Somebody who follows a page from its beginning, with nothing around but the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    pretend(monkeypatch.setattr)
    run = PageRun(tmp_path, os.environ)
    yield run
    run.close()


def followed(page: str, text: str) -> list[Block]:
    """The blocks of a page that are not exempt and that no other test runs."""
    return [
        block
        for block in blocks_of(page, text)
        if (page, block.first_line) not in EXEMPT and (page, block.language) not in RUN_ELSEWHERE
    ]


def follow(reader: PageRun, page: str, text: str) -> None:
    other = FILES_OF_ANOTHER_PAGE.get(page)
    for block in blocks_of(other, read(other)) if other else []:
        if block.title is not None:
            reader.write(block)
    if page in WITH_THE_REPOSITORYS_CONFIG:
        shutil.copytree(ROOT / "conf", reader.folder / "conf")
    for block in followed(page, text):
        reader.follow(block)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in PAGES]
)
def test_what_a_page_shows_is_what_happens(page: str, reader: PageRun) -> None:
    follow(reader, page, read(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_asks_for_no_extra_that_does_not_exist(page: str) -> None:
    assert unknown_extras(read(page)) == set()


def test_every_exemption_is_of_a_block_that_is_there() -> None:
    first_lines = {(page, block.first_line) for page in PAGES for block in blocks_of(page, read(page))}
    languages = {(page, block.language) for page in PAGES for block in blocks_of(page, read(page))}
    assert set(EXEMPT) <= first_lines
    assert set(RUN_ELSEWHERE) <= languages
    for place in RUN_ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in read(path)


WRONG = {
    "a language that nobody runs": ("```ruby\nputs 1\n```", "neither run nor listed"),
    "no language": ("```\nls\n```", "neither run nor listed"),
    "only indented": ("Run\n\n    python train.py", "indented code"),
    "Python that raises": ("```python\nx = 1\n```\n\n```python\nassert x == 2, 'x is 1'\n```", "x is 1"),
    "Python that prints something else": ("```python\nprint(1)\n```\n\n```text\n2\n```", "shown is"),
    "a command that fails": ("```bash\nfalse\n```", "exit code 1"),
    "another output": ("```console\n$ echo one\ntwo\n```", "shown is"),
    "a line too few": ("```console\n$ printf 'one\\ntwo\\n'\none\n```", "shown is"),
    "another exit code": ("```console\n$ echo $?\n1\n```", "shown is"),
    "a script that is not there": ("```bash\nbash scripts/none.sh\n```", "there is no scripts/none.sh"),
    "an extra that is not there": ("```bash\npip install 'lightning-memfit[none]'\n```", "no extra none"),
    "a benchmark that is not there": ("```bash\npython -m benchmarks.none\n```", "no module"),
    "a setting that is not there": ("```yaml\nmemfit: {budgets: 1GiB}\n```", "not a setting"),
    "YAML of nothing known": ("```yaml\na: 1\n```", "no LightningCLI's file"),
    "another document": ('```bash\necho \'{"a": [1]}\'\n```\n\n```json\n{"a": [2]}\n```', "the document has 1"),
    "an entry that is not there": ('```bash\necho \'{"a": 1}\'\n```\n\n```json\n{"b": 1}\n```', "has no 'b'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_page_that_is_wrong_is_found_out(what: str, reader: PageRun) -> None:
    text, message = WRONG[what]
    with pytest.raises(Exception, match=message):
        follow(reader, "a new page", text)


def test_what_is_left_out_may_be_anything(reader: PageRun) -> None:
    follow(reader, "a new page", "```console\n$ printf 'one\\ntwo\\nthree 3 s\\n'\none\n...\nthree ... s\n```")
    follow(reader, "a new page", "```python\nprint('a\\nb')\n```\n\n```text\n...\nb\n```")


def test_a_file_that_a_page_shows_is_there_for_its_commands(reader: PageRun) -> None:
    page = '```python title="sub/hello.py"\nprint("hello")\n```\n\n```console\n$ python sub/hello.py\nhello\n```'
    follow(reader, "a new page", page)
