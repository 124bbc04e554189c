"""Plain data in files: what is refused, with which words, and that a file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_memfit.errors import ConfigurationError, PlanFileError
from lightning_memfit.plan_file import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_NODES,
    parse_plain,
    plain_data,
    read_plain,
    to_yaml,
    write_whole,
)

LOADERS = [yaml.SafeLoader] + ([yaml.CSafeLoader] if hasattr(yaml, "CSafeLoader") else [])
ONLY_PLAIN = (
    "; only plain text, numbers, lists and mappings are read, and nothing is executed. Plan again: leave plan= out."
)

# Text that a plan can hold: everything but halves of surrogate pairs.
TEXT = st.text(max_size=40)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def refusal(text: str, loader: Any = yaml.SafeLoader) -> str:
    with pytest.raises(PlanFileError) as caught:
        parse_plain(text, source="plan.yaml", loader_class=loader)
    return str(caught.value)


# --- what is read


@pytest.mark.parametrize("loader", LOADERS)
@given(data=PLAIN)
@example(data={"\x85": ["a\u2028b", "\u2029", " a\n\x85 ", "\ufeff", "\r\n", "- a", "null", "1:30", "0b_", "=", "<<"]})
@settings(max_examples=100)
def test_plain_data_is_the_same_after_a_round_trip(loader: Any, data: Any) -> None:
    assert parse_plain(to_yaml(data), source="x", loader_class=loader) == data


@pytest.mark.parametrize("loader", LOADERS)
def test_words_mean_what_yaml_says_they_mean(loader: Any) -> None:
    text = "{a: yes, b: 0x10, c: 1.5, d: ~, e: '1', f: 12, g: 1e5, h: .5, i: , j: 0b11, k: 1:30}"
    expected = {
        "a": True,
        "b": 16,
        "c": 1.5,
        "d": None,
        "e": "1",
        "f": 12,
        "g": "1e5",  # YAML 1.1 wants a dot and a sign
        "h": 0.5,
        "i": None,
        "j": 3,
        "k": 90,  # one minute and thirty seconds
    }
    assert parse_plain(text, source="x", loader_class=loader) == expected == yaml.safe_load(text)


# --- what is refused


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: 1\nb: !!python/name:os.system", "line 2 has the tag tag:yaml.org,2002:python/name:os.system"),
        ("a: !mine {}", "line 1 has the tag !mine"),
        ("!!str a", "line 1 has the tag tag:yaml.org,2002:str"),
        ("a: !!binary aGk=", "line 1 has the tag tag:yaml.org,2002:binary"),
        ("a: &x 1", "line 1 has the anchor &x"),
        ("a: *x", "line 1 has the alias *x"),
        ("a:\n  b: 1\n  b: 2", "line 3 has the name 'b' twice in one mapping"),
        ("1: a", "line 1 has 1 in place of a name (put text in quotes)"),
        ("[a]: b", "line 1 has ['a'] in place of a name (put text in quotes)"),
        ("a:\n  <<: {b: 1}", "line 2 has '<<', which YAML reads as a merge (put text in quotes)"),
        ("a: 2001-01-01", "line 1 has '2001-01-01', which YAML reads as a timestamp (put text in quotes)"),
        ("a: =", "line 1 has '=', which YAML reads as a value (put text in quotes)"),
        ("a: " + "9" * 5000, "line 1 has a number of 5000 characters"),
        ("a: 1\n---\nb: 2", "line 2 has a second document"),
        ("[" * (MOST_DEPTH + 1), f"line 1 has lists or mappings nested deeper than {MOST_DEPTH}"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(loader: Any, text: str, found: str) -> None:
    assert refusal(text, loader) == f"plan.yaml holds no plan: {found}{ONLY_PLAIN}"


@pytest.mark.parametrize("loader", LOADERS)
def test_a_nest_as_deep_as_allowed_is_read(loader: Any) -> None:
    text = "[" * (MOST_DEPTH - 1) + "1" + "]" * (MOST_DEPTH - 1)
    assert str(parse_plain(text, source="x", loader_class=loader)).count("[") == MOST_DEPTH - 1


@pytest.mark.parametrize("loader", LOADERS)
def test_a_nest_of_a_hundred_thousand_lists_is_refused_before_it_is_followed(loader: Any) -> None:
    message = refusal("[" * 100_000, loader)
    assert message.startswith("plan.yaml holds no plan: ")
    assert "deep" in message or "not valid YAML" in message  # libyaml has a limit of its own


@pytest.mark.parametrize("loader", LOADERS)
def test_a_billion_laughs_are_refused_at_the_first(loader: Any) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert refusal("\n".join(lines), loader) == f"plan.yaml holds no plan: line 1 has the anchor &a0{ONLY_PLAIN}"


def test_more_values_than_the_limit_are_refused() -> None:
    with pytest.raises(PlanFileError) as caught:  # the list itself is one value
        parse_plain("- 1\n" * MOST_NODES, source="plan.yaml")
    assert str(caught.value) == (
        f"plan.yaml holds no plan: line {MOST_NODES} has more than {MOST_NODES} values{ONLY_PLAIN}"
    )


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "\t- a",
        '"\\U00110000"',  # beyond Unicode: PyYAML's own parser answers with a ValueError
        '"\\Uffffffff"',
        "a: \x00",
        "%YAML 9" + "9" * 5000 + ".1\n--- a",
        "%YAML 3.0\n--- a",
        "a: 'b",
        "? : :\n- x",
        "0b_",
    ],
)
def test_broken_yaml_is_refused_and_never_another_error(loader: Any, text: str) -> None:
    message = refusal(text, loader)
    assert message.startswith("plan.yaml holds no plan: it is not valid YAML (")
    assert message.endswith("). Plan again: leave plan= out.")
    assert "\n" not in message


def test_the_place_of_broken_yaml_is_told() -> None:
    assert refusal("a: 1\nb: [1\nc: 2\n") == (
        "plan.yaml holds no plan: it is not valid YAML (expected ',' or ']', but got ':' in line 3). "
        "Plan again: leave plan= out."
    )


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_an_empty_file_is_no_plan(text: str) -> None:
    assert refusal(text) == "plan.yaml holds no plan: it is empty. Plan again: leave plan= out."


# --- files


def file_refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_plain(path)
    assert type(caught.value) is PlanFileError
    return str(caught.value)


def test_a_file_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert file_refusal(path) == (
        f"{path} cannot be read as a plan: No such file or directory. Check the path, or leave plan= out."
    )


def test_a_file_that_may_not_be_read_is_refused_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("a: 1")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # whoever runs as root may read everything
    assert file_refusal(path) == (
        f"{path} cannot be read as a plan: Permission denied. Check the path, or leave plan= out."
    )


def test_a_folder_is_refused_and_the_plan_within_is_named(tmp_path: Path) -> None:
    assert file_refusal(tmp_path) == (
        f"{tmp_path} cannot be read as a plan: it is a folder. Name the file, or leave plan= out."
    )
    (tmp_path / "plan.yaml").write_text("a: 1")
    assert file_refusal(tmp_path) == (
        f"{tmp_path} cannot be read as a plan: it is a folder. Name the file, such as {tmp_path / 'plan.yaml'}."
    )


def test_a_device_without_end_is_refused_unread() -> None:
    assert file_refusal(Path("/dev/zero")) == (
        "/dev/zero cannot be read as a plan: it is a device. Name the file, or leave plan= out."
    )


def test_a_pipe_that_nobody_writes_to_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "it is a pipe" in file_refusal(path)


@pytest.mark.parametrize("name", ["a\x00b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    assert f"{tmp_path / name} cannot be read as a plan: " in file_refusal(tmp_path / name)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "Too many levels of symbolic links" in file_refusal(tmp_path / "a")


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # takes no room on the disk
    assert file_refusal(path) == (
        f"{path} cannot be read as a plan: it is larger than 8.000 MiB, the most that is read. "
        "Plan again: leave plan= out."
    )


@pytest.mark.parametrize(
    ("content", "position", "byte"),
    [("name: é".encode("latin-1"), 6, "e9"), ("a: 1".encode("utf-16"), 0, "ff"), (b"ab\x80", 2, "80")],
)
def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path, content: bytes, position: int, byte: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    assert file_refusal(path) == (
        f"{path} holds no plan: it is not text in UTF-8 (byte {position} is 0x{byte}). Plan again: leave plan= out."
    )


def test_text_beside_ascii_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("name: Ü ™ 😀\n", encoding="utf-8")
    assert read_plain(path) == {"name": "Ü ™ 😀"}


# --- written whole or not at all


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_folders_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.yaml"
    assert write_whole(path, "1") == path
    write_whole(path, "2")
    assert path.read_text() == "2"
    assert names_in(path.parent) == ["plan.yaml"]


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("earlier")

    def disk_is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "later")
    assert path.read_text() == "earlier"
    assert names_in(tmp_path) == ["plan.yaml"]


def test_a_name_that_is_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").mkdir()
    with pytest.raises(OSError, match=r"plan\.yaml"):
        write_whole(tmp_path / "plan.yaml", "1")
    assert names_in(tmp_path) == ["plan.yaml"]


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real" / "plan.yaml")
    write_whole(tmp_path / "link.yaml", "1")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real" / "plan.yaml").read_text() == "1"


# --- plain data


class Name(str):
    pass


def test_number_and_text_types_of_others_become_plain() -> None:
    data = plain_data(
        {"a": np.int64(3), "b": np.float32(0.5), "c": Name("x"), "d": (1, (2,)), "e": np.bool_(True) and 1}
    )
    assert data == {"a": 3, "b": 0.5, "c": "x", "d": [1, [2]], "e": 1}
    assert [type(value) for value in data.values()] == [int, float, str, list, int]


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert plain_data("a\ud800b") == "a?b"


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^set is no plain data$"):
        plain_data({"a": {1}})
