"""``LightningCLI`` makes MemFit from a command line or a file, as any other plugin.

Run: ``pytest tests/zoo/test_lightning_cli.py``.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml

from lightning_memfit import MemFit
from lightning_memfit.apply.slicing import LOSS_WEIGHT_WORDS
from tests.zoo.lifecycle import NAMESPACES, assert_same, classifier_of, held_out, shuffled
from tests.zoo.test_matrix import AS_IT_IS

pytest.importorskip("jsonargparse", reason="needs jsonargparse, of which LightningCLI is made")
from lightning.pytorch.cli import LightningCLI

pytestmark = [
    pytest.mark.usefixtures("no_probing", "own_arguments"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
    # What Lightning asks of jsonargparse, and will not be there in its fifth release.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

PLUGIN = "--trainer.plugins"
QUIET = (
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--seed_everything=1",
)
SLICED = (
    f"{PLUGIN}=lightning_memfit.MemFit",
    f"{PLUGIN}.micro_batch_size=3",
    f'{PLUGIN}.activation_checkpointing=["blocks.*"]',
    f"{PLUGIN}.budget=700MiB",
    f"{PLUGIN}.verbose=false",
    *(f"{PLUGIN}.{name}={value}" for name, value in AS_IT_IS.items() if name != "activation_checkpointing"),
)


@pytest.fixture
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's own arguments are not for the program."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return shuffled()

    def val_dataloader(self) -> Any:
        return held_out()


def cli(*args: str, folder: Path | None = None, run: bool = True, **settings: Any) -> Any:
    """A program that is a ``LightningCLI``, called with these arguments."""
    where = [] if folder is None else [f"--trainer.default_root_dir={folder}"]
    subcommand = ["fit"] if run else []
    return LightningCLI(
        classifier_of(NAMESPACES[0]),
        Data,
        run=run,
        args=[*subcommand, *QUIET, *where, *args],
        auto_configure_optimizers=False,
        **settings,
    )


def plugin_of(*args: str) -> MemFit:
    plugin = cli(*args, run=False, save_config_callback=None).trainer.precision_plugin
    assert isinstance(plugin, MemFit)
    return plugin


def test_its_parameters_are_seen() -> None:
    assert list(inspect.signature(MemFit).parameters) == [
        name for name in inspect.signature(MemFit.__init__).parameters if name != "self"
    ]


def test_a_run_of_the_command_line_and_of_the_file_that_it_writes_equal_one_without_memfit(tmp_path: Path) -> None:
    """Reported in Lightning-AI/pytorch-lightning#8262: types of arguments were checked, and plugin objects refused."""
    plain = cli(folder=tmp_path / "plain")
    theirs = dict(plain.model.state_dict())
    ours = cli(*SLICED, folder=tmp_path / "memfit")
    (config,) = (tmp_path / "memfit").rglob("config.yaml")
    again = cli("--config", str(config), folder=tmp_path / "again")
    for each in (ours, again):
        plan = each.trainer.precision_plugin.plan
        assert (plan.split.num_slices, plan.budget.budget_bytes) == (3, 700 * 2**20)
        assert plan.candidate.checkpointed_modules == ("blocks.0", "blocks.1", "blocks.2")
        assert each.trainer.global_step == plain.trainer.global_step == 6
        assert_same(dict(each.model.state_dict()), theirs, within=1e-5)


def test_a_list_of_plugins_and_plain_types(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = {
        "effective_batch_size": 16,
        "headroom": 0,
        "budget": 10**9,
        "activation_checkpointing": ["blocks.0", "blocks.2"],
        "planning_seconds": 2.5,
        "max_length": 128,
        "cache_dir": None,
        "verbose": False,
    }
    memfit = {"class_path": "lightning_memfit.MemFit", "init_args": settings}
    other = {"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO"}
    config.write_text(yaml.safe_dump({"trainer": {"plugins": [other, memfit]}}))
    request = plugin_of("--config", str(config)).request
    assert request == MemFit(**settings).request
    assert request.activation_checkpointing == ("blocks.0", "blocks.2")


def test_functions_are_given_by_their_import_path() -> None:
    plugin = plugin_of(
        f"{PLUGIN}=lightning_memfit.MemFit",
        f"{PLUGIN}.split_batch=torch.split",
        f"{PLUGIN}.loss_weight=torch.numel",
    )
    assert plugin._functions.split_batch is torch.split
    assert plugin._functions.loss_weight is torch.numel
    for word in LOSS_WEIGHT_WORDS:
        by_word = plugin_of(f"{PLUGIN}=lightning_memfit.MemFit", f"{PLUGIN}.loss_weight={word}")
        assert by_word._functions.loss_weight == word


@pytest.mark.parametrize("given", [(), SLICED, (f"{PLUGIN}=lightning_memfit.MemFit", f"{PLUGIN}.loss_weight=sum")])
def test_the_config_that_is_printed_makes_the_same_plugin(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = given or (f"{PLUGIN}=lightning_memfit.MemFit",)
    with pytest.raises(SystemExit) as ended:
        cli(*given, "--print_config", run=False)
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    plugin = printed["trainer"]["plugins"]
    assert plugin["class_path"] == "lightning_memfit.MemFit"
    assert list(plugin["init_args"]) == list(inspect.signature(MemFit).parameters)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(printed))
    assert plugin_of("--config", str(tmp_path / "config.yaml")).request == plugin_of(*given).request


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("budget=12GX", "budget='12GX' is not a size. Write a number and a unit"),
        ("precision=fp8", "precision='fp8'"),
        ("micro_batch_size=0", "micro_batch_size=0"),
        ("activation_checkpointing=[]", "activation_checkpointing=[] must be 'auto', 'none', 'blocks', or patterns"),
        ("loss_weight=words", "loss_weight='words' is not known. Choose 'samples'"),
        ("plan=nowhere.yaml", "nowhere.yaml"),
        ("offload=always", "offload='always'"),
        ("effective_batch=16", "Option 'effective_batch' is not accepted"),
    ],
)
def test_a_wrong_value_is_refused_in_memfits_own_words(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """jsonargparse ends the program over what it cannot parse, and raises what MemFit says of the rest."""
    with pytest.raises((SystemExit, ValueError)) as ended:
        cli(f"{PLUGIN}=lightning_memfit.MemFit", f"{PLUGIN}.{setting}", run=False)
    assert message in f"{ended.value}{capsys.readouterr().err}"


PYTORCH_LIGHTNING = """
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel

plugin = LightningCLI(BoringModel, run=False, save_config_callback=None).trainer.precision_plugin
print(plugin.request.effective_batch_size, type(plugin).__name__)
"""


def test_the_command_line_of_pytorch_lightning_makes_it_too() -> None:
    """In a process where nothing else has imported MemFit; that it then trains: ``tests/e2e/test_bad_input.py``."""
    args = ["--trainer.logger=false", f"{PLUGIN}=lightning_memfit.MemFit", f"{PLUGIN}.effective_batch_size=4"]
    program = [sys.executable, "-W", "ignore", "-c", PYTORCH_LIGHTNING, *args]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "4 MemFit\n"
