"""The config groups: every key explained, and every key of the memfit group an argument of MemFit."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import resources
from pathlib import Path

import pytest
import yaml

from lightning_memfit import MemFit
from lightning_memfit.config import HARDWARE_SCHEMA_NAME, SCHEMA_NAME, MemFitConfig
from lightning_memfit.hardware.catalog import catalog

ROOT = Path(__file__).parents[2]
GROUP = ROOT / "lightning_memfit" / "conf" / "memfit"
HARDWARE = ROOT / "lightning_memfit" / "conf" / "hardware"
FILES = sorted([*GROUP.glob("*.yaml"), *HARDWARE.glob("*.yaml"), *(ROOT / "conf").rglob("*.yaml")])
SELF_EXPLANATORY = {"_target_", "defaults", "hydra", "logger", "callbacks", "memfit"}


def keys_without_a_comment(text: str) -> list[str]:
    """Top-level keys that have a comment neither on the line above nor at their end."""
    lines = text.splitlines()
    return [
        line.split(":")[0]
        for above, line in zip(["", *lines], lines, strict=False)
        if line[:1].isalpha() and not above.startswith("#") and " # " not in line
    ]


def arguments_of_memfit() -> dict[str, object]:
    parameters = inspect.signature(MemFit.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_is_explained(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#"), "the file says what it is for in its first line"
    assert set(keys_without_a_comment(text)) <= SELF_EXPLANATORY


def test_the_check_of_comments_can_fail() -> None:
    assert keys_without_a_comment("# why\na: 1\nb: 2\nc: 3 # why") == ["b"]


def test_the_schema_has_the_arguments_of_memfit_with_their_defaults() -> None:
    schema = {field.name: field.default for field in dataclasses.fields(MemFitConfig)}
    assert schema == arguments_of_memfit()


def test_the_default_preset_names_every_argument_with_its_default() -> None:
    assert yaml.safe_load((GROUP / "auto.yaml").read_text(encoding="utf-8")) == arguments_of_memfit()


@pytest.mark.parametrize("path", sorted(GROUP.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_names_arguments_only(path: Path) -> None:
    keys = set(yaml.safe_load(path.read_text(encoding="utf-8"))) - {"defaults"}
    assert keys <= set(arguments_of_memfit())


def test_no_file_has_the_name_of_the_schema() -> None:
    assert not {SCHEMA_NAME, HARDWARE_SCHEMA_NAME} & {path.stem for path in FILES}


def test_the_hardware_group_has_the_catalogue_and_what_is_here() -> None:
    devices = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in HARDWARE.glob("*.yaml")}
    assert devices == {key: {"device": key} for key in ["local", *(model.key for model in catalog())]}


def test_the_group_is_part_of_the_package() -> None:
    names = {entry.name for entry in (resources.files("lightning_memfit.conf") / "memfit").iterdir()}
    assert {"auto.yaml", "report.yaml", "disabled.yaml", "safe.yaml", "fast.yaml"} <= names
