"""A memfit config becomes the arguments of MemFit, or an error that names the key, the value and the choices."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from lightning_memfit.config import MemFitConfig, memfit_arguments, memfit_from_config, register_configs
from lightning_memfit.errors import ConfigurationError


def compose_memfit(*overrides: str) -> Any:
    """The memfit node as the application of this repository composes it."""
    register_configs()
    GlobalHydra.instance().clear()
    with initialize(config_path="../conf", version_base="1.3"):
        return compose("config", overrides=list(overrides)).memfit


def test_an_empty_config_gives_the_defaults() -> None:
    arguments = memfit_arguments({})
    assert arguments["budget"] == "auto"
    assert arguments["num_profiled_steps"] == 2
    assert arguments["split_batch"] is None
    assert arguments == memfit_arguments(MemFitConfig()) == memfit_arguments(OmegaConf.structured(MemFitConfig))


def test_values_given_are_kept() -> None:
    arguments = memfit_arguments({"effective_batch_size": 256, "budget": "700MiB", "micro_batch_size": 8})
    assert (arguments["effective_batch_size"], arguments["budget"], arguments["micro_batch_size"]) == (256, "700MiB", 8)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("precision", "bf17", "is not known. Choose one of: 'auto', '32-true', 'bf16-mixed', '16-mixed', 'bf16-true'."),
        ("optimizer_states", "4bit", "is not known. Choose one of: 'auto', 'as-configured', '8bit'."),
        ("offload", "always", "is not known. Choose one of: 'auto', 'never', 'optimizer', 'parameters'."),
        (
            "optimizer_implementation",
            "slow",
            "is not known. Choose one of: 'auto', 'as-configured', 'single-tensor', 'foreach', 'fused'.",
        ),
        ("mode", "on", "is not known. Choose one of: 'apply', 'report', 'off'."),
        ("on_no_fit", "ignore", "is not known. Choose one of: 'raise', 'skip', 'value'."),
        (
            "on_no_fit",
            "value",
            "needs no_fit_value=: the objective of a run that does not fit, such as no_fit_value=1e9 where it is "
            "minimised. Or use on_no_fit='skip'.",
        ),
        (
            "no_fit_value",
            3.0,
            "is the objective of a run that does not fit under on_no_fit='value', and on_no_fit is 'raise'. Set "
            "on_no_fit='value', or leave no_fit_value out.",
        ),
        ("no_fit_value", float("nan"), "must be a number, or be left out."),
        ("effective_batch_size", 0, "must be a whole number of at least 1, or be left out."),
        ("effective_batch_size", True, "must be a whole number of at least 1, or be left out."),
        ("max_length", -4, "must be a whole number of at least 1, or be left out."),
        ("micro_batch_size", "half", "must be a whole number of at least 1, or be left out."),
        ("budget", 1.5, "is not a size. Write bytes as an int, or text such as '700MiB'."),
        ("headroom", None, "is not a size. Write bytes as an int, or text such as '700MiB'."),
        ("allow_inexact_slicing", "yes", "is not known. Choose one of: True, False."),
        ("verbose", "yes", "is not known. Choose one of: true, false."),
        (
            "num_profiled_steps",
            1,
            "is too few: optimizers create their states in the first step, so that only the second shows the whole "
            "peak. Use 2 or more.",
        ),
        ("planning_seconds", 0, "must be more than 0 seconds."),
        ("plan", 3, "is not known. Choose one of: null or a path."),
        (
            "activation_checkpointing",
            "some",
            "is not known. Choose one of: 'auto', 'none', 'blocks', or a list of patterns of module names such as "
            "['blocks.*'].",
        ),
        (
            "activation_checkpointing",
            [],
            "must be 'auto', 'none', 'blocks', or patterns of module names such as ['encoder.layers.*'].",
        ),
        (
            "loss_weight",
            "pixels",
            "is not known. Choose one of: 'samples', 'tokens', 'next-tokens', 'sum', or the import path of a function, "
            "'my_package.my_module.my_function'.",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_the_choices(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        memfit_arguments({key: value})
    assert str(error.value) == f"memfit.{key}={value!r} {words}"


def test_an_unknown_key_is_named_with_the_keys_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^memfit\.budgit='1GiB' is not a setting of MemFit\. Did you mean 'budget'\? Choose"
    ):
        memfit_arguments({"budgit": "1GiB"})


def test_patterns_of_modules_become_a_tuple() -> None:
    assert memfit_arguments({"activation_checkpointing": ["blocks.*"]})["activation_checkpointing"] == ("blocks.*",)
    assert memfit_arguments({"activation_checkpointing": "blocks.*"})["activation_checkpointing"] == ("blocks.*",)
    assert memfit_arguments({"activation_checkpointing": "blocks"})["activation_checkpointing"] == "blocks"


def test_functions_are_imported_by_their_path() -> None:
    arguments = memfit_arguments({"split_batch": "math.floor", "loss_weight": "statistics.mean"})
    assert arguments["split_batch"](2.5) == 2
    assert arguments["loss_weight"]([1, 3]) == 2


@pytest.mark.parametrize("path", ["math.no_such_function", "no_such_package.function"])
def test_a_function_that_cannot_be_imported_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^memfit\.worst_batch='{path}' cannot be imported: "):
        memfit_arguments({"worst_batch": path})


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^A memfit config of type list cannot be read\. Give a mapping, a Dict"
    ):
        memfit_arguments(["budget"])


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^memfit\.split_batch='math\.pi' is not known\. Choose one of: the import path"
    ):
        memfit_arguments({"split_batch": "math.pi"})


def test_a_bare_off_in_yaml_means_off() -> None:
    assert memfit_arguments(OmegaConf.create("mode: off"))["mode"] == "off"
    merged = OmegaConf.merge(OmegaConf.structured(MemFitConfig), OmegaConf.create("mode: off"))
    assert memfit_arguments(merged)["mode"] == "off"


@pytest.mark.parametrize(
    ("preset", "mode"),
    [("auto", "apply"), ("safe", "apply"), ("fast", "apply"), ("report", "report"), ("disabled", "off")],
)
def test_every_preset_composes(preset: str, mode: str) -> None:
    arguments = memfit_arguments(compose_memfit(f"memfit={preset}"))
    assert arguments["mode"] == mode
    assert arguments["effective_batch_size"] == 16


def test_an_override_of_the_budget_reaches_memfit() -> None:
    assert memfit_arguments(compose_memfit("memfit.budget=300MiB"))["budget"] == "300MiB"
    assert memfit_arguments(compose_memfit("memfit.budget=300000000"))["budget"] == 300_000_000


@pytest.mark.parametrize(
    ("override", "named"),
    [("memfit.budgit=1GiB", "budgit"), ("memfit.num_profiled_steps=two", "'two' of type 'str' could not be converted")],
)
def test_a_wrong_override_fails_while_the_config_is_composed(override: str, named: str) -> None:
    with pytest.raises(ConfigCompositionException) as error:
        compose_memfit(override)
    assert named in f"{error.value} {error.value.__cause__}"


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)^The memfit config cannot be resolved: .*no_such_key.*budget"):
        memfit_arguments(OmegaConf.create({"budget": "${no_such_key}"}))


def test_without_hydra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("hydra", "omegaconf"):
            raise ImportError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-memfit\[cli\]'$"):
        register_configs()
    assert memfit_arguments({"budget": "1GiB"})["budget"] == "1GiB"


def test_a_config_makes_the_plugin() -> None:
    plugin = memfit_from_config({"effective_batch_size": 4, "mode": "off"})
    assert type(plugin).__name__ == "MemFit"
