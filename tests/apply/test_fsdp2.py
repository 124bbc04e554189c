"""What is read from a module that ``fully_shard`` spread, what is refused, and when gradients are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard
from torch.distributed.tensor import Shard

from lightning_memfit.apply.fsdp2 import (
    Fsdp2Exchange,
    check_steppable,
    computing_dtype_of,
    deferred_bytes,
    is_fully_sharded,
    mixed_precision_of,
    notes_on_policy,
    reason_precision_kept,
    reason_states_not_quantised,
    sharding_of,
    start_anew,
    steppable_implementations,
    underway,
)
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.sharded_model import fully_shard, policy_of
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.fake_ranks import fake_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(4) as ranks:
        yield ranks


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), nn.Linear(8, 4))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_sharded_module_tells_how_it_was_sharded(mesh: DeviceMesh, reshard: bool) -> None:
    module = blocks()
    assert not is_fully_sharded(module) and sharding_of(module) is None and deferred_bytes(module) == 0
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    expected = Sharding(
        engine="fsdp2",
        ranks=4,
        synchronisation="slice",
        shard_groups=("", "0", "1"),
        reshard_after_forward=reshard,
    )
    assert is_fully_sharded(module) and sharding_of(module) == expected
    module(torch.zeros(1, 8)).sum().backward()  # torch decides some of it in the first forward
    assert sharding_of(module) == expected


def test_a_module_that_is_sharded_already_is_left_as_it_is(mesh: DeviceMesh) -> None:
    """Lightning calls ``configure_model`` for ``fit`` and again for the ``validate`` behind it."""
    module = fully_shard(blocks(), mesh=mesh, reshard_after_forward=False)
    before = sharding_of(module)
    assert fully_shard(module, mesh=mesh) is module and sharding_of(module) == before


def test_a_policy_of_mixed_precision_is_told_and_none_where_nothing_is_mixed(mesh: DeviceMesh) -> None:
    plain = fully_shard(blocks(), mesh=mesh)
    mixed = fully_shard(blocks(), mesh=mesh, mixed_precision=BF16)
    assert mixed_precision_of(plain) is None and mixed_precision_of(mixed) == BF16
    told = sharding_of(mixed)
    assert told is not None and told.param_dtype == "bfloat16" and told.reduce_dtype == "float32"
    assert policy_of(told) == BF16
    without_parameters = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))  # in the root
    assert sharding_of(fully_shard(without_parameters, mesh=mesh, mixed_precision=BF16)) == replace(
        told, shard_groups=("", "0", "1")
    )


def test_a_policy_leaves_precision_and_says_what_is_in_which_dtype(mesh: DeviceMesh) -> None:
    for plain in (None, sharding_of(fully_shard(blocks(), mesh=mesh))):
        assert reason_precision_kept(plain) is None and not notes_on_policy(plain)
    mixed = sharding_of(fully_shard(blocks(), mesh=mesh, mixed_precision=BF16))
    assert reason_precision_kept(mixed) == (
        "fully_shard's MixedPrecisionPolicy chooses the dtypes; autocast on top of it would be another computation"
    )
    assert notes_on_policy(mixed) == (
        "under fully_shard's MixedPrecisionPolicy parameters are gathered and computed with in bfloat16, and gradients "
        "added up over ranks in float32; shares of parameters, gradients and optimizer states stay in the parameters' "
        "own dtype",
    )
    assert mixed is not None
    (said,) = notes_on_policy(replace(mixed, param_dtype=None, reduce_dtype="bfloat16", output_dtype="float32"))
    assert "in the parameters' own dtype, outputs of groups cast to float32, and gradients added up" in said
    assert computing_dtype_of(fully_shard(blocks(), mesh=mesh, mixed_precision=BF16)) is torch.bfloat16
    assert computing_dtype_of(fully_shard(blocks(), mesh=mesh)) is None


def by_hand(module: nn.Sequential, mesh: DeviceMesh, **of_first: Any) -> nn.Sequential:
    shard(module[0], mesh=mesh, **of_first)
    shard(module[1], mesh=mesh)
    shard(module, mesh=mesh)
    return module


def prefetching(mesh: DeviceMesh) -> nn.Module:
    module = by_hand(blocks(), mesh)
    module[0].set_modules_to_forward_prefetch([module[1]])
    return module


def kept_in_backward(mesh: DeviceMesh) -> nn.Module:
    module = by_hand(blocks(), mesh)
    module[1].set_reshard_after_backward(False)
    return module


def grouped(mesh: DeviceMesh) -> nn.Module:
    module = blocks()
    shard([module[0], module[1]], mesh=mesh)
    shard(module, mesh=mesh)
    return module


REFUSED: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    r"'0': it is offloaded to the host": lambda mesh: by_hand(
        blocks(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    r"'0': a parameter is divided along dimension 1": lambda mesh: by_hand(
        blocks(), mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None
    ),
    r"'': which groups are fetched ahead|'0': which groups are fetched ahead was set by hand": prefetching,
    r"'1': resharding after, or gathering in, the backward was switched off": kept_in_backward,
    r"2 modules are one group": grouped,
    r"MixedPrecisionPolicy\(param_dtype=float16\) is not planned for: float16 would need a loss that is scaled": (
        lambda mesh: fully_shard(
            blocks(), mesh=mesh, mixed_precision=MixedPrecisionPolicy(torch.float16, torch.float32)
        )
    ),
    r"param_dtype=torch.bfloat16, cast_forward_inputs=False\) is not planned for": lambda mesh: fully_shard(
        blocks(), mesh=mesh, mixed_precision=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    ),
    r"2 mixed-precision policies in one module": lambda mesh: by_hand(blocks(), mesh, mp_policy=BF16),
    r"reshard_after_forward differs between groups: False for \['0'\], True for \['1'\]": lambda mesh: by_hand(
        blocks(), mesh, reshard_after_forward=False
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_forecast_is_refused_with_the_module_and_the_reason(mesh: DeviceMesh, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        sharding_of(REFUSED[words](mesh))


def reducing(module: nn.Module) -> list[bool]:
    return [part._get_fsdp_state()._fsdp_param_group.reduce_grads for part in (module[0], module[1], module)]  # type: ignore[index, operator, union-attr]


def test_gradients_are_exchanged_after_every_slice_or_wait_for_the_last(mesh: DeviceMesh) -> None:
    module = fully_shard(blocks(), mesh=mesh)
    for synchronisation, exchanged in (("slice", True), ("step", False)):
        exchange = Fsdp2Exchange(module, synchronisation=synchronisation)  # type: ignore[arg-type]
        with exchange.around_slice(is_last=False):
            assert reducing(module) == [exchanged] * 3
        with exchange.around_slice(is_last=True):
            assert reducing(module) == [True] * 3
        with pytest.raises(ZeroDivisionError), exchange.around_slice(is_last=False):
            raise ZeroDivisionError
        assert reducing(module) == [True] * 3
        assert exchange.never() is None and exchange.held_bytes() == 0 and exchange.in_every_slice


def test_a_step_starts_anew_after_an_error_in_its_midst(mesh: DeviceMesh) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyError("in block 1")

    module = fully_shard(blocks(), mesh=mesh)
    assert underway(module) == underway(blocks()) == ""
    start_anew(module)  # nothing ran
    hook = module[1][0].register_forward_hook(fail)
    with pytest.raises(KeyError):
        module(torch.zeros(1, 8))
    assert underway(module) == "the root (FORWARD, gathered); 1 (FORWARD, gathered)"
    start_anew(module)
    assert underway(module) == ""
    hook.remove()
    module(torch.zeros(1, 8)).sum().backward()
    assert underway(module) == "" and all(parameter.grad is not None for parameter in module.parameters())


def test_a_torch_that_cannot_start_anew_is_named(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fully_shard(blocks(), mesh=mesh)
    module[0][0].register_forward_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(torch.zeros(1, 8))
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    with pytest.raises(UnsupportedError, match=r"has no FSDPModule.reset_iter_state.*0 \(FORWARD, gathered\)"):
        start_anew(module)


def test_waiting_gradients_are_whole_and_in_the_dtype_that_is_reduced(mesh: DeviceMesh) -> None:
    numbers = 2 * (8 * 8 + 8) + 8 * 4 + 4
    assert deferred_bytes(fully_shard(blocks(), mesh=mesh)) == 4 * numbers
    assert deferred_bytes(fully_shard(blocks(), mesh=mesh, mixed_precision=BF16)) == 4 * numbers
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert deferred_bytes(fully_shard(blocks(), mesh=mesh, mixed_precision=half)) == 2 * numbers
    frozen = blocks()
    frozen[2].requires_grad_(False)
    assert deferred_bytes(fully_shard(frozen, mesh=mesh)) == 4 * 2 * (8 * 8 + 8)


def test_states_in_8_bits_are_refused_under_fully_shard_alone() -> None:
    assert reason_states_not_quantised(None) is None
    assert reason_states_not_quantised(Sharding(engine="ddp", ranks=2)) is None
    assert reason_states_not_quantised(Sharding(engine="deepspeed", ranks=2, zero_stage=3)) is None
    reason = reason_states_not_quantised(Sharding(engine="fsdp2", ranks=2, shard_groups=("",)))
    assert reason == "fully_shard makes parameters DTensors, which bitsandbytes cannot step"


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_fused_kernels_without_a_rule_for_divided_parameters_are_refused_by_name(
    mesh: DeviceMesh, optimizer: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"'fused' cannot be had for {optimizer} under fully_shard: .*'auto'"):
        check_steppable(optimizer, "fused")
    check_steppable(optimizer, "foreach")
    assert steppable_implementations(f"torch.optim.{optimizer}", ("foreach", "fused")) == ("foreach",)
    with pytest.raises(NotImplementedError, match="sharding strategy"):  # torch's own words, which it spares the user
        _step(getattr(torch.optim, optimizer), mesh)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_fused_kernels_that_step_divided_parameters_are_not_refused(mesh: DeviceMesh, optimizer: str) -> None:
    check_steppable(optimizer, "fused")
    for name in (optimizer, f"torch.optim.{optimizer}"):
        assert steppable_implementations(name, ("foreach", "fused")) == ("foreach", "fused")
    _step(getattr(torch.optim, optimizer), mesh)


def _step(optimizer_class: Callable[..., torch.optim.Optimizer], mesh: DeviceMesh) -> None:
    module = fully_shard(blocks(), mesh=mesh)
    optimizer = optimizer_class(module.parameters(), lr=0.1, fused=True)
    module(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
