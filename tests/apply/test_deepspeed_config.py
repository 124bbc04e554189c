"""DeepSpeed's configuration under Lightning: read as a sharding, written for a plan, put back. No engine is built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from lightning_memfit.apply.deepspeed_config import (
    frozen_on_the_device,
    is_deepspeed,
    make_deepspeed_delegate,
    notes_on_precision,
    offload_of,
    own_precision,
    write_config,
    zero_sharding,
)
from lightning_memfit.apply.sharding import is_ddp
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.plan import BatchSplit, Candidate
from lightning_memfit.predict.zero_layout import lightning_sharding
from lightning_memfit.sharding import Sharding


def strategy_with(config: dict[str, Any]) -> Any:
    """Lightning's own class as it is once it has formatted its configuration, made without DeepSpeed."""
    strategy: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    strategy.config = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.0, **config}
    strategy.loss_scale, strategy.loss_scale_window, strategy.min_loss_scale = 0, 1000, 1
    strategy.initial_scale_power, strategy.hysteresis = 16, 2
    return strategy


def lightnings(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": stage, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000, **zero,
        }
    }  # fmt: skip


def written(strategy: Any, **settings: Any) -> dict[str, Any]:
    sharding = settings.pop("sharding", Sharding(engine="deepspeed", ranks=2, zero_stage=2))
    write_config(strategy, sharding=sharding, **{"precision": "32-true", "micro_batch_size": 3} | settings)
    config: dict[str, Any] = strategy.config
    return config


def test_the_configuration_that_lightning_writes_is_read_as_its_defaults() -> None:
    for stage in (1, 2, 3):
        assert zero_sharding(strategy_with(lightnings(stage)), 4) == lightning_sharding(stage, 4)


def test_sizes_are_read_by_both_of_their_names_and_auto_is_no_size() -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 1e6,
        "param_persistence_threshold": 9,
    }
    assert zero_sharding(strategy_with({"zero_optimization": zero}), 2) == Sharding(
        engine="deepspeed", ranks=2, zero_stage=3, synchronisation="slice",
        prefetch_bucket_elements=1_000_000, persistence_threshold_elements=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "zero_optimization.stage is 0: nothing is divided"),
        ({**lightnings(2), "optimizer": {"type": "Adam"}}, r"makes the optimizer itself \(optimizer.type='Adam'\)"),
        (lightnings(2, contiguous_gradients=False), "contiguous_gradients=False is not forecast"),
        ({**lightnings(2), "data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype='fp32' is not forecast"),
    ],
)
def test_what_is_not_forecast_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        zero_sharding(strategy_with(config), 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lightnings(3, offload_param={"device": "nvme"}), r"offload_param to 'nvme' is not forecast; to 'cpu' it is\."),
        (
            lightnings(3, offload_param={"device": "cpu"}),
            r"and the optimizer on the device, which is not forecast\. Give offload_optimizer=True with",
        ),
        (
            lightnings(2, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
            r"in stage 3 alone, and zero_optimization\.stage is 2\. Use DeepSpeedStrategy\(stage=3\), or",
        ),
    ],
)
def test_parameters_are_on_the_host_in_stage_3_and_with_the_optimizer_or_refused(
    config: dict[str, Any], words: str
) -> None:
    both = lightnings(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert offload_of(strategy_with(both)) == "parameters"
    assert zero_sharding(strategy_with(both), 2).zero_stage == 3
    with pytest.raises(UnsupportedError, match=words):
        offload_of(strategy_with(config))


def test_the_optimizer_may_be_on_the_host_and_not_on_a_disk() -> None:
    assert offload_of(strategy_with(lightnings(2))) == "never"
    assert offload_of(strategy_with(lightnings(2, offload_optimizer={"device": "none"}))) == "never"
    assert offload_of(strategy_with(lightnings(2, offload_optimizer={"device": "cpu"}))) == "optimizer"
    with pytest.raises(UnsupportedError, match="to 'nvme' is not forecast"):
        offload_of(strategy_with(lightnings(3, offload_optimizer={"device": "nvme"})))


def test_a_plan_is_written_and_put_back() -> None:
    """Also the micro-batch, which Lightning infers from the loader: Lightning-AI/pytorch-lightning#7345."""
    strategy = strategy_with(lightnings(2))
    before = copy.deepcopy(strategy.config)
    sharding = Sharding(
        engine="deepspeed", ranks=2, zero_stage=3, reduce_bucket_elements=1000, prefetch_bucket_elements=2000,
        persistence_threshold_elements=30, overlap_communication=False,
    )  # fmt: skip
    undo = write_config(strategy, precision="bf16-mixed", sharding=sharding, offload="optimizer", micro_batch_size=3)
    config, zero = strategy.config, strategy.config["zero_optimization"]
    assert config["bf16"] == {"enabled": True} and "fp16" not in config
    # MemFit divides the loss by the accumulation; DeepSpeed would do it once more
    assert (config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]) == (1, 3)
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (3, 1000, False)
    assert (zero["stage3_prefetch_bucket_size"], zero["stage3_param_persistence_threshold"]) == (2000, 30)
    assert zero["allgather_bucket_size"] == 200_000_000  # the plan has no word for it
    assert zero["offload_optimizer"] == {"device": "cpu"}
    kept = strategy.config
    undo()
    undo()
    assert strategy.config is kept and strategy.config == before


def test_the_precision_that_lightning_wrote_before_is_exchanged() -> None:
    strategy = strategy_with({**lightnings(2), "bf16": {"enabled": True}})
    assert "bf16" not in written(strategy)
    config = written(strategy, precision="16-mixed")
    assert config["fp16"]["initial_scale_power"] == 16 and config["fp16"]["enabled"]
    assert "fp16" not in written(strategy, precision="bf16-true")


def test_a_precision_of_the_users_own_stays_or_is_named() -> None:
    own = {"enabled": True, "check_grad_overflow": False}
    strategy = strategy_with({**lightnings(2), "bf16": own})
    assert written(strategy, precision="bf16-mixed")["bf16"] == own
    before = copy.deepcopy(strategy.config)
    with pytest.raises(
        ConfigurationError, match=r"precision='32-true', but your DeepSpeed configuration enables 'bf16'"
    ):
        written(strategy)
    assert strategy.config == before


def test_an_offload_is_written_over_a_section_that_says_none() -> None:
    strategy = strategy_with(lightnings(2, offload_optimizer={"device": "none", "pin_memory": True}))
    zero = written(strategy, offload="optimizer")["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_a_section_like_lightnings_is_the_users_own_where_lightning_formatted_for_another_precision() -> None:
    strategy = strategy_with(lightnings(2) | {"bf16": {"enabled": True}})
    assert own_precision(strategy, "32-true") == "bf16-mixed" and own_precision(strategy, "bf16-mixed") is None
    with pytest.raises(ConfigurationError, match=r"precision='32-true', but your .* enables 'bf16'"):
        written(strategy, formatted_for="32-true")
    assert written(strategy, precision="bf16-mixed", formatted_for="32-true")["bf16"] == {"enabled": True}
    assert own_precision(strategy_with(lightnings(2)), "32-true") is None
    strategy = strategy_with(lightnings(2) | {"fp16": {"enabled": True, "loss_scale": 8}})
    assert own_precision(strategy, "32-true") == own_precision(strategy, "bf16-mixed") == "16-mixed"


def test_an_offload_that_is_no_longer_wanted_is_taken_out_and_the_users_own_is_kept() -> None:
    own = {"device": "cpu", "pin_memory": True}
    strategy = strategy_with(lightnings(2, offload_optimizer=own))
    assert written(strategy, offload="optimizer")["zero_optimization"]["offload_optimizer"] == own
    assert "offload_optimizer" not in written(strategy)["zero_optimization"]


def test_parameters_are_written_to_the_host_with_the_optimizer_in_stage_3_alone() -> None:
    own, third = {"device": "cpu", "pin_memory": True}, lightning_sharding(3, 2)
    strategy = strategy_with(lightnings(3, offload_param=own))
    zero = written(strategy, sharding=third, offload="parameters")["zero_optimization"]
    assert (zero["offload_param"], zero["offload_optimizer"]) == (own, {"device": "cpu"})
    zero = written(strategy, sharding=third, offload="optimizer")["zero_optimization"]
    assert "offload_param" not in zero and zero["offload_optimizer"] == {"device": "cpu"}
    zero = written(strategy_with(lightnings(3)), sharding=third, offload="parameters")["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu"}
    with pytest.raises(UnsupportedError, match=r"ZeRO-2 over 2 with offload='parameters' is not written"):
        written(strategy_with(lightnings(2)), offload="parameters")


def test_frozen_parameters_that_were_divided_on_the_device_stay_there() -> None:
    module = nn.Linear(2, 2)
    assert not frozen_on_the_device(strategy_with(lightnings(3)), module)
    module.weight.requires_grad_(False)
    assert not frozen_on_the_device(strategy_with(lightnings(3)), module)  # whole, they go where the others go
    module.weight.ds_id = 0
    assert frozen_on_the_device(strategy_with(lightnings(3)), module)
    on_host = lightnings(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert not frozen_on_the_device(strategy_with(on_host), module)


def test_sixteen_bits_under_zero_are_named_with_what_is_rounded() -> None:
    zero = lightning_sharding(2, 2)
    whole = BatchSplit(effective_batch_size=16, ranks=2, loader_batch_size=8, slice_sizes=(8,))
    thirds = BatchSplit(
        effective_batch_size=32, ranks=2, loader_batch_size=8, accumulate_grad_batches=2, slice_sizes=(3, 3, 2)
    )
    (note,) = notes_on_precision(Candidate(precision="bf16-mixed", split=thirds, sharding=zero))
    assert "casts the whole module to bfloat16, and adds up the gradients of 6 slices in it, rounding each time" in note
    (note,) = notes_on_precision(Candidate(precision="16-mixed", split=whole, sharding=zero))
    assert "casts the whole module to float16; master weights" in note
    assert not notes_on_precision(Candidate(precision="32-true", split=thirds, sharding=zero))
    for other in (None, Sharding(engine="ddp", ranks=2)):
        assert not notes_on_precision(Candidate(precision="bf16-mixed", split=thirds, sharding=other))


def test_parameters_that_were_divided_when_they_were_made_keep_stage_3() -> None:
    module = nn.Linear(2, 2)
    module.weight.ds_id = 0  # type: ignore[assignment]  # as deepspeed.zero.Init marks them
    with pytest.raises(ConfigurationError, match="zero_stage=2, but the module's parameters were divided"):
        written(strategy_with(lightnings(3)), module=module)


def test_a_release_of_lightning_with_other_names_is_named() -> None:
    strategy = strategy_with(lightnings(2))
    del strategy.hysteresis
    with pytest.raises(UnsupportedError, match="DeepSpeedStrategy has no hysteresis: this release of Lightning"):
        zero_sharding(strategy, 2)


def test_deepspeed_is_derived_from_ddp_and_is_none() -> None:
    assert is_deepspeed(strategy_with({})) and not is_ddp(strategy_with({}))
    assert is_ddp(DDPStrategy()) and not is_deepspeed(DDPStrategy())


def test_the_delegate_is_lightnings_own_of_either_package() -> None:
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        delegate = make_deepspeed_delegate("bf16-mixed", namespace=namespace)
        assert type(delegate).__module__.startswith(namespace) and delegate.precision == "bf16-mixed"
