"""Plain data in files: YAML without tags, aliases or surprises, read within limits, written whole or not at all.

Adapter for PyYAML: touches the events of its parser, ``resolve`` of its resolver and ``construct_yaml_*`` of its safe
constructor. Values are built here, from events, so that nothing in a file can name code.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import uuid
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lightning_memfit.errors import PlanFileError
from lightning_memfit.units import MIB, format_bytes

FILE_NAME = "plan.yaml"
"""What a run calls the record of its plan."""
MOST_BYTES = 8 * MIB
"""Largest file that is read. A plan of a hundred checkpointed blocks and 200 other candidates takes half of one MiB."""
MOST_DEPTH = 24
"""Deepest nesting that is read; a run's record is 8 deep."""
MOST_NODES = 250_000
"""Most values and names that are read; bounds the time that a file can take."""
WAY_OUT = "Plan again: leave plan= out."

_MOST_DIGITS = 40
_FILE_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
# The same events, about 20 times faster, where PyYAML was built with libyaml.
_FASTEST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def plain_data(value: Any) -> Any:
    """Dicts, lists, numbers, text and ``None`` in place of dataclasses, tuples, and number or text types of others.

    Halves of surrogate pairs, which no file can hold, become question marks.

    Raises:
        TypeError: for a value that is none of these.

    >>> plain_data({"sizes": (3, 2)})
    {'sizes': [3, 2]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain_data(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spec.name: plain_data(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__qualname__} is no plain data")


class _Dumper(yaml.SafeDumper):
    """Puts text with Unicode's own line ends in double quotes: PyYAML reads them back as spaces from any others."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if any(end in text for end in ("\x85", "\u2028", "\u2029")) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(data: Any) -> str:
    """Plain data as YAML text, in the order given; :func:`parse_plain` gives equal data back."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def write_whole(path: Path, text: str) -> Path:
    """Write ``text`` to ``path``, whole or not at all, and return ``path``.

    A draft in the same folder takes the place of the file by one rename, once it is on the disk. Folders are made; a
    link is followed.

    Raises:
        OSError: if the folder cannot be written to; an earlier file is then untouched, and no draft is left.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{uuid.uuid4().hex}.draft")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_plain(path: Path) -> Any:
    """The plain data in a YAML file.

    Raises:
        PlanFileError: naming the path and the reason, for whatever is no plain data within the limits.
    """
    return parse_plain(_read_text(path), source=str(path))


def parse_plain(text: str, *, source: str, loader_class: Any = _FASTEST_LOADER) -> Any:
    """The plain data in YAML text.

    Refused are tags, anchors, aliases, merge keys, names that are not text or occur twice, dates, more than one
    document, and what is larger or deeper than the limits.

    Args:
        text: the YAML.
        source: where the text is from, for the message.
        loader_class: PyYAML's ``SafeLoader`` or ``CSafeLoader``; only parses.

    Raises:
        PlanFileError: naming the source, the line and the reason.
    """
    if len(text) > MOST_BYTES:  # characters, of at least one byte each
        raise _too_large(source)
    loader = None
    try:
        loader = loader_class(text)
        return _Builder(loader, source).document()
    except PlanFileError:
        raise
    # Beside YAMLError, PyYAML raises these where int(), float() and chr() refuse what its patterns let through.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise PlanFileError(
            f"{source} holds no plan: it is not valid YAML ({_yaml_words(error)}). {WAY_OUT}"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Builder:
    """Makes values of the events of one document."""

    def __init__(self, loader: Any, source: str) -> None:
        self._loader = loader
        self._source = source
        self._nodes = 0

    def document(self) -> Any:
        self._loader.get_event()  # the stream begins
        if self._loader.check_event(yaml.StreamEndEvent):
            raise PlanFileError(f"{self._source} holds no plan: it is empty. {WAY_OUT}")
        self._loader.get_event()  # the document begins
        value = self._value(self._loader.get_event(), depth=1)
        self._loader.get_event()  # the document ends
        if not self._loader.check_event(yaml.StreamEndEvent):
            self._refuse(self._loader.peek_event(), "a second document")
        return value

    def _value(self, event: Any, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            self._refuse(event, f"more than {MOST_NODES} values")
        if depth > MOST_DEPTH:
            self._refuse(event, f"lists or mappings nested deeper than {MOST_DEPTH}")
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"the alias *{_cut(str(event.anchor))}")
        if event.anchor is not None:
            self._refuse(event, f"the anchor &{_cut(str(event.anchor))}")
        if event.tag is not None:
            self._refuse(event, f"the tag {_cut(str(event.tag))}")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(depth)
        return self._mapping(depth)

    def _list(self, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := self._loader.get_event(), yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := self._loader.get_event(), yaml.MappingEndEvent):
            name = self._value(event, depth + 1)
            if not isinstance(name, str):
                self._refuse(event, f"{_cut(repr(name))} in place of a name (put text in quotes)")
            if name in entries:
                self._refuse(event, f"the name {_cut(name)!r} twice in one mapping")
            entries[name] = self._value(self._loader.get_event(), depth + 1)
        return entries

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if not event.implicit[0]:  # in quotes, or a block
            return text
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))
        kind = tag.rpartition(":")[2]
        if kind == "str":
            return text
        if kind not in ("null", "bool", "int", "float"):
            self._refuse(event, f"{_cut(text)!r}, which YAML reads as a {kind} (put text in quotes)")
        if len(text) > _MOST_DIGITS:
            self._refuse(event, f"a number of {len(text)} characters")
        return getattr(self._loader, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, text))

    def _refuse(self, event: Any, what: str) -> NoReturn:
        line = event.start_mark.line + 1
        raise PlanFileError(
            f"{self._source} holds no plan: line {line} has {what}; only plain text, numbers, lists and mappings are "
            f"read, and nothing is executed. {WAY_OUT}"
        )


def _read_text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        kind = next((words for is_kind, words in _FILE_KINDS if is_kind(mode)), None)
        content = b"" if kind else _first_bytes(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        words = getattr(error, "strerror", None) or str(error)
        raise PlanFileError(f"{path} cannot be read as a plan: {words}. Check the path, or leave plan= out.") from error
    if kind:
        raise PlanFileError(f"{path} cannot be read as a plan: it is {kind}. Name the file{_file_within(path)}.")
    if len(content) > MOST_BYTES:
        raise _too_large(str(path))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFileError(
            f"{path} holds no plan: it is not text in UTF-8 (byte {error.start} is 0x{content[error.start]:02x}). "
            f"{WAY_OUT}"
        ) from error


def _first_bytes(path: Path) -> bytes:
    """Whatever the system says of its size, one byte more than is accepted is the most that is read."""
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _file_within(path: Path) -> str:
    """The plan that a run left in the folder, for the message."""
    try:
        return f", such as {path / FILE_NAME}" if (path / FILE_NAME).is_file() else ", or leave plan= out"
    except OSError:
        return ", or leave plan= out"


def _too_large(source: str) -> PlanFileError:
    return PlanFileError(
        f"{source} cannot be read as a plan: it is larger than {format_bytes(MOST_BYTES)}, the most that is read. "
        f"{WAY_OUT}"
    )


def _yaml_words(error: Exception) -> str:
    """One line out of PyYAML's several."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem:
        return f"{problem}" + (f" in line {mark.line + 1}" if mark is not None else "")
    return _cut(" ".join(str(error).split()), most=200)


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
