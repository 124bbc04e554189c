"""Runs the blocks of one page, in order: what is shown must be what happens."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from tests.docs.checked_instead import checked_instead
from tests.docs.commands import Ran, run
from tests.docs.pages import ROOT, Block

LEFT_OUT = "..."
"""Alone on a line: any number of lines. Within a line: any characters."""


class PageRun:
    """A reader who follows one page: a folder, a Python session, and what the last command said."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = dict(environment)
        self.session = types.ModuleType("page")
        sys.modules[self.session.__name__] = self.session
        self.printed: str | None = None
        self.ran: Ran | None = None

    def close(self) -> None:
        """Forget the modules that came from the folder."""
        for name, module in list(sys.modules.items()):
            if module is self.session or str(getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]

    def follow(self, block: Block) -> None:
        """Do what a block says.

        Raises:
            AssertionError: if it shows something else than happens, or nobody knows how to run it.
        """
        runners: dict[str, Callable[[Block], None]] = {
            "python": self._python,
            "console": self._console,
            "bash": self._bash,
            "yaml": self._yaml,
            "json": self._json,
            "text": self._text,
        }
        if block.language not in runners:
            raise AssertionError(f"{block.where}: a block of {block.language!r} is neither run nor listed as exempt")
        runners[block.language](block)

    def write(self, block: Block) -> Path:
        """Write the file that a block shows."""
        assert block.title is not None
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        return path

    def _python(self, block: Block) -> None:
        if block.title is not None:
            compile(block.text, str(self.write(block)), "exec")
            return
        # Lines are those of the page, so that a traceback names them.
        code = compile("\n" * block.line + block.text, str(ROOT / block.page), "exec")
        with redirect_stdout(io.StringIO()) as printed:
            exec(code, self.session.__dict__)
        self.printed = printed.getvalue()

    def _text(self, block: Block) -> None:
        assert self.printed is not None, f"{block.where}: shows what is printed, and no Python block stands before it"
        _compare(block.where, block.text.splitlines(), {"printed": self.printed})

    def _console(self, block: Block) -> None:
        for command, shown in commands_and_outputs(block):
            if not checked_instead(command, block.where):
                self._run(command, shown, block.where)

    def _bash(self, block: Block) -> None:
        for command in joined_lines(block.text.splitlines()):
            if command and not command.startswith("#") and not checked_instead(command, block.where):
                self._run(command, [], block.where)

    def _run(self, command: str, shown: list[str], where: str) -> None:
        last = 0 if self.ran is None else self.ran.code
        self.ran = ran = run(command, self.folder, self.environment, last_code=last)
        if shown:
            _compare(f"{where}: {command}", shown, {"standard output": ran.out, "standard error": ran.err})
        else:
            assert ran.code == 0, f"{where}: {command}: exit code {ran.code}\n{ran.out}\n{ran.err}"

    def _yaml(self, block: Block) -> None:
        content = yaml.safe_load(block.text)
        path = None if block.title is None else self.write(block)
        if "defaults" in content and path is not None:
            composed(path)
        elif "memfit" in content:
            from lightning_memfit.config import memfit_arguments

            memfit_arguments(content["memfit"])
        else:
            _plugins_of_a_trainer(content, block.where)

    def _json(self, block: Block) -> None:
        assert self.ran is not None, f"{block.where}: shows a document, and no command stands before it"
        _require_part(json.loads(block.text), json.loads(self.ran.out), block.where)


def commands_and_outputs(block: Block) -> list[tuple[str, list[str]]]:
    """The commands behind ``$`` of a block, each with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in joined_lines(block.text.splitlines()):
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"{block.where}: begins with an output. Write the command before it, behind '$ '"
            found[-1][1].append(line)
    return found


def joined_lines(lines: list[str]) -> list[str]:
    """Lines, those that end in a backslash joined with the next."""
    joined: list[str] = []
    goes_on = False
    for line in lines:
        piece = line.removesuffix("\\")
        if goes_on:
            joined[-1] += piece.lstrip()
        else:
            joined.append(piece)
        goes_on = piece != line
    return joined


def composed(path: Path) -> Any:
    """What Hydra composes of a primary config in a folder; its ``memfit`` part is one that MemFit takes."""
    from hydra import compose, initialize_config_dir

    from lightning_memfit.config import memfit_arguments, register_configs

    register_configs()
    with initialize_config_dir(str(path.parent), version_base="1.3"):
        config = compose(path.stem)
    memfit_arguments(config.memfit)
    return config


def _plugins_of_a_trainer(content: Mapping[str, Any], where: str) -> None:
    """The plugins in the file of a ``LightningCLI`` are ones that MemFit is."""
    import lightning_memfit

    plugins = content.get("trainer", {}).get("plugins")
    assert plugins, f"{where}: a YAML block that is no Hydra config, no memfit group and no LightningCLI's file"
    for plugin in [plugins] if isinstance(plugins, Mapping) else plugins:
        package, _, name = plugin["class_path"].rpartition(".")
        assert package == "lightning_memfit", where
        getattr(lightning_memfit, name)(**plugin["init_args"])


def _compare(where: str, shown: list[str], said: Mapping[str, str]) -> None:
    pattern = _pattern(shown)
    if any(pattern.fullmatch(_text_of(text)) for text in said.values()):
        return
    real = "\n".join(f"--- {name}\n{text}" for name, text in said.items())
    raise AssertionError(f"{where}: shown is\n{os.linesep.join(shown)}\n--- and what happens is\n{real}")


def _pattern(shown: list[str]) -> re.Pattern[str]:
    lines = [line.rstrip() for line in shown]
    while lines and not lines[-1]:
        lines.pop()
    parts = [
        r"(?:.*\n)*?" if line == LEFT_OUT else ".*".join(re.escape(part) for part in line.split(LEFT_OUT)) + r"\n"
        for line in lines
    ]
    return re.compile("".join(parts))


def _text_of(said: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in said.rstrip().splitlines())


def _require_part(shown: Any, real: Any, where: str) -> None:
    """Every entry shown is in the real document, with its value."""
    if isinstance(shown, Mapping):
        for key, value in shown.items():
            assert key in real, f"{where}: the document has no {key!r}"
            _require_part(value, real[key], f"{where}: {key}")
    elif isinstance(shown, list):
        assert len(shown) == len(real), f"{where}: {len(shown)} entries are shown of {len(real)}"
        for value, other in zip(shown, real, strict=True):
            _require_part(value, other, where)
    else:
        assert shown == real, f"{where}: shown is {shown!r}, the document has {real!r}"
