"""The vocabulary of several devices: which settings belong to which engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sharding import Sharding


@pytest.mark.parametrize(
    ("facts", "label"),
    [
        ({"engine": "ddp", "ranks": 2}, "DDP over 2"),
        ({"engine": "deepspeed", "zero_stage": 2, "ranks": 8}, "ZeRO-2 over 8"),
        ({"engine": "fsdp2", "ranks": 4, "shard_groups": ("blocks.0", "")}, "FSDP2 over 4"),
    ],
)
def test_a_label_names_engine_and_ranks(facts: dict[str, Any], label: str) -> None:
    assert Sharding(**facts).label == label


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"engine": "ddp", "ranks": 0}, "ranks=0 must be at least 1 device."),
        (
            {"engine": "deepspeed", "ranks": 2},
            "engine='deepspeed' with zero_stage=None: DeepSpeed, and only DeepSpeed, has a stage.",
        ),
        (
            {"engine": "fsdp2", "ranks": 2, "zero_stage": 3},
            "engine='fsdp2' with zero_stage=3: DeepSpeed, and only DeepSpeed, has a stage.",
        ),
        (
            {"engine": "ddp", "ranks": 2, "reduce_bucket_elements": 5},
            "reduce_bucket_elements=5 is a setting of DeepSpeed, not of ddp.",
        ),
        (
            {"engine": "ddp", "ranks": 2, "shard_groups": ("",)},
            "shard_groups=('',) are a setting of FSDP2, not of ddp.",
        ),
        (
            {"engine": "fsdp2", "ranks": 2, "gradient_as_bucket_view": True},
            "gradient_as_bucket_view is a setting of DDP, not of fsdp2.",
        ),
    ],
)
def test_a_setting_of_another_engine_is_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        Sharding(**facts)
