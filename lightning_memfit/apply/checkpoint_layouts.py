"""Which layout a checkpoint has, and whether the run that is to go on from it can read it.

Adapter for the names of files in checkpoints, and for what the engines do with them:

- Lightning 2.5 and 2.6: ``meta.pt`` beside the parts of ``ModelParallelStrategy`` (``_is_sharded_checkpoint`` of
  ``fabric/strategies/fsdp.py``), a folder ``checkpoint`` in that of ``DeepSpeedStrategy``
  (``_is_deepspeed_checkpoint`` of ``fabric/strategies/deepspeed.py``), ``load_full_weights`` of that strategy;
- torch: ``__{rank}_{n}.distcp``;
- DeepSpeed 0.19: ``latest``, ``latest_universal``, ``*_model_states.pt``, ``*_optim_states.pt``, ``dp_world_size`` and
  ``ds_config`` in the former (``_get_ckpt_name``, ``_get_zero_ckpt_prefix``, ``_load_zero_checkpoint`` of
  ``runtime/engine.py``).

Looked at before planning are only checkpoints that the strategy restores after its set-up. Others are loaded before
MemFit is asked anything: of a folder, on which Lightning then fails, is told what it is (:func:`explain_folder`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_memfit.apply.deepspeed_config import is_deepspeed
from lightning_memfit.apply.optimizer_formats import QUANTISED
from lightning_memfit.apply.resumed import path_to_restore, run_that_failed
from lightning_memfit.errors import CheckpointFormatError
from lightning_memfit.plan import Precision
from lightning_memfit.plan_reuse import CHECKPOINT_KEY
from lightning_memfit.upstream import namespace_of

Kind = Literal["file", "sharded", "deepspeed", "folder", "missing"]
"""One file; a folder of ``ModelParallelStrategy``; one of DeepSpeed; another folder; nothing."""
_BF16: tuple[Precision, ...] = ("bf16-mixed", "bf16-true")


@dataclass(frozen=True, kw_only=True)
class CheckpointLayout:
    """What a checkpoint on a local disk is, as far as its files tell."""

    path: str
    """Where it is, as the user gave it."""
    kind: Kind
    """How its files lie."""
    ranks: int | None = None
    """Whose parts a folder holds; ``None`` where it does not say."""
    zero_stage: int | None = None
    """Of DeepSpeed's; ``None`` where it does not say."""
    stages: tuple[int, ...] = ()
    """Stages of ZeRO whose files are there: 1 and 2 have the same."""
    tags: tuple[str, ...] = ()
    """What DeepSpeed can be asked for: ``"latest"``, ``"latest_universal"``."""
    precision: Precision | None = None
    """In which DeepSpeed trained, in Lightning's words; ``None`` where it does not say."""
    is_quantised: bool = False
    """Whether a file holds optimizer states in 8 bits."""
    carried: Mapping[str, Any] | None = None
    """The entry with MemFit's plan, under its key; ``None`` if there is none."""

    @property
    def words(self) -> str:
        """What it is, for messages."""
        parts = "" if self.ranks is None else f" with the parts of {self.ranks} rank(s)"
        if self.kind == "deepspeed":
            stage = "" if self.zero_stage is None else f", stage {self.zero_stage},"
            return f"a folder of DeepSpeed{stage}{parts}"
        return {
            "file": "one file",
            "sharded": f"a folder of ModelParallelStrategy (FSDP2){parts}",
            "folder": "a folder that neither DeepSpeedStrategy nor ModelParallelStrategy saved",
            "missing": "not there",
        }[self.kind]


@dataclass(frozen=True, kw_only=True)
class ResumingRun:
    """The run that is to go on."""

    namespace: str
    """Lightning's package that it uses."""
    ranks: int
    """Its devices."""
    zero_stage: int | None = None
    """Of DeepSpeed; ``None`` under others."""
    reads_one_file: str | None = None
    """Name of a strategy that reads nothing but one file; ``None`` under DeepSpeed and ModelParallelStrategy."""
    loads_full_weights: bool = False
    """Whether DeepSpeed is told to read the weights of one file, and nothing else."""
    loads_universal: bool = False
    """Whether DeepSpeed is told to read its universal layout."""
    precision: Precision | None = None
    """As the user pinned it; ``None`` if MemFit chooses."""

    @property
    def words(self) -> str:
        """What it is, for messages."""
        engine = "ModelParallelStrategy (FSDP2)"
        if self.zero_stage is not None:
            engine = f"DeepSpeedStrategy(stage={self.zero_stage})"
        return f"{self.reads_one_file or engine} on {self.ranks} device(s)"


@dataclass(frozen=True, kw_only=True)
class ToRestore:
    """What planning should know of the checkpoint that is restored after it; plain data, sent to all ranks."""

    carried: Mapping[str, Any] | None = None
    """The entry with MemFit's plan, under its key; ``None`` if there is none."""
    precision: Precision | None = None
    """The one in which the run must go on; ``None`` if any will do."""


def checkpoint_to_restore(trainer: Any, precision: Precision | None) -> ToRestore:
    """Look at the checkpoint that the strategy restores after its set-up, and refuse what it cannot read.

    Nothing is said of one that is not on a local disk.

    Args:
        trainer: the Trainer, fitting.
        precision: as the user pinned it; ``None`` if MemFit chooses.

    Raises:
        CheckpointFormatError: if the strategy surely cannot restore it on these devices.
    """
    path = path_to_restore(trainer)
    if path is None or "://" in path:
        return ToRestore()
    layout, run = layout_of(path), _run_of(trainer, precision)
    check_layout(layout, run)
    return ToRestore(carried=layout.carried, precision=precision_to_keep(layout, run))


def explain_folder(error: BaseException | None) -> None:
    """Add to the error of a fit that could not open its checkpoint, a folder, what that is and what to do.

    Args:
        error: the one that ended the run; ``None`` if none did.
    """
    failed = run_that_failed(error) if isinstance(error, IsADirectoryError) else None
    if not isinstance(error, IsADirectoryError) or failed is None or error.filename is None:
        return
    trainer, path = failed
    is_told = trainer.strategy.restore_checkpoint_after_setup or hasattr(error, "__notes__")
    if is_told or trainer.state.fn != "fit" or Path(error.filename).resolve() != Path(path).resolve():
        return
    run = ResumingRun(
        namespace=namespace_of(trainer), ranks=trainer.world_size, reads_one_file=type(trainer.strategy).__name__
    )
    try:
        check_layout(layout_of(path, weights_only=True), run)
    except CheckpointFormatError as refused:
        error.add_note(f"MemFit: {refused}")
    except Exception:  # files of anybody's may be there; the error itself stands without a note
        return


def layout_of(path: str, *, weights_only: bool | None = None) -> CheckpointLayout:
    """What lies at a path.

    Args:
        path: on a local disk.
        weights_only: whether files must hold nothing but tensors and plain data; by default they are read as the
            engine reads them soon after.
    """
    place = Path(path)
    if place.is_file():
        header = _header(place, weights_only=weights_only)
        return CheckpointLayout(
            path=path, kind="file", is_quantised=_has_quantised_states(header), carried=_carried(header)
        )
    if (place / "meta.pt").is_file():
        written = {match[1] for each in place.iterdir() if (match := re.fullmatch(r"__(\d+)_\d+\.distcp", each.name))}
        carried = _carried(_header(place / "meta.pt", weights_only=weights_only))
        return CheckpointLayout(path=path, kind="sharded", ranks=len(written) or None, carried=carried)
    if (place / "checkpoint").is_dir():
        return _deepspeed_layout(path, weights_only=False if weights_only is None else weights_only)
    return CheckpointLayout(path=path, kind="folder" if place.is_dir() else "missing")


def check_layout(layout: CheckpointLayout, run: ResumingRun) -> None:
    """Refuse a checkpoint that a run surely cannot go on from.

    Args:
        layout: of the checkpoint.
        run: the run.

    Raises:
        CheckpointFormatError: naming the checkpoint and the run, what differs, and what can be done.
    """
    remedy = _remedy(layout, run)
    if remedy is not None:
        raise CheckpointFormatError(
            f"The checkpoint {layout.path!r} is {layout.words}, and this run, {run.words}, cannot go on from it. "
            f"{remedy} Nothing was planned or trained."
        )


def precision_to_keep(layout: CheckpointLayout, run: ResumingRun) -> Precision | None:
    """The precision in which a run must go on whose precision MemFit chooses; ``None`` if any will do.

    DeepSpeed names the files of its optimizer states after bfloat16 where it trains in it, and opens those alone.
    """
    if run.zero_stage is None or run.loads_universal or run.loads_full_weights or run.precision is not None:
        return None
    return layout.precision


def _run_of(trainer: Any, precision: Precision | None) -> ResumingRun:
    strategy = trainer.strategy
    if not is_deepspeed(strategy):
        return ResumingRun(namespace=namespace_of(trainer), ranks=trainer.world_size, precision=precision)
    config = strategy.config if isinstance(strategy.config, dict) else {}
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    return ResumingRun(
        namespace=namespace_of(trainer),
        ranks=trainer.world_size,
        zero_stage=stage,
        loads_full_weights=stage == 3 and bool(getattr(strategy, "load_full_weights", False)),
        loads_universal=bool((config.get("checkpoint") or {}).get("load_universal", False)),
        precision=precision,
    )


def _deepspeed_layout(path: str, *, weights_only: bool) -> CheckpointLayout:
    place = Path(path)
    tags = tuple(tag for tag in ("latest", "latest_universal") if (place / tag).is_file())
    inside = place / ((place / tags[0]).read_text().strip() if tags else "checkpoint")
    whole, parts = (
        sorted(inside.glob(f"{name}_model_states.pt")) for name in ("mp_rank_*", "zero_pp_rank_0_mp_rank_*")
    )
    models = [*whole, *parts]  # of both kinds where a run of another stage saved over an older checkpoint
    header = _header(models[0], weights_only=weights_only) if bool(whole) != bool(parts) else {}
    config = header.get("ds_config")
    config = config if isinstance(config, dict) else {}
    ranks = header.get("dp_world_size")
    stage = (config.get("zero_optimization") or {}).get("stage")
    return CheckpointLayout(
        path=path,
        kind="deepspeed",
        ranks=ranks if isinstance(ranks, int) else None,
        zero_stage=stage if isinstance(stage, int) else None,
        stages=(*((1, 2) if whole else ()), *((3,) if parts else ())),
        tags=tags,
        precision=_precision_of(config) if config else None,
        carried=_carried(header),
    )


def _precision_of(config: dict[str, Any]) -> Precision:
    if (config.get("bf16") or {}).get("enabled"):
        return "bf16-mixed"
    return "16-mixed" if (config.get("fp16") or {}).get("enabled") else "32-true"


def _header(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """What a file holds, tensors left on the disk; empty where it cannot be read.

    Args:
        path: of a file.
        weights_only: whether it must hold nothing but tensors and plain data; ``None`` is torch's default.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except Exception:  # unpickling raises anything; the engine reads the file itself, and says what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def _has_quantised_states(header: dict[str, Any]) -> bool:
    saved = header.get("optimizer_states")
    groups = saved if isinstance(saved, list) else []
    states = [state for each in groups if isinstance(each, dict) for state in each.get("state", {}).values()]
    return any(isinstance(state, dict) and QUANTISED in state for state in states)


def _carried(header: dict[str, Any]) -> dict[str, Any] | None:
    return {CHECKPOINT_KEY: header[CHECKPOINT_KEY]} if CHECKPOINT_KEY in header else None


def _remedy(layout: CheckpointLayout, run: ResumingRun) -> str | None:
    """What can be done where a run cannot go on from a checkpoint; ``None`` if it can."""
    if layout.kind in ("missing", "folder"):
        return _hint_of_a_parent(layout) or "Give ckpt_path= a checkpoint that Trainer.save_checkpoint wrote."
    if run.reads_one_file is not None:
        return None if layout.kind == "file" else _other_strategy(layout, run)
    if run.zero_stage is None:
        return _other_strategy(layout, run) if layout.kind == "deepspeed" else _lost_by_fsdp2(layout)
    if run.loads_full_weights:
        return None if layout.kind == "file" else _not_a_file(layout)
    return _other_zero(layout, run) if layout.kind == "deepspeed" else _other_strategy(layout, run)


def _hint_of_a_parent(layout: CheckpointLayout) -> str | None:
    """The path of a part of DeepSpeed's folder leads to the folder."""
    place = Path(layout.path)
    for parent in (place.parent, place.parent.parent):
        if (parent / "checkpoint").is_dir() and place.name:
            return f"It lies in a folder of DeepSpeed: give ckpt_path={str(parent)!r}."
    return None


def _other_strategy(layout: CheckpointLayout, run: ResumingRun) -> str:
    if layout.kind == "deepspeed":
        return f"Resume under {_same_zero(layout)}. {_weights_of_zero(run)}"
    if layout.kind == "sharded":
        fabric = "lightning.fabric" if run.namespace == "lightning.pytorch" else "lightning_fabric"
        return (
            "Resume under ModelParallelStrategy, on any number of devices. Weights alone go on everywhere: 'python -m "
            f"{fabric}.utilities.consolidate_checkpoint {layout.path}' writes them to a file for load_from_checkpoint."
        )
    return (
        _hint_of_a_parent(layout)
        or "Resume under the strategy that saved it: one device, DDPStrategy or ModelParallelStrategy. Weights alone "
        "go on everywhere: load_from_checkpoint reads them from the file; leave ckpt_path= out then."
    )


def _lost_by_fsdp2(layout: CheckpointLayout) -> str | None:
    """States in 8 bits are loaded beside those that FSDP2 steps with, which stay as they were: all zero."""
    if not layout.is_quantised:
        return None
    return (
        "Its optimizer states are in 8 bits, and FSDP2 would go on with states of zero, without a word. Resume on one "
        "device or under DDPStrategy with MemFit(optimizer_states='as-configured'), and save: that file goes on here."
    )


def _not_a_file(layout: CheckpointLayout) -> str:
    if layout.kind == "deepspeed":
        return f"load_full_weights=True reads one file: leave it out, and resume under {_same_zero(layout)}."
    return "load_full_weights=True reads one file. Resume under ModelParallelStrategy, on any number of devices."


def _other_zero(layout: CheckpointLayout, run: ResumingRun) -> str | None:
    """What can be done where a folder of DeepSpeed is not one for this run of DeepSpeed; ``None`` if it is."""
    wanted = "latest_universal" if run.loads_universal else "latest"
    if wanted not in layout.tags:
        other = "leave checkpoint.load_universal out of" if run.loads_universal else "set checkpoint.load_universal in"
        return f"It has no file {wanted!r}" + (f": {other} DeepSpeed's configuration." if layout.tags else ".")
    if layout.stages and (3 if run.zero_stage == 3 else 1) not in layout.stages:
        return f"Resume under {_same_zero(layout)}. {_weights_of_zero(run)}"
    if run.loads_universal:
        return None
    if layout.ranks not in (None, run.ranks):
        return (
            f"DeepSpeed's own folders are read by as many ranks as saved them: resume on {layout.ranks} device(s), or "
            "convert it. 'python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
            f"{layout.path}/checkpoint --output_folder OTHER/checkpoint' makes a folder OTHER that DeepSpeedStrategy("
            "config=...) reads on any number of devices, with 'checkpoint': {'load_universal': True} in config."
        )
    was_bf16 = layout.precision in _BF16
    if layout.precision is None or run.precision is None or was_bf16 == (run.precision in _BF16):
        return None
    return (
        f"It was saved in {layout.precision!r}, and DeepSpeed opens no optimizer states of bfloat16 in another "
        f"precision, nor others in bfloat16. Set MemFit(precision={layout.precision!r}), or leave precision= out; you "
        f"set {run.precision!r}."
    )


def _same_zero(layout: CheckpointLayout) -> str:
    stage = layout.zero_stage if layout.zero_stage is not None else " or ".join(map(str, layout.stages)) or "..."
    devices = "as many devices as before" if layout.ranks is None else f"{layout.ranks} device(s)"
    return f"DeepSpeedStrategy(stage={stage}) on {devices}"


def _weights_of_zero(run: ResumingRun) -> str:
    return (
        f"Weights alone go on everywhere: {run.namespace}.utilities.deepspeed."
        "convert_zero_checkpoint_to_fp32_state_dict(folder, file) writes them to a file for load_from_checkpoint."
    )
