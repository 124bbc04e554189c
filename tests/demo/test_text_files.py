"""Text files of the user's: what a path means, how text is divided, and errors that say what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memfit.demo.text_files import TextFiles, divide_texts, find_files, read_texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, one of them deeper, and files that are hidden."""
    for name in ("b.txt", "a/c.md", ".hidden.txt", ".git/config"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_bytes(name.encode())
    return tmp_path / "texts"


def names(files: list[Path], folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in files]


def test_a_path_is_a_file_a_folder_or_a_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_files(folder / "b.txt") == [folder / "b.txt"]
    assert names(find_files(str(folder)), folder) == ["a/c.md", "b.txt"]
    assert names(find_files(f"{folder}/**/*.md"), folder) == ["a/c.md"]
    monkeypatch.chdir(folder)
    assert find_files("*.txt") == [Path("b.txt")]
    assert find_files("a") == [Path("a/c.md")]


def test_hidden_files_are_read_if_the_path_names_them(folder: Path) -> None:
    assert names(find_files(folder / ".hidden.txt"), folder) == [".hidden.txt"]
    assert names(find_files(folder / ".git"), folder) == [".git/config"]


def test_a_name_with_a_bracket_is_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "notes [1].txt").write_text("text")
    assert find_files(tmp_path / "notes [1].txt") == [tmp_path / "notes [1].txt"]


@pytest.mark.parametrize("name", ["missing", "missing/*.txt", "*.rst", "deeper/**"])
def test_a_path_of_no_files_is_an_error_that_says_where_it_was_looked_for(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(FileNotFoundError) as caught:
        find_files(name)
    assert str(caught.value) == (
        f"path={name!r} is no file, no folder, and a pattern of no files, seen from {folder}. Give a text file, a "
        "folder of them, or a pattern in quotes such as 'texts/**/*.txt'."
    )


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is a folder without files, seen from"):
        find_files(tmp_path)


def test_reading_stops_at_the_limit_within_a_file(folder: Path) -> None:
    files = find_files(folder)
    assert read_texts(files, None) == [b"a/c.md", b"b.txt"]
    assert read_texts(files, 8) == [b"a/c.md", b"b."]
    assert read_texts(files, 6) == [b"a/c.md"]


def test_a_binary_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x1a")
    with pytest.raises(ValueError, match=r"picture\.png is binary, .* byte 5 of it is 0\. Leave it out with a pattern"):
        read_texts([tmp_path / "picture.png"], None)


def test_files_without_a_byte_are_an_error_with_their_number(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"^2 files such as .*a hold 0 bytes of text\. Name files with text\.$"):
        read_texts(find_files(tmp_path), None)
    with pytest.raises(ValueError, match=r"hold 0 bytes of text within max_bytes=0\."):
        read_texts(find_files(tmp_path), 0)


TWENTY = [bytes([ord("a") + index]) * 10 for index in range(20)]


@pytest.mark.parametrize(
    ("texts", "how", "validation"),
    [
        # The tenth and the twentieth of twenty files: letters j and t.
        (TWENTY, "files", b"j" * 10 + b"t" * 10),
        (TWENTY, "auto", b"j" * 10 + b"t" * 10),
        # The last 20 of 200 bytes: letters s and t.
        (TWENTY, "tail", b"s" * 10 + b"t" * 10),
        # Nine files are too few to keep one: the last 9 of 90 bytes, letter i.
        (TWENTY[:9], "auto", b"i" * 9),
    ],
)
def test_every_tenth_file_or_the_last_tenth_is_for_validation(texts: list[bytes], how: str, validation: bytes) -> None:
    train, kept = divide_texts(texts, how)
    assert bytes(kept) == validation
    assert len(train) + len(kept) == sum(map(len, texts))
    assert sorted(bytes(train) + bytes(kept)) == sorted(b"".join(texts))


def test_too_few_files_to_keep_one_are_an_error_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"^validation='files' keeps every 10th file, but there are 3 files .*='tail'"):
        divide_texts(TWENTY[:3], "files")


def test_an_unknown_division_is_an_error_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^validation='half' is not known\. Choose one of: auto, files, tail\.$"):
        divide_texts(TWENTY, "half")


def test_a_file_becomes_batches(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be, " * 100)
    data = TextFiles(tmp_path / "text.txt", sequence_length=19, batch_size=5)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.inputs.shape == batch.labels.shape == (5, 19)
    # The last tenth of 2,000 bytes: ten windows of nineteen.
    assert len(data.validation_samples) == 10
