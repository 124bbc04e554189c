"""The table of publicly reported failures is true: its tests exist and cite its reports, its limits are written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")
STAGES = ("predict", "apply", "validate", "distributed", "sweep")


class Kind(NamedTuple):
    """A row of the table."""

    name: str
    stage: str
    reports: tuple[str, ...]
    tests: tuple[str, ...]
    has_limit: bool


def kinds(table: str) -> list[Kind]:
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    return [
        Kind(
            name=name.strip(),
            stage=stage.strip(),
            reports=tuple(report.strip() for report in reports.split(",")),
            tests=tuple(re.findall(r"`([^`]+)`", proof)),
            has_limit="(known-limits.md#" in proof,
        )
        for name, stage, reports, proof in rows
    ]


@cache
def collected(path: Path) -> Mapping[str, str]:
    """What pytest collects from a file by name, with the docstrings."""
    if not path.exists() or not path.name.startswith("test_"):
        return {}
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {function.name: ast.get_docstring(function) or "" for function in functions}


def docstring_of(test: str) -> str | None:
    """The docstring of ``path::name``; ``None`` if there is no such test."""
    path, _, name = test.partition("::")
    return collected(ROOT / path).get(name)


def limits(page: str) -> dict[str, str]:
    """The entry of each kind on the page of known limits."""
    entries = re.split(r"^- ", page, flags=re.MULTILINE)[1:]
    return {found[1]: entry for entry in entries if (found := re.match(r"\*\*(.+?)\*\*", entry, re.DOTALL))}


def faults(table: str, page: str) -> Iterator[str]:
    """One line for everything that is not as the table says."""
    written = limits(page)
    for kind in kinds(table):
        if kind.stage not in STAGES:
            yield f"{kind.name}: no stage {kind.stage!r}"
        if not kind.tests and not kind.has_limit:
            yield f"{kind.name}: neither a test nor a limit"
        if kind.has_limit and kind.name not in written:
            yield f"{kind.name}: not among the known limits"
        yield from (f"{kind.name}: there is no {test}" for test in kind.tests if docstring_of(test) is None)
        where = [docstring_of(test) or "" for test in kind.tests] + [written.get(kind.name, "")] * kind.has_limit
        for report in kind.reports:
            if not REPORT.fullmatch(report):
                yield f"{kind.name}: {report!r} is no owner/repository#number"
            elif not any(report in REPORT.findall(text) for text in where):
                yield f"{kind.name}: {report} is cited neither by its tests nor among the known limits"
    named = {kind.name for kind in kinds(table) if kind.has_limit}
    yield from (f"{name}: a known limit that the table does not name" for name in written if name not in named)


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_kind_of_public_failure_has_its_tests_or_a_known_limit() -> None:
    assert len(kinds(read("public-failures.md"))) > 50
    assert list(faults(read("public-failures.md"), read("known-limits.md"))) == []


def test_every_test_of_a_public_failure_is_in_the_table() -> None:
    named = {test for kind in kinds(read("public-failures.md")) for test in kind.tests}
    here = [
        f"{path.relative_to(ROOT).as_posix()}::{name}"
        for path in sorted((ROOT / "tests" / "public_failures").glob("test_*.py"))
        for name in collected(path)
    ]
    assert len(here) > 20
    assert [test for test in here if test not in named] == []


def test_every_stage_has_its_kinds() -> None:
    assert {kind.stage for kind in kinds(read("public-failures.md"))} == set(STAGES)


def test_no_kind_stands_in_the_table_twice() -> None:
    names = [kind.name for kind in kinds(read("public-failures.md"))]
    assert len(names) == len(set(names))


def test_the_check_of_the_table_can_fail() -> None:
    this = "tests/contracts/test_public_failures.py::test_the_check_of_the_table_can_fail"
    table = "\n".join(
        (
            "| kind | stage | reports | test |",
            f"| one | apply | a/b#1 | `{this}` |",
            "| two | apply | a/b#2 | `tests/test_gone.py::test_gone` |",
            "| three | sometimes | a/b#3 | [limit](known-limits.md#x) |",
            "| four | apply | a/b#4 | |",
            "| five | predict | report 5 | [limit](known-limits.md#x) |",
        )
    )
    assert list(faults(table, "- **five**: because (a/b#55).\n- **six**: because.")) == [
        "one: a/b#1 is cited neither by its tests nor among the known limits",
        "two: there is no tests/test_gone.py::test_gone",
        "two: a/b#2 is cited neither by its tests nor among the known limits",
        "three: no stage 'sometimes'",
        "three: not among the known limits",
        "three: a/b#3 is cited neither by its tests nor among the known limits",
        "four: neither a test nor a limit",
        "four: a/b#4 is cited neither by its tests nor among the known limits",
        "five: 'report 5' is no owner/repository#number",
        "six: a known limit that the table does not name",
    ]
