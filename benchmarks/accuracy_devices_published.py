"""Forecasts for several absent GPUs against peaks that others measured on real ones and published.

    python -m benchmarks.accuracy_devices_published [--rows PATTERN] [--json PATH] [--markdown PATH]

Nothing is trained and no GPU is needed. Few published rows of several GPUs say what a forecast needs: those that do are
forecast, each with what had to be assumed, and all others are listed with the reason. No target: the rows that are left
were made by engines that differ from those that are forecast, and the table says in what.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from benchmarks.published_models.language import llama, qwen3
from benchmarks.published_rows import PublishedRow, published_rows
from lightning_memfit import Sharding, forecast
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.units import MIB

_LOSS_CHUNKS = 8
_TITAN = (
    "the source traces the whole step as a graph, with attention by flex; forecast: eager, flash attention, everything "
    "computed and gathered in bfloat16, and what a rank holds of parameters, gradients and states in 32 bits "
    "(twice the forecast in bf16-true); the loss in 8 chunks that are recomputed, since from one published row to the "
    "next a token takes less than its logits alone would"
)
_HELD_IN_32_BITS = ("parameters", "gradients", "optimizer_states")
_GRAPH_CHOICE = "what is kept, recomputed or offloaded was chosen by a solver over a graph, operator by operator"
_COMPILED = "compiled, and what is recomputed is not stated"
_MEGATRON = (
    "Megatron's own engine: one buffer of 32-bit gradients, a distributed optimizer of its own, attention that keeps "
    "its scores (the source's file is in 10^9 bytes, by its run_megatron.py)"
)
_TENSOR = "tensor parallelism"

LEFT_OUT: Mapping[str, str] = {
    "listed-11": "compiled; the optimizer's states lie on the host by a policy of FSDP2 that is not forecast",
    "listed-12": "compiled; LoRA's rank and modules are not stated",
    "listed-13": "compiled; QLoRA's rank and modules are not stated",
    **{f"listed-{number}": _COMPILED for number in range(28, 34)},
    **{f"listed-{number}": _GRAPH_CHOICE for number in range(35, 46, 2)},
    **{f"listed-{number}": _TENSOR for number in (82, 83, 85, 86, 87, 88, 89)},
    **{f"listed-{number}": _MEGATRON for number in (81, 84, 90)},
    "listed-97": "batch, sequence and optimizer are not stated; parameters on the host are not forecast",
}
"""By id: why a row of several GPUs is not forecast."""


@dataclass(frozen=True, kw_only=True)
class DevicesSetting:
    """What one rank of a row trains."""

    model: str
    """``"llama3-8B"`` or ``"qwen3-14B"``."""
    batch: int
    """Sequences per rank."""
    length: int
    """Tokens per sequence."""
    ranks: int = 4
    """Devices."""
    device: str = "h100-sxm"
    """The catalogue's key."""


FORECAST: Mapping[str, DevicesSetting] = {
    f"listed-{number}": DevicesSetting(model=model, batch=batch, length=length)
    for number, model, batch, length in (
        (34, "qwen3-14B", 8, 2048), (36, "qwen3-14B", 16, 2048), (38, "qwen3-14B", 8, 4096),
        (40, "llama3-8B", 8, 2048), (42, "llama3-8B", 16, 2048), (44, "llama3-8B", 8, 4096),
    )
}  # fmt: skip
"""By id: the rows that are forecast; every layer is recomputed, AdamW, FSDP2."""


@dataclass(frozen=True, kw_only=True)
class DevicesRow:
    """One row, forecast."""

    id: str
    """Of the published row."""
    title: str
    """What it is of."""
    measured_bytes: int
    """As published."""
    predicted_bytes: int
    """Predicted peak of what the allocator hands out on one rank."""
    by_category: Mapping[str, int]
    """What it consists of."""
    seconds: float
    """How long the forecast took."""
    assumed: str
    """What differs between the source and the forecast."""

    @property
    def error(self) -> float:
        """Predicted against measured, as a share of the measured."""
        return self.predicted_bytes / self.measured_bytes - 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="*", help="pattern of ids such as 'listed-4*'")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    of_several = {row.id: row for row in published_rows() if row.id in {*FORECAST, *LEFT_OUT}}
    asked = [name for name in FORECAST if fnmatch.fnmatch(name, chosen.rows)]
    rows = []
    with progress_bar(console) as progress:
        task = progress.add_task("predicting", total=len(asked))
        for name in asked:
            rows.append(row_of(of_several[name], FORECAST[name]))
            progress.advance(task)
    console.print(_table(rows))
    console.print(f"{len(LEFT_OUT)} rows are not forecast; {machine.caption}", style="dim")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(rows, of_several, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(rows, of_several, machine))
    return 0


def row_of(published: PublishedRow, setting: DevicesSetting) -> DevicesRow:
    """Forecast one row."""
    assert published.measured_bytes is not None
    begin = time.perf_counter()
    # Held in 32 bits, though everything is computed in 16.
    held = {name: size * (2 if name in _HELD_IN_32_BITS else 1) for name, size in _memory(setting).by_category.items()}
    return DevicesRow(
        id=published.id,
        title=f"{setting.model}, {setting.ranks} x {setting.batch} x {setting.length} tokens",
        measured_bytes=published.measured_bytes,
        predicted_bytes=sum(held.values()),
        by_category=held,
        seconds=time.perf_counter() - begin,
        assumed=_TITAN,
    )


def _memory(setting: DevicesSetting) -> MemoryBreakdown:
    with torch.device("meta"):
        network = _network(setting.model)
        ids = torch.zeros(setting.batch, setting.length, dtype=torch.long)
    # As torchtitan groups them: embedding, every layer, output; the last norm is the root's.
    groups = ("", "model.embed_tokens", *find_repeated_blocks(network), "lm_head")
    return forecast(
        network,
        {"input_ids": ids, "labels": ids},
        loss=loss_in_chunks,
        optimizer=partial(torch.optim.AdamW, fused=True),
        device=setting.device,
        precision="bf16-true",
        activation_checkpointing="blocks",
        zero_gradients_early=True,
        sharding=Sharding(engine="fsdp2", ranks=setting.ranks, shard_groups=groups),
    )


def loss_in_chunks(network: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of each token, of which one chunk of logits is alive at a time."""
    hidden = network.model(input_ids=batch["input_ids"]).last_hidden_state.flatten(0, 1)
    labels = batch["labels"].flatten()

    def of_chunk(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(network.lm_head(part).float(), wanted, reduction="sum")

    parts = zip(hidden.chunk(_LOSS_CHUNKS), labels.chunk(_LOSS_CHUNKS), strict=True)
    total = sum(checkpoint(of_chunk, part, wanted, use_reentrant=False) for part, wanted in parts)
    return total / labels.numel()


def _network(model: str) -> torch.nn.Module:
    if model == "llama3-8B":
        return llama(width=4096, hidden=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256)
    return qwen3(width=5120, hidden=17408, layers=40, heads=40, key_value_heads=8)


def as_json(rows: Sequence[DevicesRow], published: Mapping[str, PublishedRow], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "accuracy_devices_published",
        "statistic": "peak allocated bytes of one rank",
        "machine": machine.to_dict(),
        "rows": [{**asdict(row), "error": row.error, "source": published[row.id].source} for row in rows],
        "left_out": [
            {"id": name, "title": published[name].title, "reason": reason, "source": published[name].source}
            for name, reason in LEFT_OUT.items()
        ],
    }


def as_markdown(rows: Sequence[DevicesRow], published: Mapping[str, PublishedRow], machine: Machine) -> str:
    """The rows that are forecast, and those that are not."""
    return "\n".join(
        [
            "| row | measured MiB | predicted MiB | error |",
            "|---|--:|--:|--:|",
            *(f"| {' | '.join(_cells(row))} |" for row in rows),
            "",
            *(f"- {words}." for words in dict.fromkeys(row.assumed for row in rows)),
            "",
            f"Not forecast ({len(LEFT_OUT)} rows of several GPUs):",
            "",
            *(f"- {published[n].title} ({n}; {published[n].source}): {reason}" for n, reason in LEFT_OUT.items()),
            "",
            f"{machine.caption}.",
            "",
        ]
    )


def _cells(row: DevicesRow) -> list[str]:
    return [
        f"{row.id} {row.title}",
        f"{row.measured_bytes / MIB:.0f}",
        f"{row.predicted_bytes / MIB:.0f}",
        f"{100 * row.error:+.1f} %",
    ]


def _table(rows: Sequence[DevicesRow]) -> Table:
    table = plain_table("One rank: predicted against published, MiB allocated")
    table.add_column("row")
    for column in ("measured", "predicted", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


if __name__ == "__main__":
    sys.exit(main())
