"""The documentation's site: nothing public is left out, and nothing is fetched."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from types import ModuleType

import pytest
import yaml

import lightning_memfit
from lightning_memfit import MemFit
from tests.docs.pages import ROOT, read


def rows(page: str) -> list[list[str]]:
    """The cells of every row of the tables of a page."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in read(page).splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]


def shown_on_the_api_page() -> list[str]:
    return re.findall(r"^::: ([\w.]+)$", read("docs/api.md"), re.MULTILINE)


def test_every_public_name_is_on_the_api_page() -> None:
    public = {f"lightning_memfit.{name}" for name in lightning_memfit.__all__} - {"lightning_memfit.__version__"}
    assert public <= set(shown_on_the_api_page())


@pytest.mark.parametrize("name", shown_on_the_api_page())
def test_what_the_api_page_shows_can_be_imported_and_has_a_docstring(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert inspect.getdoc(getattr(importlib.import_module(module), attribute))


def test_every_preset_is_on_the_page_about_hydra() -> None:
    presets = {path.stem for path in (ROOT / "lightning_memfit" / "conf" / "memfit").glob("*.yaml")}
    assert presets == {cells[0].strip("`") for cells in rows("docs/quick-start-hydra.md")} - {"memfit="}


def test_every_lever_is_an_argument_of_memfit_or_is_none() -> None:
    named = [re.search(r"\(`(\w+)`\)$", cells[0]) for cells in rows("docs/levers.md")[1:]]
    arguments = {match[1] for match in named if match is not None}
    assert arguments <= set(inspect.signature(MemFit).parameters)
    assert arguments == {
        "activation_checkpointing",
        "micro_batch_size",
        "optimizer_implementation",
        "optimizer_states",
        "precision",
    }
    # Early zeroing has none: it is MemFit's to choose.
    assert len(named) - len(arguments) == 1


def test_the_site_fetches_nothing() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert settings["theme"]["font"] is False
    assert "://" not in read("mkdocs.yml")
    assert {"extra_css", "extra_javascript"} & set(settings) == set()
    assert settings["strict"] is True


@pytest.fixture
def docstring_roles() -> ModuleType:
    pytest.importorskip("griffe", reason="griffe is not installed: pip install 'lightning-memfit[docs]'")
    spec = importlib.util.spec_from_file_location("docstring_roles", ROOT / "scripts" / "docstring_roles.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_roles_of_docstrings_are_shown_as_names(docstring_roles: ModuleType) -> None:
    text = "As :func:`make_plan`, :class:`~lightning_memfit.plan.Plan` and :meth:`Plan.save`; not ``:func:``."
    assert docstring_roles.without_roles(text) == "As `make_plan`, `Plan` and `save`; not ``:func:``."
