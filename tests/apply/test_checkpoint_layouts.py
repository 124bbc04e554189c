"""What a checkpoint is, told from its files; which runs go on from it; and what the errors say.

Checkpoints that real ranks saved are in ``tests/ranks/test_layouts.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader

from lightning_memfit import MemFit
from lightning_memfit.apply.checkpoint_layouts import (
    CheckpointLayout,
    ResumingRun,
    check_layout,
    explain_folder,
    layout_of,
    precision_to_keep,
)
from lightning_memfit.apply.resumed import path_to_restore
from lightning_memfit.errors import CheckpointFormatError, UnsupportedError
from lightning_memfit.upstream import NAMESPACES

CARRIED = {"MemFit": {"plan": {"schema_version": 1}}}
FILE = CheckpointLayout(path="a.ckpt", kind="file")
SHARDED = CheckpointLayout(path="a.ckpt", kind="sharded", ranks=4)
ZERO_2 = CheckpointLayout(
    path="a.ckpt", kind="deepspeed", ranks=4, zero_stage=2, stages=(1, 2), tags=("latest",), precision="32-true"
)
ZERO_3 = dataclasses.replace(ZERO_2, zero_stage=3, stages=(3,))
UNIVERSAL = dataclasses.replace(ZERO_2, tags=("latest_universal",))
FSDP2_RUN = ResumingRun(namespace="lightning.pytorch", ranks=2)
ZERO_2_RUN, ZERO_3_RUN = (ResumingRun(namespace="lightning.pytorch", ranks=4, zero_stage=stage) for stage in (2, 3))


def deepspeed_folder(folder: Path, *, stage: int, ranks: int = 2, tag: str = "latest", **config: Any) -> Path:
    """The files that DeepSpeed 0.19 writes, without the tensors."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    (folder / tag).write_text("checkpoint")
    header = {"dp_world_size": ranks, "ds_config": {"zero_optimization": {"stage": stage}, **config}, **CARRIED}
    names = [f"zero_pp_rank_{rank}_" for rank in range(ranks)] if stage == 3 else [""]
    for name in names:
        torch.save(header, folder / "checkpoint" / f"{name}mp_rank_00_model_states.pt")
    return folder


def test_a_file_is_a_file_and_its_plan_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(3)}, **CARRIED}, path)
    assert layout_of(str(path)) == CheckpointLayout(path=str(path), kind="file", carried=CARRIED)


def test_of_a_file_it_is_told_whether_its_optimizer_states_are_in_8_bits(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    small, large = {"exp_avg": torch.ones(2)}, {"__bnb_optimizer_quant_state__": {"state1": torch.ones(2)}}
    for states, is_quantised in (({0: small}, False), ({0: small, 1: large}, True)):
        torch.save({"optimizer_states": [{"state": states, "param_groups": []}]}, path)
        assert layout_of(str(path)).is_quantised == is_quantised


def test_a_folder_of_fsdp2_tells_its_ranks_and_its_plan(tmp_path: Path) -> None:
    torch.save({"epoch": 3, **CARRIED}, tmp_path / "meta.pt")
    for rank in range(3):
        (tmp_path / f"__{rank}_0.distcp").touch()
    (tmp_path / "__2_1.distcp").touch()  # a second file of the last rank
    assert layout_of(str(tmp_path)) == CheckpointLayout(path=str(tmp_path), kind="sharded", ranks=3, carried=CARRIED)


@pytest.mark.parametrize(
    ("config", "precision"),
    [({}, "32-true"), ({"bf16": {"enabled": True}}, "bf16-mixed"), ({"fp16": {"enabled": True}}, "16-mixed")],
)
@pytest.mark.parametrize(("stage", "stages"), [(1, (1, 2)), (2, (1, 2)), (3, (3,))])
def test_a_folder_of_deepspeed_tells_stage_ranks_precision_and_plan(
    tmp_path: Path, stage: int, stages: tuple[int, ...], config: dict[str, Any], precision: Any
) -> None:
    deepspeed_folder(tmp_path, stage=stage, **config)
    assert layout_of(str(tmp_path)) == CheckpointLayout(
        path=str(tmp_path),
        kind="deepspeed",
        ranks=2,
        zero_stage=stage,
        stages=stages,
        tags=("latest",),
        precision=precision,
        carried=CARRIED,
    )


def test_of_a_folder_in_which_two_stages_saved_nothing_is_told_that_may_be_the_older_ones(tmp_path: Path) -> None:
    deepspeed_folder(tmp_path, stage=3, ranks=4)
    layout = layout_of(str(deepspeed_folder(tmp_path, stage=2, ranks=2)))
    assert layout.stages == (1, 2, 3) and layout.ranks is layout.zero_stage is layout.precision is None
    check_layout(layout, dataclasses.replace(ZERO_2_RUN, ranks=2))


def test_a_file_that_cannot_be_read_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "latest").write_text("checkpoint")
    (tmp_path / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(b"no pickle")
    layout = layout_of(str(tmp_path))
    assert layout.stages == (1, 2) and layout.ranks is None and layout.carried is None
    check_layout(layout, ZERO_2_RUN)


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (FILE, FSDP2_RUN),
        (SHARDED, FSDP2_RUN),
        (dataclasses.replace(SHARDED, ranks=1), FSDP2_RUN),
        (ZERO_2, ZERO_2_RUN),
        (ZERO_2, dataclasses.replace(ZERO_2_RUN, zero_stage=1)),
        (ZERO_3, ZERO_3_RUN),
        (FILE, dataclasses.replace(ZERO_3_RUN, loads_full_weights=True)),
        (UNIVERSAL, dataclasses.replace(ZERO_2_RUN, loads_universal=True, ranks=7, precision="bf16-mixed")),
        (ZERO_2, dataclasses.replace(ZERO_2_RUN, precision="16-mixed")),
        (dataclasses.replace(ZERO_2, precision="bf16-mixed"), dataclasses.replace(ZERO_2_RUN, precision="bf16-true")),
    ],
)
def test_what_an_engine_reads_is_not_refused(layout: CheckpointLayout, run: ResumingRun) -> None:
    check_layout(layout, run)


def test_the_error_names_checkpoint_and_run_and_what_can_be_done() -> None:
    """Other numbers of devices: reported in Lightning-AI/pytorch-lightning#19585, deepspeedai/DeepSpeed#3810."""
    with pytest.raises(CheckpointFormatError) as caught:
        check_layout(ZERO_2, dataclasses.replace(ZERO_2_RUN, ranks=2))
    assert str(caught.value) == (
        "The checkpoint 'a.ckpt' is a folder of DeepSpeed, stage 2, with the parts of 4 rank(s), and this run, "
        "DeepSpeedStrategy(stage=2) on 2 device(s), cannot go on from it. DeepSpeed's own folders are read by as many "
        "ranks as saved them: resume on 4 device(s), or convert it. 'python -m deepspeed.checkpoint.ds_to_universal "
        "--inject_missing_state --input_folder a.ckpt/checkpoint --output_folder OTHER/checkpoint' makes a folder "
        "OTHER that DeepSpeedStrategy(config=...) reads on any number of devices, with 'checkpoint': "
        "{'load_universal': True} in config. Nothing was planned or trained."
    )


_WEIGHTS_OF_ZERO = (
    "Weights alone go on everywhere: lightning.pytorch.utilities.deepspeed."
    "convert_zero_checkpoint_to_fp32_state_dict(folder, file) writes them to a file for load_from_checkpoint."
)


@pytest.mark.parametrize(
    ("layout", "run", "remedy"),
    [
        (ZERO_2, FSDP2_RUN, f"Resume under DeepSpeedStrategy(stage=2) on 4 device(s). {_WEIGHTS_OF_ZERO}"),
        (ZERO_2, ZERO_3_RUN, f"Resume under DeepSpeedStrategy(stage=2) on 4 device(s). {_WEIGHTS_OF_ZERO}"),
        (ZERO_3, ZERO_2_RUN, f"Resume under DeepSpeedStrategy(stage=3) on 4 device(s). {_WEIGHTS_OF_ZERO}"),
        (
            SHARDED,
            ZERO_2_RUN,
            "Resume under ModelParallelStrategy, on any number of devices. Weights alone go on everywhere: 'python -m "
            "lightning.fabric.utilities.consolidate_checkpoint a.ckpt' writes them to a file for load_from_checkpoint.",
        ),
        (
            SHARDED,
            dataclasses.replace(ZERO_3_RUN, loads_full_weights=True),
            "load_full_weights=True reads one file. Resume under ModelParallelStrategy, on any number of devices.",
        ),
        (
            FILE,
            ZERO_2_RUN,
            "Resume under the strategy that saved it: one device, DDPStrategy or ModelParallelStrategy. Weights alone "
            "go on everywhere: load_from_checkpoint reads them from the file; leave ckpt_path= out then.",
        ),
        (
            ZERO_3,
            dataclasses.replace(ZERO_3_RUN, loads_full_weights=True),
            "load_full_weights=True reads one file: leave it out, and resume under DeepSpeedStrategy(stage=3) on 4 "
            "device(s).",
        ),
        (
            ZERO_2,
            dataclasses.replace(ZERO_2_RUN, precision="bf16-mixed"),
            "It was saved in '32-true', and DeepSpeed opens no optimizer states of bfloat16 in another precision, nor "
            "others in bfloat16. Set MemFit(precision='32-true'), or leave precision= out; you set 'bf16-mixed'.",
        ),
        (UNIVERSAL, ZERO_2_RUN, "It has no file 'latest': set checkpoint.load_universal in DeepSpeed's configuration."),
        (
            ZERO_2,
            dataclasses.replace(ZERO_2_RUN, loads_universal=True),
            "It has no file 'latest_universal': leave checkpoint.load_universal out of DeepSpeed's configuration.",
        ),
        (dataclasses.replace(ZERO_2, tags=()), ZERO_2_RUN, "It has no file 'latest'."),
        (
            dataclasses.replace(FILE, is_quantised=True),
            FSDP2_RUN,
            "Its optimizer states are in 8 bits, and FSDP2 would go on with states of zero, without a word. Resume on "
            "one device or under DDPStrategy with MemFit(optimizer_states='as-configured'), and save: that file goes "
            "on here.",
        ),
        (
            CheckpointLayout(path="gone", kind="missing"),
            FSDP2_RUN,
            "Give ckpt_path= a checkpoint that Trainer.save_checkpoint wrote.",
        ),
    ],
)
def test_each_error_says_what_can_be_done(layout: CheckpointLayout, run: ResumingRun, remedy: str) -> None:
    with pytest.raises(CheckpointFormatError) as caught:
        check_layout(layout, run)
    assert str(caught.value).endswith(f"cannot go on from it. {remedy} Nothing was planned or trained.")


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_tools_that_errors_name_are_there(namespace: str) -> None:
    run = dataclasses.replace(ZERO_2_RUN, namespace=namespace)
    with pytest.raises(CheckpointFormatError, match=r"python -m (\S+) a\.ckpt") as caught:
        check_layout(SHARDED, run)
    tool = str(caught.value).partition("python -m ")[2].partition(" ")[0]
    assert importlib.util.find_spec(tool) is not None
    converts = importlib.import_module(f"{namespace}.utilities.deepspeed")
    assert callable(converts.convert_zero_checkpoint_to_fp32_state_dict)


def test_the_path_of_a_part_leads_to_the_folder(tmp_path: Path) -> None:
    deepspeed_folder(tmp_path, stage=2)
    part = tmp_path / "checkpoint"
    for inside in (part, part / "mp_rank_00_model_states.pt"):
        with pytest.raises(CheckpointFormatError) as caught:
            check_layout(layout_of(str(inside)), ZERO_2_RUN)
        assert f"It lies in a folder of DeepSpeed: give ckpt_path={str(tmp_path)!r}." in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "run", "kept"),
    [
        (ZERO_2, ZERO_2_RUN, "32-true"),
        (dataclasses.replace(ZERO_2, precision="bf16-mixed"), ZERO_2_RUN, "bf16-mixed"),
        (ZERO_2, dataclasses.replace(ZERO_2_RUN, precision="16-mixed"), None),  # the user's
        (UNIVERSAL, dataclasses.replace(ZERO_2_RUN, loads_universal=True), None),
        (SHARDED, FSDP2_RUN, None),
    ],
)
def test_a_precision_is_kept_where_deepspeed_would_open_no_other(
    layout: CheckpointLayout, run: ResumingRun, kept: Any
) -> None:
    assert precision_to_keep(layout, run) == kept


# The path, which Lightning has not set yet


def line_of(pl: Any) -> Any:
    class Line(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Line()


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.parametrize("restored_late", [True, False])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_path_is_known_in_set_up_where_the_checkpoint_is_restored_after_it(
    namespace: str, restored_late: bool, tmp_path: Path
) -> None:
    pl = importlib.import_module(namespace)
    strategies, plugins = (
        importlib.import_module(f"{namespace}.{name}") for name in ("strategies", "plugins.precision")
    )
    found: list[Any] = []

    class Restores(strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        restore_checkpoint_after_setup = restored_late

    class Asks(plugins.Precision):  # type: ignore[misc, name-defined]
        def convert_module(self, module: Any) -> Any:
            found.append(path_to_restore(module.trainer))
            return module

    def trainer(epochs: int) -> Any:
        return pl.Trainer(
            strategy=Restores(device=torch.device("cpu")), plugins=[Asks()], max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
            default_root_dir=tmp_path,
        )  # fmt: skip

    loader = DataLoader(torch.ones(4, 2), batch_size=2)
    first, path = trainer(1), tmp_path / "last.ckpt"
    first.fit(line_of(pl), loader)
    first.save_checkpoint(path)
    trainer(2).fit(line_of(pl), loader, ckpt_path=path)
    assert found == ([None, str(path)] if restored_late else [None, None])


# A folder where one file is read: Lightning fails before MemFit is asked


def fit_from(path: Path, namespace: str, checkpoint_io: Any = None) -> None:
    pl = importlib.import_module(namespace)

    trainer = pl.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=path.parent,
        plugins=[MemFit(verbose=False), *([] if checkpoint_io is None else [checkpoint_io])],
    )  # fmt: skip
    trainer.fit(line_of(pl), DataLoader(torch.ones(4, 2), batch_size=2), ckpt_path=path)


def sharded_folder(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"epoch": 0}, folder / "meta.pt")
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").touch()
    return folder


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_folder_of_fsdp2_on_one_device_is_told_what_it_is(namespace: str, tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "last.ckpt")
    with pytest.raises(IsADirectoryError) as caught:
        fit_from(folder, namespace)
    fabric = {"lightning.pytorch": "lightning.fabric"}.get(namespace, "lightning_fabric")
    assert caught.value.__notes__ == [
        f"MemFit: The checkpoint {str(folder)!r} is a folder of ModelParallelStrategy (FSDP2) with the parts of 2 "
        "rank(s), and this run, SingleDeviceStrategy on 1 device(s), cannot go on from it. Resume under "
        "ModelParallelStrategy, on any number of devices. Weights alone go on everywhere: 'python -m "
        f"{fabric}.utilities.consolidate_checkpoint {folder}' writes them to a file for load_from_checkpoint. "
        "Nothing was planned or trained."
    ]


def test_a_folder_of_deepspeed_on_one_device_is_told_what_it_is(tmp_path: Path) -> None:
    folder = deepspeed_folder(tmp_path / "last.ckpt", stage=2)
    with pytest.raises(IsADirectoryError) as caught:
        fit_from(folder, "lightning.pytorch")
    (note,) = caught.value.__notes__
    assert (
        f"{str(folder)!r} is a folder of DeepSpeed, stage 2, with the parts of 2 rank(s), and this run, Single" in note
    )
    assert "Resume under DeepSpeedStrategy(stage=2) on 2 device(s). Weights alone go on everywhere: lightning" in note


def test_other_errors_of_loading_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        fit_from(tmp_path / "gone.ckpt", "lightning.pytorch")
    assert not hasattr(missing.value, "__notes__")
    explain_folder(None)
    own = IsADirectoryError("of a run that resumes nothing")
    explain_folder(own)
    assert not hasattr(own, "__notes__")


def test_the_note_is_there_once_and_not_where_memfit_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharded_folder(tmp_path / "last.ckpt")
    with pytest.raises(IsADirectoryError) as caught:
        fit_from(folder, "lightning.pytorch")
    explain_folder(caught.value)  # as of another run that ends while this one is handled
    assert len(caught.value.__notes__) == 1
    monkeypatch.setenv("MEMFIT", "off")
    with pytest.raises(IsADirectoryError) as caught:
        fit_from(folder, "lightning.pytorch")
    assert not hasattr(caught.value, "__notes__")


def test_an_error_of_another_folder_in_a_run_that_opened_its_own_is_left_as_it_is(tmp_path: Path) -> None:
    folder, elsewhere = sharded_folder(tmp_path / "last.ckpt"), tmp_path / "elsewhere"
    elsewhere.mkdir()

    class OfFolders(TorchCheckpointIO):
        """The user's, which opens folders."""

        def load_checkpoint(self, *_: Any, **__: Any) -> dict[str, Any]:
            elsewhere.read_bytes()
            raise AssertionError

    with pytest.raises(IsADirectoryError) as caught:
        fit_from(folder, "lightning.pytorch", checkpoint_io=OfFolders())
    assert caught.value.filename == str(elsewhere) and not hasattr(caught.value, "__notes__")


def test_outside_of_a_run_the_path_is_not_guessed() -> None:
    trainer = type("Trainer", (), {"strategy": type("Strategy", (), {"restore_checkpoint_after_setup": True})()})()
    with pytest.raises(UnsupportedError) as caught:
        path_to_restore(trainer)
    assert str(caught.value) == (
        "No caller is Trainer._run(ckpt_path=...), which says which checkpoint is resumed, in this version of "
        "Lightning; MemFit knows 2.5 and 2.6. Install one of those, or set MEMFIT=off in the environment."
    )
