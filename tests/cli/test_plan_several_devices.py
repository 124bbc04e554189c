"""``memfit plan`` for several devices, of the shapes that come with the package. Run: ``pytest`` and this file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_memfit.cli.arguments import BAD_REQUEST, DOES_NOT_FIT, FITS
from lightning_memfit.cli.config_folder import SHAPES
from lightning_memfit.demo.token_shapes import token_shapes
from tests.docs.commands import run
from tests.docs.pages import blocks_of, read
from tests.docs.running import PageRun, _compare, commands_and_outputs

COMMANDS = (
    "memfit plan hardware=a100-80gb devices=8 model=llama_70b",
    "memfit plan hardware=rtx-4090 model=llama2_7b memfit.offload=auto",
)
SMALL = (
    "memfit", "plan", "hardware=a100-40gb", "model=llama2_7b", "model.sizes.num_hidden_layers=2",
    "model.sizes.hidden_size=512", "model.sizes.intermediate_size=1024", "model.sizes.num_attention_heads=8",
    "model.sizes.num_key_value_heads=8", "data.sequence_length=64",
)  # fmt: skip


def planned(folder: Path, *more: str) -> Any:
    pytest.importorskip("transformers")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return run(" ".join((*SMALL, *more)), folder, environment)


def test_a_model_of_the_package_is_planned_for_several_devices_in_a_folder_without_configs(tmp_path: Path) -> None:
    ran = planned(tmp_path, "devices=4", "memfit.effective_batch_size=64", "--json")
    assert ran.code == FITS, ran.err
    document = json.loads(ran.out)
    (found,) = document["devices"]
    split = found["plan"]["forecast"]["candidate"]["split"]
    assert (split["ranks"], split["accumulate_grad_batches"], split["loader_batch_size"]) == (4, 4, 4)
    assert found["plan"]["forecast"]["candidate"]["sharding"]["engine"] == "ddp"
    assert not any("left out" in note for note in document["notes"])


def test_strategies_stand_side_by_side_with_why_each_was_passed_over(tmp_path: Path) -> None:
    ran = planned(tmp_path, "--num-devices", "2", "--budget", "400MiB")
    assert ran.code == FITS, ran.err
    assert "Strategies (predicted; of each the fastest that fits, else the smallest)" in ran.out
    lines = ran.out[ran.out.index("Strategies (predicted") :]
    assert "the plan" in lines and "DDP over 2" in lines and "FSDP2 over 2" in lines and "ZeRO-2 over 2" in lines


def test_options_name_the_strategy_and_the_host(tmp_path: Path) -> None:
    ran = planned(tmp_path, "--num-devices", "2", "--strategy", "deepspeed_stage_2_offload", "--host-memory", "1MiB")
    assert ran.code == DOES_NOT_FIT, ran.err
    assert "does not fit: No plan fits the host: of the smallest one, 2 ranks keep" in ran.out


def test_one_gpu_offloads_where_the_config_says_so(tmp_path: Path) -> None:
    tight = ("memfit.precision=bf16-mixed", "--budget", "450MiB")
    asked = planned(tmp_path, "memfit.offload=auto", *tight)
    assert asked.code == FITS, asked.err
    assert "ZeRO-2 over 1, optimizer on the host" in asked.out and "one device" in asked.out
    assert "left out of this forecast" not in asked.out
    alone = planned(tmp_path, "memfit.offload=never", *tight)
    assert alone.code == DOES_NOT_FIT, alone.err
    assert 'strategy="deepspeed_stage_2_offload", the optimizer on the host: ' in alone.out
    named = planned(tmp_path, "+trainer.strategy=deepspeed_stage_2_offload", *tight, "--json")
    assert named.code == FITS, named.err
    (found,) = json.loads(named.out)["devices"]
    assert found["plan"]["forecast"]["candidate"]["offload"] == "optimizer"


def test_an_effective_batch_that_devices_cannot_share_is_refused(tmp_path: Path) -> None:
    ran = planned(tmp_path, "devices=3", "memfit.effective_batch_size=64")
    assert ran.code == BAD_REQUEST
    assert "effective_batch_size=64 samples cannot be shared equally by 3 ranks" in ran.err


def test_the_shapes_are_those_that_their_files_say() -> None:
    names = sorted(path.stem for path in (SHAPES / "model").glob("*.yaml"))
    assert names == ["llama2_7b", "llama_70b", "llama_8b"]
    with pytest.raises(ValueError, match="batch_size=0 and sequence_length=8 must be at least 1"):
        token_shapes(0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_shows_what_the_plan_of_billions_of_parameters_prints(command: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks = blocks_of("docs/forecast-several-devices.md", read("docs/forecast-several-devices.md"))
    shown = {
        command: lines
        for block in blocks
        if block.language == "console"
        for command, lines in commands_and_outputs(block)
    }
    reader = PageRun(tmp_path, {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"})
    ran = run(command, tmp_path, reader.environment)
    reader.close()
    _compare(command, shown[command], {"standard output": ran.out})
