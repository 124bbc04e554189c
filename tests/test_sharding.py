"""The vocabulary of several devices: which settings belong to which engine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.sharding import GroupPrecision, Sharding


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
        (
            {"engine": "deepspeed", "ranks": 2, "zero_stage": 3, "param_dtype": "bfloat16"},
            "param_dtype=bfloat16 is a setting of FSDP2, not of deepspeed.",
        ),
        (
            {"engine": "fsdp2", "ranks": 2, "reduce_dtype": "float16"},
            "reduce_dtype='float16' of a mixed-precision policy is not forecast: float16 needs a loss that is scaled, "
            "which nothing does there. Use one of float32, bfloat16, or None.",
        ),
    ],
)
def test_a_setting_of_another_engine_is_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        Sharding(**facts)


def test_a_policy_tells_the_dtypes_of_a_step_on_one_device_and_leaves_precision() -> None:
    plain = Sharding(engine="fsdp2", ranks=2, shard_groups=("", "blocks.0"))
    assert not plain.has_policy and plain.group_precision is None
    plain.check_precision("bf16-mixed")
    sums = replace(plain, reduce_dtype="bfloat16")
    assert sums.has_policy and sums.group_precision is None  # the step itself is in the parameters' dtype
    policy = replace(plain, param_dtype="bfloat16", reduce_dtype="float32")
    assert policy.group_precision == GroupPrecision(groups=("", "blocks.0"), param_dtype="bfloat16")
    policy.check_precision("32-true")
    with pytest.raises(ConfigurationError, match=re.escape(
        "precision='bf16-mixed' cannot be had with fully_shard's MixedPrecisionPolicy(param_dtype=bfloat16, "
        "reduce_dtype=float32): both choose the dtypes of the computation, and 1 of them may. Leave precision out"
    )):  # fmt: skip
        policy.check_precision("bf16-mixed")
