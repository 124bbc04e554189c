"""Peaks that others measured on GPUs and published: the rows of ``data/``, and what they say they measured.

Rows that cannot be rebuilt on one absent GPU are there as well, each with the reason.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.kept_outputs import Held
from lightning_memfit.hardware.catalog import find_gpu
from lightning_memfit.units import MIB

DATA = Path(__file__).parent / "data"
PEAKS = DATA / "published_gpu_peaks.csv"
PERCEPTRONS = DATA / "mlp_a100.json"

LISTED = "listed"
"""The group of the rows that are not rebuilt."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a step is made of; rows that measured several statistics of one run share it."""

    model: str
    """Key of ``published_models.MODELS``, or ``"mlp"``."""
    layers: tuple[tuple[str, int], ...] = ()
    """Kind and width of each layer of a perceptron; empty for other models."""
    batch: int
    """Samples of the optimizer step that is followed."""
    shape: int
    """Pixels a side, tokens, or features of a sample."""
    precision: str
    """In Lightning's words."""
    optimizer: str
    """Key of ``published_case.OPTIMIZERS``."""
    optimizer_implementation: str
    """``"as-configured"``, ``"single-tensor"``, ``"foreach"``, ``"fused"``, or ``"8bit"`` for quantised states."""
    activation_checkpointing: str
    """``"none"`` or ``"blocks"``."""
    micro_batch: int | None
    """Samples of a slice where gradients accumulate; ``None`` where they do not."""
    zero_gradients: str
    """Where the loop drops gradients: ``"before forward"`` (or after the step) or ``"before backward"``; ``"in place"``
    where it fills them with zeros and keeps them."""
    kept_outputs: Held
    """How long the loop holds on to what the network returned."""
    cublas_workspace: str = ""
    """What ``CUBLAS_WORKSPACE_CONFIG`` was; empty where it was not set."""
    device: str
    """Name of the device in the catalogue."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published measurement."""

    id: str
    """Group and number."""
    group: str
    """Rows of one source, made by the same script on one machine; ``"listed"`` for those not rebuilt."""
    title: str
    """As the source names the model."""
    setting: Setting | None
    """How to rebuild it; ``None`` where that is not possible."""
    not_rebuilt: str
    """Why it cannot be rebuilt; empty where it can."""
    measured_bytes: int | None
    """What was measured; ``None`` where the run died for want of memory."""
    statistic: str
    """What the number is: ``peak_allocated``, ``peak_reserved``, ``device_total``, or in the source's own words."""
    grade: str
    """How completely the source describes the run: A, A-, B or C; others where nobody graded it."""
    peer_predicted_bytes: int | None
    """What the source's own estimator said of the same run."""
    cause: str
    """Why the prediction is off by more than a tenth, once that is understood."""
    note: str
    """What else the source tells."""
    source: str
    """Repository and file at its version."""

    @property
    def out_of_memory(self) -> bool:
        """Whether the run died."""
        return self.measured_bytes is None

    @property
    def capacity_bytes(self) -> int | None:
        """What torch reports as the device's size; ``None`` where the row is not rebuilt."""
        return None if self.setting is None else find_gpu(self.setting.device).torch_total_bytes.high


def published_rows() -> list[PublishedRow]:
    """All rows, in the order of the files."""
    return [*_perceptrons(), *_peaks()]


def settings_of(rows: Iterable[PublishedRow]) -> list[Setting]:
    """The distinct settings, each once."""
    return list(dict.fromkeys(row.setting for row in rows if row.setting is not None))


def _perceptrons() -> list[PublishedRow]:
    data: dict[str, Any] = json.loads(PERCEPTRONS.read_text(encoding="utf-8"))
    return [_perceptron(data, row) for row in data["rows"]]


def _perceptron(data: dict[str, Any], row: dict[str, Any]) -> PublishedRow:
    setting = Setting(
        model="mlp",
        layers=tuple((kind, width) for kind, width in row["layers"]),
        batch=row["batch"],
        shape=row["inputs"],
        precision=data["precision"],
        optimizer=data["optimizer"],
        optimizer_implementation=data["optimizer_implementation"],
        activation_checkpointing="none",
        micro_batch=None,
        zero_gradients=data["zero_gradients"],
        kept_outputs=data["kept_outputs"],
        device=data["device"],
    )
    depth = sum(kind == "linear" for kind, _ in row["layers"])
    return PublishedRow(
        id=row["id"],
        group="mlp",
        title=f"MLP, {row['inputs']} features, {depth} linear layers",
        setting=setting,
        not_rebuilt="",
        measured_bytes=row["measured_mib"] * MIB,
        statistic=data["statistic"],
        grade=data["grade"],
        peer_predicted_bytes=None,
        cause=row["cause"],
        note=data["note"],
        source=data["source"],
    )


def _peaks() -> list[PublishedRow]:
    with PEAKS.open(encoding="utf-8", newline="") as file:
        return [_peak(row) for row in csv.DictReader(file)]


def _peak(row: dict[str, str]) -> PublishedRow:
    return PublishedRow(
        id=row["id"],
        group=row["group"],
        title=row["title"],
        setting=None if row["not_rebuilt"] else _setting(row),
        not_rebuilt=row["not_rebuilt"],
        measured_bytes=_bytes(row["measured_mib"]),
        statistic=row["statistic"],
        grade=row["grade"],
        peer_predicted_bytes=_bytes(row["peer_predicted_mib"]),
        cause=row["cause"],
        note=row["note"],
        source=row["source"],
    )


def _setting(row: dict[str, str]) -> Setting:
    return Setting(
        model=row["model"],
        batch=int(row["batch"]),
        shape=int(row["shape"]),
        precision=row["precision"],
        optimizer=row["optimizer"],
        optimizer_implementation=row["optimizer_implementation"],
        activation_checkpointing=row["activation_checkpointing"],
        micro_batch=int(row["micro_batch"]) if row["micro_batch"] else None,
        zero_gradients=row["zero_gradients"],
        kept_outputs=_held(row["kept_outputs"]),
        cublas_workspace=row["cublas_workspace"],
        device=row["device"],
    )


def _held(words: str) -> Held:
    found: Held = next(known for known in get_args(Held) if known == words)
    return found


def _bytes(mebibytes: str) -> int | None:
    return round(float(mebibytes) * MIB) if mebibytes else None
