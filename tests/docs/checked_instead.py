"""Commands of the documentation that a test does not run, and what is looked at in their place."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable

from tests.docs.pages import ROOT


def checked_instead(command: str, where: str) -> bool:
    """Whether a command is one that is only looked at; if so, it was.

    Raises:
        AssertionError: if it could not work.
    """
    for pattern, (_, check) in CHECKED.items():
        if re.match(pattern, command):
            check(shlex.split(command, comments=True), where)
            return True
    return False


def extras() -> dict[str, list[str]]:
    """The extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["optional-dependencies"])


def unknown_extras(text: str) -> set[str]:
    """Extras that a text asks for, as in ``lightning-memfit[cli]`` or ``.[cli]``, and the package does not have."""
    asked = re.findall(r"(?:lightning-memfit|(?<![\w)\]`])\.)\[([a-z0-9,-]+)\]", text)
    return {name for names in asked for name in names.split(",")} - set(extras())


def _installs(words: list[str], where: str) -> None:
    unknown = unknown_extras(" ".join(words))
    assert not unknown, f"{where}: the package has no extra {', '.join(sorted(unknown))}"
    targets = [word for word in words[2:] if not word.startswith("-")]
    constraints = {words[place + 1] for place, word in enumerate(words) if word == "-c"}
    assert all((ROOT / path).exists() for path in constraints), where
    for target in set(targets) - constraints:
        name = target.partition("[")[0]
        declared = {re.split(r"[^\w.-]", each)[0] for extra in extras().values() for each in extra}
        assert name in {".", "lightning-memfit", *declared}, f"{where}: {name} is in no extra"


def _run_by_ci(words: list[str], where: str) -> None:
    script = next(word for word in words if word.startswith(("scripts/", ".ci/")))
    assert (ROOT / script).exists(), f"{where}: there is no {script}"
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script == ".ci/run" or script in ci, f"{where}: .ci/run does not run {script}"


def _a_benchmark(words: list[str], where: str) -> None:
    assert importlib.util.find_spec(words[2]) is not None, f"{where}: there is no module {words[2]}"
    results = [word for word in words[3:] if word.startswith("benchmarks/")]
    assert all((ROOT / path).exists() for path in results), f"{where}: a result is not kept"


def _a_slow_test(words: list[str], where: str) -> None:
    text = (ROOT / "tests" / "cli" / "test_plan_several_devices.py").read_text(encoding="utf-8")
    commands = text.partition("COMMANDS = (")[2].partition(")")[0]
    assert f'"{" ".join(words)}"' in commands, f"{where}: no slow test runs it"


CHECKED: dict[str, tuple[str, Callable[[list[str], str], None]]] = {
    r"pip install ": ("changes the environment; its extras are those of pyproject.toml", _installs),
    r"git clone <this repository>": ("needs the network", lambda words, where: None),
    r"bash (scripts/\w+\.sh|\.ci/run)": ("takes minutes; .ci/run runs it", _run_by_ci),
    r"python -m benchmarks\.": ("takes minutes; benchmarks/README.md and tests/benchmarks have them", _a_benchmark),
    r"memfit plan hardware=\S+ (devices=8 )?model=llama": (
        "takes most of a minute; a slow test of tests/cli compares what it prints",
        _a_slow_test,
    ),
    r"python -m mkdocs build --strict": ("a step of .ci/run", lambda words, where: None),
}
"""By the beginning of a command: why it is not run, and the check."""
